"""Host-side costs one by one: a decision, a record, a reading of the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mindtune.controller.contract import DecisionRecord, ProfilerSection
from mindtune.controller.device import choose_probe
from mindtune.controller.live.observing import StepTime
from mindtune.controller.live.profiler_window import ProfilerWindow
from mindtune.controller.metrics.profile_summary import Shares, Span
from mindtune.controller.records import DecisionWriter, RunFolder, SignalWriter, read_signals
from mindtune.policies.decisions import KNOBS
from mindtune.policies.engine import build_engine
from mindtune.policies.facts import RunFacts
from mindtune.policies.signals import Observation

__all__ = [
    "CopyTimes",
    "closed_window_times",
    "decision_times",
    "device_read_times",
    "record_times",
    "recorded_trace",
]

_NUM_OBSERVATIONS = 4096
_NUM_RECORDS = 2000
_NUM_READS = 50


@dataclass(frozen=True, kw_only=True)
class CopyTimes:
    """Seconds of each copy and return, and the size of one copy."""

    num_bytes: int
    memory: tuple[list[float], list[float]]
    """Copies to the host's memory, returns to them."""
    disk: tuple[list[float], list[float]]
    """Copies to files, returns to them."""


def recorded_trace(signals: Path, *, length: int = _NUM_OBSERVATIONS) -> list[Observation]:
    """Return a recorded table as one run of `length` training steps, repeated where too short."""
    recorded = [
        row.observation for row in read_signals(signals) if row.observation.phase == "train"
    ]
    return [
        replace(recorded[index % len(recorded)], step=index + 1, run=0) for index in range(length)
    ]


def decision_times(trace: Sequence[Observation]) -> list[float]:
    """Return the seconds of each engine step: detectors, all policies, arbiter."""
    engine = build_engine({}, mode="act")
    state = engine.init(
        RunFacts(
            reachable=frozenset(KNOBS),
            micro_batch_size=trace[0].micro_batch_size,
            optimizer_family="adam",
        )
    )
    seconds = []
    for observation in trace:
        begin_s = time.perf_counter()
        result = engine.step(observation, state)
        seconds.append(time.perf_counter() - begin_s)
        state = result.state
    return seconds


def record_times(trace: Iterable[Observation], folder: Path) -> tuple[list[float], list[float]]:
    """Return the seconds of each row of signals and of each decision record written."""
    signals = SignalWriter(folder / "signals.csv")
    rows = _timed((lambda o=o: signals.write(o)) for o in trace)  # type: ignore[misc] # bound now
    signals.close()
    decisions = DecisionWriter(folder / "decisions.jsonl")
    record = DecisionRecord(
        step=1,
        policy="gradient_norm",
        action="SetLearningRateScale",
        requested=0.5,
        before=1.0,
        verdict="granted",
        reason="the loss stands above its baseline and still rises",
        evidence={"loss": 4.25, "median": 3.125, "threshold": 6.0},
        budget_left=15,
    )
    lines = _timed((lambda: decisions.write(record)) for _ in range(_NUM_RECORDS))
    decisions.close()
    return rows, lines


def device_read_times() -> list[float]:
    """Return the seconds of each reading of the host, which a thread takes twice a second."""
    probe = choose_probe("CPU").probe
    seconds = _timed(probe.read for _ in range(_NUM_READS))
    probe.close()
    return seconds


def closed_window_times(folder: Path) -> list[float]:
    """Return the seconds that a profiler window which is closed takes of each step."""
    window = ProfilerWindow(
        ProfilerSection(findings=["step_time_spike"]), _NoProfiler(), RunFolder(folder)
    )
    return _timed(
        (lambda step=step: window.take(StepTime(step, 0.1, "train"), data_time_s=0.0, findings=()))  # type: ignore[misc] # bound now
        for step in range(_NUM_RECORDS)
    )


class _NoProfiler:
    """Stands for the profiler where none is opened."""

    def start(self, folder: Path) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        raise NotImplementedError

    def shares(self, folder: Path, steps: list[Span]) -> Shares | None:
        raise NotImplementedError


def _timed(calls: Iterable[Callable[[], object]]) -> list[float]:
    seconds = []
    for call in calls:
        begin_s = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin_s)
    return seconds

"""Drives the engine: over recorded observations, or over a plant that obeys its set-points."""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mindtune.policies.decisions import KNOBS, Action, RequestStop, Rewind
from mindtune.policies.engine import Engine, EngineState, build_engine
from mindtune.policies.facts import RunFacts
from mindtune.policies.findings import Finding
from mindtune.policies.records import ActionRecord
from mindtune.policies.signals import Observation

EVERYTHING = frozenset({"learning_rate_scale", "loss_scale", "global_batch_size"})
PROTECTED = frozenset({"learning_rate_scale", "clip_norm", "skip_threshold"})

Fault = Callable[[int, float, list[float]], tuple[float, list[float]]]


@dataclass
class Run:
    """What an engine said over a run."""

    engine: Engine
    state: EngineState
    findings: list[Finding] = field(default_factory=list)
    grants: list[tuple[int, Action]] = field(default_factory=list)
    records: list[ActionRecord] = field(default_factory=list)
    healthy: bool = False

    def feed(self, observation: Observation) -> tuple[Action, ...]:
        result = self.engine.step(observation, self.state)
        self.state = result.state
        self.healthy = result.healthy
        self.findings.extend(result.findings)
        self.grants.extend((observation.step, grant) for grant in result.grants)
        self.records.extend(result.records)
        return result.grants

    def set_points(self, kind: type) -> list[tuple[int, float]]:
        return [(step, a.value) for step, a in self.grants if isinstance(a, kind)]

    def events(self, kind: type) -> list[tuple[int, str]]:
        return [(step, a.id) for step, a in self.grants if isinstance(a, kind)]

    def kinds(self) -> set[str]:
        return {finding.kind.value for finding in self.findings}

    def steps_of(self, kind: str) -> list[int]:
        return [f.step for f in self.findings if f.kind.value == kind]


@pytest.fixture
def start() -> Callable[..., Run]:
    """Return a run that has not begun: `start(mode=..., settings=..., **facts)`."""

    def begin(
        *,
        mode: str = "act",
        settings: dict[str, Any] | None = None,
        prior: Any = None,
        **facts: Any,
    ) -> Run:
        engine = build_engine(settings or {}, mode=mode, prior=prior)
        facts.setdefault("reachable", EVERYTHING)
        facts.setdefault("micro_batch_size", 2)
        return Run(engine, engine.init(RunFacts(**facts)))

    return begin


@pytest.fixture
def replay(start: Callable[..., Run]) -> Callable[..., Run]:
    """Return the run over observations that no action changes: dicts without `step`, from 1."""

    def over(rows: Iterable[dict[str, Any]], **options: Any) -> Run:
        run = start(**options)
        for step, row in enumerate(rows, start=1):
            run.feed(Observation(step=step, **row))
        return run

    return over


class Plant:
    """A training run in miniature: four weights in a bowl whose rim is flat.

    The loss is 2 + 40 (1 - exp(-q / 10)) with q the squared distance from the best weights: near
    them it is convex, far out it is flat and nothing is learnt any more, so a step that is too
    long ruins the run for good. The device's part of a step (unscale, check, skip, clip, update)
    is that of the real one.

    Args:
        run: The engine that sees its signals; None: nobody guards it.
        rate: Learning rate; above 0.25 the bowl's middle is unstable.
        skips: Whether non-finite updates are skipped by the device.
        fault: Changes loss and gradient of a step.
    """

    def __init__(
        self,
        run: Run | None,
        *,
        rate: float = 0.03,
        seed: int = 0,
        skips: bool = True,
        fault: Fault | None = None,
        snapshots: bool = True,
    ) -> None:
        self.run, self.rate, self.skips, self.fault = run, rate, skips, fault
        self.generator = random.Random(seed)
        self.weights = [0.55, -0.5, 0.45, -0.4]
        self.knobs = {
            "learning_rate_scale": 1.0,
            "clip_norm": math.inf,
            "skip_threshold": math.inf,
        }
        self.kept = [list(self.weights)] if snapshots else []
        self.losses: list[float] = []
        self.skipped: list[int] = []
        self.rewinds: list[int] = []
        self.stopped: tuple[int, RequestStop] | None = None

    def drive(self, steps: int) -> Plant:
        first = len(self.losses) + 1
        for step in range(first, first + steps):
            self._step(step)
            if self.stopped:
                break
        return self

    def final_loss(self) -> float:
        """Return the true loss of the weights, without the noise of a batch."""
        return self._loss()

    def _loss(self) -> float:
        return 2 + 40 * (1 - math.exp(-sum(w * w for w in self.weights) / 10))

    def _step(self, step: int) -> None:
        slope = 8 * math.exp(-sum(w * w for w in self.weights) / 10)
        loss = self._loss() + self.generator.gauss(0, 0.04)
        gradient = [slope * w + self.generator.gauss(0, 0.25) for w in self.weights]
        if self.fault is not None:
            loss, gradient = self.fault(step, loss, gradient)
        norm = math.hypot(*gradient)
        overflow = not (math.isfinite(norm) and math.isfinite(loss))
        skipped = (overflow and self.skips) or norm > self.knobs["skip_threshold"]
        acting = dict(self.knobs)
        if not skipped:
            factor = min(1.0, acting["clip_norm"] / norm) if norm > 0 else 1.0
            move = self.rate * acting["learning_rate_scale"] * factor
            self.weights = [w - move * g for w, g in zip(self.weights, gradient, strict=True)]
        else:
            self.skipped.append(step)
        self.losses.append(loss)
        if self.run is None:
            return
        grants = self.run.feed(
            Observation(
                step=step, loss=loss, grad_norm=norm, overflow=float(overflow),
                update_skipped=float(skipped), learning_rate=self.rate, **acting,
            )
        )  # fmt: skip
        for grant in grants:
            if type(grant) in KNOBS.values():
                self.knobs[grant.knob] = grant.value
            elif isinstance(grant, Rewind) and self.kept:
                self.weights = list(self.kept[-1])
                self.rewinds.append(step)
            elif isinstance(grant, RequestStop):
                self.stopped = (step, grant)
        if self.run.healthy and step % 8 == 0 and self.kept:
            self.kept.append(list(self.weights))


@pytest.fixture
def plant(start: Callable[..., Run]) -> Callable[..., Plant]:
    """Return a guarded run in miniature: `plant(rate=..., fault=..., can_rewind=...)`."""

    def begin(*, can_rewind: bool = True, guarded: bool = True, mode: str = "act",
              settings: dict[str, Any] | None = None, **options: Any) -> Plant:  # fmt: skip
        run = None
        if guarded:
            run = start(mode=mode, settings=settings, reachable=PROTECTED, can_rewind=can_rewind)
        return Plant(run, snapshots=can_rewind, **options)

    return begin


@pytest.fixture(scope="session")
def reference_starts() -> list[list[tuple[float, float]]]:
    """Return loss and gradient norm of the first 100 steps of the reference workload, per seed.

    Healthy, with a warm-up of 20 steps and no clipping (`experiments/fault_injection`).
    """
    runs: dict[str, list[tuple[float, float]]] = {}
    with (Path(__file__).parent / "data" / "reference_starts.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            runs.setdefault(row["seed"], []).append((float(row["loss"]), float(row["grad_norm"])))
    return list(runs.values())

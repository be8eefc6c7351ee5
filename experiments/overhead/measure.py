"""Alternates between the ways of training and takes their step times."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor

from mindtune.experiments.gpt.config import GptConfig
from mindtune.experiments.gpt.corpus import Corpus
from mindtune.experiments.gpt.samples import MicroBatches, SampleOrder
from mindtune.experiments.overhead.cells import Batch, ControlledStep, Runner, build_runners
from mindtune.experiments.overhead.copies import copy_times
from mindtune.experiments.overhead.costs import CopyTimes
from mindtune.experiments.overhead.signal_runners import build_signal_runners

__all__ = ["Alternation", "Rounds", "alternate", "step_times", "training_batches"]

_NUM_BATCHES = 32
_CLIP_NORM = 1.0

Rounds = dict[str, list[list[float]]]
"""Name -> per round the seconds of each measured step."""


@dataclass(frozen=True, kw_only=True)
class Alternation:
    """What the alternation gave."""

    times: Rounds
    """Seconds of each measured step, by name and round."""
    num_actions: int
    """Actions granted in the measured runs."""
    num_parameters: int
    """Of each network."""
    signals: Path
    """Signal table of the acting run."""
    copies: CopyTimes
    """Of earlier states."""
    signal_times: Rounds
    """As `times`, of the bare step and of those with one signal more."""
    added_s: Mapping[str, Sequence[float]]
    """Seconds of the host's part of each signal in each step."""


def step_times(
    config: GptConfig, *, rounds: int, block: int, records: Path, tell: Callable[[str], None]
) -> Alternation:
    """Build, compile and measure all ways of training in this process.

    Args:
        config: The workload's config.
        rounds: Times that each way has its turn.
        block: Measured steps of a turn.
        records: Folder for the records.
        tell: Takes lines of progress.
    """
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(config.training.seed)
    runners = build_runners(config, clip_norm=_CLIP_NORM, records=records)
    batches = training_batches(config)
    _warm_up(runners, batches, tell)
    times = alternate(runners, batches, rounds=rounds, block=block, tell=tell)
    controlled = [runner for runner in runners.values() if isinstance(runner, ControlledStep)]
    own = runners["own"]
    copies = copy_times(
        controlled[-1].train_step, lambda: own(batches[0]), records / "earlier_states"
    )
    watching = build_signal_runners(config, records / "signals")
    _warm_up(watching, batches, tell)
    for watcher in watching.values():
        watcher.added_s.clear()
    signal_times = alternate(watching, batches, rounds=rounds, block=block, tell=tell)
    return Alternation(
        times=times,
        signal_times=signal_times,
        added_s={name: watcher.added_s for name, watcher in watching.items()},
        num_parameters=controlled[-1].num_parameters,
        num_actions=sum(runner.num_actions for runner in controlled),
        signals=controlled[-1].folder.signals,
        copies=copies,
    )


def _warm_up(
    runners: Mapping[str, Runner], batches: Sequence[Batch], tell: Callable[[str], None]
) -> None:
    """Let every way compile."""
    for name, runner in runners.items():
        begin_s = time.perf_counter()
        runner.open()
        for batch in batches[:2]:
            runner(batch)
        runner.close()
        tell(f"{name}: first two steps took {time.perf_counter() - begin_s:.1f} s")


def alternate(
    runners: Mapping[str, Runner],
    batches: Sequence[Batch],
    *,
    rounds: int,
    block: int,
    tell: Callable[[str], None],
) -> Rounds:
    """Give every runner a turn per round, each round beginning with another one.

    The first step of a turn is not measured: it finds the caches full of another one's weights.
    """
    names = list(runners)
    times: Rounds = {name: [] for name in names}
    # A collection in mid-step would be charged to whoever happens to run.
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            first = number % len(names)
            for name in (*names[first:], *names[:first]):
                times[name].append(_turn(runners[name], batches, number * (block + 1), block))
                gc.collect()
            if (number + 1) % 5 == 0:
                tell(f"round {number + 1} of {rounds}")
    finally:
        gc.enable()
    return times


def _turn(runner: Runner, batches: Sequence[Batch], start: int, block: int) -> list[float]:
    runner.open()
    seconds = []
    for index in range(block + 1):
        batch = batches[(start + index) % len(batches)]
        begin_s = time.perf_counter()
        runner(batch)
        seconds.append(time.perf_counter() - begin_s)
    runner.close()
    return seconds[1:]


def training_batches(config: GptConfig) -> list[Batch]:
    """Return the first batches of the workload's training data."""
    corpus = Corpus.load("train", cache=True)
    order = SampleOrder((len(corpus) - 1) // config.model.seq_length, config.training.seed)
    source = MicroBatches(corpus, order, config, _NUM_BATCHES)
    return [
        (Tensor(tokens), Tensor(weights.astype(np.float32)))
        for tokens, weights in (source[index] for index in range(_NUM_BATCHES))
    ]

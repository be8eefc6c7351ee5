"""What each signal costs, beside what a tutorial on the same subject tells of its own way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mindtune.controller.contract import ContractModel
from mindtune.experiments.overhead.quartiles import Quartiles, quartiles

__all__ = ["SIGNALS", "SignalCost", "signal_costs", "signal_table"]

SIGNALS = {
    "loss": ("loss on the host, one row of signals.csv", 0.12),
    "norm": ("global gradient norm as well", 1.8),
    "device": ("newest reading of the sampling thread", 0.45),
    "together": ("loss, norm and device", 3.0),
    "entropy": ("a look inside: attention entropy per head, loss per layer, confidence", 3.2),
}
"""Signal -> what it is, and the tutorial's milliseconds a step."""
_NUM_RESAMPLES = 2000
_SAMPLED_EVERY = 50


class SignalCost(ContractModel):
    """What one signal adds to a step of MindSpore's own."""

    difference_ms: Quartiles
    """Of the medians of two turns of one round; smaller than the machine's noise for most."""
    interval_ms: tuple[float, float]
    """95 % bootstrap interval of their median over the rounds."""
    host_ms: Quartiles
    """The host's part alone, timed inside the same steps."""
    share: float
    """Median difference over the median bare step."""
    tutorial_ms: float


def signal_costs(
    times: Mapping[str, Sequence[Sequence[float]]], added: Mapping[str, Sequence[float]]
) -> dict[str, SignalCost]:
    """Return the costs by signal.

    Args:
        times: Way -> per round the seconds of each step; `bare` is one of them.
        added: Way -> seconds of the host's part in each step.
    """
    bare = [float(np.median(turn)) for turn in times["bare"]]
    costs = {}
    for name, (_, tutorial_ms) in SIGNALS.items():
        differences = np.array(
            [1e3 * (np.median(turn) - base) for turn, base in zip(times[name], bare, strict=True)]
        )
        generator = np.random.default_rng(0)
        drawn = generator.integers(0, len(differences), size=(_NUM_RESAMPLES, len(differences)))
        begin, end = np.percentile(np.median(differences[drawn], axis=1), [2.5, 97.5])
        costs[name] = SignalCost(
            difference_ms=quartiles(differences.tolist()),
            interval_ms=(float(begin), float(end)),
            host_ms=quartiles(added[name], unit=1e-3),
            share=float(np.median(differences)) / 1e3 / float(np.median(bare)),
            tutorial_ms=tutorial_ms,
        )
    return costs


def signal_table(costs: Mapping[str, SignalCost]) -> list[str]:
    """Return the lines of the table."""
    lines = [
        "| signal | over bare, ms: median [95 %] | of a step | host's part, ms | tutorial, ms |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, cost in costs.items():
        low, high = cost.interval_ms
        lines.append(
            f"| {name}: {SIGNALS[name][0]} | {cost.difference_ms.median:.2f} [{low:.2f}, "
            f"{high:.2f}] | {cost.share:.2%} | {cost.host_ms.median:.3f} "
            f"[{cost.host_ms.low:.3f}, {cost.host_ms.high:.3f}] | {cost.tutorial_ms:g} |"
        )
    entropy = costs["entropy"]
    sampled_ms = entropy.difference_ms.median / _SAMPLED_EVERY
    sampled = (
        f"A look inside is sampled: with `every: {_SAMPLED_EVERY}` it costs {sampled_ms:.3f} ms a "
        f"step, {entropy.share / _SAMPLED_EVERY:.3%} of it."
    )
    lines += ["", sampled]
    return lines

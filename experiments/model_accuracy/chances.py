"""Whether the calibrated memory model knows its own error: what it says against what came true."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from mindtune.experiments.model_accuracy.acceptance import judged
from mindtune.experiments.model_accuracy.evaluation import Result
from mindtune.experiments.model_accuracy.mapping import Row
from mindtune.search.normal import normal_cdf

__all__ = ["chances", "spreads"]

_CLASSES = (0.0, 0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98, 1.0)
"""Limits of the chances that are counted together."""
_DISTANCES = (0.0, 1.0, 2.0, 3.0)
"""Deviations above the device that a config might be predicted at and still be allowed."""


def spreads(results: Sequence[Result]) -> list[str]:
    """Return in Markdown how often rows lie as far off as the calibrated model expects."""
    scores = np.concatenate([
        (np.log(result.group.measured / draw.predicted) / draw.spread)[draw.held_out]
        for result in results
        for draw in result.draws
    ])  # fmt: skip
    own = np.concatenate([draw.spread[draw.held_out] for r in results for draw in r.draws])
    within = ", ".join(f"{np.mean(np.abs(scores) <= most):.1%}" for most in (1, 2, 3))
    above = ", ".join(f"{np.mean(scores > most):.1%}" for most in (1, 2, 3))
    low, middle, high = np.quantile(own, [0.25, 0.5, 0.75])
    said = (
        f"With 3 rows it expects to be {middle:.1%} [{low:.1%}, {high:.1%}] off (standard "
        f"deviation). Within 1, 2, 3 of these lie {within} of the rows (normal: 68.3, 95.4, "
        f"99.7%), above the prediction by more {above} (15.9, 2.3, 0.1%)."
    )
    return [said]


def chances(results: Sequence[Result], rows: Sequence[Row]) -> list[str]:
    """Return in Markdown which share of configs fits the whole device, by the chance said."""
    scores, fits = [np.zeros(0)], [np.zeros(0, dtype=bool)]
    for result in results:
        known = judged(result, rows)
        if known is None:
            continue
        counted = known.failed | known.ran
        for draw in result.draws:
            log_memory, slopes = known.forecast(draw.log_rates)
            score = (np.log(known.sizes) - log_memory) / draw.doubt.spreads(slopes)
            scores.append(score[counted])
            fits.append(known.ran[counted])
    score, fit = np.concatenate(scores), np.concatenate(fits)
    if not len(score):
        return []
    chance = normal_cdf(score)
    lines = [
        "Chance to fit the whole device, as said after 3 rows, and what came true:", "",
        "| Said | Configs x draws | Mean said | Fit |", "|---|---|---|---|",
    ]  # fmt: skip
    for low, high in pairwise(_CLASSES):
        at = (chance >= low) & ((chance < high) | (high == _CLASSES[-1]))
        if at.any():
            said, true = chance[at].mean(), fit[at].mean()
            lines.append(f"| {low:.0%} to {high:.0%} | {at.sum()} | {said:.1%} | {true:.1%} |")
    lines += [
        "",
        "| Allowed above the device | Failed, allowed | Fit, rejected |",
        "|---|---|---|",
    ]
    for most in _DISTANCES:
        allowed = score >= -most
        lines.append(
            f"| {most:g} deviations | {allowed[~fit].mean():.1%} | {(~allowed[fit]).mean():.1%} |"
        )
    return lines

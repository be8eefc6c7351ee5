"""The first steps of a run, in which there is no baseline yet: real runs die in their first ten.

Theory of operation. The loss is watched through the median of 3 samples, which one outlier cannot
move, against the lowest such median so far (at first: the first loss). Noise is what makes this
hard: a fine-tuning run starts with a loss that scatters by 20 % from batch to batch and is
healthy. So there is no single threshold but eight patterns, each of which noise alone does not
make:

- **jump**: the first losses but one or two are 5 times the first; or, among the first 8, two in a
  row are 3 times everything before and climb;
- **excursion**: three losses in a row are at twice the lowest median (3 times, if fewer than 4
  losses came before), above 1.5 times everything before, and climb;
- **worse than untrained**, in the 9th to 12th loss: the newest 5 all stand above 1.5 times the
  highest of the first 4, however they scatter, and do not fall: a loss that uniform guesses would
  beat (seen with AdamW at 1.0 under a clip: 5.5, 4.3, 4.8, then 8 to 31 without an order). Or, in
  the 12th loss: all after the first stand at 1.5 times it and their median at 2.2 times, or at 1.4
  and 1.5 times and 5 robust deviations above it; and they do not fall;
- **return**: the run was learning in order (the medians fell, nearly without a break, to 70 % of
  the first loss and the norm to 35 % of its first), and now both come back: three of four losses
  stand at `cold_rise` times the lowest median, the fourth above it too, and the median norm at
  1.75 times its lowest;
- **climb**: the run was learning in order, and 5 medians in a row rise to `cold_rise` times the
  lowest, none of the steps making more than half of the climb;
- **standstill**: the first 4 losses fell without a break by a third, the norm to 30 %, and 13 to
  16 losses into the run the median of 8 stands 8 % above the lowest median of the first 6 and at
  two thirds of the first loss or more: a run that falls that fast and then goes nowhere (the
  healthy one is at 0.8 of that lowest median there, at 30 times its rate at 1.1 or more). Without
  norms it is not looked for;
- **rebound**: the lowest median of the first 6 losses was at two thirds of the first loss, the
  norm fell to 30 %, and 13 or 14 losses into the run none of the newest 8 comes back to that
  median by more than 1 %, while their median stands 5 % above it and their mean 9 %. Of simulated
  healthy starts that fall as fast and then stand still it names 0.1 % more than the other patterns
  do at a scatter of 5 %, 1 % more at 10 %. Without norms it is not looked for either;
- **excess**, after `cold_steps` losses: the median stands above that of the 8 losses before by 3
  times the largest of the distances from loss to loss among these.

A jump that the run is recovering from is none of these: all but the first ask for a loss that
still climbs. A first loss below `_SCALE` may be one of those that scatter around zero, of which
the multiples of few samples say nothing: no jump or excursion is seen from there. A single loss
of 5 times everything before it, among the first 8, is noted as a spike.

On 1500 runs of 64 independent log-normal samples with a scatter of 20 % (norms of 35 %) they fire
in 0.6 %, with 10 % in 0.2 %, with 5 % in none; with 30 % (norms of 50 %, 600 runs) in 3 %, so that
a run of very small batches should have a warm-up or the policy on observe; on the reference
workload at 30 and 100 times its learning rate in the 8th to 10th step.

Only finite losses come here. After `cold_end` losses the state no longer changes.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

from mindtune.policies.detectors.thresholds import DetectorThresholds
from mindtune.policies.findings import Finding, FindingKind, Severity
from mindtune.policies.signals import Observation
from mindtune.policies.state_class import state_class
from mindtune.policies.windows import MAD_TO_SIGMA, median, push

__all__ = ["ColdStartState", "judge_cold_start"]

_BASE = 8
_KEPT = _BASE + 3
_MEDIANS = 5
_NOISE = 1.3
_JUMP = 5.0
_FEW, _TWOFOLD = 8, 3.0
_SCALE = 0.5
_EXCURSION_EARLY, _EXCURSION, _ABOVE_ALL = 3.0, 2.0, 1.5
_LEARNT, _NORM_FELL, _MOST_UPS = 0.7, 0.35, 0.2
_FELL, _STANDS, _OF_FIRST, _STANDSTILL = 0.68, 1.08, 0.65, range(13, 17)
_NORM_FELL_FAR = 0.3
_NO_RETURN, _MEDIAN_ABOVE, _MEAN_ABOVE, _REBOUND = 0.99, 1.05, 1.09, range(13, 15)
_SETTLED, _STAYS = 4, 5
_FAR = ((1.5, 2.2, 0.0), (1.4, 1.5, 5.0))
_FALLS = 0.8
_FOURTH, _NORM_BACK = 1.08, 1.75
_ELEVATED, _LARGEST_SHARE = 1.02, 0.5
_EXCESS = 3.0


@state_class(frozen=True, slots=True)
class ColdStartState:
    """What the first losses and norms were like."""

    seen: int = 0
    """Finite losses so far, counted up to the end of the cold start."""
    losses: tuple[float, ...] = ()
    """Newest losses."""
    medians: tuple[float, ...] = ()
    """Newest medians of 3."""
    norms: tuple[float, ...] = ()
    """Newest norms, at most 3."""
    first: float = 0.0
    """First loss."""
    lowest: float = math.inf
    """Lowest median so far."""
    highest: float = -math.inf
    """Highest loss but for the newest 3."""
    ups: int = 0
    """Medians that rose."""
    downs: int = 0
    """Medians that fell."""
    lowest_ups: int = 0
    """Rises on the way to the lowest median."""
    lowest_downs: int = 0
    """Falls on the way to the lowest median."""
    reported: bool = False
    """Whether a pattern was found."""
    fell: bool = False
    """Whether the first 4 losses fell without a break, by a third."""
    early: float = math.inf
    """Lowest median of the first 6 losses."""
    first_norm: float = 0.0
    """Larger one of the first two norms."""
    lowest_norm: float = math.inf
    """Lowest median of 3 norms before this step."""


def judge_cold_start(
    observation: Observation, loss: float, state: ColdStartState, thresholds: DetectorThresholds
) -> tuple[tuple[Finding, ...], ColdStartState]:
    """Return the finding that the loss explodes in the first steps, and the next state.

    Args:
        observation: The step.
        loss: Its loss, finite.
        state: State before it.
        thresholds: When to report.
    """
    if state.seen >= thresholds.cold_end:
        return (), state
    norm = observation.grad_norm
    norms, first_norm = state.norms, state.first_norm
    if norm is not None and math.isfinite(norm):
        norms = push(norms, norm, 3)
        if state.seen < 2:
            first_norm = max(first_norm, norm)
    early = _early(observation, loss, state)
    losses = push(state.losses, loss, _KEPT + 1)
    following = replace(
        state, seen=state.seen + 1, losses=losses, norms=norms, first_norm=first_norm
    )
    if len(losses) < 3:
        first = loss if state.seen == 0 else state.first
        return early, replace(following, first=first, lowest=first)
    now = _median_of_3(losses)
    highest = state.highest if len(losses) < 4 else max(state.highest, losses[-4])
    before = state.medians[-1] if state.medians else state.first
    ups, downs = state.ups + int(now > before), state.downs + int(now < before)
    medians = push(state.medians, now, _MEDIANS)
    following = replace(following, medians=medians, highest=highest, ups=ups, downs=downs)
    if following.seen == 4:
        unbroken = all(later < earlier for earlier, later in pairwise(losses))
        following = replace(following, fell=unbroken and loss <= _FELL * state.first)
    pattern = ""
    if now <= state.lowest:
        following = replace(following, lowest=now, lowest_ups=ups, lowest_downs=downs)
    elif state.lowest > 0 and now >= thresholds.cold_rise * state.lowest:
        pattern = _pattern(following, now, thresholds)
    if following.seen == 6:
        following = replace(following, early=min(now, state.lowest))
    if following.seen in _STANDSTILL and norms and not (pattern or state.reported):
        pattern = _stands(following)
    if len(norms) == 3:
        lowest_norm = min(state.lowest_norm, _median_of_3(norms))
        following = replace(following, lowest_norm=lowest_norm)
    if not pattern:
        return early, following
    following = replace(following, reported=True)
    finding = Finding(
        step=observation.step,
        last_step=observation.step,
        kind=FindingKind.DIVERGENCE,
        severity=Severity.CRITICAL,
        message=f"in the first steps the loss rose from {state.lowest:.4g} to {now:.4g} "
        f"({pattern}): the learning rate is too high.",
        evidence={
            "cold_start": 1,
            "pattern": pattern,
            "loss": now,
            "lowest": state.lowest,
            "threshold": thresholds.cold_rise,
            "learning_rate": observation.learning_rate,
        },
    )
    return (*early, finding), following


def _early(observation: Observation, loss: float, state: ColdStartState) -> tuple[Finding, ...]:
    """Return the note that one of the first losses is far above all before it."""
    if not 1 <= state.seen < _FEW or state.first < _SCALE or min(state.losses) <= 0:
        return ()
    highest = max(state.losses)
    if loss < _JUMP * highest:
        return ()
    spike = Finding(
        step=observation.step,
        last_step=observation.step,
        kind=FindingKind.LOSS_SPIKE,
        severity=Severity.INFO,
        message=f"the loss {loss:.4g} is {loss / highest:.1f} times everything in the "
        f"{state.seen} steps before it.",
        evidence={
            "value": loss,
            "median": highest,
            "score": 0.0,
            "threshold": _JUMP,
            "consecutive": 1,
            "count": 1,
            "burst": 0,
        },
    )
    return (spike,)


def _pattern(state: ColdStartState, now: float, thresholds: DetectorThresholds) -> str:
    """Return the name of the pattern that the losses make, or an empty string."""
    losses, lowest = state.losses, state.lowest
    a, b, c = losses[-3:]
    climbs = a >= _ELEVATED * lowest and max(b, c) >= thresholds.climb * a
    if state.seen > thresholds.cold_steps:
        return _late(losses, now, thresholds)
    known = state.first >= _SCALE
    if known and state.seen <= 4 and min(b, c) >= _JUMP * lowest:
        return "jump"
    two = b >= _TWOFOLD * max(a, state.highest) and c >= thresholds.climb * b
    if known and 4 <= state.seen <= _FEW and two:
        return "jump"
    factor = _EXCURSION_EARLY if state.seen - 3 < 4 else _EXCURSION
    if known and climbs and min(a, b, c) >= max(factor * lowest, _ABOVE_ALL * state.highest):
        return "excursion"
    learnt = (
        lowest <= _LEARNT * state.first
        and state.lowest_downs >= 2
        and state.lowest_ups <= _MOST_UPS * state.lowest_downs
        and _norm_fell(state, _NORM_FELL)
    )
    if len(losses) == state.seen >= _SETTLED + _STAYS:
        worst = max(losses[:_SETTLED])
        if min(losses[-_STAYS:]) >= _ABOVE_ALL * worst and max(b, c) >= a:
            return "worse than untrained"
        if known and state.seen == _KEPT + 1 and _is_untrained(losses):
            return "worse than untrained"
    distances = tuple(abs(later - earlier) for earlier, later in pairwise(losses[-_BASE - 1 :]))
    if not learnt or now - lowest < _NOISE * median(distances):
        return ""
    if len(state.norms) == 3 and _median_of_3(state.norms) >= _NORM_BACK * state.lowest_norm:
        ordered = sorted(losses[-4:])
        back = ordered[0] >= _FOURTH * lowest and ordered[1] >= thresholds.cold_rise * lowest
        if back and max(a, b, c) >= thresholds.climb * losses[-4]:
            return "return"
    steps = [later - earlier for earlier, later in pairwise(state.medians)]
    climbed = state.medians[-1] - state.medians[0]
    unbroken = len(steps) == _MEDIANS - 1 and min(steps) > 0
    return "climb" if unbroken and max(steps) <= _LARGEST_SHARE * climbed else ""


def _stands(state: ColdStartState) -> str:
    """Return how a run that fell fast goes on without learning, or an empty string."""
    newest, early = state.losses[-_BASE:], state.early
    level = median(newest)
    if level < _OF_FIRST * state.first or not _norm_fell(state, _NORM_FELL_FAR):
        return ""
    if state.fell and level >= _STANDS * early:
        return "standstill"
    rebounds = (
        state.seen in _REBOUND
        and 0.0 < early <= _FELL * state.first
        and min(newest) >= _NO_RETURN * early
        and level >= _MEDIAN_ABOVE * early
        and fmean(newest) >= _MEAN_ABOVE * early
    )
    return "rebound" if rebounds else ""


def _is_untrained(losses: tuple[float, ...]) -> bool:
    """Return whether all losses after the first stand far above it, and do not fall."""
    first, later = losses[0], losses[1:]
    level = median(later)
    scatter = MAD_TO_SIGMA * median(tuple(abs(loss - level) for loss in later))
    falls = median(later[-_SETTLED:]) < _FALLS * median(later[:_SETTLED])
    return not falls and any(
        min(later) >= each * first
        and level >= middle * first
        and level - first >= deviations * scatter
        for each, middle, deviations in _FAR
    )


def _norm_fell(state: ColdStartState, share: float) -> bool:
    """Return whether the norm, if it is measured, has fallen to a share of its first values."""
    return not state.norms or state.lowest_norm <= share * state.first_norm


def _late(losses: tuple[float, ...], now: float, thresholds: DetectorThresholds) -> str:
    """Return whether the loss has left the level of the 8 losses before the newest 3."""
    if len(losses) <= _KEPT:
        return ""
    a, b, c = losses[-3:]
    earlier = losses[1:-3]
    base = median(earlier)
    largest = max(abs(y - x) for x, y in pairwise(losses[:-3]))
    climbs = a >= _ELEVATED * base and max(b, c) >= thresholds.climb * a
    rises = now >= thresholds.cold_rise * base and now - base >= _EXCESS * largest
    return "excess" if climbs and rises else ""


def _median_of_3(values: tuple[float, ...]) -> float:
    a, b, c = values[-3:]
    return max(min(a, b), min(max(a, b), c))

"""Where the gradient norm is going, if no single step shows it: to another level, or ever upwards.

Theory of operation. A norm that moves to three times its level is an outlier only where its
scatter is small; in a young run, whose baseline still holds the fall of the warm-up, it is none.
And a norm that grows by 5 % a step takes its baseline along. Both are seen from groups of the
newest norms, flagged ones included, every `_EVERY` steps:

- **another level**: nearly all of the newest 24 (but for the 3 lowest) stand above nearly all of
  the 16 before them, or of those 8 steps earlier (but for the 2 highest), their median is
  `level_rise` times that of these, and they do not climb: the median of the newer half is at most
  1.3 times that of the older one; since norms wander, the rise of the logarithm must be twice the
  largest one in 32 steps that the run has made before (forgotten over some thousand steps);
- a **climb**: of the medians of the newest 8 groups of 4 nearly each is above most before it (at
  least 23 of the 28 pairs agree, as in Mann and Kendall's test), no group makes more than half of
  the rise, and the last two stand above the first two by `norm_climb`, by 4 standard errors of
  such a rise, and by 1.5 times the largest one before, as above.

Either is a note, given once. Norms move for good reasons (another batch size, another phase of the
schedule), and what is to be answered shows in the loss. After a shift the baseline is lifted to
the new level with the scatter that it had. An unbroken row of flags is left to the rules on
outliers, which rebase it too, and so is a climb in any; while the loss is flagged no level is
called a new one.
"""

from __future__ import annotations

import math
from itertools import combinations, pairwise

from mindtune.policies.detectors.spike import Judgement, SpikeState
from mindtune.policies.detectors.thresholds import DetectorThresholds
from mindtune.policies.findings import Finding, FindingKind, Severity
from mindtune.policies.signals import Observation
from mindtune.policies.state_class import state_class
from mindtune.policies.windows import Window, median, push

__all__ = ["CourseState", "judge_course"]

_LEAST = 1e-300
_EVERY = 4
_NEW, _OLD, _GAP = 24, 16, 8
_ROW = 16
_LOWEST, _HIGHEST = 3, 2
_CLIMBS = 1.3
_GROUP, _GROUPS = 4, 8
_AGREE = 18  # 23 pairs rise and 5 fall
_LARGEST_SHARE = 0.5
_ERRORS = 4.0
_LEVEL_OF_EARLIER, _CLIMB_OF_EARLIER = 2.0, 1.5
_FORGET = 0.996  # once in 4 steps
# The median of 4 normal samples has a deviation of 0.546, and so has the difference of two means
# of two such medians each; the median distance of two samples is 0.954 deviations.
_RISE_ERROR = 0.546 / 0.954


@state_class(frozen=True, slots=True)
class CourseState:
    """The newest norms, and how far they have wandered."""

    norms: tuple[float, ...] = ()
    """Newest norms, those of 0 left out."""
    waits: int = 0
    """Norms since the last look."""
    rises: tuple[float, ...] = ()
    """What the logarithm rose by over the groups, at the newest looks."""
    wander: float = 0.0
    """Largest rise before these, slowly forgotten."""
    climbs: bool = False
    """Whether the present climb was reported."""

    def contradiction(self) -> str | None:
        """Return why no run can have stored these norms; None if one can."""
        if not all(0.0 < norm < math.inf for norm in self.norms):
            return "norms must be finite and above 0"
        return None


def judge_course(
    observation: Observation,
    norm: float,
    judgement: Judgement,
    norms: SpikeState,
    state: CourseState,
    thresholds: DetectorThresholds,
    *,
    loss_flagged: bool,
) -> tuple[tuple[Finding, ...], SpikeState, CourseState]:
    """Return the finding about the course of the norm, its baseline, and the next state.

    Args:
        observation: The step.
        norm: Its gradient norm, finite.
        judgement: The verdict over it as a spike.
        norms: Baseline of the norm after that verdict.
        state: State before the step.
        thresholds: When to report.
        loss_flagged: Whether the loss is out of line.
    """
    if norm < _LEAST:
        return (), norms, state
    newest = push(state.norms, norm, _NEW + _GAP + _OLD)
    if judgement.shifted_from is not None:
        return (), norms, CourseState(newest[-_NEW:], wander=state.wander)
    if state.waits + 1 < _EVERY:
        waiting = CourseState(newest, state.waits + 1, state.rises, state.wander, state.climbs)
        return (), norms, waiting
    state = CourseState(newest, 0, state.rises, state.wander, state.climbs)
    before = 0.0
    if norms.row < _ROW and not loss_flagged:
        before = _old_level(newest, state.wander, thresholds)
    if before:
        new = median(newest[-_NEW:])
        return (
            (_shift(observation, before, new, thresholds),),
            _lifted(norms, newest[-_NEW:], new / before),
            CourseState(newest[-_NEW:], wander=state.wander),
        )
    if len(newest) < _GROUP * _GROUPS:
        return (), norms, state
    groups = newest[-_GROUP * _GROUPS :]
    last, before_last, first, second = (_log_median(groups, at) for at in (-1, -2, 0, 1))
    rise = 0.5 * (last + before_last - first - second)
    medians: tuple[float, ...] = ()
    least = max(math.log(thresholds.norm_climb), _CLIMB_OF_EARLIER * state.wander)
    if rise >= least and not judgement.held:
        medians = tuple(_log_median(groups, at) for at in range(_GROUPS))
    climbs = bool(medians) and _climbs(newest, medians, rise)
    findings = (_climb(observation, medians, thresholds),) if climbs and not state.climbs else ()
    # A climb must not count against itself.
    oldest = state.rises[0] if len(state.rises) == _GROUPS else 0.0
    return (
        findings,
        norms,
        CourseState(
            newest,
            0,
            push(state.rises, rise, _GROUPS),
            max(_FORGET * state.wander, oldest),
            climbs,
        ),
    )


def _log_median(groups: tuple[float, ...], at: int) -> float:
    """Return the logarithm of the median of one group of the newest norms."""
    begin = _GROUP * (at % _GROUPS)
    return math.log(median(groups[begin : begin + _GROUP]))


def _old_level(newest: tuple[float, ...], wander: float, thresholds: DetectorThresholds) -> float:
    """Return the level that the newest norms have left for another one; 0: they have not."""
    if len(newest) < _NEW + _OLD:
        return 0.0
    new = newest[-_NEW:]
    level, half = median(new), _NEW // 2
    for gap in (0, _GAP):
        last = len(newest) - _NEW - gap
        if last < _OLD:
            break
        old = newest[last - _OLD : last]
        before = median(old)
        rise = level / before
        if (
            thresholds.level_rise <= rise < math.inf
            and math.log(rise) >= _LEVEL_OF_EARLIER * wander
            and sorted(new)[_LOWEST] > sorted(old)[-1 - _HIGHEST]
            and median(new[half:]) <= _CLIMBS * median(new[:half])
        ):
            return before
    return 0.0


def _lifted(norms: SpikeState, new: tuple[float, ...], ratio: float) -> SpikeState:
    """Return the baseline at the new level, with the scatter of the old one around it."""
    values = tuple(value * ratio for value in norms.window.values[: -len(new)])
    if any(math.isinf(value) for value in values):
        values = ()
    return SpikeState(Window.of((*values, *new)), seen=norms.seen, marks=norms.marks)


def _climbs(
    newest: tuple[float, ...],
    medians: tuple[float, ...],
    rise: float,
) -> bool:
    """Return whether the groups rise one after the other, by more than noise makes them."""
    agree = sum(1 if later > earlier else -1 for earlier, later in combinations(medians, 2))
    largest = max(later - earlier for earlier, later in pairwise(medians))
    if agree < _AGREE or largest > _LARGEST_SHARE * (medians[-1] - medians[0]):
        return False
    distances = tuple(abs(math.log(b) - math.log(a)) for a, b in pairwise(newest))
    return rise >= _ERRORS * _RISE_ERROR * median(distances)


def _shift(
    observation: Observation, before: float, now: float, thresholds: DetectorThresholds
) -> Finding:
    return Finding(
        step=max(1, observation.step - _NEW + 1),
        last_step=observation.step,
        kind=FindingKind.LEVEL_SHIFT,
        severity=Severity.INFO,
        message=f"the gradient norm has moved from a level of {before:.4g} to {now:.4g} and stays "
        f"there for {_NEW} steps: this is its new baseline.",
        evidence={
            "signal": "grad_norm",
            "value": now,
            "median": before,
            "threshold": thresholds.level_rise,
            "consecutive": _NEW,
        },
    )


def _climb(
    observation: Observation, medians: tuple[float, ...], thresholds: DetectorThresholds
) -> Finding:
    first, last = math.exp(medians[0]), math.exp(medians[-1])
    return Finding(
        step=observation.step,
        last_step=observation.step,
        kind=FindingKind.LEVEL_SHIFT,
        severity=Severity.INFO,
        message=f"the gradient norm climbs, from {first:.4g} to {last:.4g} in "
        f"{_GROUP * _GROUPS} steps; its baseline goes along.",
        evidence={
            "signal": "grad_norm",
            "pattern": "climb",
            "value": last,
            "median": first,
            "threshold": thresholds.norm_climb,
            "window": _GROUP * _GROUPS,
        },
    )

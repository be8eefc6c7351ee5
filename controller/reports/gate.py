"""Whether a run may be released: rules over its metrics and signals."""

from __future__ import annotations

import math
import re
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

from mindtune.controller.contract import (
    GateCheck,
    GateFile,
    GateOutput,
    GateRule,
    RunConditions,
    RunMetrics,
    read_document,
)
from mindtune.controller.metrics.collect import TimeJudge
from mindtune.controller.metrics.judge import impossible
from mindtune.controller.metrics.run_metrics import measure
from mindtune.controller.metrics.run_source import open_source
from mindtune.controller.records.log_readers import Names
from mindtune.policies.detectors.non_finite import overflowed_by_scale
from mindtune.policies.signals import Observation

__all__ = ["DEFAULT_RULES", "judge_run", "to_junit"]

_TIMED = frozenset({
    "step_time_s", "data_time_s", "tokens_per_s", "mfu", "device_utilization", "straggler_rank",
    "straggler_ratio",
})  # fmt: skip
"""Signals of the time that a step took, which is no step's own where it held a compile, an
evaluation or a save; any other signal of such a step counts."""

_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")

DEFAULT_RULES = (
    GateRule(
        name="grad_norm_of_the_last_100_steps", signal="grad_norm", statistic="max",
        last_steps=100, max=1e5, required=False,
    ),
    GateRule(
        name="finite_losses_in_the_last_100_steps", signal="loss", statistic="non_finite_share",
        last_steps=100, max=0.0,
    ),
    GateRule(
        name="updates_skipped_in_the_last_100_steps", signal="update_skipped", statistic="mean",
        last_steps=100, max=0.1, required=False,
    ),
    GateRule(name="ended_in_good_order", outcome=["ok"], required=False),
)  # fmt: skip
"""Of any run: not every step tells its norm and what it skipped, and no log how it ended."""


def judge_run(
    run: Path,
    rules_file: Path | None = None,
    *,
    format: str = "auto",  # noqa: A002 - the option's word
    names: Names | None = None,
    conditions: RunConditions | None = None,
) -> GateOutput:
    """Return what every rule says about a run.

    Args:
        run: folder of a run, finished or going on, or of a trial; or a training log.
        rules_file: gate.yaml; None: `DEFAULT_RULES`.
        format: name of a log reader, or `auto`.
        names: what a log calls the signals; None: what is known.
        conditions: what is known besides, for metrics that need the model or the peak.

    Raises:
        ConfigError: if there is nothing that can be read, or the rules are not valid.
    """
    rules: Sequence[GateRule] = DEFAULT_RULES
    if rules_file is not None:
        rules = read_document(GateFile, rules_file).rules
    source = open_source(run, format=format, names=names)
    windows = [_Window(rule) for rule in rules if rule.signal is not None]
    steps = _passing(source.observations, windows)
    metrics = None
    if any(rule.metric is not None for rule in rules):
        metrics = measure(replace(source, observations=steps), conditions=conditions)
    else:
        deque(steps, maxlen=0)
    of_signals = iter(windows)
    checks = []
    for rule in rules:
        if rule.outcome is not None:
            checks.append(_check_outcome(rule, source.outcome))
        elif metrics is not None and rule.metric is not None:
            checks.append(_check_metric(rule, metrics))
        else:
            checks.append(_check_signal(rule, next(of_signals).values()))
    return GateOutput(passed=all(check.ok is not False for check in checks), checks=checks)


class _Window:
    """The values of one signal that a rule looks at: of all steps, or of the last ones."""

    def __init__(self, rule: GateRule) -> None:
        self._signal = rule.signal or ""
        self._timed = self._signal in _TIMED
        self._steps: deque[tuple[int, float | None]] = deque(maxlen=rule.last_steps)

    def take(self, step: Observation, *, is_first: bool, trained: bool) -> None:
        """Take in a step.

        Args:
            step: The step.
            is_first: Whether it is the first of a segment.
            trained: Whether its time went into nothing else.
        """
        if is_first:
            # A restart makes these once more: they are no part of what is to be released.
            while self._steps and self._steps[-1][0] >= step.step:
                self._steps.pop()
        if trained or not self._timed:
            self._steps.append((step.step, self._value(step)))

    def _value(self, step: Observation) -> float | None:
        value: float | None = getattr(step, self._signal)
        of_scale = self._signal == "grad_norm" and overflowed_by_scale(step)
        # What a loss scale brings to overflow is no norm: those updates are told as skipped.
        return None if of_scale and value is not None and not math.isfinite(value) else value

    def values(self) -> list[float]:
        """Return what was measured."""
        return [float(value) for _, value in self._steps if value is not None]


def _passing(steps: Iterable[Observation], windows: Sequence[_Window]) -> Iterator[Observation]:
    judge = TimeJudge()
    run: int | None = None
    for step in steps:
        is_first, run = run != (step.run or 0), step.run or 0
        trained = judge.why_untimed(step) is None
        for window in windows:
            window.take(step, is_first=is_first, trained=trained)
        yield step


def _check_outcome(rule: GateRule, outcome: str | None) -> GateCheck:
    fine = rule.outcome or []
    if outcome is None:
        return _unmeasured(
            rule, "how it ended is not recorded: it goes on, was killed or is a log"
        )
    return GateCheck(
        rule=rule.name,
        ok=outcome in fine,
        value=None,
        limit=None,
        message=f"it ended with {outcome}, must be {' or '.join(fine)}",
    )


def _check_metric(rule: GateRule, metrics: RunMetrics) -> GateCheck:
    name = rule.metric or ""
    value = metrics.values()[name]
    if value is None:
        why = metrics.reasons.get(name)
        return _unmeasured(rule, f"{name} was not measured{f': {why}' if why else ''}")
    check = _judged(rule, name, value)
    if impossible(name, value):
        return check.model_copy(
            update={"ok": False, "message": f"{check.message}, but above 1 it is wrong"}
        )
    return check


def _check_signal(rule: GateRule, values: Sequence[float]) -> GateCheck:
    if not values:
        return _unmeasured(rule, f"{rule.signal} was not measured")
    what = f"{rule.statistic} of {rule.signal} over {len(values)} steps"
    return _judged(rule, what, _statistic(rule, values))


def _unmeasured(rule: GateRule, message: str) -> GateCheck:
    return GateCheck(
        rule=rule.name,
        ok=False if rule.required else None,
        value=None,
        limit=rule.min if rule.max is None else rule.max,
        message=message,
    )


def _judged(rule: GateRule, what: str, value: float) -> GateCheck:
    below = rule.min is not None and not value >= rule.min
    above = rule.max is not None and not value <= rule.max
    bounds = [f"at least {rule.min:g}"] if rule.min is not None else []
    bounds += [f"at most {rule.max:g}"] if rule.max is not None else []
    return GateCheck(
        rule=rule.name,
        ok=not (below or above),
        value=value,
        limit=rule.min if below or rule.max is None else rule.max,
        message=f"{what} is {value:g}, must be {' and '.join(bounds)}",
    )


def _statistic(rule: GateRule, values: Sequence[float]) -> float:
    broken = sum(not math.isfinite(value) for value in values)
    if rule.statistic == "non_finite_share":
        return broken / len(values)
    if rule.statistic == "last":
        return values[-1]
    if any(math.isnan(value) for value in values):
        # Every comparison with NaN is false, so that a limit is never met by one.
        return math.nan
    return _STATISTICS[rule.statistic or ""](values)


def _mean(values: Sequence[float]) -> float:
    if not all(map(math.isfinite, values)):
        return sum(values)  # infinite, or NaN where both signs occur
    return math.fsum(value / len(values) for value in values)


_STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {
    "max": max,
    "min": min,
    "mean": _mean,
    "median": statistics.median,
}


def to_junit(output: GateOutput, *, suite: str) -> str:
    """Return the checks as a JUnit document, as CI systems show them."""
    failed = sum(check.ok is False for check in output.checks)
    skipped = sum(check.ok is None for check in output.checks)
    root = ET.Element(
        "testsuite",
        name=_xml_text(suite),
        tests=str(len(output.checks)),
        failures=str(failed),
        errors="0",
        skipped=str(skipped),
    )
    for check in output.checks:
        case = ET.SubElement(
            root, "testcase", classname="mindtune.gate", name=_xml_text(check.rule)
        )
        if check.ok is False:
            message = _xml_text(check.message)
            # Some systems show the attribute, others the text.
            ET.SubElement(case, "failure", type="gate", message=message).text = message
        elif check.ok is None:
            ET.SubElement(case, "skipped", message=_xml_text(check.message))
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _xml_text(text: str) -> str:
    """Spell out what XML cannot hold, such as the control characters of a name."""
    return _NOT_XML.sub(lambda match: match[0].encode("unicode_escape").decode(), text)

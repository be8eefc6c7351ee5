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
from mindtune.controller.metrics.run_metrics import measure
from mindtune.controller.metrics.run_source import open_source
from mindtune.controller.records.log_readers import Names
from mindtune.policies.signals import Observation

__all__ = ["DEFAULT_RULES", "judge_run", "to_junit"]

_TIMED = frozenset({"step_time_s", "data_time_s", "tokens_per_s", "mfu", "device_utilization"})
"""Signals of the time that a step took, which is no step's own where it held a compile, an
evaluation or a save; any other signal of such a step counts."""

_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")

DEFAULT_RULES = (
    GateRule(
        name="grad_norm_of_the_last_100_steps", signal="grad_norm", statistic="max",
        last_steps=100, max=1e5,
    ),
    GateRule(
        name="finite_losses_in_the_last_100_steps", signal="loss", statistic="non_finite_share",
        last_steps=100, max=0.0, required=True,
    ),
    GateRule(
        name="updates_skipped_in_the_last_100_steps", signal="update_skipped", statistic="mean",
        last_steps=100, max=0.1,
    ),
)  # fmt: skip


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
        rules_file: gate.yaml; None: the default rules.
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
    checks = [
        _check_metric(rule, metrics)
        if metrics is not None and rule.metric is not None
        else _check_signal(rule, next(of_signals).values())
        for rule in rules
    ]
    return GateOutput(passed=all(check.ok is not False for check in checks), checks=checks)


class _Window:
    """The values of one signal that a rule looks at: of all steps, or of the last ones."""

    def __init__(self, rule: GateRule) -> None:
        self._signal = rule.signal or ""
        self._timed = self._signal in _TIMED
        self._steps: deque[float | None] = deque(maxlen=rule.last_steps)

    def take(self, step: Observation) -> None:
        """Take in a step."""
        if not self._timed or step.phase in (None, "train"):
            self._steps.append(getattr(step, self._signal))

    def values(self) -> list[float]:
        """Return what was measured."""
        return [float(value) for value in self._steps if value is not None]


def _passing(steps: Iterable[Observation], windows: Sequence[_Window]) -> Iterator[Observation]:
    for step in steps:
        for window in windows:
            window.take(step)
        yield step


def _check_metric(rule: GateRule, metrics: RunMetrics) -> GateCheck:
    name = rule.metric or ""
    value = metrics.values()[name]
    if value is None:
        why = metrics.reasons.get(name)
        return _unmeasured(rule, f"{name} was not measured{f': {why}' if why else ''}")
    return _judged(rule, name, value)


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
            ET.SubElement(case, "failure", type="gate", message=_xml_text(check.message))
        elif check.ok is None:
            ET.SubElement(case, "skipped", message=_xml_text(check.message))
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _xml_text(text: str) -> str:
    """Spell out what XML cannot hold, such as the control characters of a name."""
    return _NOT_XML.sub(lambda match: match[0].encode("unicode_escape").decode(), text)

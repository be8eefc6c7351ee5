"""Whether a run may be released: rules over its signals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

from mindtune.controller.contract import GateCheck, GateOutput, read_document
from mindtune.controller.contract.gate_file import GateFile, GateRule
from mindtune.controller.records import RunFolder, read_signals
from mindtune.policies.signals import Observation

__all__ = ["DEFAULT_RULES", "judge_run", "to_junit"]

_TIMED = frozenset({"step_time_s", "data_time_s", "tokens_per_s", "mfu", "device_utilization"})
"""Signals of the time that a step took, which is no step's own where it held a compile, an
evaluation or a save; any other signal of such a step counts."""

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


def judge_run(folder: Path, rules_file: Path | None = None) -> GateOutput:
    """Return what every rule says about a run.

    Args:
        folder: of the run; a finished one or one that goes on.
        rules_file: gate.yaml; None: the default rules.

    Raises:
        ConfigError: if the folder has no readable signals.csv, or the rules are not valid.
    """
    rules: Sequence[GateRule] = DEFAULT_RULES
    if rules_file is not None:
        rules = read_document(GateFile, rules_file).rules
    steps = [row.observation for row in read_signals(RunFolder(folder).signals)]
    checks = [_check(rule, steps) for rule in rules]
    return GateOutput(passed=all(check.ok is not False for check in checks), checks=checks)


def _check(rule: GateRule, steps: Sequence[Observation]) -> GateCheck:
    trained = steps
    if rule.signal in _TIMED:
        trained = [step for step in steps if step.phase in (None, "train")]
    looked_at = trained if rule.last_steps is None else trained[-rule.last_steps :]
    values = [float(v) for o in looked_at if (v := getattr(o, rule.signal)) is not None]
    limit = rule.max if rule.max is not None else rule.min
    what = f"{rule.statistic} of {rule.signal} over {len(values)} steps"
    if not values:
        return GateCheck(
            rule=rule.name, ok=False if rule.required else None, value=None, limit=limit,
            message=f"{rule.signal} was not measured",
        )  # fmt: skip
    value = _statistic(rule, values)
    below = rule.min is not None and not value >= rule.min
    above = rule.max is not None and not value <= rule.max
    bounds = [f"at least {rule.min:g}"] if rule.min is not None else []
    bounds += [f"at most {rule.max:g}"] if rule.max is not None else []
    return GateCheck(
        rule=rule.name, ok=not (below or above), value=value,
        limit=rule.min if below else limit,
        message=f"{what} is {value:g}, must be {' and '.join(bounds)}",
    )  # fmt: skip


def _statistic(rule: GateRule, values: Sequence[float]) -> float:
    broken = sum(not math.isfinite(value) for value in values)
    if rule.statistic == "non_finite_share":
        return broken / len(values)
    if rule.statistic == "last":
        return values[-1]
    if any(math.isnan(value) for value in values):
        # Every comparison with NaN is false, so that a limit is never met by one.
        return math.nan
    return _STATISTICS[rule.statistic](values)


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
    root = ET.Element("testsuite", name=suite, tests=str(len(output.checks)), failures=str(failed))
    for check in output.checks:
        case = ET.SubElement(root, "testcase", classname="mindtune.gate", name=check.rule)
        if check.ok is False:
            ET.SubElement(case, "failure", message=check.message)
        elif check.ok is None:
            ET.SubElement(case, "skipped", message=check.message)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"

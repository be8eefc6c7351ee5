"""What is true of a problem, whoever searches it: what the rules do, and what could run."""

from __future__ import annotations

from collections import Counter

from mindtune.controller.errors import ConfigError
from mindtune.experiments.search_quality.problem import Problem
from mindtune.experiments.search_quality.rows import FILL, SpaceFacts
from mindtune.search.constraints import first_failure
from mindtune.search.knobs import Config, KnobValue
from mindtune.search.rules import RULES
from mindtune.search.walk import walk

__all__ = ["answers"]

_FILLING = tuple(rule for rule in RULES if rule.name == FILL)


def answers(problem: Problem) -> SpaceFacts:
    """Return what is true of a problem.

    Every layout that fills the cluster is asked, whatever other rule rejects it: the problem says
    whether it starts, and what it is worth.

    Raises:
        ConfigError: if nothing that the rules let pass can run: there is no answer.
    """
    report = problem.report
    accepted = {_values(entry.config) for entry in report.configs}
    seen: Counter[str] = Counter()
    saved: Counter[str] = Counter()
    running: list[float] = []
    running_feasible: list[float] = []
    for config in walk(report.space, report.cost, _FILLING):
        is_accepted = _values(config) in accepted
        if not problem.can_start(config):
            seen["refused"] += 1
            seen["accepted_refused"] += is_accepted
            continue
        value = problem.true_value(config)
        if value is None:
            seen["failing"] += 1
            seen["accepted_failures"] += is_accepted
            if problem.fails_for_memory(config):
                seen["failing_for_memory"] += 1
                seen["accepted_for_memory"] += is_accepted
            continue
        running.append(value)
        if is_accepted:
            running_feasible.append(value)
        else:
            failure = first_failure(report.space.complete(config), report.cost) or ""
            saved[failure.partition(":")[0]] += 1
    if not running_feasible:
        raise ConfigError(
            f"a search of {problem.name} must have something to find, but of its {report.total} "
            "configs none runs that the rules let pass."
        )
    return SpaceFacts(
        configs=report.total,
        rejected={entry.rule: entry.count for entry in report.rejected if entry.count},
        rejected_runnable=dict(saved),
        feasible=report.feasible,
        accepted_refused=seen["accepted_refused"],
        accepted_failures=seen["accepted_failures"],
        refused=seen["refused"],
        failing=seen["failing"],
        failing_for_memory=seen["failing_for_memory"],
        accepted_for_memory=seen["accepted_for_memory"],
        best=max(running),
        best_feasible=max(running_feasible),
    )


def _values(config: Config) -> tuple[KnobValue, ...]:
    return tuple(config.values())

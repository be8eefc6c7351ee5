"""One case of the experiment: a fault, the runs that are made of it, and what would be right.

A case is a set of overrides of the workload's base config and a plan of faults for the injector
(`controller/live/faults`); a guard is a mode of the policies and, at times, an override of its
own. All guards of a case see the same samples in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from mindtune.controller.contract import AnyFault, FaultPlan, parse
from mindtune.policies.findings import FindingKind

__all__ = ["GUARDED", "NOTHING", "SMALL", "UNGUARDED", "Case", "Guard", "Overrides", "Planted"]

Overrides = Mapping[str, Any]
NOTHING: Overrides = MappingProxyType({})

SMALL: Overrides = MappingProxyType(
    {
        "model.num_layers": 2,
        "training.recompute": "none",
        "training.global_batch_size": 16,
        "training.micro_batch_size": 16,
        "training.clip_norm": None,
        "training.eval_samples": 128,
    }
)
"""Half of the workload's blocks, a step in one micro-batch, which keeps two cores busy, and no
clipping, which would hide what a policy does."""


@dataclass(frozen=True)
class Guard:
    """One way of running a case."""

    name: str
    mode: Literal["act", "observe"]
    meaning: str
    """What the reader of the table must know."""
    overrides: Overrides = field(default_factory=lambda: NOTHING)


GUARDED = Guard("guarded", "act", "policies act")
UNGUARDED = Guard("unguarded", "observe", "policies only observe")


@dataclass(frozen=True)
class Planted:
    """What makes a run of some length faulty."""

    first_step: int
    """Step from which the fault acts."""
    faults: Sequence[Mapping[str, Any]] = ()
    """For the injector."""
    overrides: Overrides = field(default_factory=lambda: NOTHING)
    """For the workload's own config, where the injector cannot do it."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One fault on one size of the workload."""

    name: str
    fault: str
    """What is wrong, in a few words."""
    wanted: str
    """What the policies ought to do about it."""
    plant: Callable[[int], Planted | None] = lambda _steps: None
    """From the number of steps to what is planted; None: nothing."""
    expected: frozenset[FindingKind] = frozenset()
    """Findings that name the fault."""
    justified: frozenset[str] = frozenset()
    """Actions that are an answer to it; any other one is a false action."""
    steps: int = 100
    """Optimizer steps at the configured batch size."""
    guards: tuple[Guard, ...] = (GUARDED, UNGUARDED)
    base: Overrides = field(default_factory=lambda: SMALL)
    num_ranks: int = 1
    live: Overrides = field(default_factory=lambda: NOTHING)
    """Keys of the run's best config that the callback reads."""
    also_ends: frozenset[str] = frozenset()
    """Outcomes that are what the fault does, beside ok, stopped and non_finite."""

    def overrides(self, guard: Guard, *, seed: int, steps: int) -> dict[str, Any]:
        """Return the overrides of one row, by dotted key of the workload's base config."""
        planted = self.plant(steps)
        own = {} if planted is None else planted.overrides
        run = {"training.seed": seed, "training.steps": steps}
        return {**self.base, **run, **own, **guard.overrides}

    def faults(self, steps: int) -> tuple[AnyFault, ...]:
        """Return what the injector plants in a run of so many steps."""
        planted = self.plant(steps)
        if planted is None or not planted.faults:
            return ()
        content = {"faults": [dict(fault) for fault in planted.faults]}
        return parse(FaultPlan, content, source=f"the faults of {self.name}").faults

    def first_step(self, steps: int) -> int | None:
        """Return the step from which the fault acts; None: there is none."""
        planted = self.plant(steps)
        return None if planted is None else planted.first_step

    def guard(self, name: str) -> Guard:
        """Return a guard by its name."""
        return next(guard for guard in self.guards if guard.name == name)

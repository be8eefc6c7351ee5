"""The faults, and how each is run: guarded, unguarded, and where it helps a third way.

A case is a set of overrides of the workload's base config; a guard is a mode of the policies and,
at times, an override of its own. All guards of a case see the same samples in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from mindtune.controller.errors import ConfigError

__all__ = ["CASES", "Case", "Guard", "chosen_cases"]

Overrides = Mapping[str, Any]
_NOTHING: Overrides = MappingProxyType({})

_LOSS_SCALE = 2.0**24
_POISON_FACTOR = 1.0e6
_SLOW_S = 0.5

_REFERENCE: Overrides = MappingProxyType(
    {
        "training.recompute": "none",
        "training.global_batch_size": 16,
        "training.micro_batch_size": 16,
        "training.eval_samples": 128,
    }
)
"""The workload as it is, but that nothing is recomputed and a step is one micro-batch."""

_SMALL: Overrides = MappingProxyType({**_REFERENCE, "model.num_layers": 2})
"""With half of its blocks, where the model's size does not matter: a row takes half a minute."""


@dataclass(frozen=True)
class Guard:
    """One way of running a case."""

    name: str
    mode: Literal["act", "observe"]
    meaning: str
    """What the reader of the table must know."""
    overrides: Overrides = field(default_factory=lambda: _NOTHING)


_GUARDED = Guard("guarded", "act", "policies act")
_UNGUARDED = Guard("unguarded", "observe", "policies only observe")


@dataclass(frozen=True)
class Case:
    """One fault on one size of the workload."""

    name: str
    fault: str
    """What is wrong, in a few words."""
    wanted: str
    """What a policy ought to do about it."""
    steps: int
    """Optimizer steps at the configured batch size."""
    plant: Callable[[int], tuple[int | None, Overrides]]
    """From the number of steps to the step from which the fault acts (None: there is none) and to
    the overrides that plant it."""
    guards: tuple[Guard, ...] = (_GUARDED, _UNGUARDED)
    base: Overrides = field(default_factory=lambda: _REFERENCE)

    def overrides(self, guard: Guard, *, seed: int, steps: int) -> dict[str, Any]:
        """Return the overrides of one row, by dotted key of the workload's base config."""
        _, planted = self.plant(steps)
        run = {"training.seed": seed, "training.steps": steps}
        return {**self.base, **run, **planted, **guard.overrides}

    def guard(self, name: str) -> Guard:
        """Return a guard by its name."""
        return next(guard for guard in self.guards if guard.name == name)


def _learning_rate(_steps: int) -> tuple[int, Overrides]:
    return 1, {"faults.learning_rate_factor": 30.0}


def _loss_scale(steps: int) -> tuple[int, Overrides]:
    return 1, {
        "training.precision": "float16",
        "training.loss_scale": "dynamic",
        "faults.loss_scale_start": _LOSS_SCALE,
        "faults.poison.steps": [max(2, steps // 2)],
        "faults.poison.factor": _POISON_FACTOR,
    }


def _slow_data(steps: int) -> tuple[int, Overrides]:
    first = max(2, steps // 5)
    return first, {"faults.slow_data.seconds": _SLOW_S, "faults.slow_data.first_step": first}


def _small_batch(_steps: int) -> tuple[int, Overrides]:
    return 1, {"training.global_batch_size": 1, "training.micro_batch_size": 1}


def _healthy(_steps: int) -> tuple[None, Overrides]:
    return None, {}


_ALL = (
    Case(
        "healthy",
        "none",
        "nothing at all",
        steps=80,
        plant=_healthy,
    ),
    Case(
        "learning_rate",
        "learning rate 30 times too high",
        "lower the learning rate",
        steps=80,
        plant=_learning_rate,
    ),
    Case(
        "loss_scale",
        "float16, loss scale starting at 2^24, one poisoned batch",
        "bring the scale down fast, forgive the single overflow",
        steps=100,
        plant=_loss_scale,
        guards=(
            Guard("guarded", "act", "the loss-scale policy owns the scale"),
            Guard(
                "unguarded",
                "observe",
                "the scale stays at 2^24, as given",
                {"training.loss_scale": _LOSS_SCALE, "faults.loss_scale_start": None},
            ),
            Guard("dynamic", "observe", "MindSpore's own rule of dynamic scaling, no policy"),
        ),
        base={
            **_SMALL,
            "model.seq_length": 64,
            "training.global_batch_size": 8,
            "training.micro_batch_size": 8,
        },
    ),
    Case(
        "slow_data",
        f"pipeline that sleeps {_SLOW_S:g} s per batch",
        "advise more data workers, leave the batch alone",
        steps=60,
        plant=_slow_data,
        guards=(
            _GUARDED,
            _UNGUARDED,
            Guard("advised", "observe", "the advice taken: two data workers", {"data.workers": 2}),
        ),
        base={
            **_SMALL,
            "training.global_batch_size": 4,
            "training.micro_batch_size": 4,
        },
    ),
    Case(
        "small_batch",
        "one short sample per optimizer step",
        "enlarge the batch",
        steps=800,
        plant=_small_batch,
        base={**_SMALL, "model.seq_length": 32},
    ),
)

CASES: Mapping[str, Case] = MappingProxyType({case.name: case for case in _ALL})
"""Every case by its name, in the order in which they run."""


def chosen_cases(names: str | None) -> tuple[Case, ...]:
    """Return the cases named in a comma-separated list, in their own order; None: all.

    Raises:
        ConfigError: A name is none of a case.
    """
    if names is None:
        return tuple(CASES.values())
    wanted = {name.strip() for name in names.split(",") if name.strip()}
    unknown = sorted(wanted - set(CASES))
    if unknown or not wanted:
        raise ConfigError(
            f"--faults must name some of {', '.join(CASES)}, but got {names!r}; separate them "
            "by commas."
        )
    return tuple(case for case in CASES.values() if case.name in wanted)

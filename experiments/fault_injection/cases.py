"""The faults, each with what would be right, and the healthy runs that they are compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from mindtune.controller.errors import ConfigError
from mindtune.experiments.fault_injection.case import (
    GUARDED,
    SMALL,
    UNGUARDED,
    Case,
    Guard,
    Overrides,
    Planted,
)
from mindtune.policies.findings import FindingKind as Kind

__all__ = ["CASES", "FAULT_FREE", "GUARDS", "chosen_cases", "chosen_guards", "healthy_case"]

_SLOW_S = 0.5
_HEALTHY_STEPS = 4000
_HANG_LIMIT_S = 5.0
_MEMORY = "2GB"
"""The workload's process holds about 1.1 GB."""

_HALF: Overrides = MappingProxyType(
    {
        **SMALL,
        "training.precision": "float16",
        "training.loss_scale": "dynamic",
        "faults.loss_scale_start": 1024.0,
    }
)
"""In float16, from a scale at which the workload does not overflow by itself (2^16 does)."""
_TWO_RANKS: Overrides = MappingProxyType(
    {**SMALL, "parallel.data_parallel": 2, "training.micro_batch_size": 8}
)
_TINY: Overrides = MappingProxyType(
    {
        **SMALL,
        "model.num_layers": 1,
        "model.hidden_size": 32,
        "model.seq_length": 32,
        "training.global_batch_size": 8,
        "training.micro_batch_size": 8,
        "training.clip_norm": 1.0,
    }
)
"""The smallest model, for many steps."""
_FIXED_BATCH: Overrides = MappingProxyType({"policies": {"batch_size": {"enabled": False}}})
"""Such a model leaves any device idle, which is rightly found and answered."""


def _half(steps: int) -> int:
    return max(2, steps // 2)


def _at_half(kind: str, **values: Any) -> Callable[[int], Planted]:
    """Plant one fault from the middle of the run on; `steps_long` says for how long."""

    def plant(steps: int) -> Planted:
        first = _half(steps)
        fault = {"kind": kind, "first_step": first, **values}
        long = fault.pop("steps_long", None)
        if long is not None:
            fault["last_step"] = max(first, min(first + long, steps + 1) - 1)
        return Planted(first, [fault])

    return plant


def _wrong_rate(_steps: int) -> Planted:
    return Planted(1, [{"kind": "learning_rate_jump", "first_step": 1, "factor": 30.0}])


def _loss_scale(steps: int) -> Planted:
    return Planted(
        1,
        overrides={
            "faults.loss_scale_start": 2.0**24,
            "faults.poison.steps": [_half(steps)],
            "faults.poison.factor": 1.0e6,
        },
    )


def _slow_data(steps: int) -> Planted:
    first = max(2, steps // 5)
    slow = {"faults.slow_data.seconds": _SLOW_S, "faults.slow_data.first_step": first}
    return Planted(first, overrides=slow)


def _small_batch(_steps: int) -> Planted:
    size = {"training.global_batch_size": 1, "training.micro_batch_size": 1}
    return Planted(1, overrides=size)


_NON_FINITE = frozenset({Kind.NON_FINITE_LOSS, Kind.NON_FINITE_GRAD, Kind.OVERFLOW})
_SPIKES = frozenset({Kind.LOSS_SPIKE, Kind.GRAD_NORM_SPIKE, Kind.DIVERGENCE})
_SKIP = frozenset({"SetSkipThreshold"})
_SOFT = frozenset({"SetSkipThreshold", "SetClipNorm", "SetLearningRateScale"})
_RATE = frozenset({"SetLearningRateScale", "SetClipNorm", "Rewind"})
_STOP = frozenset({"RequestStop"})
_BACK = frozenset({"Rewind", "SetLearningRateScale"})
"""A return to a healthy state goes on with a lower rate."""

_ALL = (
    Case(name="healthy", fault="none", wanted="nothing at all"),
    Case(
        name="healthy_float16",
        fault="none, float16 with dynamic loss scaling",
        wanted="nothing at all",
        guards=(GUARDED,),
        base=_HALF,
    ),
    Case(
        name="healthy_long",
        fault="none, the smallest model over many steps, with a fixed batch",
        wanted="nothing at all",
        steps=_HEALTHY_STEPS,
        guards=(GUARDED,),
        base=_TINY,
        live=_FIXED_BATCH,
    ),
    Case(
        name="nan_loss",
        fault="one step with a NaN loss and so NaN gradients",
        wanted="skip the update",
        plant=_at_half("nan_loss"),
        expected=_NON_FINITE,
        justified=_SKIP,
    ),
    Case(
        name="nan_gradient",
        fault="one step with NaN in one gradient",
        wanted="skip the update",
        plant=_at_half("nan_gradient"),
        expected=_NON_FINITE,
        justified=_SKIP,
    ),
    Case(
        name="nan_for_ever",
        fault="NaN in one gradient in every step from the middle on; cannot be helped",
        wanted="stop with the diagnosis within 20 steps",
        plant=_at_half("nan_gradient", steps_long=1_000_000),
        expected=_NON_FINITE,
        justified=_SKIP | _BACK | _STOP,
    ),
    Case(
        name="spike",
        fault="one step with loss and gradients 100 times too large",
        wanted="keep the update from hurting, change nothing for good",
        plant=_at_half("spike", factor=100.0),
        expected=_SPIKES,
        justified=_SKIP,
    ),
    Case(
        name="burst",
        fault="ten steps with loss and gradients 30 times too large",
        wanted="flag all ten, keep them from hurting",
        plant=_at_half("burst", factor=30.0, steps_long=10),
        expected=_SPIKES,
        justified=_SOFT | _BACK,
    ),
    Case(
        name="level_shift",
        fault="gradients three times as large from the middle on: legal",
        wanted="declare the shift, throttle nothing for good",
        plant=_at_half("level_shift", factor=3.0),
        expected=frozenset({Kind.LEVEL_SHIFT}),
        justified=_SKIP,
    ),
    Case(
        name="drift",
        fault="gradients that grow by 5 % a step from the middle on",
        wanted="see it within 32 steps",
        plant=_at_half("drift", factor=1.05, signal="gradient"),
        expected=frozenset({Kind.DIVERGENCE, Kind.GRAD_NORM_SPIKE, Kind.LEVEL_SHIFT}),
        justified=_SOFT,
    ),
    Case(
        name="poisoned_batch",
        fault="one batch of rubbish: finite, gradients 10,000 times too large in any direction",
        wanted="skip the update in the same step",
        plant=_at_half("poisoned_batch", factor=1.0e4),
        expected=_SPIKES,
        justified=_SKIP | _BACK,
    ),
    Case(
        name="learning_rate",
        fault="learning rate 30 times too high from the start",
        wanted="lower the learning rate",
        plant=_wrong_rate,
        expected=_SPIKES | {Kind.PLATEAU},
        justified=_RATE | _SKIP,
    ),
    Case(
        name="learning_rate_jump",
        fault="learning rate 30 times too high from the middle on",
        wanted="lower the learning rate",
        plant=_at_half("learning_rate_jump", factor=30.0),
        expected=_SPIKES | {Kind.PLATEAU},
        justified=_RATE | _SKIP,
    ),
    Case(
        name="loss_scale",
        fault="float16, loss scale starting at 2^24, one poisoned batch",
        wanted="bring the scale down fast, forgive the single overflow",
        plant=_loss_scale,
        expected=frozenset({Kind.OVERFLOW, Kind.OVERFLOW_STORM}),
        justified=frozenset({"SetLossScale"}) | _SKIP,
        guards=(
            Guard("guarded", "act", "the loss-scale policy owns the scale"),
            Guard(
                "unguarded",
                "observe",
                "the scale stays at 2^24, as given",
                {"training.loss_scale": 2.0**24, "faults.loss_scale_start": None},
            ),
            Guard("dynamic", "observe", "MindSpore's own rule of dynamic scaling, no policy"),
        ),
        base=_HALF,
    ),
    Case(
        name="overflow_storm",
        fault="float16, from the middle on gradients overflow at every loss scale above 16",
        wanted="bring the scale down fast",
        plant=_at_half("overflow_storm", max_loss_scale=16.0),
        expected=frozenset({Kind.OVERFLOW, Kind.OVERFLOW_STORM}),
        justified=frozenset({"SetLossScale"}) | _SKIP,
        base=_HALF,
    ),
    Case(
        name="overflow_for_ever",
        fault="float16, from the middle on gradients overflow at any scale; cannot be helped",
        wanted="stop with the diagnosis within 20 steps",
        plant=_at_half("overflow_storm"),
        expected=frozenset({Kind.OVERFLOW, Kind.OVERFLOW_STORM, Kind.LOSS_SCALE_FLOOR}),
        justified=frozenset({"SetLossScale"}) | _SKIP | _BACK | _STOP,
        base=_HALF,
    ),
    Case(
        name="stuck_utilization",
        fault="the device's utilization reads 5 % whatever it does",
        wanted="try a larger batch at most, and take it back when it brings nothing",
        plant=_at_half("stuck_utilization", value=0.05),
        expected=frozenset({Kind.LOW_UTILIZATION}),
        justified=frozenset({"SetBatchSize", "SetLearningRateScale"}) | _SKIP,
        guards=(GUARDED,),
    ),
    Case(
        name="slow_data",
        fault=f"pipeline that sleeps {_SLOW_S:g} s per batch",
        wanted="advise more data workers, leave the batch alone",
        steps=60,
        plant=_slow_data,
        expected=frozenset({Kind.DATA_STALL}),
        justified=_SKIP,
        guards=(
            GUARDED,
            UNGUARDED,
            Guard("advised", "observe", "the advice taken: two data workers", {"data.workers": 2}),
        ),
    ),
    Case(
        name="small_batch",
        fault="one short sample per optimizer step",
        wanted="enlarge the batch",
        steps=800,
        plant=_small_batch,
        expected=frozenset({Kind.LOW_UTILIZATION}),
        justified=frozenset({"SetBatchSize", "SetLearningRateScale"}) | _SKIP,
        base={**SMALL, "model.seq_length": 32},
    ),
    Case(
        name="memory_climb",
        fault=f"a leak of 32 MB a step on a device of {_MEMORY}",
        wanted="warn before it is full",
        plant=_at_half("memory_climb", per_step="32MB", total=_MEMORY),
        expected=frozenset({Kind.MEMORY_PRESSURE}),
        justified=frozenset({"SetMicroBatch"}) | _SKIP | _STOP,
        also_ends=frozenset({"oom"}),
    ),
    Case(
        name="hang",
        fault="a step that does not end",
        wanted=f"stacks and exit code 3 after {_HANG_LIMIT_S:g} s",
        plant=_at_half("hang"),
        expected=frozenset({Kind.HANG}),
        justified=_SKIP,
        guards=(GUARDED,),
        live={"watchdog": {"train_min_s": _HANG_LIMIT_S, "exit_on_hang": True}},
        also_ends=frozenset({"crash"}),
    ),
    Case(
        name="healthy_two_ranks",
        fault="none, two data-parallel ranks",
        wanted="nothing at all",
        guards=(GUARDED,),
        base=_TWO_RANKS,
        num_ranks=2,
    ),
    Case(
        name="nan_one_rank",
        fault="one step with NaN in one gradient of rank 1 of 2",
        wanted="both ranks skip the update",
        plant=_at_half("nan_gradient", rank=1),
        expected=_NON_FINITE,
        justified=_SKIP,
        base=_TWO_RANKS,
        num_ranks=2,
    ),
    Case(
        name="slow_rank",
        fault="the host of rank 1 of 2 takes 0.3 s longer per step from the middle on",
        wanted="name the rank, change nothing",
        plant=_at_half("slow_rank", rank=1, seconds=0.3),
        expected=frozenset({Kind.STRAGGLER}),
        justified=_SKIP,
        guards=(GUARDED,),
        base=_TWO_RANKS,
        num_ranks=2,
    ),
)

CASES: Mapping[str, Case] = MappingProxyType({case.name: case for case in _ALL})
"""Every case by its name, in the order in which they run."""

FAULT_FREE = "fault_free"
"""Stands for the healthy case that a faulty one is compared with."""
GUARDS = (FAULT_FREE, *dict.fromkeys(guard.name for case in _ALL for guard in case.guards))
"""What may be asked for by name."""


def healthy_case(case: Case) -> Case | None:
    """Return the case that trains like this one without its fault; None: there is none."""
    for other in _ALL:
        alike = other.base is case.base and other.steps == case.steps
        if alike and other.name.startswith("healthy") and other is not case:
            return other
    return None


def chosen_cases(names: str | None) -> tuple[Case, ...]:
    """Return the cases named in a comma-separated list, in their own order; None: all.

    Raises:
        ConfigError: A name is none of a case.
    """
    wanted = _chosen("--faults", names, tuple(CASES))
    return tuple(case for case in CASES.values() if case.name in wanted)


def chosen_guards(names: str | None) -> tuple[str, ...]:
    """Return the guards named in a comma-separated list; None: all.

    Raises:
        ConfigError: A name is none of a guard.
    """
    return _chosen("--guards", names, GUARDS)


def _chosen(option: str, names: str | None, known: tuple[str, ...]) -> tuple[str, ...]:
    if names is None:
        return known
    wanted = {name.strip() for name in names.split(",") if name.strip()}
    if wanted - set(known) or not wanted:
        raise ConfigError(
            f"{option} must name some of {', '.join(known)}, but got {names!r}; separate them "
            "by commas."
        )
    return tuple(name for name in known if name in wanted)

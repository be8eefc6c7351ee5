"""What a study shows beside its winner: noise, the front, the kept steps, what each knob gave.

All of it follows from measurements that exist; what was not measured is not in it.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence

from mindtune.controller.trials.summary import (
    AblationStep,
    KeptStep,
    TrialNoise,
    TrialSummary,
    confirming,
)
from mindtune.search.ablation import way
from mindtune.search.confirming import TIE
from mindtune.search.knobs import DERIVED, Config, KnobValue
from mindtune.search.noise import between_launches, part_noise, step_noise
from mindtune.search.pareto import front
from mindtune.search.student import student_quantile

__all__ = ["ConfigKey", "ablation", "ablation_way", "config_key", "kept_steps", "known_values",
           "speed_front", "trial_noise"]  # fmt: skip

ConfigKey = tuple[tuple[str, KnobValue], ...]
_Launches = dict[int, dict[int, float]]
"""Number of a config -> repeat -> what was measured."""

_WAY_BACK = "mindtune export . --trial {0} --out trial_{0}.yaml"


def trial_noise(
    trials: Sequence[TrialSummary], step_times_s: Sequence[Sequence[float]]
) -> TrialNoise:
    """Return how much the measurements of a study vary by themselves.

    Args:
        trials: With their confirming measurements.
        step_times_s: Of every launch that ended ok.
    """
    steps = [noise for times in step_times_s if (noise := step_noise(times)) is not None]
    launches = between_launches(
        {
            trial.number: {m.repeat: m.value or 0.0 for m in confirming(trial.measurements)}
            for trial in trials
        }
    )
    return TrialNoise(
        step=statistics.median(steps) if steps else None,
        part=part_noise(step_times_s),
        launch=None if launches is None else launches.total,
        launch_freedom=0 if launches is None else launches.freedom,
        common=None if launches is None else launches.common,
        own=None if launches is None else launches.own,
    )


def speed_front(trials: Sequence[TrialSummary]) -> list[int]:
    """Return the configs that no other beats in speed and stability, each by its own noise."""
    points = {}
    launches: tuple[_Launches, _Launches] = ({}, {})
    for trial in trials:
        found = trial.speed_and_stability()
        if found is not None:
            points[trial.number] = found
        for entry in confirming(trial.measurements):
            for values, value in zip(launches, entry.speed_and_stability() or (), strict=False):
                values.setdefault(trial.number, {})[entry.repeat] = value
    speed, stability = (math.expm1(_launch_band(values)) for values in launches)
    return list(front(points, noise=(speed, stability)))


def _launch_band(values: _Launches) -> float:
    """Return by how much, in logarithms, two launches may differ though equal."""
    noise = between_launches(values)
    return TIE if noise is None else _difference(noise.total, noise.freedom)


def kept_steps(
    trials: Sequence[TrialSummary], versions: Mapping[int, str], noise: TrialNoise
) -> list[KeptStep]:
    """Return the improvements of the search in the order in which they were found.

    Those within the noise are marked, not left out: the search went on from them.

    Args:
        trials: In the order of their numbers.
        versions: Number of a config -> hash of what it was measured with.
        noise: Of the trials.
    """
    band = _band(noise)
    steps: list[KeptStep] = []
    before: TrialSummary | None = None
    for trial in trials:
        value = trial.search_value()
        if value is None or (steps and value <= steps[-1].value):
            continue
        steps.append(
            KeptStep(
                trial=trial.number,
                value=value,
                gain=value / steps[-1].value if steps else None,
                different=_differ(steps[-1].value, value, band) if steps else None,
                changed={} if before is None else _changed(before.knobs, trial.knobs),
                version=versions.get(trial.number, ""),
                way_back=_WAY_BACK.format(trial.number),
            )
        )
        before = trial
    return steps


def config_key(config: Config) -> ConfigKey:
    """Return what tells a config of the space from the others."""
    return tuple(sorted(config.items()))


def known_values(
    configs: Mapping[int, Config], trials: Sequence[TrialSummary], *, ends: Collection[int]
) -> dict[ConfigKey, tuple[int, float]]:
    """Return the number and value of each config that has a value.

    Args:
        configs: Number of a trial -> its knobs of the space.
        trials: Of the study.
        ends: Numbers of base and winner, whose confirmed values count where they have any; the
            others have that of the search's own launch.
    """
    values = {
        trial.number: trial.settled_value() if trial.number in ends else trial.search_value()
        for trial in trials
    }
    return {
        config_key(configs[number]): (number, value)
        for number, value in reversed(values.items())
        if value is not None
    }


def ablation_way(
    configs: Mapping[int, Config],
    trials: Sequence[TrialSummary],
    *,
    base: int,
    winner: int,
    extra: Mapping[ConfigKey, float],
    may_run: Callable[[Config], bool] | None = None,
) -> tuple[Config, ...]:
    """Return the configs from base to winner, one knob at a time where that can be.

    Args:
        configs: Number of a trial -> its knobs of the space.
        trials: Of the study.
        base: Number of the base config.
        winner: Number of the winner.
        extra: Values that were measured for the ablation alone.
        may_run: Whether a config that was not measured may be; None: none may.
    """
    known = known_values(configs, trials, ends=(base, winner)).keys() | extra.keys()
    return way(
        configs[base],
        configs[winner],
        is_measured=lambda config: config_key(config) in known,
        may_run=may_run,
    )


def ablation(
    configs: Mapping[int, Config],
    trials: Sequence[TrialSummary],
    *,
    base: int,
    winner: int | None,
    noise: TrialNoise,
    extra: Mapping[ConfigKey, float] | None = None,
) -> list[AblationStep]:
    """Return what each step from the base config to the winner gave, measured ones only.

    Empty where base or winner has no value, or is the same config. The arguments are those of
    `ablation_way`.
    """
    extra = extra or {}
    if winner is None or base not in configs:
        return []
    known = known_values(configs, trials, ends=(base, winner))
    if not {config_key(configs[base]), config_key(configs[winner])} <= known.keys():
        return []
    path = ablation_way(configs, trials, base=base, winner=winner, extra=extra)
    band = _band(noise)
    steps = []
    for before, after in itertools.pairwise(path):
        since, old = known.get(config_key(before)) or (None, extra[config_key(before)])
        number, new = known.get(config_key(after)) or (None, extra[config_key(after)])
        steps.append(
            AblationStep(
                trial=number,
                since=since,
                changed=_changed(before, after),
                value=new,
                ratio=new / old,
                different=_differ(old, new, band),
            )
        )
    return steps


def _band(noise: TrialNoise) -> float | None:
    """Return by how much two launches may differ though equal (95 %); None: not known."""
    return None if noise.launch is None else _difference(noise.launch, noise.launch_freedom)


def _difference(deviation: float, freedom: int) -> float:
    return max(TIE, student_quantile(0.975, freedom) * math.sqrt(2.0) * deviation)


def _differ(old: float, new: float, band: float | None) -> bool | None:
    return None if band is None else abs(math.log(new / old)) > band


def _changed(old: Config, new: Config) -> dict[str, tuple[KnobValue, KnobValue]]:
    return {
        name: (old[name], value)
        for name, value in new.items()
        if name in old and name not in DERIVED and old[name] != value
    }

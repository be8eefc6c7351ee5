"""What a study of the trials so far would conclude: its own confirmation and ranking, replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mindtune.controller.contract import TrialSection
from mindtune.controller.trials.confirm import BASE, Plan, choose, exclusion, num_leaders
from mindtune.controller.trials.summary import Measurement
from mindtune.experiments.search_quality.problem import SimulatedTrial
from mindtune.search.knobs import Config

__all__ = ["BASE", "Tried", "concluded", "leaders"]

_REPEATS = int(TrialSection.model_fields["repeats"].default)
"""Of each confirmed config, as in a study file that does not say."""

Launch = Callable[[Config, int], SimulatedTrial]
"""Config, repeat from 1 -> the confirming launch."""


@dataclass(frozen=True)
class Tried:
    """A trial that has ended."""

    number: int
    """In the order of the starts; `BASE` is the base config's."""
    config: Config
    trial: SimulatedTrial


def leaders(tried: Sequence[Tried]) -> list[Tried]:
    """Return the configs that a study confirms beside the base, best first."""
    return _ranked(tried, "ok")[: num_leaders(len(tried))]


def _ranked(tried: Sequence[Tried], *outcomes: str) -> list[Tried]:
    found = [one for one in tried if one.number != BASE and one.trial.outcome in outcomes]
    return sorted(found, key=lambda one: (-(one.trial.value or 0.0), one.number))


def concluded(
    tried: Sequence[Tried], base: Config, launch: Launch, *, device_memory: float | None
) -> Config | None:
    """Return the winner of a study that ends with these trials; None: nothing ended ok.

    As `SearchLoop.confirm` without longer trials, so that convergence is not judged.

    Args:
        tried: All trials.
        base: What everything is compared with, whether its own trial has ended or not.
        launch: Confirms; equal arguments give equal launches.
        device_memory: Bytes of one device; None: unknown.
    """
    if not any(one.trial.outcome == "ok" for one in tried):
        return None
    configs = {BASE: base} | {one.number: one.config for one in tried}
    first = [one.number for one in leaders(tried)]
    plan = Plan(tuple(first), _REPEATS, None)
    seen = _measured(plan, configs, launch)
    if first and all(exclusion(number, seen[number], None) for number in first):
        ranked = (one.number for one in _ranked(tried, "ok", "pruned"))
        others = [number for number in ranked if number not in first]
        again = Plan(tuple(others[: num_leaders(len(tried))]), _REPEATS, None, _REPEATS)
        for number, more in _measured(again, configs, launch).items():
            seen.setdefault(number, []).extend(more)
    winner = choose(seen, {}, device_memory=device_memory).winner
    return None if winner is None else configs[winner]


def _measured(
    plan: Plan, configs: dict[int, Config], launch: Launch
) -> dict[int, list[Measurement]]:
    found: dict[int, list[Measurement]] = {number: [] for number in (BASE, *plan.leaders)}
    for number, repeat in plan.order():
        trial = launch(configs[number], repeat)
        found[number].append(
            Measurement(
                repeat=repeat,
                seed=repeat,
                outcome=trial.outcome,
                value=trial.value,
                peak_memory_bytes=None
                if trial.memory_bytes is None
                else round(trial.memory_bytes),
                wall_s=trial.wall_s,
            )
        )
    return found

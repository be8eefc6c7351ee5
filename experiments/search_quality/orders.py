"""Orders that no trial changes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from mindtune.experiments.search_quality.problem import SimulatedTrial
from mindtune.search.baseline import choose_baseline
from mindtune.search.constraints import SpaceReport
from mindtune.search.knobs import Config, KnobValue

__all__ = ["InOrder", "grid_order", "largest_micro_batch", "predicted_order"]


class InOrder:
    """The base config, then the others in their order."""

    def __init__(self, base: Config, others: Iterator[Config]) -> None:
        self._left = _base_first(base, others)
        self._numbers = count()

    def ask(self) -> tuple[int, Config] | None:
        """Return the next config and its place; None: there is no other."""
        config = next(self._left, None)
        return None if config is None else (next(self._numbers), config)

    def tell(self, number: int, trial: SimulatedTrial) -> None:
        """Learn nothing."""


def _base_first(base: Config, others: Iterator[Config]) -> Iterator[Config]:
    yield base
    yield from (config for config in others if config != base)


def predicted_order(report: SpaceReport) -> Iterator[Config]:
    """Yield the feasible configs as the cost model predicts them before any trial."""
    yield from (entry.config for entry in report.configs)


def grid_order(report: SpaceReport) -> Iterator[Config]:
    """Yield the feasible configs as a nested loop over the user's lists would."""
    space = report.space
    places = {name: {v: i for i, v in enumerate(vs)} for name, vs in space.choices.items()}

    def place(config: Config) -> tuple[int, ...]:
        return tuple(places[name][config[name]] for name in space.choices)

    yield from sorted((entry.config for entry in report.configs), key=place)


_STAGES = ("none", "optimizer", "gradient", "parameter")


def largest_micro_batch(report: SpaceReport) -> Iterator[Config]:
    """Yield what DeepSpeed's autotuner tries: stage by stage, the largest micro-batch first.

    Other knobs stay as the base has them as long as there are configs of that kind; DeepSpeed
    does not search them. Then those follow that differ in fewest of the others.
    """
    base = choose_baseline(report).config
    own = ("optimizer_sharding", "micro_batch_size")

    def turn(config: Config) -> tuple[int, int, int]:
        others = sum(config[name] != value for name, value in base.items() if name not in own)
        stage: KnobValue = config.get("optimizer_sharding", "none")
        return others, _STAGES.index(str(stage)), -int(config.get("micro_batch_size", 1))

    yield from sorted((entry.config for entry in report.configs), key=turn)

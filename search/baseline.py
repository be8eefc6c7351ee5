"""Which config is trial 0: the user's own, or the nearest one that can run."""

from __future__ import annotations

from dataclasses import dataclass

from mindtune.search.constraints import SpaceReport, first_failure
from mindtune.search.errors import SearchError
from mindtune.search.knobs import KNOBS, Config

__all__ = ["Baseline", "choose_baseline"]


@dataclass(frozen=True)
class Baseline:
    """The config that everything else is compared with."""

    config: Config
    """Knobs of the space; a value from the user's base config may lie outside the choices."""
    rejection: str | None = None
    """Why the user's own config cannot run; then `config` is the nearest feasible one."""


def choose_baseline(report: SpaceReport) -> Baseline:
    """Return the baseline of a space.

    Every knob takes the base config's value, or else the space's only choice, the knob's default
    if that is among the choices, or the first choice. If a rule rejects that, it is the feasible
    config that differs in the fewest knobs, the best predicted one among equals.

    Raises:
        SearchError: if no config is feasible.
    """
    space = report.space
    wished: Config = {}
    for name, values in space.choices.items():
        default = KNOBS[name].default if name in KNOBS else None
        wished[name] = space.base.get(name, default if default in values else values[0])
    rejection = first_failure(space.complete(wished), report.cost)
    in_list = space.candidates is None or wished in space.candidates
    has_own = all(name in space.base for name in space.searched)
    if rejection is None and (in_list or has_own):
        return Baseline(wished)
    if not report.configs:
        raise SearchError(report.emptied_by or "no config is feasible.")
    nearest = min(
        report.configs,
        key=lambda entry: sum(entry.config[name] != value for name, value in wished.items()),
    )
    return Baseline(nearest.config, rejection if has_own else None)

"""The way from the base config to the winner, one knob at a time, over configs that can run.

Some knobs can only change together: with four devices, two tensor-parallel ranks more are two
data-parallel ranks fewer. Such knobs make one step. Among all orders the one with the most steps
is taken, then the one that needs the fewest new trials, then the usual order of work: memory,
parallelism, communication, data. Where more knobs have changed than all orders can be looked at
for, the stages of that order come one after the other, and the best order is sought in each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations, groupby

from mindtune.search.knobs import Config
from mindtune.search.stages import STAGES

__all__ = ["way"]

_MAX_KNOBS = 10
"""Beyond it, the subsets are too many to look at all at once."""


def way(
    base: Config,
    winner: Config,
    *,
    is_measured: Callable[[Config], bool],
    may_run: Callable[[Config], bool] | None = None,
) -> tuple[Config, ...]:
    """Return the configs from base to winner, both included.

    Args:
        base: Where it begins.
        winner: Where it ends; it has the same knobs.
        is_measured: Whether a config has a value already.
        may_run: Whether a config that has none may be measured; None: it may not.
    """
    changed = sorted((name for name in winner if winner[name] != base[name]), key=_place)
    if len(changed) > _MAX_KNOBS:
        return _by_stage(base, winner, changed, is_measured=is_measured, may_run=may_run)
    everything = frozenset(changed)

    def config(subset: frozenset[str]) -> Config:
        return {name: (winner if name in subset else base)[name] for name in base}

    # Of each subset: steps, measured configs, ranks of the knobs in order; negated where less is
    # better, so that the largest is the best. Subsets come in order of size.
    best: dict[frozenset[str], tuple[tuple[int, int, tuple[int, ...]], tuple[frozenset[str], ...]]]
    best = {frozenset(): ((0, 0, ()), (frozenset(),))}
    for size in range(1, len(changed) + 1):
        for names in combinations(changed, size):
            subset = frozenset(names)
            candidate = config(subset)
            measured = is_measured(candidate)
            allowed = measured or (may_run is not None and may_run(candidate))
            if subset != everything and not allowed:
                continue
            reached = (
                (
                    (steps + 1, count + measured, (*order, *_order(changed, subset - earlier))),
                    (*path, subset),
                )
                for earlier, ((steps, count, order), path) in best.items()
                if earlier < subset
            )
            best[subset] = max(reached, key=lambda entry: entry[0])
    return tuple(config(subset) for subset in best[everything][1]) if changed else (base,)


def _by_stage(
    base: Config,
    winner: Config,
    changed: list[str],
    *,
    is_measured: Callable[[Config], bool],
    may_run: Callable[[Config], bool] | None,
) -> tuple[Config, ...]:
    """Return the way stage by stage; stages between which nothing can run are taken together."""
    path: tuple[Config, ...] = (base,)
    names: list[str] = []
    for group in _groups(changed):
        names += group
        reached = path[-1] | {name: winner[name] for name in names}
        allowed = is_measured(reached) or (may_run is not None and may_run(reached))
        if reached != winner and not allowed:
            continue
        part: tuple[Config, ...] = (path[-1], reached)
        if len(names) <= _MAX_KNOBS:
            part = way(path[-1], reached, is_measured=is_measured, may_run=may_run)
        path, names = (*path, *part[1:]), []
    return path


def _groups(changed: list[str]) -> Iterator[list[str]]:
    """Yield the changed knobs of each stage, in the order of work."""
    for _, names in groupby(changed, key=lambda name: _place(name)[0]):
        stage = list(names)
        yield from (stage[i : i + _MAX_KNOBS] for i in range(0, len(stage), _MAX_KNOBS))


def _order(changed: list[str], names: frozenset[str]) -> tuple[int, ...]:
    return tuple(-changed.index(name) for name in sorted(names, key=changed.index))


def _place(name: str) -> tuple[int, int, str]:
    """Return where a knob stands in the order of work; the others come last."""
    for stage, things in enumerate(STAGES):
        for place, thing in enumerate(things):
            if name in thing:
                return stage, place, name
    return len(STAGES), 0, name

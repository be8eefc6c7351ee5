"""Which feasible configs may still be tried, remembered between questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mindtune.search.constraints import SpaceReport
from mindtune.search.history import Attempt, infer
from mindtune.search.knobs import Config, KnobValue

__all__ = ["Remaining"]


class Remaining:
    """The configs of a report that nobody has tried and no failure rules out.

    Only a cache: what it answers follows from the report and the attempts alone.
    """

    def __init__(self, report: SpaceReport) -> None:
        self._names = report.space.knobs
        self.configs: list[Config] = [entry.config for entry in report.configs]
        """All feasible configs, best predicted first."""
        self._index = {self._values(config): i for i, config in enumerate(self.configs)}
        self._ruled_out: dict[int, frozenset[int]] = {}

    def indices(self, attempts: Sequence[Attempt]) -> list[int]:
        """Return the indices of the untried configs, best predicted first."""
        gone: set[int] = set()
        for attempt in attempts:
            # An interrupted attempt says nothing about its config.
            if attempt.outcome != "interrupted":
                own = self._index.get(self._values(attempt.config))
                gone.update(() if own is None else (own,))
            if attempt.outcome == "oom":
                gone |= self._excluded_by(attempt)
        return [index for index in range(len(self.configs)) if index not in gone]

    def _excluded_by(self, attempt: Attempt) -> frozenset[int]:
        known = self._ruled_out.get(attempt.number)
        if known is None:
            known = frozenset(
                index for index, config in enumerate(self.configs) if infer(config, [attempt])
            )
            self._ruled_out[attempt.number] = known
        return known

    def _values(self, config: Mapping[str, KnobValue]) -> tuple[KnobValue, ...]:
        return tuple(config[name] for name in self._names)

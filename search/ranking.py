"""The configs that may be tried, best predicted first, judged anew as the cost model learns.

Of all rules only those about memory depend on what trials teach. The configs that pass the others
are kept with the amounts that memory and time are made of, so that a calibrated model judges all
of them at once: 10^5 configs in milliseconds. What it answers follows from the report, the cost
model and the attempts alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from mindtune.search.advice import ADVICE
from mindtune.search.baseline import choose_baseline
from mindtune.search.constraints import SpaceReport
from mindtune.search.cost_model import COST_KNOBS, FAR, CostModel, Measurement, calibrate
from mindtune.search.encoding import Encoding, Flags, Floats, Indices, Places, following
from mindtune.search.forecasts import memory_forecast, time_forecast
from mindtune.search.history import MAX_STARTS, MEMORY_KNOBS, Attempt, infer
from mindtune.search.knobs import Config, KnobValue
from mindtune.search.memory_model import MemoryRates
from mindtune.search.normal import normal_cdf
from mindtune.search.rules import RULES
from mindtune.search.space import Space
from mindtune.search.walk import walk

__all__ = ["Ranking", "choices", "passing_without_memory"]

_OTHER_RULES = tuple(rule for rule in RULES if rule.reads != COST_KNOBS)
_OTHER_ADVICE = tuple(soft for soft in ADVICE if soft.reads != COST_KNOBS)
_OVERLAP = next(soft for soft in ADVICE if soft.limit == "min_overlap_headroom")
_advice_key = itemgetter(*dict.fromkeys(name for soft in _OTHER_ADVICE for name in soft.reads))


def choices(report: SpaceReport) -> dict[str, tuple[KnobValue, ...]]:
    """Return what each knob may be; a base value outside the user's choices is added."""
    baseline = choose_baseline(report).config
    return {
        name: tuple(dict.fromkeys((*values, baseline[name])))
        for name, values in report.space.choices.items()
    }


def passing_without_memory(space: Space, cost: CostModel) -> Iterator[Config]:
    """Yield every config that no rule rejects but those that depend on predicted memory."""
    return walk(space, cost, _OTHER_RULES)


class Ranking:
    """The configs of a report, and those that only a memory rule rejects."""

    def __init__(self, report: SpaceReport) -> None:
        self.space = report.space
        self.cost = report.cost
        """Whose verdicts hold now."""
        self._first_cost = report.cost
        self._num_learnt = 0
        self._choices = choices(report)
        self.configs: list[Config] = [entry.config for entry in report.configs]
        self._has_limit = _has_memory_limit(self.cost)
        self._all_known = not self._has_limit
        self._take_in()
        # The report has judged these already.
        self._allowed: Flags = np.ones(len(self.configs), dtype=bool)
        self._rank()

    @property
    def feasible(self) -> int:
        """How many configs can work as far as is known now, tried ones included."""
        return int(self._allowed.sum())

    def learn_from(self, measurements: Sequence[Measurement]) -> None:
        """Let all that trials of the study have measured correct the cost model.

        Nothing happens where no measurement was added, or the model's shape is unknown.
        """
        if self._first_cost.facts.model is None or len(measurements) == self._num_learnt:
            return
        self._num_learnt = len(measurements)
        self.learn(calibrate(self._first_cost, measurements))

    def learn(self, cost: CostModel) -> None:
        """Judge every config by a model that has learnt from trials."""
        if not self._all_known:
            known = {self._values(config) for config in self.configs}
            others = passing_without_memory(self.space, self.cost)
            self.configs += [c for c in others if self._values(c) not in known]
            self._take_in()
            self._all_known = True
        self._judge_by(cost)

    def log_cost(self, configs: Iterable[Mapping[str, KnobValue]]) -> Floats:
        """Return the logarithm of the predicted cost of any configs, 0 where it is unknown."""
        costs = [self.cost.relative_cost(self.space.complete(config)) for config in configs]
        return np.asarray(np.log([1.0 if cost is None else cost for cost in costs]))

    def untried(self, attempts: Sequence[Attempt]) -> Indices:
        """Return the indices of the configs that may be tried, best predicted first.

        Left out are those that were tried or are running, but for interrupted ones, unless they
        keep being interrupted, and those that certainly need no less memory than one that ran
        out of it. Where a model that has learnt lets none of the others through, its memory is
        distrusted and the report's verdicts hold again: one bad reading must not end a search.
        """
        found = self._open(attempts)
        if not len(found) and self.cost.memory_rates != self._first_cost.memory_rates:
            learnt = self.cost
            self._judge_by(
                learnt.with_rates(
                    self._first_cost.memory_rates,
                    learnt.time_rates,
                    memory_doubt=self._first_cost.memory_doubt,
                    calibrated_by=learnt.calibrated_by,
                )
            )
            found = self._open(attempts)
        return found

    def _open(self, attempts: Sequence[Attempt]) -> Indices:
        is_open = self._allowed.copy()
        starts: Counter[int] = Counter()
        for attempt in attempts:
            own = self._index.get(self._values(attempt.config))
            if own is not None:
                starts[own] += not attempt.ended_on_request
                if attempt.outcome != "interrupted" or starts[own] >= MAX_STARTS:
                    is_open[own] = False
            if attempt.outcome == "oom":
                is_open[self._excluded_by(attempt)] = False
        return np.asarray(self._order[is_open[self._order]])

    def chance_to_fit(self, indices: Indices) -> Floats:
        """Return the probability that the memory of each config stays within the limit.

        The logarithm of what a config needs is expected to be normal around the prediction, with
        the deviation that trials have left open (`CostModel.memory_spreads`). 1 where there is no
        limit or the memory is unknown: that is no statement, and failures speak for themselves.
        """
        limit = self.cost.facts.memory_limit
        if limit is None:
            return np.ones(len(indices))
        log_memory, spread = self._amounts.log_memory(self.cost, indices)
        chance = normal_cdf((math.log(limit[0]) - log_memory) / spread)
        return np.where(np.isnan(log_memory), 1.0, chance)

    def is_expected_to_fit(self, config: Mapping[str, KnobValue]) -> bool | None:
        """Return whether a config's predicted memory is within the limit; None: unknown."""
        limit = self.cost.facts.memory_limit
        predicted = self.cost.memory_bytes(self.space.complete(config))
        return None if limit is None or predicted is None else predicted <= limit[0]

    def num_different(self, config: Mapping[str, KnobValue]) -> NDArray[np.int16]:
        """Return by config in how many knobs it differs from a given one."""
        found = np.zeros(len(self.configs), dtype=np.int16)
        for column, place in zip(self._columns, self.encoding.places([config])[0], strict=True):
            found += column != place
        return found

    def _take_in(self) -> None:
        """Prepare what does not depend on the cost model's rates."""
        self._index = {self._values(config): i for i, config in enumerate(self.configs)}
        every = Encoding(self._choices)
        without = following(every, every.places(self.configs))
        self.encoding = Encoding({k: v for k, v in self._choices.items() if k not in without})
        """Of the knobs that do not follow from another one."""
        self.places: Places = self.encoding.places(self.configs)
        self._columns = np.ascontiguousarray(self.places.T)
        self._excluded: dict[int, Indices] = {}
        complete = [self.space.complete(config) for config in self.configs]
        self._amounts = _Amounts(complete, self.cost)
        self._overlaps = np.array([bool(config["comm_overlap"]) for config in complete])
        self._advice = self._num_advice(complete)

    def _judge_by(self, cost: CostModel) -> None:
        self.cost = cost
        self._allowed = self._fitting()
        self._rank()

    def _rank(self) -> None:
        self.log_costs: Floats = self._amounts.log_cost(self.cost)
        """By config: logarithm of the predicted cost, 0 where it is unknown."""
        # Costs that differ by rounding are equal: advice decides, then the first order.
        level = np.round(np.where(np.isnan(self.log_costs), np.inf, self.log_costs), 9)
        advice = self._advice + self._speaks_against_overlap(_OVERLAP.default)
        self._order: Indices = np.lexsort((advice.astype(np.int16), level))
        self.log_costs = np.nan_to_num(self.log_costs, nan=0.0)

    def _num_advice(self, complete: Sequence[Config]) -> Indices:
        """Count what speaks against each config whatever its cost; few knobs decide it."""
        known: dict[object, int] = {}
        found = np.empty(len(complete), dtype=np.intp)
        for index, config in enumerate(complete):
            key = _advice_key(config)
            if key not in known:
                against = [soft.advise(config, self.cost) for soft in _OTHER_ADVICE]
                known[key] = sum(reason is not None for reason in against)
            found[index] = known[key]
        return found

    def _speaks_against_overlap(self, limit: float) -> Flags:
        device_memory = self.cost.facts.cluster.device_memory
        if device_memory is None:
            return np.zeros(len(self.configs), dtype=bool)
        memory = self._amounts.memory(self.cost)
        return np.asarray(self._overlaps & (memory > (1.0 - limit) * device_memory))

    def _fitting(self) -> Flags:
        """Return which configs the memory rules let pass; unknown memory is not judged."""
        facts = self.cost.facts
        found = np.ones(len(self.configs), dtype=bool)
        if not self._has_limit:
            return found
        memory = self._amounts.memory(self.cost)
        if facts.memory_limit is not None:
            limit = facts.memory_limit[0]
            above = np.flatnonzero(memory > limit)
            if self.cost.memory_doubt is not None:
                # As the rule does: what is near counts unless it was above a chosen limit before.
                log_memory, spread = self._amounts.log_memory(self.cost, above)
                is_out = log_memory > math.log(limit) + FAR * spread
                if facts.has_chosen_memory_limit:
                    first, _ = self._amounts.log_memory(self.cost.uncorrected, above)
                    is_out |= first > math.log(limit)
                above = above[is_out]
            found[above] = False
        least, device_memory = facts.limits.min_memory_utilization, facts.cluster.device_memory
        if least is not None and device_memory is not None:
            found &= ~(memory < least * device_memory)
        headroom = _OVERLAP.set_limit(self.cost)
        if headroom is not None:
            found &= ~self._speaks_against_overlap(headroom)
        return found

    def _excluded_by(self, attempt: Attempt) -> Indices:
        known = self._excluded.get(attempt.number)
        if known is None:
            # Only configs that are equal in every other knob can follow: few, found at once.
            others = [i for i, name in enumerate(self.encoding.names) if name not in MEMORY_KNOBS]
            own = self.encoding.places([attempt.config])[0]
            alike = np.flatnonzero((self.places[:, others] == own[others]).all(axis=1))
            known = np.array(
                [index for index in alike if infer(self.configs[index], [attempt])], dtype=np.intp
            )
            self._excluded[attempt.number] = known
        return known

    def _values(self, config: Mapping[str, KnobValue]) -> tuple[KnobValue, ...]:
        return tuple(map(config.__getitem__, self.space.choices))


def _has_memory_limit(cost: CostModel) -> bool:
    limits = cost.facts.limits
    return cost.facts.model is not None and (
        cost.facts.memory_limit is not None
        or limits.min_memory_utilization is not None
        or limits.min_overlap_headroom is not None
    )


class _Amounts:
    """What memory and time of many configs are made of, once for all that share it."""

    def __init__(self, configs: Sequence[Config], cost: CostModel) -> None:
        places: dict[object, int] = {}
        distinct: list[Config] = []
        self._of: Indices = np.empty(len(configs), dtype=np.intp)
        for index, config in enumerate(configs):
            key = tuple(map(config.get, COST_KNOBS))
            if key not in places:
                places[key] = len(distinct)
                distinct.append(config)
            self._of[index] = places[key]
        parts = [(cost.stage_parts(config), cost.time_parts(config)) for config in distinct]
        stages = [own for own, _ in parts if own is not None]
        self._stages_at = np.array([own is not None for own, _ in parts], dtype=bool)
        self._memory = memory_forecast(stages) if stages else None
        self._place = np.cumsum(self._stages_at) - 1
        """Of distinct configs among those whose memory is known."""
        self._last_memory: tuple[MemoryRates, Floats] | None = None
        steps = [step for _, step in parts if step is not None]
        timed = bool(steps) and cost.facts.cluster.is_timed
        known = [
            step if step is not None and (step.amounts is not None or not timed) else None
            for _, step in parts
        ]
        self._timed_at = np.array([step is not None for step in known], dtype=bool)
        usable = [step for step in known if step is not None]
        self._time = time_forecast(usable) if timed and usable else None
        self._log_work = np.log([step.work for step in usable])

    def memory(self, cost: CostModel) -> Floats:
        """Return the predicted bytes of each config; NaN: unknown. The last answer is kept."""
        if self._last_memory is None or self._last_memory[0] != cost.memory_rates:
            found = np.full(len(self._stages_at), np.nan)
            if self._memory is not None:
                found[self._stages_at] = np.exp(self._memory.log_totals(cost.log_memory_rates))
            self._last_memory = (cost.memory_rates, found[self._of])
        return self._last_memory[1]

    def log_memory(self, cost: CostModel, indices: Indices) -> tuple[Floats, Floats]:
        """Return the logarithm of predicted bytes and its deviation; NaN: unknown."""
        log_memory = np.full(len(indices), np.nan)
        spread = np.full(len(indices), np.nan)
        of = self._of[indices]
        known = self._stages_at[of]
        if self._memory is not None and known.any():
            places = self._place[of[known]]
            log_memory[known], slopes = self._memory(cost.log_memory_rates, places)
            spread[known] = cost.memory_spreads(slopes)
        return log_memory, spread

    def log_cost(self, cost: CostModel) -> Floats:
        """Return the logarithm of `CostModel.relative_cost` of each config; NaN: unknown."""
        found = np.full(len(self._timed_at), np.nan)
        if self._time is None:
            found[self._timed_at] = self._log_work
        else:
            log_rates = np.log(astuple(cost.time_rates))
            found[self._timed_at] = self._time.log_totals(log_rates)
        return found[self._of]

"""What a config will cost: memory and step time, predicted by formula, corrected by trials.

Three kinds of knowledge never mix: `Prediction` (a formula), `Measurement` (a trial) and
`history.Inference` (drawn from another config's failure). Unknown is None, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from mindtune.search.calibration import (
    Doubt,
    Fit,
    Prior,
    fit,
)
from mindtune.search.facts import StudyFacts
from mindtune.search.forecasts import memory_forecast, time_forecast
from mindtune.search.knobs import Config, KnobValue
from mindtune.search.layout import DEGREES
from mindtune.search.memory_model import MemoryParts, MemoryRates, stage_memory
from mindtune.search.time_model import TimeParts, TimeRates, time_parts

if TYPE_CHECKING:
    from mindtune.search.forecasts import Floats, Forecast

__all__ = [
    "COST_KNOBS", "FAR", "MEMORY_MISFIT", "MEMORY_NOISE", "TIME_MISFIT", "TIME_NOISE", "TRUSTED",
    "CostModel", "Measurement", "Prediction", "Usual", "calibrate",
]  # fmt: skip

COST_KNOBS = (
    *DEGREES, "expert_parallel", "pp_interleave_num", "offset", "use_seq_parallel",
    "micro_batch_size",
    "optimizer_sharding", "precision", "recompute", "optimizer_offload", "gradient_compression",
    "comm_overlap",
)  # fmt: skip
"""Every knob that the formulas read."""


class Prediction(NamedTuple):
    """What the formulas expect of a config; None: unknown."""

    memory_bytes: float | None = None
    step_time_s: float | None = None
    mfu: float | None = None


@dataclass(frozen=True)
class Measurement:
    """What a trial of a complete config showed; None: not measured."""

    config: Config
    memory_bytes: float | None = None
    step_time_s: float | None = None
    memory_above: float | None = None
    """Bytes that it ran out of: all that is known is that it wants more."""


_TIME_SPREADS = TimeRates(
    compute=0.24, attention=0.7, traffic=0.7, near_exchange=0.8, far_exchange=0.55, context=0.8,
    pipeline=0.8, expert=0.95, launch=0.7, synchronization=0.7, pipelined_synchronization=1.0,
    message=1.1, stall=2.5, sharded_stall=2.5, near_gradients=0.9, far_gradients=1.1,
    optimizer=1.0, step=1.1,
)  # fmt: skip
_MEMORY_SPREADS = MemoryRates(
    states=0.04, buffers=1.0, activations=0.24, gathered=1.2, logits=0.46, fixed=0.76
)


@dataclass(frozen=True)
class Usual:
    """What the rates usually are, before any trial, and how widely trainings differ.

    The defaults are what experiments/model_accuracy learns from all its tables.
    """

    memory: MemoryRates = field(default_factory=MemoryRates)
    time: TimeRates = field(default_factory=TimeRates)
    memory_spreads: MemoryRates = _MEMORY_SPREADS
    """Standard deviations of the rates' logarithms between trainings."""
    time_spreads: TimeRates = _TIME_SPREADS

    @property
    def memory_prior(self) -> Prior:
        """Where the calibration of memory starts from."""
        means = tuple(map(math.log, astuple(self.memory)))
        return Prior(means, astuple(self.memory_spreads), MEMORY_MISFIT)

    @property
    def time_prior(self) -> Prior:
        """Where the calibration of step times starts from."""
        means = tuple(map(math.log, astuple(self.time)))
        return Prior(means, astuple(self.time_spreads), TIME_MISFIT)


_Stages = tuple[MemoryParts, ...] | None
"""Memory of the stages that can be the worst; None: unknown."""
_Key = tuple[KnobValue | None, ...]
_MEMORY_READS = tuple(name for name in COST_KNOBS if name != "comm_overlap")
_TIME_READS = tuple(name for name in COST_KNOBS if name != "optimizer_offload")
_UNSEEN = object()


@dataclass(frozen=True)
class CostModel:
    """The formulas with this study's corrections."""

    facts: StudyFacts
    memory_rates: MemoryRates = field(default_factory=MemoryRates)
    time_rates: TimeRates = field(default_factory=TimeRates)
    memory_doubt: Doubt | None = None
    """What trials have left open about memory; None: they have taught nothing about it."""
    calibrated_by: int = 0
    """Measurements behind the corrections; 0: formulas alone."""
    usual: Usual = field(default_factory=Usual)
    """Where calibration starts from."""
    _known_stages: dict[_Key, _Stages] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )
    _known_times: dict[_Key, TimeParts | None] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )
    """Parts by the knobs that decide them: most configs of a large space share theirs, and
    models of the same facts share these tables."""

    def memory_parts(self, config: Config) -> MemoryParts | None:
        """Return the formula's parts of a complete config on its worst stage."""
        stages = self.stage_parts(config)
        if stages is None:
            return None
        return max(stages, key=lambda parts: parts.total(self.memory_rates))

    def stage_parts(self, config: Config) -> tuple[MemoryParts, ...] | None:
        """Return the parts of every stage that can be the worst, remembered; None: unknown."""
        key = tuple(map(config.get, _MEMORY_READS))
        known: Any = self._known_stages.get(key, _UNSEEN)
        if known is _UNSEEN:
            known = self._known_stages[key] = stage_memory(config, self.facts)
        stages: tuple[MemoryParts, ...] | None = known
        return stages

    def time_parts(self, config: Config) -> TimeParts | None:
        """Return the formula's parts of a complete config, remembered; None: unknown."""
        key = tuple(map(config.get, _TIME_READS))
        known: Any = self._known_times.get(key, _UNSEEN)
        if known is _UNSEEN:
            known = self._known_times[key] = time_parts(config, self.facts)
        step: TimeParts | None = known
        return step

    def memory_bytes(self, config: Config) -> float | None:
        """Return the predicted memory of the worst rank.

        Rates are positive, so it cannot fall below what states alone take.
        """
        stages = self.stage_parts(config)
        if stages is None:
            return None
        return max([parts.total(self.memory_rates) for parts in stages])

    @property
    def uncorrected(self) -> CostModel:
        """The model before any trial."""
        return self.with_rates(
            self.usual.memory, self.usual.time, memory_doubt=None, calibrated_by=0
        )

    def memory_spread(self, config: Config) -> float | None:
        """Return the standard deviation of log(memory / predicted memory); None: unknown."""
        stages = self.stage_parts(config)
        if stages is None:
            return None
        slopes = memory_forecast([stages])(self.log_memory_rates)[1]
        return float(self.memory_spreads(slopes)[0])

    def memory_spreads(self, slopes: Floats) -> Floats:
        """Return `memory_spread` of many configs.

        Args:
            slopes: Of a `memory_forecast` at `log_memory_rates`.
        """
        doubt = self.memory_doubt or self.usual.memory_prior.doubt
        return doubt.spreads(slopes)

    @property
    def log_memory_rates(self) -> Floats:
        """Logarithms of the memory rates, as `memory_forecast` takes them."""
        import numpy as np  # noqa: PLC0415 - `space` must start without it

        return np.asarray(np.log(astuple(self.memory_rates)))

    def step_time_s(self, config: Config) -> float | None:
        """Return the predicted time of a step."""
        parts = self.time_parts(config)
        return None if parts is None else parts.total(self.time_rates)

    def relative_cost(self, config: Config) -> float | None:
        """Return a number that orders configs by expected time, known even without a peak.

        It is the step time where peak and bandwidths of the cluster are known, and the FLOPs on a
        rank's critical path otherwise; compare it only between configs of one study.
        """
        parts = self.time_parts(config)
        if parts is None:
            return None
        return parts.total(self.time_rates) if self.facts.cluster.is_timed else parts.work

    def predict(self, config: Config) -> Prediction:
        """Return what is expected of a complete config."""
        step_time = self.step_time_s(config)
        return Prediction(self.memory_bytes(config), step_time, self.mfu(step_time))

    def with_rates(
        self,
        memory_rates: MemoryRates,
        time_rates: TimeRates,
        *,
        memory_doubt: Doubt | None,
        calibrated_by: int,
    ) -> CostModel:
        """Return the model with other rates; parts know none, so that these are shared."""
        found = replace(
            self, memory_rates=memory_rates, time_rates=time_rates,
            memory_doubt=memory_doubt, calibrated_by=calibrated_by,
        )  # fmt: skip
        object.__setattr__(found, "_known_stages", self._known_stages)
        object.__setattr__(found, "_known_times", self._known_times)
        return found

    def mfu(self, step_time_s: float | None) -> float | None:
        """Return the model FLOP utilisation of all devices at a step time.

        None: unknown peak, model or time. Idle devices count.
        """
        model, cluster = self.facts.model, self.facts.cluster
        if model is None or cluster.peak_flops is None or step_time_s is None:
            return None
        tokens = self.facts.training.global_batch_size * model.seq_length
        return model.step_flops(tokens) / (step_time_s * cluster.peak_flops * cluster.num_devices)


TIME_NOISE, MEMORY_NOISE = 0.1, 0.05
"""Scales of the relative errors of a calibrated formula in the median table, by the same
experiment: what a measurement is trusted with."""
TIME_MISFIT, MEMORY_MISFIT = 0.2, 0.12
"""Standard deviations of these errors, tables that the formulas describe badly included: within
what they predict with three measurements lie two thirds of the other rows."""
FAR = 1.0
"""Deviations of the prediction above the memory limit from which on a config is not worth a
launch: with less than one chance in six. By model_accuracy that turns away 0.4 % of what fits a
device, in place of 1.3 %, and lets 16 % of what fails pass, in place of 8 %: such configs are
tried in the order of their chance."""
TRUSTED = 2.0
"""Factor by which the formulas may be off before all rates move at once."""


def calibrate(model: CostModel, measurements: Sequence[Measurement]) -> CostModel:
    """Return the model whose rates fit the measurements best.

    What a trial did not measure is left out: a crashed one is no evidence of 0 bytes. One that
    ran out of memory says that it wants more than there was, and no more. Where the machine's
    speed is unknown, only memory is calibrated.
    """
    stages, memories, exceeds, steps, times = [], [], [], [], []
    for seen in measurements:
        own, parts = model.stage_parts(seen.config), model.time_parts(seen.config)
        is_read = _is_measured(seen.memory_bytes)
        if own is not None and (is_read or _is_measured(seen.memory_above)):
            stages.append(own)
            memories.append(seen.memory_bytes if is_read else seen.memory_above)
            exceeds.append(not is_read)
        if parts is not None and parts.amounts is not None and _is_measured(seen.step_time_s):
            steps.append(parts)
            times.append(seen.step_time_s)
    usual = model.usual
    memory_rates, time_rates, doubt = usual.memory, usual.time, None
    if memories:
        prior = usual.memory_prior
        found = _fitted(memory_forecast(stages), memories, prior, MEMORY_NOISE, exceeds)
        memory_rates = MemoryRates(*map(math.exp, found.log_rates))
        doubt = found.doubt
    if times:
        found = _fitted(time_forecast(steps), times, usual.time_prior, TIME_NOISE)
        time_rates = TimeRates(*map(math.exp, found.log_rates))
    calibrated_by = max(len(times), len(memories))
    return model.with_rates(
        memory_rates, time_rates, memory_doubt=doubt, calibrated_by=calibrated_by
    )


def _is_measured(value: float | None) -> bool:
    return value is not None and value > 0 and math.isfinite(value)


def _fitted(
    forecast: Forecast,
    measured: Sequence[float | None],
    prior: Prior,
    noise: float,
    exceeds: Sequence[bool] | None = None,
) -> Fit:
    import numpy as np  # noqa: PLC0415 - `space` must start without it

    bounds = None if exceeds is None else np.array(exceeds, dtype=bool)
    logs = np.log(np.array(measured, dtype=float))
    return fit(forecast, logs, prior, noise, exceeds=bounds, trusted=TRUSTED)

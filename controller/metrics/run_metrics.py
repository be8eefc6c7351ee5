"""From a run's folder or a log to its metrics in five dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mindtune.controller.contract import RunMetrics, StepCounts, parse, read_json
from mindtune.controller.contract.conditions import RunConditions
from mindtune.controller.contract.run_metrics import Communication, Convergence, Stability
from mindtune.controller.errors import ConfigError
from mindtune.controller.metrics.bootstrap import (
    Array,
    block_interval,
    count_interval,
    mean_interval,
    quantile_interval,
    rate_interval,
    slope_interval,
)
from mindtune.controller.metrics.collect import Collected, collect
from mindtune.controller.metrics.judge import judge
from mindtune.controller.metrics.resources import profile_mean, resource_use
from mindtune.controller.metrics.run_source import RunSource, open_source
from mindtune.controller.metrics.throughput import Figures, throughput
from mindtune.controller.records.log_readers import Names
from mindtune.policies.detectors.non_finite import LARGEST
from mindtune.policies.findings import Finding, FindingKind, Severity
from mindtune.search.efficiency import steadiness

__all__ = ["measure", "read_metrics"]

_FINAL_SHARE, _FINAL_MOST = 0.2, 100
_LONG_ENOUGH = 20
"""Losses of which a fall per 1000 steps is told."""
_UNFINISHED = frozenset({"crash", "oom", "interrupted", "timeout", "non_finite", "bad_config"})


def read_metrics(
    path: Path,
    *,
    format: str = "auto",  # noqa: A002 - the option's word
    names: Names | None = None,
    conditions: RunConditions | None = None,
) -> RunMetrics:
    """Return the metrics of what lies at a path.

    Args:
        path: Folder of a run or trial, a training log, or a file that holds metrics already, such
            as a baseline.
        format: Name of a log reader, or `auto`.
        names: What a log calls the signals; None: what is known.
        conditions: What is known besides, such as `study_conditions` of a study file; what the
            run says itself comes first.

    Raises:
        ConfigError: There is nothing that can be read, or no step in it.
    """
    if path.suffix == ".json" and path.is_file():
        try:
            content = read_json(path)
        except ConfigError:  # a log of one object per line, too, may have this ending
            content = None
        if isinstance(content, dict) and {"source", "convergence", "steps"} <= set(content):
            return parse(RunMetrics, content, source=str(path))
    source = open_source(path, format=format, names=names)
    return measure(source, conditions=conditions)


def measure(
    source: RunSource,
    *,
    conditions: RunConditions | None = None,
    collected: Collected | None = None,
) -> RunMetrics:
    """Return the metrics of a run.

    Args:
        source: The run; its steps are read here unless they have been collected.
        conditions: As of `read_metrics`.
        collected: What its steps say; None: they are read.

    Raises:
        ConfigError: It cannot be read, or has no step.
    """
    found = collect(source.observations) if collected is None else collected
    if not found.recorded:
        raise ConfigError(
            f"{source.name} must hold at least one optimizer step, but none was recorded."
        )
    known = _completed(source.conditions, conditions)
    figures = Figures()
    course = _convergence(found, figures)
    speed = throughput(found, known, figures, is_log=source.is_log)
    resources = resource_use(found, source, figures)
    return RunMetrics(
        source=source.name,
        format=source.format,
        outcome=source.outcome,
        conditions=known,
        steps=StepCounts(
            first_step=max(0, found.first_step),
            last_step=max(0, found.last_step),
            recorded=found.recorded,
            timed=len(found.step_times),
            excluded=dict(found.excluded),
            segments=found.segments,
            interval=max(1, round(found.covered / found.recorded)),
        ),
        convergence=course,
        throughput=speed,
        resources=resources,
        communication=_communication(found, known, source, figures),
        stability=_stability(found, source, figures),
        intervals=figures.intervals,
        findings=judge(found, speed, resources),
        reasons=figures.reasons,
    )


def _completed(own: RunConditions, told: RunConditions | None) -> RunConditions:
    """Return what the run says, with what it does not say from elsewhere."""
    if told is None:
        return own
    missing = {
        name: value
        for name, value in told
        if getattr(own, name) in (None, {}) and value is not None
    }
    if own.peak_flops is None and told.peak_flops is not None:
        missing["peak_source"] = told.peak_source
    return own.model_copy(update=missing)


def _convergence(found: Collected, figures: Figures) -> Convergence:
    losses = found.losses
    last = losses[-max(1, min(_FINAL_MOST, round(_FINAL_SHARE * len(losses)))) :]
    loss = None
    if last:
        loss = math.fsum(last) / len(last) if all(map(_is_number, last)) else math.nan
        if not math.isnan(loss):
            figures.interval("loss", mean_interval(last))
    finite = [value for value in losses if _is_number(value)]
    evaluated = [value for value in found.eval_losses if _is_number(value)]
    norms = np.asarray(found.grad_norms)
    figures.interval("grad_norm_median", quantile_interval(norms, 0.5))
    figures.interval("grad_norm_p95", quantile_interval(norms, 0.95))
    p50, p95, p99 = np.percentile(norms, [50, 95, 99]) if len(norms) else (None, None, None)
    return Convergence(
        first_loss=losses[0] if losses else None,
        loss=loss,
        best_loss=min(finite, default=None),
        loss_drop_per_1000_steps=_loss_drop(found, figures),
        eval_loss=found.eval_losses[-1] if found.eval_losses else None,
        best_eval_loss=min(evaluated, default=None),
        grad_norm_median=p50,
        grad_norm_p95=p95,
        grad_norm_p99=p99,
        grad_norm_max=float(norms.max()) if len(norms) else None,
    )


def _loss_drop(found: Collected, figures: Figures) -> float | None:
    """Return the fall of the loss per 1000 steps in the newer half of the run."""
    name = "loss_drop_per_1000_steps"
    half = len(found.losses) // 2
    pairs = [
        (step, loss)
        for step, loss in zip(found.loss_steps[half:], found.losses[half:], strict=True)
        if _is_number(loss)
    ]
    if len(found.losses) < _LONG_ENOUGH or len({step for step, _ in pairs}) < 2:
        figures.reasons[name] = (
            f"a fall is told of {_LONG_ENOUGH} losses, half of which count, but there are "
            f"{len(found.losses)}"
        )
        return None
    slope, interval = slope_interval([step for step, _ in pairs], [loss for _, loss in pairs])
    if interval is not None:
        low, high = interval
        figures.intervals[name] = (-1000 * high, -1000 * low)
    return -1000 * slope


def _communication(
    found: Collected, known: RunConditions, source: RunSource, figures: Figures
) -> Communication:
    straggler = _median(found.stragglers)
    if known.num_devices == 1:
        return Communication(communication_share=0.0, straggler_ratio=straggler)
    names = ("communication_share", "communication_overlap", "communication_bytes_per_s")
    profiled = {name: profile_mean(source.profiles, name, figures) for name in names}
    return Communication(straggler_ratio=straggler, **profiled)


def _stability(found: Collected, source: RunSource, figures: Figures) -> Stability:
    times = np.asarray(found.step_times)
    steady = jitter = None
    if len(times):
        low, median, high = np.percentile(times, [25, 50, 75])
        jitter = float((high - low) / median)
        figures.interval("step_time_jitter", block_interval(times, _jitters))
        steady = steadiness(
            bad_share=min(1.0, found.bad_steps / found.recorded),
            median_s=float(median),
            mean_s=float(times.mean()),
        )
    broken = found.broken if found.losses else None
    rates = {
        "non_finite_rate": broken,
        "overflow_rate": found.overflows,
        "skipped_rate": found.skips,
    }
    for name, column in rates.items():
        if column:
            figures.interval(name, rate_interval(column))
    if source.timeouts is None:
        figures.reasons["timeouts"] = "a log does not tell of silences"
    ended = source.outcome in _UNFINISHED
    return Stability(
        stability=steady,
        non_finite_rate=_mean(broken) if broken else None,
        loss_spikes_per_1000_steps=_spikes(found, found.losses, "loss", figures),
        grad_norm_spikes_per_1000_steps=_spikes(found, found.grad_norms, "grad_norm", figures),
        overflow_rate=_mean(found.overflows),
        skipped_rate=_mean(found.skips),
        interruptions=found.segments - 1 + ended,
        timeouts=source.timeouts,
        repeated_steps_share=found.repeated / found.recorded,
        step_time_jitter=jitter,
        spike_period_steps=_period(found.incidents, figures),
        critical_findings=sum(entry.severity is Severity.CRITICAL for entry in found.incidents),
    )


def _spikes(
    found: Collected, values: Sequence[float], signal: str, figures: Figures
) -> float | None:
    """Return how often a signal spiked, in 1000 steps."""
    if not values:
        return None
    name = f"{signal}_spikes_per_1000_steps"
    count = found.spikes(FindingKind(f"{signal}_spike"))
    per_1000 = 1000 / found.covered
    if found.covered > found.recorded:
        # A rate of the records says little about the steps between them.
        figures.reasons[name] = (
            f"{found.recorded} records of {found.covered} steps: what comes and goes between two "
            "of them is not seen"
        )
    else:
        low, high = count_interval(count)
        figures.intervals[name] = (low * per_1000, high * per_1000)
    return count * per_1000


def _jitters(rows: Array) -> Array:
    low, median, high = np.percentile(rows, [25, 50, 75], axis=1)
    return np.asarray((high - low) / median)


def _period(incidents: Sequence[Finding], figures: Figures) -> float | None:
    """Return the rhythm of spikes; of those of a signal before those of the step time."""
    series = [entry for entry in incidents if entry.kind is FindingKind.PERIODIC_SPIKES]
    if not series:
        return None
    told = max(series, key=lambda entry: entry.severity is not Severity.INFO)
    figures.reasons["spike_period_steps"] = told.message
    return told.number("period")


def _is_number(value: float) -> bool:
    """Tell whether a loss is one that can be reckoned with, as the detectors see it."""
    return abs(value) < LARGEST


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(np.asarray(values))) if len(values) else None


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(np.asarray(values))) if len(values) else None

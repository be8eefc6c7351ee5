"""The five dimensions of a run: each figure with its interval and how it is measured."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mindtune.controller.contract.run_metrics import METRICS, RunMetrics
from mindtune.controller.reports.language import Words
from mindtune.controller.reports.page import Column, Section, Table, number
from mindtune.controller.reports.recorded import retold
from mindtune.controller.units import format_size

__all__ = ["dimension_sections", "metric_text"]


def dimension_sections(metrics: RunMetrics, words: Words) -> Iterator[Section]:
    """Yield the figures of all dimensions, and what is not known with the reason."""
    columns = [
        Column(words("column.dimension")), Column(words("column.metric")),
        Column(words("column.value"), number=True), Column(words("column.interval"), number=True),
        Column(words("column.how")),
    ]  # fmt: skip
    rows, unknown = [], []
    for dimension, section in metrics.sections():
        title = words(f"dimension.{dimension}")
        for name, value in section:
            reason = metrics.reasons.get(name, "")
            if value is None:
                if reason:
                    unknown.append([words(f"metric.{name}"), retold(reason, words)])
                continue
            how = retold(reason, words) if reason else words(f"how.{name}")
            rows.append([
                title, words(f"metric.{name}"), metric_text(name, value, words),
                _interval(metrics, name, words), how,
            ])  # fmt: skip
            title = ""
    steps = metrics.steps
    text = words("dimensions.text", timed=number(steps.timed), recorded=number(steps.recorded))
    quotes = [retold(found.message, words) for found in metrics.findings]
    yield Section(
        words("section.dimensions"), text=text, table=Table(columns, rows), quotes=quotes
    )
    if unknown:
        columns = [Column(words("column.metric")), Column(words("column.why"))]
        yield Section(
            words("section.unknown"), text=words("unknown.text"), table=Table(columns, unknown)
        )


def _interval(metrics: RunMetrics, name: str, words: Words) -> str:
    found = metrics.intervals.get(name)
    if found is None:
        return ""
    low, high = (metric_text(name, bound, words) for bound in found)
    number_of_low, _, unit = low.partition(" ")
    if unit and high.endswith(f" {unit}"):
        low = number_of_low
    return f"{low} \N{EN DASH} {high}"


def metric_text(name: str, value: float, words: Words) -> str:
    """Return a metric for reading, with its unit.

    A loss has none: whether it is one in nats only the program knows.
    """
    unit = METRICS[name].unit
    if not math.isfinite(value):
        return number(value)
    if unit == "bytes":
        return format_size(value)
    if unit == "bytes/s":
        return f"{value / 1e9:.3g} GB/s"
    if unit == "ratio" and name != "straggler_ratio":
        return f"{value:.2%}"
    if unit == "s":
        return f"{value * 1e3:.4g} ms" if abs(value) < 1 else f"{value:.4g} s"
    return f"{number(value)} {words.known('measure', unit)}".rstrip()

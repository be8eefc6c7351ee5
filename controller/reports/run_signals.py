"""The figures of a run's report: course, signals, learning-rate map, distributions, the model."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mindtune.controller.reports.fates import fate_of, is_action
from mindtune.controller.reports.figure_style import ACCENT, BLUE, ORANGE, RED
from mindtune.controller.reports.language import Words
from mindtune.controller.reports.page import Figure, Section, number
from mindtune.controller.reports.run_records import RunRecords
from mindtune.controller.reports.spread_figures import (
    Histogram,
    course_map,
    histograms,
    percentile,
)
from mindtune.controller.reports.time_figures import (
    FATES,
    SEVERITIES,
    Dash,
    Lane,
    Line,
    Mark,
    Panel,
    Span,
    time_line,
    time_series,
)

__all__ = ["course", "rate_map", "signal_sections", "times"]

_MAX_LANES = 24
_MB = 2**20
_MEASURES = frozenset({
    "samples", "seconds", "token_rate", "percent", "megabytes", "celsius", "watts",
})  # fmt: skip
"""Units that stand behind a number; the others only name the axis."""
_SHORTEST_S, _LONGEST_S = 1e-9, 1e9
"""As of the times of a trial; what is beyond is no time."""


@dataclass(frozen=True)
class _Signal:
    """A line of a panel."""

    name: str
    colour: str = BLUE
    dash: Dash = "-"


@dataclass(frozen=True)
class _Plot:
    """A panel: what it shows, and how."""

    key: str
    """Of its title in the catalogue, under `panel`."""
    signals: Sequence[_Signal]
    unit: str
    """Of its unit in the catalogue, under `unit`."""
    log: bool = False
    from_zero: bool = False
    factor: float = 1.0


def _one(key: str, **how: object) -> _Plot:
    return _Plot(key, (_Signal(key),), **how)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Group:
    """Panels of one section."""

    key: str
    plots: Sequence[_Plot] = field(default_factory=tuple)


_GROUPS = (
    _Group("convergence", (
        _one("loss", unit="loss", log=True),
        _one("eval_loss", unit="loss"),
        _Plot("grad_norm", (
            _Signal("grad_norm"), _Signal("clip_norm", ORANGE, "--"),
            _Signal("skip_threshold", RED, ":"),
        ), unit="norm", log=True),
        _one("update_norm", unit="norm", log=True),
        _one("global_batch_size", unit="samples", from_zero=True),
    )),
    _Group("learning_rate", (
        _one("learning_rate", unit="rate", from_zero=True),
        _one("learning_rate_scale", unit="factor", log=True),
    )),
    _Group("precision", (
        _one("loss_scale", unit="factor", log=True),
        _Plot("overflow", (_Signal("overflow"), _Signal("update_skipped", ORANGE, "--")),
              unit="yes", from_zero=True),
    )),
    _Group("speed", (
        _Plot("step_time_s", (_Signal("step_time_s"), _Signal("data_time_s", ORANGE, "--")),
              unit="seconds", log=True),
        _one("tokens_per_s", unit="token_rate", from_zero=True),
        _one("mfu", unit="percent", from_zero=True, factor=100.0),
        _one("device_utilization", unit="percent", from_zero=True, factor=100.0),
        _one("straggler_ratio", unit="ratio", log=True),
    )),
    _Group("memory", (
        _Plot("memory", (
            _Signal("device_memory_used_bytes"), _Signal("memory_allocated_bytes", ACCENT, "--"),
        ), unit="megabytes", from_zero=True, factor=1 / _MB),
        _one("device_temperature_c", unit="celsius"),
        _one("device_power_w", unit="watts", from_zero=True),
    )),
)  # fmt: skip


def course(run: RunRecords, words: Words) -> Section:
    """Return the loss over lanes of what was found and what was decided."""
    panel = _panel(run, _GROUPS[0].plots[0], words, marks=_marks(run))
    lanes = [*_finding_lanes(run, words), *_policy_lanes(run)]
    title = words("section.course")
    if panel is None and not lanes:
        return Section(title, text=words("course.nothing"))
    left_out = max(0, len(lanes) - _MAX_LANES)
    names = {key: words(f"fate.{key}") for key in FATES}
    names |= {key: words(f"severity.{key}") for key in SEVERITIES}
    drawing = time_line(panel, lanes[:_MAX_LANES], step_label=words("axis.step"), names=names)
    note = words("course.left_out", count=left_out) if left_out else ""
    first, last = number(run.steps.lowest_step), number(run.steps.highest_step)
    return Section(
        title,
        text=words("course.text" if lanes else "course.calm", first=first, last=last),
        figures=[Figure(drawing, words("course.caption"))],
        note=note,
    )


def _finding_lanes(run: RunRecords, words: Words) -> list[Lane]:
    spans: dict[str, list[Span]] = {}
    for entry in run.story.findings:
        span = Span(entry.step, entry.last_step, entry.severity)
        spans.setdefault(entry.kind, []).append(span)
    return [Lane(words.known("finding", kind), spans=found) for kind, found in spans.items()]


def _policy_lanes(run: RunRecords) -> list[Lane]:
    marks: dict[str, list[Mark]] = {}
    for record in run.decisions:
        if record.policy != "sensors":
            marks.setdefault(record.policy, []).append(Mark(record.step, FATES[fate_of(record)]))
    return [Lane(policy, marks=found) for policy, found in marks.items()]


def _marks(run: RunRecords) -> list[Mark]:
    return [
        Mark(record.step, FATES[fate_of(record)]) for record in run.decisions if is_action(record)
    ]


def signal_sections(run: RunRecords, words: Words) -> Iterable[Section]:
    """Yield one section of panels per group of signals that were measured."""
    marks = _marks(run)
    for group in _GROUPS:
        panels, constant = [], []
        for plot in group.plots:
            panel = _panel(run, plot, words, marks=marks)
            if panel is None:
                continue
            same = _constant(run, plot)
            if same is None:
                panels.append(panel)
            else:
                constant.append(_same_in_all(plot, panel.title, same, words))
        if not panels and not constant:
            continue
        text = words("signals.constant", signals=words("list").join(constant)) if constant else ""
        figures = []
        if panels:
            drawing = time_series(panels, step_label=words("axis.step"))
            caption = words("signals.caption") if group.key == _GROUPS[0].key else ""
            figures.append(Figure(drawing, caption))
        yield Section(words(f"section.{group.key}"), text=text, figures=figures)


def _panel(run: RunRecords, plot: _Plot, words: Words, *, marks: Sequence[Mark]) -> Panel | None:
    measured = [signal for signal in plot.signals if signal.name in run.steps.signals]
    if not measured or (plot.signals[0] not in measured and plot.key != "memory"):
        return None
    return Panel(
        title=words(f"panel.{plot.key}"),
        lines=[_line(run, plot, signal, words) for signal in measured],
        unit=words(f"unit.{plot.unit}"),
        log=plot.log,
        from_zero=plot.from_zero,
        marks=marks,
    )


def _line(run: RunRecords, plot: _Plot, signal: _Signal, words: Words) -> Line:
    found = run.steps.signals[signal.name]
    return Line(
        found.points.steps,
        [value * plot.factor for value in found.points.values()],
        words(f"signal.{signal.name}") if len(plot.signals) > 1 else "",
        signal.colour,
        signal.dash,
        found.broken.steps,
    )


def _constant(run: RunRecords, plot: _Plot) -> float | None:
    """Return the one value that all steps have; None: there are several, or several lines."""
    found = [
        run.steps.signals[signal.name]
        for signal in plot.signals
        if signal.name in run.steps.signals
    ]
    if run.steps.count < 2 or len(found) != 1 or found[0].constant is None:
        return None
    return found[0].constant * plot.factor


def _same_in_all(plot: _Plot, title: str, value: float, words: Words) -> str:
    name = title if title[:2].isupper() else f"{title[:1].lower()}{title[1:]}"
    unit = words(f"unit.{plot.unit}") if plot.unit in _MEASURES else ""
    return f"{name} {number(value)} {unit}".rstrip()


def rate_map(run: RunRecords, words: Words) -> Section | None:
    """Return at which learning rates the gradient, else the loss, was how large."""
    has_norms = any(map(math.isfinite, run.steps.norms.values()))
    name = "grad_norm" if has_norms else "loss"
    points = run.steps.maps[name]
    steps, rates, measured = points.steps, points.values(0), points.values(1)
    if len(set(rates)) < 2:
        return None
    drawing = course_map(
        steps, rates, measured, title=words("rate_map.title"),
        labels=(words("signal.learning_rate"), words(f"signal.{name}"), words("axis.step")),
    )  # fmt: skip
    text = words("rate_map.text", signal=words(f"signal.{name}"))
    return Section(words("section.rate_map"), figures=[Figure(drawing, text)])


def times(run: RunRecords, words: Words) -> Section | None:
    """Return the distributions of step time and data time."""
    entries = []
    for name in ("step_time_s", "data_time_s"):
        told = run.steps.distributions[name]
        measured = [time for time in told if time == 0 or _SHORTEST_S < time < _LONGEST_S]
        if measured:
            entries.append(_histogram(name, measured, words))
    if not entries:
        return None
    drawing = histograms(entries, count_label=words("axis.count"))
    shares = run.steps.waits
    text = ""
    if shares:
        text = words("times.share", share=f"{statistics.median(shares):.1%}",
                     worst=f"{percentile(shares, 0.99):.1%}")  # fmt: skip
    return Section(
        words("section.times"), text=text, figures=[Figure(drawing, words("times.caption"))]
    )


def _histogram(name: str, measured: Sequence[float], words: Words) -> Histogram:
    scale, unit = (1e3, "ms") if statistics.median(measured) < 1 else (1.0, "s")
    scaled = [value * scale for value in measured]
    marks = {
        "median": statistics.median(scaled),
        "p95": percentile(scaled, 0.95),
        "p99": percentile(scaled, 0.99),
    }
    return Histogram(
        words(f"panel.{name}"), scaled, unit,
        [
            (words(f"times.{key}", value=f"{number(found, 3)} {unit}"), found)
            for key, found in marks.items()
        ],
    )  # fmt: skip

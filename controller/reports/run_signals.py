"""The figures of a run's report: course, signals, learning-rate map, distributions, the model."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from mindtune.controller.reports.fates import fate_of, is_action
from mindtune.controller.reports.figure_style import ACCENT, BLUE, GREY, ORANGE, RED, is_shown
from mindtune.controller.reports.language import Words
from mindtune.controller.reports.page import Figure, Section, number
from mindtune.controller.reports.run_records import RunRecords
from mindtune.controller.reports.run_summary import data_shares, values
from mindtune.controller.reports.spread_figures import (
    Histogram,
    course_map,
    histograms,
    percentile,
)
from mindtune.controller.reports.time_figures import (
    FATES,
    Lane,
    Line,
    Mark,
    Panel,
    Span,
    time_line,
    time_series,
)
from mindtune.policies.signals import Observation

__all__ = ["course", "rate_map", "signal_sections", "times"]

_SEVERITY_COLOURS = {"critical": RED, "warning": ORANGE, "info": GREY}
_MAX_LANES = 24
_MB = 2**20
_SHORTEST_S, _LONGEST_S = 1e-9, 1e9
"""As of the times of a trial; what is beyond is no time."""


@dataclass(frozen=True)
class _Signal:
    """A line of a panel."""

    name: str
    colour: str = BLUE
    dashed: bool = False


@dataclass(frozen=True)
class _Plot:
    """A panel: what it shows, and how."""

    key: str
    """Of its title in the catalogue, under `panel`."""
    signals: Sequence[_Signal]
    unit: str = ""
    log: bool = False
    from_zero: bool = False
    factor: float = 1.0
    of_time: bool = False
    """Not comparable where the step compiled, evaluated or saved: left out there."""


def _one(key: str, **how: object) -> _Plot:
    return _Plot(key, (_Signal(key),), **how)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Group:
    """Panels of one section."""

    key: str
    plots: Sequence[_Plot] = field(default_factory=tuple)


_GROUPS = (
    _Group("convergence", (
        _one("loss", unit="nats", log=True),
        _one("eval_loss", unit="nats"),
        _Plot("grad_norm", (
            _Signal("grad_norm"), _Signal("clip_norm", ORANGE, dashed=True),
            _Signal("skip_threshold", RED, dashed=True),
        ), log=True),
        _one("update_norm", log=True),
        _one("global_batch_size", from_zero=True),
    )),
    _Group("learning_rate", (
        _one("learning_rate", from_zero=True),
        _one("learning_rate_scale", log=True),
    )),
    _Group("precision", (
        _one("loss_scale", log=True),
        _Plot("overflow", (_Signal("overflow"), _Signal("update_skipped", ORANGE)),
              from_zero=True),
    )),
    _Group("speed", (
        _Plot("step_time_s", (_Signal("step_time_s"), _Signal("data_time_s", ORANGE)), unit="s",
              log=True, of_time=True),
        _one("tokens_per_s", unit="tokens/s", from_zero=True, of_time=True),
        _one("mfu", from_zero=True, of_time=True),
        _one("device_utilization", from_zero=True, of_time=True),
        _one("straggler_ratio", log=True),
    )),
    _Group("memory", (
        _Plot("memory", (
            _Signal("device_memory_used_bytes"), _Signal("memory_allocated_bytes", ACCENT),
        ), unit="MB", from_zero=True, factor=1 / _MB),
        _one("device_temperature_c", unit="°C"),
        _one("device_power_w", unit="W", from_zero=True),
    )),
)  # fmt: skip


def course(run: RunRecords, words: Words) -> Section:
    """Return the loss over lanes of what was found and what was decided."""
    steps = [step.step for step in run.observations]
    panel = _panel(run, _GROUPS[0].plots[0], words, marks=_marks(run))
    lanes = [*_finding_lanes(run, words), *_policy_lanes(run)]
    title = words("section.course")
    if panel is None and not lanes:
        return Section(title, text=words("course.nothing"))
    left_out = max(0, len(lanes) - _MAX_LANES)
    names = {key: words(f"fate.{key}") for key in FATES}
    drawing = time_line(panel, lanes[:_MAX_LANES], step_label=words("axis.step"), names=names)
    note = words("course.left_out", count=left_out) if left_out else ""
    first, last = number(min(steps)), number(max(steps))
    return Section(
        title,
        text=words("course.text" if lanes else "course.calm", first=first, last=last),
        figures=[Figure(drawing, words("course.caption"))],
        note=note,
    )


def _finding_lanes(run: RunRecords, words: Words) -> list[Lane]:
    spans: dict[str, list[Span]] = {}
    for entry in run.story.findings:
        colour = _SEVERITY_COLOURS[entry.severity]
        spans.setdefault(entry.kind, []).append(Span(entry.step, entry.last_step, colour))
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
            same = _constant(panel)
            if same is None:
                panels.append(panel)
            else:
                text = f"{panel.title.lower()} {number(same)} {panel.unit}"
                constant.append(text.strip())
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
    lines = []
    for index, signal in enumerate(plot.signals):
        points = [_plotted(step, signal.name, plot) for step in run.observations]
        # Where a limit is switched off it is infinite, which is no broken value.
        if signal.dashed:
            points = [None if point is None or math.isinf(point) else point for point in points]
        if any(point is not None for point in points):
            label = words(f"signal.{signal.name}") if len(plot.signals) > 1 else ""
            lines.append(Line(points, label, signal.colour, signal.dashed))
        elif index == 0 and plot.key != "memory":
            return None
    if not lines:
        return None
    return Panel(
        title=words(f"panel.{plot.key}"),
        steps=[step.step for step in run.observations],
        lines=lines,
        unit=words("unit.samples") if plot.key == "global_batch_size" else plot.unit,
        log=plot.log,
        from_zero=plot.from_zero,
        marks=marks,
    )


def _plotted(step: Observation, name: str, plot: _Plot) -> float | None:
    if plot.of_time and step.phase not in (None, "train"):
        return None
    value: float | None = getattr(step, name)
    return value if value is None else value * plot.factor


def _constant(panel: Panel) -> float | None:
    """Return the one value that all steps have; None: there are several, or several lines."""
    measured = {value for line in panel.lines for value in line.values if value is not None}
    if len(panel.steps) < 2 or len(measured) != 1 or len(panel.lines) > 1:
        return None
    (value,) = measured
    return value if math.isfinite(value) else None


def rate_map(run: RunRecords, words: Words) -> Section | None:
    """Return at which learning rates the gradient, else the loss, was how large."""
    name = "grad_norm" if values(run.observations, "grad_norm") else "loss"
    points = [
        (step.step, step.learning_rate, value)
        for step in run.observations
        if step.learning_rate is not None
        and (value := getattr(step, name)) is not None
        and 0 < step.learning_rate <= 1e100
        and is_shown(value)
        and value > 0
    ]
    if len({rate for _, rate, _ in points}) < 2:
        return None
    steps, rates, measured = zip(*points, strict=True)
    drawing = course_map(
        steps, rates, measured, title=words("rate_map.title"),
        labels=(words("signal.learning_rate"), words(f"signal.{name}"), words("axis.step")),
    )  # fmt: skip
    text = words("rate_map.text", signal=words(f"signal.{name}"))
    return Section(words("section.rate_map"), figures=[Figure(drawing, text)])


def times(run: RunRecords, words: Words) -> Section | None:
    """Return the distributions of step time and data time."""
    trained = run.trained
    entries = []
    for name in ("step_time_s", "data_time_s"):
        measured = [t for t in values(trained, name) if t == 0 or _SHORTEST_S < t < _LONGEST_S]
        if measured:
            entries.append(_histogram(name, measured, words))
    if not entries:
        return None
    drawing = histograms(entries, count_label=words("axis.count"))
    shares = data_shares(trained)
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
    marks: list[tuple[str, Callable[[], float]]] = [
        ("median", lambda: statistics.median(scaled)),
        ("p95", lambda: percentile(scaled, 0.95)),
        ("p99", lambda: percentile(scaled, 0.99)),
    ]
    return Histogram(
        words(f"panel.{name}"), scaled, unit,
        [
            (words(f"times.{key}", value=f"{number(found, 3)} {unit}"), found)
            for key, find in marks
            for found in (find(),)
        ],
    )  # fmt: skip

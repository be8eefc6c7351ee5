"""Sections of a run's report from inside the model: gradients by size and layer, attention."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from mindtune.controller.contract import ModelSignalRecord
from mindtune.controller.reports.language import Words
from mindtune.controller.reports.page import Figure, Section, number
from mindtune.controller.reports.run_records import RunRecords
from mindtune.controller.reports.run_steps import Points
from mindtune.controller.reports.spread_figures import HeatMap, heat_maps

__all__ = ["gradient_section", "model_sections"]

_STRETCHES = 80
"""Stretches of steps of the norms' histogram; fewer where a run is short."""
_PER_STRETCH = 8
"""Norms that one stretch holds at least."""
_BINS = 30
_MOST_HEADS = 48
"""Rows up to which every head is shown; of more, the mean and the lowest of each block."""


def gradient_section(run: RunRecords, words: Words) -> Section | None:
    """Return how the gradients were distributed over time.

    By the entries of each layer where the run has looked into the model, else by its norms.
    """
    title = words("section.gradients")
    sampled = [sample for sample in run.samples if sample.gradient_counts]
    if sampled:
        maps = [_entries(sampled, words)]
        norms = _by_layer(sampled, "gradient_norms", words)
        if norms is not None:
            maps.append(norms)
        drawing = heat_maps(maps, step_label=words("axis.step"))
        return Section(title, figures=[Figure(drawing, words("gradients.entries"))])
    found = _norms(run.steps.norms, words)
    if found is None:
        return None
    drawing = heat_maps([found], step_label=words("axis.step"))
    return Section(
        title, figures=[Figure(drawing, words("gradients.norms"))], note=words("gradients.how")
    )


def _entries(samples: Sequence[ModelSignalRecord], words: Words) -> HeatMap:
    """Return the share of all entries per decade, largest at the top."""
    edges = samples[0].log10_edges
    names = [f"< 1e{edges[0]}", *(f"1e{edge}" for edge in edges)]
    shares = []
    for sample in samples:
        counts = [sum(layer[bin_] for layer in sample.gradient_counts or []) for bin_ in
                  range(len(names))]  # fmt: skip
        total = sum(counts) + sum(sample.gradient_zeros or [])
        shares.append([count / total if total else math.nan for count in counts])
    used = [bin_ for bin_ in range(len(names)) if any(share[bin_] > 0 for share in shares)]
    first, last = (min(used), max(used)) if used else (0, len(names) - 1)
    rows = range(last, first - 1, -1)
    return HeatMap(
        words("gradients.entries_title"),
        [sample.step for sample in samples],
        [names[row] for row in rows],
        [[share[row] for share in shares] for row in rows],
        words("gradients.share"),
        words("gradients.size"),
        log=True,
    )


def _by_layer(samples: Sequence[ModelSignalRecord], name: str, words: Words) -> HeatMap | None:
    layers = list(dict.fromkeys(layer for sample in samples for layer in sample.layers))
    columns = [
        dict(zip(sample.layers, getattr(sample, name) or (), strict=False)) for sample in samples
    ]
    grid = [[float(column.get(layer, math.nan)) for column in columns] for layer in layers]
    if not any(math.isfinite(value) for row in grid for value in row):
        return None
    return HeatMap(
        words(f"layers.{name}"), [sample.step for sample in samples], layers, grid,
        words(f"layers.{name}_unit"),
        words("layers.layer"), log=True,
    )  # fmt: skip


def _norms(norms: Points, words: Words) -> HeatMap | None:
    """Return how often each size of the gradient norm came, per stretch of steps."""
    points = [
        (step, math.log10(norm))
        for step, norm in zip(norms.steps, norms.values(), strict=True)
        if 1e-100 < norm < 1e100
    ]
    if len(points) < 2 * _PER_STRETCH:
        return None
    sizes = [size for _, size in points]
    low, high = min(sizes), max(sizes)
    if not high > low:
        return None
    width = (high - low) / _BINS
    stretches = max(2, min(_STRETCHES, len(points) // _PER_STRETCH))
    grid = [[math.nan] * stretches for _ in range(_BINS)]
    for index, (_, size) in enumerate(points):
        row = _BINS - 1 - min(_BINS - 1, int((size - low) / width))
        column = index * stretches // len(points)
        grid[row][column] = 1.0 if math.isnan(grid[row][column]) else grid[row][column] + 1
    return HeatMap(
        words("gradients.norms_title"),
        [points[column * len(points) // stretches][0] for column in range(stretches)],
        [number(10 ** (high - (row + 0.5) * width), 2) for row in range(_BINS)],
        grid,
        words("axis.count"),
        words("signal.grad_norm"),
    )


def model_sections(run: RunRecords, words: Words) -> Iterable[Section]:
    """Yield what was seen inside the model besides gradients."""
    attention = [sample for sample in run.samples if sample.attention_entropy]
    if attention:
        yield _attention(attention, words)
    updates = _by_layer(run.samples, "update_ratios", words) if run.samples else None
    if updates is not None:
        drawing = heat_maps([updates], step_label=words("axis.step"))
        yield Section(
            words("section.updates"), figures=[Figure(drawing, words("layers.updates_caption"))]
        )


def _attention(samples: Sequence[ModelSignalRecord], words: Words) -> Section:
    steps = [sample.step for sample in samples]
    blocks = max(len(sample.attention_entropy or ()) for sample in samples)
    heads = max(len(row) for sample in samples for row in sample.attention_entropy or ())
    if blocks * heads <= _MOST_HEADS:
        names = [f"{block}.{head}" for block in range(blocks) for head in range(heads)]
        grid = [
            [_entropy(sample, block, head) for sample in samples]
            for block in range(blocks)
            for head in range(heads)
        ]
        maps = [HeatMap(words("attention.heads"), steps, names, grid, "nats",
                        words("attention.block_head"))]  # fmt: skip
    else:
        maps = []
        for key, reduce in (("mean", _mean), ("lowest", min)):
            grid = [
                [
                    reduce(found) if (found := _block(sample, block)) else math.nan
                    for sample in samples
                ]
                for block in range(blocks)
            ]
            names = [str(block) for block in range(blocks)]
            maps.append(HeatMap(words(f"attention.{key}"), steps, names, grid, "nats",
                                words("attention.block")))  # fmt: skip
    drawing = heat_maps(maps, step_label=words("axis.step"))
    return Section(
        words("section.attention"), figures=[Figure(drawing, words("attention.caption"))]
    )


def _entropy(sample: ModelSignalRecord, block: int, head: int) -> float:
    rows = sample.attention_entropy or ()
    found = block < len(rows) and head < len(rows[block])
    return float(rows[block][head]) if found else math.nan


def _block(sample: ModelSignalRecord, block: int) -> list[float]:
    rows = sample.attention_entropy or ()
    row = rows[block] if block < len(rows) else ()
    return [float(value) for value in row if math.isfinite(value)]


def _mean(numbers: Sequence[float]) -> float:
    return math.fsum(numbers) / len(numbers)

"""Replays runs made up to mislead, each with several seeds."""

from __future__ import annotations

import tempfile
from pathlib import Path

from mindtune.controller.contract import ReplayOutput
from mindtune.controller.records.log_readers import open_log
from mindtune.controller.replay import load_engine, replay
from mindtune.experiments.replay.faulty_shapes import FAULTY
from mindtune.experiments.replay.healthy_shapes import HEALTHY
from mindtune.experiments.replay.shape import Shape, write_log

__all__ = ["SHAPES", "misleading", "replay_shape"]

SHAPES: dict[str, Shape] = {**HEALTHY, **FAULTY}

_HEADER = (
    "| run | verdict (right) | first finding above a note | likeliest cause |\n"
    "| --- | --- | --- | --- |"
)


def replay_shape(shape: Shape, seed: int) -> ReplayOutput:
    """Return what a replay says about one run of a shape."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.csv"
        write_log(shape, seed, path)
        return replay(open_log(path), load_engine(None))


def misleading(seeds: int) -> str:
    """Return the table of all shapes, one row each, and how many verdicts are right."""
    lines, right = [_HEADER], 0
    for name, shape in SHAPES.items():
        outputs = [replay_shape(shape, seed) for seed in range(seeds)]
        good = sum(output.verdict == shape.verdict for output in outputs)
        right += good
        verdict = f"{shape.verdict} {good} of {seeds}"
        lines.append(f"| {shape.story} (`{name}`) | {verdict} | {_first(outputs[0])} |")
    total = seeds * len(SHAPES)
    return "\n".join([*lines, "", f"Verdicts that are right: {right} of {total}."])


def _first(output: ReplayOutput) -> str:
    grave = [finding for finding in output.findings if finding.severity != "info"]
    if not grave:
        return "- | -"
    first = min(grave, key=lambda finding: (finding.run, finding.step))
    cause = next((f"{entry.cause} ({entry.confidence})" for entry in output.diagnoses), "-")
    return f"{first.step} {first.kind} | {cause}"

"""A kind of run that is made up to mislead.

Equal seeds give equal rows. The runs are of our own making, not of any training, and say nothing
about how often real ones look like this.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mindtune.experiments.replay.rows import Row

__all__ = ["Shape", "write_log"]


@dataclass(frozen=True)
class Shape:
    """One kind of run."""

    verdict: Literal["healthy", "faulty"]
    story: str
    rows: Callable[[random.Random], Iterator[Row]]


def write_log(shape: Shape, seed: int, path: Path) -> None:
    """Write one run of a shape as a CSV."""
    rows = list(shape.rows(random.Random(seed)))
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, restval="")
        writer.writeheader()
        writer.writerows(rows)

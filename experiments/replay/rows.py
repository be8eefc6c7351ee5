"""Rows of a plain healthy run, from which the misleading ones are made."""

from __future__ import annotations

import math
import random
from typing import Any

__all__ = ["Row", "cosine", "learning", "norm", "plain"]

Row = dict[str, Any]
"""Column -> value of one record."""


def learning(g: random.Random, step: int, *, scatter: float = 0.02) -> float:
    """Return the loss of a language model from scratch, in nats per token."""
    return (2.2 + 8.6 * math.exp(-step / 120) + 0.6 * math.exp(-step / 900)) * g.lognormvariate(
        0, scatter
    )


def norm(g: random.Random, step: int) -> float:
    """Return a gradient norm that falls in the first steps."""
    return (0.4 + 6.0 * math.exp(-step / 60)) * g.lognormvariate(0, 0.25)


def cosine(step: int, total: int, top: float = 3e-4, warm: int = 100) -> float:
    """Return the learning rate of a warm-up and a cosine down to a twentieth."""
    if step <= warm:
        return top * step / warm
    return top * (0.05 + 0.475 * (1 + math.cos(math.pi * (step - warm) / (total - warm))))


def plain(g: random.Random, step: int, total: int = 800) -> Row:
    """Return one step of a healthy run of `total` steps."""
    return {
        "step": step,
        "loss": learning(g, step),
        "grad_norm": norm(g, step),
        "learning_rate": cosine(step, total),
    }

"""Bad runs that look healthy."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from mindtune.experiments.replay.rows import Row, learning, plain
from mindtune.experiments.replay.shape import Shape

__all__ = ["FAULTY"]


def _slow_divergence(g: random.Random) -> Iterator[Row]:
    """From step 600 on the loss creeps upwards, by half in 400 steps."""
    for step in range(1, 1201):
        row = plain(g, step, 1200)
        row["loss"] *= math.exp(max(0, step - 600) / 1000)
        yield row


def _creeping_norm(g: random.Random) -> Iterator[Row]:
    """The norm climbs first, the loss follows, and nothing is sudden."""
    for step in range(1, 901):
        row = plain(g, step, 900)
        row["grad_norm"] *= math.exp(max(0, step - 400) / 60)
        row["loss"] *= math.exp(max(0, step - 550) / 250)
        yield row


def _bounce(g: random.Random) -> Iterator[Row]:
    """The scale bounces between 1 and 2, and never gets away from there."""
    for step in range(1, 801):
        hit = step > 100 and step % 25 == 0
        scale = 1024.0 if step < 90 else 2.0 if hit else 1.0
        yield {
            **plain(g, step),
            "loss_scale": scale,
            "overflow": float(hit),
            "update_skipped": float(hit),
        }


def _filtered_nan(g: random.Random) -> Iterator[Row]:
    """The trainer filters NaN out of its log: the loss reads 0 from then on."""
    for step in range(10, 2001, 10):
        row = plain(g, step, 2000)
        yield {**row, "loss": 0.0 if step > 1200 else row["loss"], "grad_norm": ""}


def _skipped_nan(g: random.Random) -> Iterator[Row]:
    """A guard skips every update, the loss stands still, and the run goes on."""
    for step in range(1, 801):
        row = plain(g, step)
        dead = step > 500
        yield {
            **row,
            "loss": 4.7312 if dead else row["loss"],
            "grad_norm": "nan" if dead else row["grad_norm"],
            "update_skipped": float(dead),
        }


def _rate_typed_wrong(g: random.Random) -> Iterator[Row]:
    """The rate is 20 times too high after a resume."""
    for step in range(1, 601):
        row = plain(g, step)
        if step > 400:
            row["learning_rate"] *= 20
            row["loss"] = 7.4 * g.lognormvariate(0, 0.03)
            row["grad_norm"] *= 12
        yield row


def _cold_explosion(g: random.Random) -> Iterator[Row]:
    """It learns for ten steps and explodes in the warm-up."""
    for step in range(1, 121):
        level = 10.8 - 0.25 * step if step <= 10 else min(40.0, 8.3 * 1.18 ** (step - 10))
        yield {
            "step": step,
            "loss": level * g.lognormvariate(0, 0.01),
            "grad_norm": (3.0 if step <= 10 else 30.0) * g.lognormvariate(0, 0.2),
            "learning_rate": 1e-4 * step,
        }


def _diverged_between_records(g: random.Random) -> Iterator[Row]:
    """A record every 50 steps: the loss is three times as high from one to the next."""
    for step in range(50, 3001, 50):
        loss = learning(g, step)
        yield {"step": step, "loss": loss if step < 2000 else 7.2 * g.lognormvariate(0, 0.04)}


def _starved(g: random.Random) -> Iterator[Row]:
    """The storage becomes slow in mid-run."""
    for step in range(1, 601):
        wait = 0.02 if step < 300 else 1.5 * g.lognormvariate(0, 0.2)
        yield {**plain(g, step), "step_time_s": 0.5 + wait, "data_time_s": wait}


def _applied_overflow(g: random.Random) -> Iterator[Row]:
    """Overflows that neither skip the update nor lower the scale."""
    for step in range(1, 401):
        hit = step > 200
        yield {
            **plain(g, step),
            "loss_scale": 1024.0,
            "overflow": float(hit),
            "update_skipped": 0.0,
        }


def _frozen_weights(g: random.Random) -> Iterator[Row]:
    """Nothing is trained: the norm is 0 and the loss is noise around its start."""
    for step in range(1, 301):
        yield {
            "step": step,
            "loss": 6.9 * g.lognormvariate(0, 0.02),
            "grad_norm": 0.0,
            "learning_rate": 1e-3,
        }


def _late_nan(g: random.Random) -> Iterator[Row]:
    """NaN from step 700 on, and the run is not stopped."""
    for step in range(1, 801):
        row = plain(g, step)
        yield {**row, "loss": "nan" if step >= 700 else row["loss"]}


FAULTY: dict[str, Shape] = {
    "slow_divergence": Shape("faulty", "loss up by 80 % over 600 steps", _slow_divergence),
    "creeping_norm": Shape("faulty", "norm up first, then the loss", _creeping_norm),
    "bouncing_scale": Shape("faulty", "scale between 1 and 2 for 700 steps", _bounce),
    "filtered_nan": Shape("faulty", "loss exactly 0 from step 1210 on", _filtered_nan),
    "skipped_nan": Shape("faulty", "every update skipped from step 501 on", _skipped_nan),
    "wrong_rate": Shape("faulty", "rate times 20 at step 401", _rate_typed_wrong),
    "cold_explosion": Shape("faulty", "explodes in the warm-up", _cold_explosion),
    "sparse_divergence": Shape("faulty", "three times the loss between records",
                               _diverged_between_records),
    "slow_storage": Shape("faulty", "75 % of the step waits for data", _starved),
    "applied_overflow": Shape("faulty", "overflows without an effect", _applied_overflow),
    "frozen_weights": Shape("faulty", "all norms are 0", _frozen_weights),
    "late_nan": Shape("faulty", "NaN from step 700 on", _late_nan),
}  # fmt: skip
"""Name -> shape."""

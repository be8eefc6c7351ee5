"""Runs made up to mislead: healthy ones that look bad, and bad ones that look healthy.

Each shape yields the rows of a log; equal seeds give equal rows. They are of our own making, not
of any run, and say nothing about how often real runs look like this.
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

__all__ = ["SHAPES", "Shape", "write_log"]

Row = dict[str, Any]
Rows = Callable[[random.Random], Iterator[Row]]


@dataclass(frozen=True)
class Shape:
    """One kind of run."""

    verdict: Literal["healthy", "faulty"]
    story: str
    rows: Rows


def write_log(shape: Shape, seed: int, path: Path) -> None:
    """Write one run of a shape as a CSV."""
    rows = list(shape.rows(random.Random(seed)))
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, restval="")
        writer.writeheader()
        writer.writerows(rows)


def _learning(g: random.Random, step: int, *, scatter: float = 0.02) -> float:
    return (2.2 + 8.6 * math.exp(-step / 120) + 0.6 * math.exp(-step / 900)) * g.lognormvariate(
        0, scatter
    )


def _norm(g: random.Random, step: int) -> float:
    return (0.4 + 6.0 * math.exp(-step / 60)) * g.lognormvariate(0, 0.25)


def _cosine(step: int, total: int, top: float = 3e-4, warm: int = 100) -> float:
    if step <= warm:
        return top * step / warm
    return top * (0.05 + 0.475 * (1 + math.cos(math.pi * (step - warm) / (total - warm))))


def _plain(g: random.Random, step: int, total: int = 800) -> Row:
    return {
        "step": step,
        "loss": _learning(g, step),
        "grad_norm": _norm(g, step),
        "learning_rate": _cosine(step, total),
    }


def _calm(g: random.Random) -> Iterator[Row]:
    yield from (_plain(g, step) for step in range(1, 801))


def _warm_up_peak(g: random.Random) -> Iterator[Row]:
    """The loss rises by a sixth near the top of the warm-up, and comes down again."""
    for step in range(1, 801):
        row = _plain(g, step)
        row["loss"] *= 1 + 0.16 * math.exp(-(((step - 95) / 25) ** 2))
        yield row


def _restarts(g: random.Random) -> Iterator[Row]:
    """Cosine restarts: the rate jumps back to its top, the loss by a tenth."""
    for step in range(1, 1001):
        place = (step - 1) % 250
        row = _plain(g, step)
        row["learning_rate"] = 3e-4 * 0.5 * (1 + math.cos(math.pi * place / 250))
        row["loss"] *= 1 + 0.12 * (step > 250) * math.exp(-place / 40)
        yield row


def _evaluations(g: random.Random) -> Iterator[Row]:
    """Evaluation lines between, with losses of their own and long steps."""
    for step in range(1, 801):
        row = {**_plain(g, step), "step_time_s": 0.5 * g.lognormvariate(0, 0.03)}
        if step % 100 == 0:
            row |= {"phase": "eval", "step_time_s": 45.0, "eval_loss": row["loss"] * 1.3}
        yield row


def _resumes(g: random.Random) -> Iterator[Row]:
    """Two resumes, 60 steps back each, with a cold optimizer's small bump."""
    for begin, end in ((1, 300), (240, 550), (490, 800)):
        for step in range(begin, end + 1):
            row = _plain(g, step)
            row["loss"] *= 1 + 0.06 * (begin > 1) * math.exp(-(step - begin) / 10)
            yield row


def _sums(g: random.Random) -> Iterator[Row]:
    """The loss is a sum over a batch's tokens."""
    for step in range(1, 801):
        row = _plain(g, step)
        yield {**row, "loss": row["loss"] * 524288, "grad_norm": row["grad_norm"] * 524288}


def _adversarial(g: random.Random) -> Iterator[Row]:
    """Two networks against each other: a loss of any height, correlated over some steps."""
    mood = 0.0
    for step in range(1, 1001):
        mood = 0.9 * mood + g.gauss(0, 0.25)
        yield {"step": step, "loss": 4 * math.exp(mood) * g.lognormvariate(0, 0.5)}


def _policy(g: random.Random) -> Iterator[Row]:
    """A policy's loss: both signs, a scatter that swings, norms with heavy tails."""
    size = 0.0
    for step in range(1, 1001):
        size = 0.98 * size + g.gauss(0, 0.1)
        yield {
            "step": step,
            "loss": g.gauss(0, 0.05) * math.exp(size),
            "grad_norm": 0.3 * g.lognormvariate(0, 0.7),
            "learning_rate": 1e-6,
        }


def _curriculum(g: random.Random) -> Iterator[Row]:
    """Harder data from step 500 on: the loss jumps by a third, and falls from there."""
    for step in range(1, 1201):
        row = _plain(g, step, 1200)
        if step > 500:
            row["loss"] += 0.9 + 0.3 * math.exp(-(step - 500) / 150)
            row["grad_norm"] *= 1.3
        yield row


def _batch_ramp(g: random.Random) -> Iterator[Row]:
    """The batch doubles three times: less noise, longer steps."""
    for step in range(1, 1001):
        batch = 64 << min(3, step // 250)
        yield {
            **_plain(g, step, 1000),
            "global_batch_size": batch,
            "step_time_s": 0.01 * batch * g.lognormvariate(0, 0.03),
        }


def _probing(g: random.Random) -> Iterator[Row]:
    """A dynamic scale that grows every 200 steps, and is cut at once."""
    scale = 65536.0
    for step in range(1, 1001):
        hit = step <= 4 or step % 200 == 0
        yield {
            **_plain(g, step, 1000),
            "loss_scale": scale * (2 if step % 200 == 0 else 1),
            "overflow": float(hit),
            "update_skipped": float(hit),
        }


def _sparse(g: random.Random) -> Iterator[Row]:
    """A record every 100 steps, at two decimals."""
    for step in range(100, 20001, 100):
        yield {**_plain(g, step, 20000), "loss": round(_learning(g, step), 2)}


def _fine_tuning(g: random.Random) -> Iterator[Row]:
    """Few records, noisy, stepping down from epoch to epoch."""
    for step in range(5, 605, 5):
        epoch = step // 200
        yield {
            "step": step,
            "loss": (1.4, 0.9, 0.55)[min(2, epoch)] * g.lognormvariate(0, 0.18),
            "grad_norm": 1.2 * g.lognormvariate(0, 0.4),
            "learning_rate": 2e-5 * (1 - step / 700),
        }


def _wandering(g: random.Random) -> Iterator[Row]:
    """Data in order: the loss wanders with the subject, over hundreds of steps."""
    wander = 0.0
    for step in range(1, 1501):
        wander = 0.99 * wander + g.gauss(0, 0.012)
        row = _plain(g, step, 1500)
        yield {**row, "loss": row["loss"] * math.exp(wander)}


def _single_spikes(g: random.Random) -> Iterator[Row]:
    """Single bad batches, thirty times, without any effect."""
    bad = set(g.sample(range(100, 1500), 30))
    for step in range(1, 1501):
        row = _plain(g, step, 1500)
        if step in bad:
            row["grad_norm"] *= 15
            row["loss"] *= 1.4
        yield row


def _slow_start(g: random.Random) -> Iterator[Row]:
    """The first steps compile and wait; then all is well."""
    for step in range(1, 401):
        late = 60.0 if step == 1 else 1.0 if step < 5 else 0.0
        time = 0.4 * g.lognormvariate(0, 0.05)
        yield {**_plain(g, step), "step_time_s": time + late, "data_time_s": 0.02 + 0.9 * late}


def _grokking(g: random.Random) -> Iterator[Row]:
    """Nothing for 400 steps, then a fall: a plateau is no fault."""
    for step in range(1, 1001):
        level = 4.6 - 3.5 / (1 + math.exp(-(step - 500) / 30))
        yield {"step": step, "loss": level * g.lognormvariate(0, 0.02), "learning_rate": 1e-3}


def _slow_divergence(g: random.Random) -> Iterator[Row]:
    """From step 600 on the loss creeps upwards, by half in 400 steps."""
    for step in range(1, 1201):
        row = _plain(g, step, 1200)
        row["loss"] *= math.exp(max(0, step - 600) / 1000)
        yield row


def _creeping_norm(g: random.Random) -> Iterator[Row]:
    """The norm climbs first, the loss follows, and nothing is sudden."""
    for step in range(1, 901):
        row = _plain(g, step, 900)
        row["grad_norm"] *= math.exp(max(0, step - 400) / 60)
        row["loss"] *= math.exp(max(0, step - 550) / 250)
        yield row


def _bounce(g: random.Random) -> Iterator[Row]:
    """The scale bounces between 1 and 2, and never gets away from there."""
    for step in range(1, 801):
        hit = step > 100 and step % 25 == 0
        scale = 1024.0 if step < 90 else 2.0 if hit else 1.0
        yield {
            **_plain(g, step),
            "loss_scale": scale,
            "overflow": float(hit),
            "update_skipped": float(hit),
        }


def _filtered_nan(g: random.Random) -> Iterator[Row]:
    """The trainer filters NaN out of its log: the loss reads 0 from then on."""
    for step in range(10, 2001, 10):
        row = _plain(g, step, 2000)
        yield {**row, "loss": 0.0 if step > 1200 else row["loss"], "grad_norm": ""}


def _skipped_nan(g: random.Random) -> Iterator[Row]:
    """A guard skips every update, the loss stands still, and the run goes on."""
    for step in range(1, 801):
        row = _plain(g, step)
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
        row = _plain(g, step)
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
        loss = _learning(g, step)
        yield {"step": step, "loss": loss if step < 2000 else 7.2 * g.lognormvariate(0, 0.04)}


def _starved(g: random.Random) -> Iterator[Row]:
    """The storage becomes slow in mid-run."""
    for step in range(1, 601):
        wait = 0.02 if step < 300 else 1.5 * g.lognormvariate(0, 0.2)
        yield {**_plain(g, step), "step_time_s": 0.5 + wait, "data_time_s": wait}


def _applied_overflow(g: random.Random) -> Iterator[Row]:
    """Overflows that neither skip the update nor lower the scale."""
    for step in range(1, 401):
        hit = step > 200
        yield {
            **_plain(g, step),
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
        row = _plain(g, step)
        yield {**row, "loss": "nan" if step >= 700 else row["loss"]}


SHAPES: dict[str, Shape] = {
    "calm": Shape("healthy", "a smooth run", _calm),
    "warm_up_peak": Shape("healthy", "loss up by 16 % near the top of the warm-up", _warm_up_peak),
    "cosine_restarts": Shape("healthy", "rate back to its top three times", _restarts),
    "evaluations_between": Shape("healthy", "evaluation in every hundredth step", _evaluations),
    "resumed_twice": Shape("healthy", "two resumes, 60 steps back", _resumes),
    "summed_loss": Shape("healthy", "loss and norm times 524288", _sums),
    "adversarial": Shape("healthy", "a loss between 1 and 50 without a trend", _adversarial),
    "policy_loss": Shape("healthy", "a loss of both signs around 0", _policy),
    "curriculum": Shape("healthy", "harder data: loss up by 40 % at once", _curriculum),
    "batch_ramp": Shape("healthy", "the batch doubles three times", _batch_ramp),
    "probing_scale": Shape("healthy", "one overflow in 200 steps", _probing),
    "sparse": Shape("healthy", "a record every 100 steps, two decimals", _sparse),
    "fine_tuning": Shape("healthy", "120 noisy records, steps at epoch ends", _fine_tuning),
    "wandering": Shape("healthy", "correlated over a hundred steps", _wandering),
    "single_spikes": Shape("healthy", "30 single norms of 15 times the usual", _single_spikes),
    "slow_start": Shape("healthy", "compilation, then waits in 3 steps", _slow_start),
    "late_learner": Shape("healthy", "flat for 400 steps, then it falls", _grokking),
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

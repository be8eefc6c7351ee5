"""Healthy runs that look bad."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from mindtune.experiments.replay.rows import Row, learning, plain
from mindtune.experiments.replay.shape import Shape

__all__ = ["HEALTHY"]


def _calm(g: random.Random) -> Iterator[Row]:
    yield from (plain(g, step) for step in range(1, 801))


def _warm_up_peak(g: random.Random) -> Iterator[Row]:
    """The loss rises by a sixth near the top of the warm-up, and comes down again."""
    for step in range(1, 801):
        row = plain(g, step)
        row["loss"] *= 1 + 0.16 * math.exp(-(((step - 95) / 25) ** 2))
        yield row


def _restarts(g: random.Random) -> Iterator[Row]:
    """Cosine restarts: the rate jumps back to its top, the loss by a tenth."""
    for step in range(1, 1001):
        place = (step - 1) % 250
        row = plain(g, step)
        row["learning_rate"] = 3e-4 * 0.5 * (1 + math.cos(math.pi * place / 250))
        row["loss"] *= 1 + 0.12 * (step > 250) * math.exp(-place / 40)
        yield row


def _evaluations(g: random.Random) -> Iterator[Row]:
    """Evaluation lines between, with losses of their own and long steps."""
    for step in range(1, 801):
        row = {**plain(g, step), "step_time_s": 0.5 * g.lognormvariate(0, 0.03)}
        if step % 100 == 0:
            row |= {"phase": "eval", "step_time_s": 45.0, "eval_loss": row["loss"] * 1.3}
        yield row


def _resumes(g: random.Random) -> Iterator[Row]:
    """Two resumes, 60 steps back each, with a cold optimizer's small bump."""
    for begin, end in ((1, 300), (240, 550), (490, 800)):
        for step in range(begin, end + 1):
            row = plain(g, step)
            row["loss"] *= 1 + 0.06 * (begin > 1) * math.exp(-(step - begin) / 10)
            yield row


def _sums(g: random.Random) -> Iterator[Row]:
    """The loss is a sum over a batch's tokens."""
    for step in range(1, 801):
        row = plain(g, step)
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
        row = plain(g, step, 1200)
        if step > 500:
            row["loss"] += 0.9 + 0.3 * math.exp(-(step - 500) / 150)
            row["grad_norm"] *= 1.3
        yield row


def _batch_ramp(g: random.Random) -> Iterator[Row]:
    """The batch doubles three times: less noise, longer steps."""
    for step in range(1, 1001):
        batch = 64 << min(3, step // 250)
        yield {
            **plain(g, step, 1000),
            "global_batch_size": batch,
            "step_time_s": 0.01 * batch * g.lognormvariate(0, 0.03),
        }


def _probing(g: random.Random) -> Iterator[Row]:
    """A dynamic scale that grows every 200 steps, and is cut at once."""
    scale = 65536.0
    for step in range(1, 1001):
        hit = step <= 4 or step % 200 == 0
        yield {
            **plain(g, step, 1000),
            "loss_scale": scale * (2 if step % 200 == 0 else 1),
            "overflow": float(hit),
            "update_skipped": float(hit),
        }


def _sparse(g: random.Random) -> Iterator[Row]:
    """A record every 100 steps, at two decimals."""
    for step in range(100, 20001, 100):
        yield {**plain(g, step, 20000), "loss": round(learning(g, step), 2)}


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
        row = plain(g, step, 1500)
        yield {**row, "loss": row["loss"] * math.exp(wander)}


def _single_spikes(g: random.Random) -> Iterator[Row]:
    """Single bad batches, thirty times, without any effect."""
    bad = set(g.sample(range(100, 1500), 30))
    for step in range(1, 1501):
        row = plain(g, step, 1500)
        if step in bad:
            row["grad_norm"] *= 15
            row["loss"] *= 1.4
        yield row


def _slow_start(g: random.Random) -> Iterator[Row]:
    """The first steps compile and wait; then all is well."""
    for step in range(1, 401):
        late = 60.0 if step == 1 else 1.0 if step < 5 else 0.0
        time = 0.4 * g.lognormvariate(0, 0.05)
        yield {**plain(g, step), "step_time_s": time + late, "data_time_s": 0.02 + 0.9 * late}


def _grokking(g: random.Random) -> Iterator[Row]:
    """Nothing for 400 steps, then a fall: a plateau is no fault."""
    for step in range(1, 1001):
        level = 4.6 - 3.5 / (1 + math.exp(-(step - 500) / 30))
        yield {"step": step, "loss": level * g.lognormvariate(0, 0.02), "learning_rate": 1e-3}


def _generator(g: random.Random) -> Iterator[Row]:
    """The generator's loss rises as the discriminator learns."""
    for step in range(1, 1001):
        level = 0.7 + 3.2 * (1 - math.exp(-step / 400))
        yield {"step": step, "loss": level * g.lognormvariate(0, 0.15), "learning_rate": 2e-4}


def _diffusion(g: random.Random) -> Iterator[Row]:
    """A diffusion model: a loss of any timestep, without a trend."""
    for step in range(1, 1001):
        yield {**plain(g, step), "loss": 0.08 * g.lognormvariate(0, 0.6)}


def _annealed(g: random.Random) -> Iterator[Row]:
    """A second term of the loss is faded in over 300 steps."""
    for step in range(1, 1201):
        weight = min(1.0, max(0.0, (step - 300) / 300))
        level = 60 + 60 * math.exp(-step / 80) + weight * (12 - 6 * min(1.0, step / 1200))
        yield {**plain(g, step, 1200), "loss": level * g.lognormvariate(0, 0.03)}


def _preferences(g: random.Random) -> Iterator[Row]:
    """Preference training: from ln 2 to what four decimals print as 0."""
    for step in range(10, 2001, 10):
        loss = 0.693 * math.exp(-step / 150) * g.lognormvariate(0, 0.3)
        yield {"step": step, "loss": round(loss, 4), "learning_rate": 5e-7}


def _bfloat16(g: random.Random) -> Iterator[Row]:
    """A scale of 1 throughout, and a norm that overflows once in 150 steps."""
    for step in range(1, 2001):
        hit = step % 150 == 0
        yield {
            **plain(g, step, 2000),
            "loss_scale": 1.0,
            "overflow": float(hit),
            "update_skipped": float(hit),
        }


HEALTHY: dict[str, Shape] = {
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
    "generator": Shape("healthy", "a loss that rises from 0.7 to 3.6", _generator),
    "diffusion": Shape("healthy", "a scatter of 60 % without a trend", _diffusion),
    "annealed_term": Shape("healthy", "a second term fades in", _annealed),
    "preferences": Shape("healthy", "0.69 to 0.0000 at four decimals", _preferences),
    "bfloat16": Shape("healthy", "scale 1, one overflow in 150 steps", _bfloat16),
}  # fmt: skip
"""Name -> shape."""

"""Healthy training of many shapes: nothing of severity warning or worse is found in it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

import pytest

from mindtune.policies.detectors import DetectorState, update
from mindtune.policies.findings import Severity
from mindtune.policies.signals import Observation

STEPS = 20_000
Shape = Callable[[random.Random, int], dict]


def student(generator: random.Random) -> float:
    """Student's t with 3 degrees of freedom."""
    spread = math.sqrt(sum(generator.gauss(0, 1) ** 2 for _ in range(3)) / 3)
    return generator.gauss(0, 1) / spread


def falling(step: int, floor: float = 2.0, above: float = 8.0) -> float:
    """A loss over a warm-up of 200 steps and a power law."""
    return floor + above * math.exp(-step / 60) + 1.5 * (1 + step / 100) ** -0.5


def cosine(g: random.Random, step: int) -> dict:
    rate = min(step / 200, 0.5 + 0.5 * math.cos(math.pi * step / STEPS))
    return {
        "loss": falling(step) + g.gauss(0, 0.03),
        "grad_norm": (0.4 + 8 * math.exp(-step / 40)) * g.lognormvariate(0, 0.2),
        "learning_rate": 3e-4 * rate,
    }


def heavy_tails(g: random.Random, step: int) -> dict:
    return {
        "loss": falling(step) + 0.1 * student(g),
        "grad_norm": abs(1 + 0.2 * student(g)) + 0.01,
    }


def log_normal(sigma: float) -> Shape:
    def shape(g: random.Random, step: int) -> dict:
        return {
            "loss": falling(step) * g.lognormvariate(0, 0.2),
            "grad_norm": (1 + 20 * math.exp(-step / 30)) * g.lognormvariate(0, sigma),
        }

    return shape


def epochs(g: random.Random, step: int) -> dict:
    """A fine-tuning whose loss falls at once when the data comes again."""
    return {
        "loss": 2.5 * 0.6 ** (step // 2500) * (1 + 0.02 * math.exp(-(step % 2500) / 300))
        + g.gauss(0, 0.05),
        "grad_norm": 2 * 1.1 ** (step // 2500) * g.lognormvariate(0, 0.3),
    }


def rate_steps(g: random.Random, step: int) -> dict:
    factor = 0.1 ** (step // 6000)
    return {
        "loss": 1 + 2 * math.exp(-step / 400) + 0.3 * factor + g.gauss(0, 0.02 + 0.03 * factor),
        "grad_norm": 1.5 + 0.2 * (step // 6000) + abs(g.gauss(0, 0.3)),
        "learning_rate": 0.1 * factor,
    }


def norm_drift(g: random.Random, step: int) -> dict:
    return {
        "loss": falling(step) + g.gauss(0, 0.02),
        "grad_norm": 0.2 * math.exp(step / 5000) * g.lognormvariate(0, 0.15),
    }


def correlated(memory: float, size: float) -> Callable[[random.Random], Iterator[dict]]:
    """Small batches in order of their origin: neighbours are alike."""

    def rows(g: random.Random) -> Iterator[dict]:
        noise = other = 0.0
        fresh = math.sqrt(1 - memory**2)
        for step in range(1, STEPS + 1):
            noise = memory * noise + fresh * g.gauss(0, 1)
            other = memory * other + fresh * g.gauss(0, 1)
            yield {
                "loss": falling(step) * math.exp(size * noise) + g.gauss(0, 0.02),
                "grad_norm": math.exp(0.3 * other + g.gauss(0, 0.1)),
            }

    return rows


def policy_loss(memory: float, scale: float) -> Callable[[random.Random], Iterator[dict]]:
    """A loss made of advantages: around zero, of both signs, now quiet and now loud."""

    def rows(g: random.Random) -> Iterator[dict]:
        noise, fresh = 0.0, math.sqrt(1 - memory**2)
        for step in range(1, STEPS + 1):
            noise = memory * noise + fresh * g.gauss(0, 1)
            loud = 1 + 0.5 * math.sin(step / 700)
            yield {
                "loss": scale * loud * noise,
                "grad_norm": 0.5 * loud * g.lognormvariate(0, 0.4),
            }

    return rows


def mostly_zero(g: random.Random, step: int) -> dict:
    silent = g.random() < 0.8
    return {
        "loss": 0.0 if silent else g.gauss(0, 0.1),
        "grad_norm": 0.0 if silent and g.random() < 0.5 else abs(g.gauss(0, 0.05)),
    }


def negative(g: random.Random, step: int) -> dict:
    """A negative log-likelihood of densities falls without end."""
    return {
        "loss": 3 - 8 * (1 - math.exp(-step / 3000)) + g.gauss(0, 0.2),
        "grad_norm": 5 + abs(g.gauss(0, 1)),
    }


def adversarial(g: random.Random, step: int) -> dict:
    return {"loss": 6 * g.lognormvariate(0, 0.55), "grad_norm": 3 * g.lognormvariate(0, 0.5)}


def dynamic_scale(g: random.Random, step: int) -> dict:
    """A loss scale that probes upwards every 1000 steps and falls back."""
    hit = step > 1 and step % 1000 == 0
    return {
        "loss": falling(step) + g.gauss(0, 0.03),
        "grad_norm": math.inf if hit else g.lognormvariate(0, 0.2),
        "overflow": float(hit),
        "update_skipped": float(hit),
        "loss_scale": 2.0**17 if hit else 2.0**16,
    }


def device(g: random.Random, step: int) -> dict:
    """Times with saves and garbage collections, memory that swings with the sequence length."""
    time = 0.2 * g.lognormvariate(0, 0.05)
    if step % 500 == 0:
        time += 2.0
    elif g.random() < 0.01:
        time *= 2.5
    return {
        "loss": falling(step) + g.gauss(0, 0.03),
        "step_time_s": time,
        "data_time_s": 0.01 * g.lognormvariate(0, 1.0),
        "device_utilization": min(1.0, 0.9 + 0.05 * g.gauss(0, 1)),
        "device_memory_total_bytes": 64 << 30,
        "device_memory_used_bytes": int((40 + 8 * min(1, step / 20) + 3 * g.random()) * 2**30),
        "tokens_per_s": 2048 / time,
        "mfu": min(0.5, 0.09 / time),
        "straggler_rank": g.randrange(4),
        "straggler_ratio": 1 + abs(g.gauss(0, 0.1)),
    }


def each(shape: Shape) -> Callable[[random.Random], Iterator[dict]]:
    return lambda g: (shape(g, step) for step in range(1, STEPS + 1))


RUNS: dict[str, Callable[[random.Random], Iterator[dict]]] = {
    "warm-up and cosine": each(cosine),
    "Student t with 3 degrees": each(heavy_tails),
    "log-normal norm": each(log_normal(0.5)),
    "log-normal norm, very wide": each(log_normal(1.0)),
    "epochs": each(epochs),
    "steps of the learning rate": each(rate_steps),
    "slow drift of the norm": each(norm_drift),
    "correlated over 10 steps": correlated(0.9, 0.05),
    "correlated over 50 steps": correlated(0.98, 0.05),
    "policy loss": policy_loss(0.0, 0.1),
    "policy loss, correlated": policy_loss(0.9, 1.0),
    "mostly zero": each(mostly_zero),
    "negative": each(negative),
    "adversarial": each(adversarial),
    "dynamic loss scale": each(dynamic_scale),
    "device": each(device),
}


@pytest.mark.parametrize("name", RUNS)
def test_twenty_thousand_healthy_steps_raise_no_warning(name) -> None:
    state = DetectorState()
    for step, row in enumerate(RUNS[name](random.Random(0)), start=1):
        findings, state = update(Observation(step=step, **row), state)
        grave = [f for f in findings if f.severity is not Severity.INFO]
        assert grave == [], (name, grave)

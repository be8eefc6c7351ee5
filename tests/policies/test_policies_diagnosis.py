"""Which cause is named first for which symptom, and what is said for and against it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from mindtune.policies.decisions import KNOBS
from mindtune.policies.diagnosis import (
    CAUSES,
    Confidence,
    Diagnosis,
    History,
    RunContext,
    Symptom,
    diagnose,
)
from mindtune.policies.engine import build_engine
from mindtune.policies.facts import RunFacts
from mindtune.policies.incidents import merge
from mindtune.policies.signals import Observation

ENGINE = build_engine({}, mode="observe")
SURE = (Confidence.NEARLY_CERTAIN, Confidence.LIKELY)
LN_VOCABULARY = math.log(32000)

Rows = Iterable[dict[str, Any]]


def told(rows: Rows, context: RunContext | None = None, resumed: Rows = ()) -> list[Diagnosis]:
    state = ENGINE.init(RunFacts(reachable=frozenset(KNOBS), can_rewind=True))
    history, before, incidents = History(), None, ()
    for part in (resumed, rows):
        history, found, gap = History(before), [], 1
        for step, row in enumerate(part, start=1):
            observation = Observation(**{"step": step, **row})
            gap = row.get("step", step) - (history.last_step or 0) if history.steps else gap
            result = ENGINE.step(observation, state)
            state = result.state
            history.add(observation, result.findings)
            found += result.findings
        incidents, before = merge(found, gap=8 * max(1, gap)), history if history.steps else None
    return list(diagnose(history, incidents, context))


def of(diagnoses: list[Diagnosis], symptom: Symptom) -> list[Diagnosis]:
    found = [entry for entry in diagnoses if entry.symptom is symptom]
    assert found, [(entry.symptom, entry.cause) for entry in diagnoses]
    return [entry for entry in found if entry.step == found[0].step]


def calm(count: int, **more: Any) -> Iterator[dict[str, Any]]:
    noise = random.Random(7)
    for step in range(1, count + 1):
        row = {
            "loss": 2 + 4 * math.exp(-step / 60) + noise.gauss(0, 0.03),
            "grad_norm": 1.0 + abs(noise.gauss(0, 0.1)),
            "learning_rate": 3e-4,
        }
        yield {**row, **{name: f(step) if callable(f) else f for name, f in more.items()}}


def at(steps: dict[int, dict[str, Any]], rows: Rows) -> Iterator[dict[str, Any]]:
    for step, row in enumerate(rows, start=1):
        yield {**row, **steps.get(step, {})}


def flat(count: int, level: float = 8.0, **more: Any) -> Iterator[dict[str, Any]]:
    noise = random.Random(3)
    for step in range(1, count + 1):
        row = {"loss": level + noise.gauss(0, 0.05)}
        yield {**row, **{name: f(step) if callable(f) else f for name, f in more.items()}}


def burst(first: int, last: int, **values: Any) -> dict[int, dict[str, Any]]:
    return dict.fromkeys(range(first, last + 1), values)


CASES: dict[str, tuple[Callable[[], list[Diagnosis]], Symptom, str]] = {
    "all norms are 0": (
        lambda: told(flat(200, grad_norm=0.0, learning_rate=1e-3)),
        Symptom.LOSS_NOT_FALLING, "no_trainable_parameters"),
    "the rate is 0": (
        lambda: told(flat(200, grad_norm=0.5, learning_rate=0.0, update_skipped=0.0)),
        Symptom.LOSS_NOT_FALLING, "learning_rate_zero"),
    "the warm-up goes on": (
        lambda: told(flat(200, grad_norm=0.5, learning_rate=lambda s: 1e-7 * s,
                          update_skipped=0.0)),
        Symptom.LOSS_NOT_FALLING, "warm_up_not_over"),
    "every update is skipped at ln(vocabulary)": (
        lambda: told([*calm(80), *({"loss": LN_VOCABULARY, "update_skipped": 1.0}
                                   for _ in range(80))]),
        Symptom.LOSS_NOT_FALLING, "updates_skipped"),
    "a policy's loss": (
        lambda: told({"loss": random.Random(s).gauss(0, 1)} for s in range(300)),
        Symptom.LOSS_NOT_FALLING, "not_meant_to_fall"),
    "the rate jumps": (
        lambda: told(at({**burst(150, 170, loss=9.0, grad_norm=9.0, learning_rate=3e-2),
                         **burst(171, 200, learning_rate=3e-2)}, calm(200))),
        Symptom.DIVERGENCE, "learning_rate_jump"),
    "three batches are bad": (
        lambda: told(at(burst(150, 153, loss=9.0, grad_norm=40.0), calm(200))),
        Symptom.LOSS_SPIKES, "bad_batch"),
    "every eighth step at 8 micro-batches": (
        lambda: told(at({s: {"loss": 6.0} for s in range(120, 400, 8)},
                        calm(400, num_microbatches=8))),
        Symptom.LOSS_SPIKES, "parallel_split"),
    "every fiftieth step": (
        lambda: told(at({s: {"loss": 6.0} for s in range(150, 1000, 50)}, calm(1000))),
        Symptom.LOSS_SPIKES, "counts_steps"),
    "a resume loses its state": (
        lambda: told([{"step": 400 + s, "loss": 2.0 + 0.01 * (s % 3) + 3 * (8 < s < 16)}
                      for s in range(1, 60)],
                     resumed=[{"loss": 2.0 + 0.01 * (s % 3)} for s in range(400)]),
        Symptom.LOSS_SPIKES, "resume_lost_state"),
    "NaN from the first step on": (
        lambda: told({"loss": math.nan} for _ in range(20)),
        Symptom.NON_FINITE, "bad_from_the_start"),
    "only the gradient is NaN": (
        lambda: told(at(burst(150, 170, grad_norm=math.nan, update_skipped=1.0), calm(200))),
        Symptom.NON_FINITE, "backward_pass"),
    "one rank is NaN first": (
        lambda: told(at(burst(150, 151, loss=math.nan), calm(200, grad_norm=None)),
                     RunContext(num_ranks=8, first_non_finite="rank 3 alone, in step 150")),
        Symptom.NON_FINITE, "one_rank"),
    "overflows at an unmoved scale": (
        lambda: told(at(burst(150, 170, overflow=1.0, update_skipped=0.0),
                        calm(200, loss_scale=1024.0, overflow=0.0))),
        Symptom.OVERFLOWS, "no_effect"),
    "a summed loss at the floor": (
        lambda: told(at({s: {"overflow": 1.0, "update_skipped": 1.0} for s in range(100, 140)},
                        calm(200, loss=lambda s: 5e4 - s, loss_scale=1.0, overflow=0.0))),
        Symptom.OVERFLOWS, "gradients_too_large"),
    "a scale that bounces at its floor": (
        lambda: told(calm(800, loss_scale=lambda s: 2.0 if s % 20 == 0 else 1.0,
                          overflow=lambda s: float(s % 20 == 0),
                          update_skipped=lambda s: float(s % 20 == 0))),
        Symptom.OVERFLOWS, "bounces_at_floor"),
    "memory that grows": (
        lambda: told(calm(400, memory_allocated_bytes=lambda s: 2**33 + s * 2**24,
                          device_memory_total_bytes=2**34)),
        Symptom.MEMORY, "leak"),
    "memory that is full": (
        lambda: told(calm(100, memory_allocated_bytes=15 * 2**30,
                          device_memory_used_bytes=15 * 2**30 + 2**20,
                          device_memory_total_bytes=2**34)),
        Symptom.MEMORY, "steady_need"),
    "a starved device": (
        lambda: told(calm(100, step_time_s=1.0, data_time_s=0.4)),
        Symptom.SLOW_STEPS, "data_starved"),
    "a slow rank": (
        lambda: told(calm(100, step_time_s=1.0, data_time_s=0.01, straggler_rank=5,
                          straggler_ratio=1.6)),
        Symptom.SLOW_STEPS, "straggler"),
    "ranks that exchange for half of the step": (
        lambda: told(calm(300, step_time_s=lambda s: 1.0 + 0.6 * (s > 150) + 0.001 * (s % 5)),
                     RunContext(communication_share=0.5, communication_overlap=0.1,
                                profiled="steps 200 to 204")),
        Symptom.SLOW_STEPS, "communication"),
    "heat": (
        lambda: told(calm(300, step_time_s=lambda s: 1.0 + 0.6 * (s > 150) + 0.001 * (s % 5),
                          device_temperature_c=lambda s: 60.0 + 30 * (s > 150),
                          device_power_w=lambda s: 400.0 - 150 * (s > 150))),
        Symptom.SLOW_STEPS, "throttled"),
    "a low MFU that waits": (
        lambda: told(calm(100, mfu=0.2, step_time_s=1.0, data_time_s=0.5)),
        Symptom.LOW_MFU, "data_starved"),
    "a low MFU with idle ranks": (
        lambda: told(calm(100, mfu=0.2), RunContext(num_ranks=8, idle_ranks="4 of 8 ranks idle")),
        Symptom.LOW_MFU, "idle_ranks"),
    "a low MFU of a busy host": (
        lambda: told(calm(100, mfu=0.2), RunContext(host_share=0.5, profiled="steps 50 to 54")),
        Symptom.LOW_MFU, "too_little_work"),
    "a clip far below the norm": (
        lambda: told(calm(200, grad_norm=lambda s: 20.0 + s % 3, clip_norm=1.0)),
        Symptom.ODD_GRADIENT, "clip_too_low"),
    "sinking hides steps": (
        lambda: told(({**row, "step": 50 * s} for s, row in enumerate(calm(60), start=1)),
                     RunContext(every_step=True)),
        Symptom.HIDDEN_STEPS, "sink_mode"),
    "a reading above 1": (
        lambda: told(calm(50, mfu=1.7)), Symptom.WRONG_FIGURE, "wrong_input"),
    "no attention weights": (
        lambda: told(calm(50), RunContext(has_attention=False)),
        Symptom.ATTENTION_MISSING, "attention_not_returned"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_cause_is_named_first(name):
    diagnoses, symptom, cause = CASES[name]
    first = of(diagnoses(), symptom)[0]
    assert (first.cause, first.confidence in SURE) == (cause, True), first
    assert first.evidence_for
    has_number = any(character.isdigit() for text in first.evidence_for for character in text)
    assert has_number or symptom is Symptom.ATTENTION_MISSING
    assert first.next_steps


def test_a_calm_run_has_no_diagnosis():
    assert told(calm(400)) == []


def test_what_speaks_against_a_cause_is_told_with_its_numbers():
    entries = of(told(at(burst(150, 153, loss=9.0, grad_norm=40.0), calm(200))),
                 Symptom.LOSS_SPIKES)  # fmt: skip
    jump = next(entry for entry in entries if entry.cause == "learning_rate_jump")
    assert jump.confidence is Confidence.UNLIKELY
    assert "0.0003" in jump.evidence_against[0]
    precision = next(entry for entry in entries if entry.cause == "precision")
    assert precision.confidence is Confidence.CANNOT_BE_TOLD
    assert "overflow" in precision.missing[0]


def test_causes_come_by_confidence_and_then_in_the_order_of_looking():
    ranks = list(Confidence)
    for symptom in (Symptom.LOSS_SPIKES, Symptom.NON_FINITE):
        name = {Symptom.LOSS_SPIKES: "three batches are bad"}.get(
            symptom, "only the gradient is NaN"
        )
        entries = of(CASES[name][0](), symptom)
        keys = [cause.key for cause in CAUSES[symptom]]
        places = [(ranks.index(e.confidence), keys.index(e.cause)) for e in entries]
        assert places == sorted(places)


def test_a_run_of_any_length_is_remembered_in_bounded_memory():
    history = History()
    for step in range(1, 5001):
        history.add(Observation(step=step, loss=float(step), grad_norm=math.nan))
    loss = history.course("loss")
    assert loss is not None
    assert len(loss.means) < 256
    assert (loss.first, loss.last, loss.low_step, loss.high_step) == (1.0, 5000.0, 1, 5000)
    assert loss.part(0.0, 0.5) == pytest.approx(1250, rel=0.01)
    assert history.course("grad_norm") is None
    assert history.measured("grad_norm")


def test_every_cause_is_reached_by_a_case_or_speaks_for_itself():
    keys = [(symptom, cause.key) for symptom, causes in CAUSES.items() for cause in causes]
    assert len(keys) == len(set(keys))
    assert set(CAUSES) == set(Symptom)
    assert all(cause.next_steps for causes in CAUSES.values() for cause in causes)


def test_damaged_signals_never_raise():
    noise = random.Random(11)
    values = [None, math.nan, math.inf, -math.inf, 0.0, -1.0, 1e200, 5.0]
    names = ("loss", "grad_norm", "learning_rate", "loss_scale", "overflow", "update_skipped",
             "step_time_s", "data_time_s", "mfu", "device_temperature_c", "tokens",
             "global_batch_size", "clip_norm", "device_memory_used_bytes",
             "device_memory_total_bytes")  # fmt: skip
    for _ in range(20):
        rows = [{name: noise.choice(values) for name in names} for _ in range(60)]
        for entry in told(rows):
            assert entry.statement

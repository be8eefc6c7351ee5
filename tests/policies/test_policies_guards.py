"""Skip threshold, clip norm and micro-batch: what each guard asks for, and when it lets go."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest

from mindtune.policies.arbiter import Arbitration
from mindtune.policies.arbiter_state import ArbiterState
from mindtune.policies.decisions import (
    NO_CHANGE,
    Advise,
    RequestStop,
    SetClipNorm,
    SetMicroBatch,
    SetSkipThreshold,
)
from mindtune.policies.facts import RunFacts
from mindtune.policies.findings import Finding, FindingKind, Severity
from mindtune.policies.memory_guard import MemoryGuardPolicy
from mindtune.policies.policy import Feedback
from mindtune.policies.settings import PolicySettings
from mindtune.policies.signals import Observation

GUARDED = frozenset({"skip_threshold", "clip_norm", "micro_batch_size"})
INF = math.inf


class Rows:
    """Feeds steps to a run whose skip threshold and clip obey."""

    def __init__(self, run, *, skip: float | None = INF, clip: float | None = INF) -> None:
        self.run, self.step, self.acting = run, 0, {"skip_threshold": skip, "clip_norm": clip}
        self.generator = random.Random(0)
        self.skipped = 0

    def feed(self, count: int, norm: float = 1.0, loss: float = 2.0, **signals) -> Rows:
        for _ in range(count):
            self.step += 1
            value = norm * (1 + 0.1 * self.generator.gauss(0, 1))
            skip = self.acting["skip_threshold"]
            skipped = skip is not None and value > skip
            self.skipped += skipped
            for action in self.run.feed(
                Observation(
                    step=self.step, loss=loss + 0.02 * self.generator.gauss(0, 1),
                    grad_norm=value, update_skipped=float(skipped), **self.acting, **signals,
                )
            ):  # fmt: skip
                if getattr(action, "knob", None) in self.acting:
                    self.acting[action.knob] = action.value
        return self


# Skip threshold ------------------------------------------------------------------------------


def test_the_guard_stands_at_infinity_until_32_samples_and_then_far_above_them(start) -> None:
    run = start(reachable=GUARDED)
    rows = Rows(run).feed(31)
    assert run.grants == []
    rows.feed(1)
    ((step, value),) = run.set_points(SetSkipThreshold)
    assert step == 32
    assert value == pytest.approx(8.0, rel=0.1)
    record = run.records[0]
    assert "baseline is armed after 32 samples" in record.reason
    assert set(record.evidence) == {"median", "spread", "samples", "threshold"}


def test_the_guard_follows_a_norm_that_falls_and_is_not_rewritten_at_every_step(start) -> None:
    run = start(reachable=GUARDED)
    rows = Rows(run)
    for decade in (30.0, 10.0, 3.0, 1.0, 0.3, 0.1):
        rows.feed(200, decade)
    moves = run.set_points(SetSkipThreshold)
    assert rows.skipped == 0
    assert len(moves) <= 16
    assert moves[-1][1] < 2 * 8 * 0.1 * 1.2
    assert all(later[0] - earlier[0] >= 8 for earlier, later in pairwise(moves))


def test_the_guard_goes_up_at_once_with_a_norm_that_rises(start) -> None:
    run = start(reachable=GUARDED)
    rows = Rows(run).feed(100)
    for i in range(300):
        rows.feed(1, 1.02**i)
    assert rows.skipped == 0
    assert rows.acting["skip_threshold"] > 1.02**300


def test_a_guard_that_fires_again_and_again_opens_with_an_advice_and_closes_again(start) -> None:
    run = start(reachable=GUARDED)
    rows = Rows(run).feed(100)
    # Every other norm is far out: no level of its own, and no burst.
    for _ in range(40):
        rows.feed(1, 100.0).feed(1)
    opened = [step for step, value in run.set_points(SetSkipThreshold) if value == INF]
    assert opened == [100 + 31]
    assert rows.skipped == 16
    assert [name for _, name in run.events(Advise)] == ["skip-guard-open-1"]
    (advice,) = [a for _, a in run.grants if isinstance(a, Advise)]
    assert "16 of the last 48 updates were skipped" in advice.message
    rows.feed(200)
    assert math.isfinite(rows.acting["skip_threshold"])


def test_a_threshold_of_the_user_is_left_alone(start) -> None:
    run = start(reachable=GUARDED)
    rows = Rows(run, skip=3.0).feed(200)
    assert run.grants == []
    assert rows.acting["skip_threshold"] == 3.0


def test_a_threshold_of_the_user_that_skips_everything_ends_the_run(start) -> None:
    run = start(reachable=GUARDED)
    Rows(run, skip=3.0).feed(100, 44.0)
    assert run.events(Advise) == [(16, "skip-threshold")]
    assert run.events(RequestStop) == [(20, "every-update-skipped")]
    (stop,) = [a for _, a in run.grants if isinstance(a, RequestStop)]
    for words in ("20 updates in a row", "skip threshold 3", "raise skip_threshold to about 3"):
        assert words in stop.diagnosis


def test_a_step_that_does_not_report_its_threshold_is_guarded_all_the_same(start) -> None:
    run = start(reachable=GUARDED)
    rows = Rows(run, skip=None)
    for _ in range(300):
        rows.acting["skip_threshold"] = None
        rows.feed(1)
    assert len(run.set_points(SetSkipThreshold)) == 1


@pytest.mark.parametrize("options", [{"mode": "observe"}, {"reachable": frozenset()}])
def test_out_of_reach_only_a_poisoned_update_is_told(start, options) -> None:
    run = start(**{"reachable": GUARDED, **options})
    rows = Rows(run).feed(300)
    assert run.records == []
    # The norm alone may be a heavy tail; loss and norm are poison.
    rows.feed(1, 20.0)
    assert run.records == []
    rows.feed(1, 20.0, loss=9.0)
    told = [r for r in run.records if r.action == "SetSkipThreshold"]
    assert [r.step for r in told] == [302]
    assert "is poisoned: usual is" in told[0].reason


def test_without_norms_the_guard_does_nothing(start) -> None:
    run = start(reachable=GUARDED)
    for step in range(1, 200):
        run.feed(Observation(step=step, loss=2.0 + 0.01 * (step % 5), skip_threshold=INF))
    assert run.records == []


# Clip norm -----------------------------------------------------------------------------------


def burst(rows: Rows, count: int, norm: float = 4.0, loss: float = 3.0) -> Rows:
    for i in range(count):
        rows.feed(1, norm, loss + 0.1 * i)
    return rows


@pytest.mark.parametrize("user", [INF, 50.0])
def test_a_burst_is_clipped_to_what_is_usual_and_then_released(start, user) -> None:
    run = start(reachable=GUARDED)
    rows = burst(Rows(run, clip=user).feed(200), 6)
    ((step, value),) = run.set_points(SetClipNorm)
    assert step == 203
    assert value == pytest.approx(1 + 6 * 0.1, rel=0.15)
    rows.feed(63)
    assert len(run.set_points(SetClipNorm)) == 1
    rows.feed(1)
    assert run.set_points(SetClipNorm)[1:] == [(270, user)]
    assert rows.acting["clip_norm"] == user


@pytest.mark.parametrize("user", [0.5, 1.0, 1.5])
def test_a_sensible_clip_is_left_alone_in_a_burst(start, user) -> None:
    run = start(reachable=GUARDED)
    burst(Rows(run, clip=user).feed(200), 10)
    assert run.set_points(SetClipNorm) == []


def test_a_norm_that_moves_alone_is_not_clipped(start) -> None:
    run = start(reachable=GUARDED)
    Rows(run).feed(200).feed(300, 3.0)
    assert run.set_points(SetClipNorm) == []


def test_a_level_shift_releases_the_clip(start) -> None:
    run = start(reachable=GUARDED)
    rows = Rows(run).feed(200)
    for _ in range(5):
        rows.feed(1, 4.0, 3.0)
    rows.feed(60, 4.0)
    tight, released = run.set_points(SetClipNorm)
    assert released[1] == INF
    assert released[0] - tight[0] <= 32


def test_a_release_that_is_refused_is_asked_for_again(start) -> None:
    settings = {"clipping": PolicySettings(limits={"budget": 1})}
    run = start(reachable=GUARDED, settings=settings)
    rows = burst(Rows(run).feed(200), 6).feed(100)
    assert rows.acting["clip_norm"] < 3
    rows.feed(1000)
    assert rows.acting["clip_norm"] == INF


# Micro-batch ---------------------------------------------------------------------------------


def fill(run, used: float, first: int, last: int, **signals) -> None:
    signals = {"micro_batch_size": 8, "num_microbatches": 2, "global_batch_size": 16, **signals}
    for step in range(first, last + 1):
        run.feed(
            Observation(
                step=step, loss=2.0 + 0.01 * (step % 5), device_memory_used_bytes=int(used),
                device_memory_total_bytes=100, **signals,
            )
        )  # fmt: skip


FULL = Finding(
    step=1,
    last_step=1,
    kind=FindingKind.MEMORY_PRESSURE,
    severity=Severity.CRITICAL,
    message="99% of the device memory is in use (limit 85%).",
    evidence={"share": 0.99},
)
SHORT = replace(FULL, severity=Severity.WARNING)
REACH = Feedback(facts=RunFacts(reachable=GUARDED, micro_batch_size=8))


def asked(findings: list, size: float | None = 8, incoming: int | None = 8, steps: int = 3):
    policy, answers = MemoryGuardPolicy(), []
    reach = Feedback(facts=RunFacts(reachable=GUARDED, micro_batch_size=incoming))
    state = policy.init()
    for step in range(1, steps + 1):
        observation = Observation(step=step, micro_batch_size=size, num_microbatches=2)
        decision, state = policy.decide(observation, findings, reach, state)
        answers.append(decision)
    return answers


def test_head_room_is_no_action(start) -> None:
    run = start(reachable=GUARDED)
    fill(run, 80, 1, 300)
    assert run.records == []


def test_pressure_gets_advice_once_and_no_move(start) -> None:
    run = start(reachable=GUARDED)
    fill(run, 90, 1, 100)
    assert run.set_points(SetMicroBatch) == []
    assert [name for _, name in run.events(Advise)] == ["memory-pressure"]
    (advice,) = [a for _, a in run.grants if isinstance(a, Advise)]
    for words in ("recompute", "offload", "halve the micro-batch"):
        assert words in advice.message


def test_full_memory_halves_the_micro_batch_after_two_readings() -> None:
    first, second, _ = asked([FULL])
    assert first == NO_CHANGE
    assert second.actions == (SetMicroBatch(4),)
    assert "instead of 8" in second.reason
    assert [d.actions[0].id for d in asked([SHORT])] == ["memory-pressure"] * 3
    assert asked([]) == [NO_CHANGE] * 3


@pytest.mark.parametrize(
    ("size", "incoming", "smaller"),
    [(8, 8, 4), (4, 8, 2), (7, 7, None), (12, 12, 6), (6, 12, 3), (3, 12, 2), (2, 8, 1), (10, None, 5),
     (9, 9, None), (10, 30, 5), (15, 30, 10)],
)  # fmt: skip
def test_the_smaller_size_divides_what_comes_in_and_is_no_less_than_half(
    size, incoming, smaller
) -> None:
    action = asked([FULL], size, incoming)[1].actions[0]
    if smaller is None:
        assert isinstance(action, Advise)
    else:
        assert action == SetMicroBatch(smaller)
        assert (incoming or size) % smaller == 0
        assert 2 * smaller >= size


@pytest.mark.parametrize("size", [1, 0, -3, 1.5, math.nan, INF])
def test_a_micro_batch_that_cannot_be_halved_gets_advice(size) -> None:
    answers = asked([FULL], size)
    assert [d.actions[0].id for d in answers[1:]] == ["memory-critical"] * 2


@pytest.mark.parametrize(("frees", "moves"), [(True, [4]), (False, [4, 8])])
def test_a_smaller_micro_batch_that_frees_nothing_is_taken_back(frees, moves) -> None:
    policy = MemoryGuardPolicy()
    table = {knob: (policy.name, limits) for knob, limits in policy.knobs.items()}
    state, books, used, size = policy.init(), ArbiterState(), 99, 8
    granted, records = [], []
    for step in range(1, 400):
        observation = Observation(
            step=step, micro_batch_size=size, num_microbatches=16 // size,
            device_memory_used_bytes=used, device_memory_total_bytes=100,
        )  # fmt: skip
        turn = Arbitration(table, REACH.facts, observation, books)
        turn.review()
        findings = [FULL] if used > 95 else []
        feedback = replace(REACH, knobs=turn.feedback)
        decision, state = policy.decide(observation, findings, feedback, state)
        turn.request(policy.name, "act", decision)
        grants, said, books = turn.finish()
        records += said
        for action in grants:
            if isinstance(action, SetMicroBatch):
                granted.append(action.value)
                size = action.value
                used = 60 if frees and size < 8 else 99
    assert granted == moves
    undone = {record.reason for record in records if record.verdict == "undone"}
    said = {"memory in use went from 99.0% to 99.0% of the device"}
    assert undone == (set() if frees else said)


def leak(run, *, per_step: int, size: int = 8, first: int = 60) -> int | None:
    """Feed memory that grows until it is full; return the step of a stop before that."""
    for step in range(1, 400):
        used = 40_000 + max(0, step - first) * per_step
        if used > 100_000:
            return None
        actions = run.feed(
            Observation(
                step=step, loss=2.0 + 0.01 * (step % 5), device_memory_used_bytes=used,
                device_memory_total_bytes=100_000, micro_batch_size=size,
                num_microbatches=16 // size,
            )
        )  # fmt: skip
        for action in actions:
            if isinstance(action, RequestStop):
                assert "something is kept from step to step" in action.diagnosis
                return step
            if isinstance(action, SetMicroBatch):
                size = int(action.value)
    return None


@pytest.mark.parametrize("per_step", [1500, 1000, 400])
@pytest.mark.parametrize("size", [8, 1])
def test_a_leak_that_a_smaller_micro_batch_does_not_end_ends_the_run_before_it_is_full(
    start, per_step, size
) -> None:
    run = start(reachable=GUARDED, micro_batch_size=8)
    stop = leak(run, per_step=per_step, size=size)
    full = 60 + 60_000 // per_step
    assert stop is not None
    assert full - 4 <= stop < full
    assert bool(run.set_points(SetMicroBatch)) is (size > 1)


def test_memory_that_stays_full_ends_no_run(start) -> None:
    run = start(reachable=GUARDED)
    fill(run, 99, 1, 300)
    fill(run, 97, 301, 600)
    assert run.events(RequestStop) == []

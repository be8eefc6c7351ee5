"""The second stage alone: who may write what, how far, how often, and what becomes of it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mindtune.policies.arbiter import Arbitration
from mindtune.policies.arbiter_state import ArbiterState
from mindtune.policies.decisions import (
    Advise,
    Decision,
    RequestStop,
    SetBatchSize,
    SetClipNorm,
    SetLearningRateScale,
    SetLossScale,
)
from mindtune.policies.facts import RunFacts
from mindtune.policies.limits import KnobLimits
from mindtune.policies.signals import Observation

LR = KnobLimits(
    low=0.1, high=1.0, max_factor=4.0, cooldown=5, budget=3, check="loss", check_after=8
)
BATCH = KnobLimits(
    low=1, high=64, max_factor=2, cooldown=5, budget=9, check="throughput", check_after=8, settle=4
)
TABLE = {"learning_rate_scale": ("a", LR), "global_batch_size": ("b", BATCH)}
ALL = frozenset({"learning_rate_scale", "global_batch_size"})


class Bench:
    """One arbiter over steps, with whatever acts."""

    def __init__(self, reachable: frozenset[str] = ALL, family: str = "adam") -> None:
        self.facts = RunFacts(reachable=reachable, optimizer_family=family)
        self.state = ArbiterState()
        self.step = 0
        self.records: list[Any] = []
        self.findings: list[Any] = []

    def go(self, *requests: tuple[str, str, Any], **signals: Any) -> tuple[Any, ...]:
        self.step += 1
        signals = {"learning_rate_scale": 1.0, "global_batch_size": 8, "loss": 2.0, **signals}
        turn = Arbitration(TABLE, self.facts, Observation(step=self.step, **signals), self.state)
        turn.review()
        for policy, mode, asked in requests:
            actions = asked if isinstance(asked, tuple) else (asked,)
            turn.request(policy, mode, Decision(actions=actions, reason="why"))
        grants, records, self.state = turn.finish()
        self.records.extend(records)
        self.findings.extend(turn.findings)
        self.last = records
        return grants


def lr(value: float, mode: str = "act") -> tuple[str, str, Any]:
    return ("a", mode, SetLearningRateScale(value))


def test_a_request_is_granted_recorded_and_confirmed() -> None:
    bench = Bench()
    assert bench.go(lr(0.5)) == (SetLearningRateScale(0.5),)
    record = bench.last[0]
    assert (record.requested, record.before, record.acted, record.verdict) == (
        0.5,
        1.0,
        None,
        "granted",
    )
    assert record.budget_left == 2
    bench.go(learning_rate_scale=0.5)
    confirmed = bench.last[0]
    assert (confirmed.step, confirmed.requested, confirmed.acted) == (1, 0.5, 0.5)
    assert bench.state.knobs["learning_rate_scale"].feedback.effective is True


@pytest.mark.parametrize(
    ("wanted", "acting", "granted"),
    [(0.01, 1.0, 0.25), (0.01, 0.2, 0.1), (5.0, 0.1, 0.4), (5.0, 0.9, 1.0), (0.5, None, 0.5)],
)
def test_a_request_is_cut_to_factor_and_bounds(wanted, acting, granted) -> None:
    bench = Bench()
    (grant,) = bench.go(lr(wanted), learning_rate_scale=acting)
    assert grant.value == granted
    assert ("cut to the limits" in bench.last[0].reason) == (wanted != granted)


def test_a_set_point_that_acts_already_is_no_action() -> None:
    bench = Bench()
    assert bench.go(lr(1.0)) == ()
    assert bench.go(lr(7.0)) == ()
    assert bench.records == []
    assert bench.state.knobs == {}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_is_refused(value) -> None:
    bench = Bench()
    assert bench.go(lr(value)) == ()
    assert [(r.verdict, r.reason) for r in bench.last] == [
        ("refused", "learning_rate_scale must be a finite number: why")
    ]


def test_cooldown_then_budget() -> None:
    bench, granted, scale = Bench(), [], 1.0
    for step in range(1, 40):
        grants = bench.go(lr(0.5 if scale == 1.0 else 1.0), learning_rate_scale=scale)
        for grant in grants:
            if isinstance(grant, SetLearningRateScale):
                granted.append(step)
                scale = grant.value
    assert granted == [1, 6, 11]
    refused = [(r.step, r.reason.split(":")[0]) for r in bench.records if r.verdict == "refused"]
    assert refused == [
        (2, "1 of 5 steps of cool-down have passed"),
        (7, "1 of 5 steps of cool-down have passed"),
        (12, "1 of 5 steps of cool-down have passed"),
        (16, "3 moves in 1000 steps are spent"),
    ]
    advice = [r.requested for r in bench.records if r.action == "Advise"]
    assert advice == ["budget-learning_rate_scale"]


def test_the_budget_comes_back_after_1000_steps() -> None:
    bench, scale, granted = Bench(), 1.0, []
    for step in range(1, 1100):
        for grant in bench.go(lr(0.5 if scale == 1.0 else 1.0), learning_rate_scale=scale):
            if isinstance(grant, SetLearningRateScale):
                granted.append(step)
                scale = grant.value
    assert granted == [1, 6, 11, 1001, 1006, 1011]


def test_one_writer_per_knob_and_step_and_the_first_wins() -> None:
    bench = Bench()
    grants = bench.go(lr(0.5), lr(0.25), ("b", "act", SetLearningRateScale(0.3)))
    assert grants == (SetLearningRateScale(0.5),)
    assert [(r.verdict, r.requested) for r in bench.last] == [
        ("granted", 0.5), ("refused", 0.25), ("refused", 0.3),
    ]  # fmt: skip
    assert "already written" in bench.last[1].reason
    assert "not a knob of this policy" in bench.last[2].reason


def test_a_knob_of_nobody_is_refused() -> None:
    bench = Bench()
    assert bench.go(("a", "act", (SetClipNorm(1.0), SetLossScale(8.0)))) == ()
    assert [r.verdict for r in bench.last] == ["refused", "refused"]


def test_a_knob_out_of_reach_is_refused_with_one_advice() -> None:
    bench = Bench(reachable=frozenset())
    grants = [grant for _ in range(5) for grant in bench.go(lr(0.5))]
    assert [type(grant) for grant in grants] == [Advise]
    assert grants[0].id == "unreachable-learning_rate_scale"
    assert "TrainStep" in grants[0].message
    assert [r.verdict for r in bench.records] == ["refused", "granted"]
    assert bench.state.knobs["learning_rate_scale"].feedback.verdict == "refused"


def test_observe_mode_gives_out_nothing_and_counts_alike() -> None:
    bench = Bench(reachable=frozenset())
    for _ in range(12):
        assert bench.go(lr(0.5, "observe"), ("a", "observe", Advise("x", "text"))) == ()
    verdicts = [(r.step, r.action, r.verdict) for r in bench.records if r.verdict == "observed"]
    assert verdicts == [
        (1, "SetLearningRateScale", "observed"), (1, "Advise", "observed"),
        (6, "SetLearningRateScale", "observed"), (11, "SetLearningRateScale", "observed"),
    ]  # fmt: skip


def test_an_event_happens_once() -> None:
    bench = Bench()
    stop = ("a", "act", RequestStop("dead", "because"))
    assert bench.go(stop) == (RequestStop("dead", "because"),)
    assert bench.go(stop) == ()
    assert [r.requested for r in bench.records] == ["dead"]


def test_a_knob_that_does_not_obey_is_found_and_left_alone() -> None:
    bench = Bench()
    bench.go(lr(0.5))
    bench.go()
    (advice,) = bench.go()
    assert advice.id == "ineffective-learning_rate_scale"
    (finding,) = bench.findings
    assert finding.kind.value == "knob_ineffective"
    assert finding.evidence == {"knob": "learning_rate_scale", "requested": 0.5, "acted": 1.0}
    assert bench.last[0].outcome.startswith("ineffective")
    assert bench.last[0].acted == 1.0
    assert bench.state.knobs["learning_rate_scale"].feedback.effective is False
    granted = [bench.step for _ in range(300) if bench.go(lr(0.5))]
    assert granted == [3 + 256]


def test_a_raise_that_costs_loss_is_undone_without_budget_or_cooldown() -> None:
    bench, scale = Bench(), 0.25
    for _ in range(10):
        bench.go(learning_rate_scale=scale, loss=2.0)
    assert bench.go(lr(0.5), learning_rate_scale=scale) == (SetLearningRateScale(0.5),)
    grants = []
    for _ in range(12):
        grants += bench.go(learning_rate_scale=0.5, loss=2.2)
        if grants:
            break
    assert grants == [SetLearningRateScale(0.25)]
    assert bench.step == 11 + LR.check_after + LR.settle
    outcome, undo = bench.last
    assert (outcome.step, outcome.verdict) == (11, "granted")
    assert (
        outcome.outcome
        == "undone: median loss went from 2 to 2.2 in 8 steps (tolerance of a raise: 0.04)"
    )
    assert (undo.verdict, undo.requested, undo.before) == ("undone", 0.25, 0.5)
    assert bench.state.knobs["learning_rate_scale"].feedback.verdict == "undone"


@pytest.mark.parametrize(("start", "wanted", "after"), [(0.25, 0.5, 2.03), (1.0, 0.5, 9.0)])
def test_a_harmless_raise_and_any_cut_are_kept(start, wanted, after) -> None:
    bench = Bench()
    for _ in range(10):
        bench.go(learning_rate_scale=start, loss=2.0)
    bench.go(lr(wanted), learning_rate_scale=start)
    for _ in range(20):
        assert bench.go(learning_rate_scale=wanted, loss=after) == ()
    outcomes = [r.outcome for r in bench.records if r.outcome]
    assert outcomes == [
        f"median loss went from 2 to {after:g} in 8 steps (tolerance of a raise: 0.04)"
    ]


def test_a_raise_into_non_finite_losses_is_undone() -> None:
    bench = Bench()
    for _ in range(10):
        bench.go(learning_rate_scale=0.25)
    bench.go(lr(0.5), learning_rate_scale=0.25)
    grants = [g for _ in range(12) for g in bench.go(learning_rate_scale=0.5, loss=math.nan)]
    assert grants[0] == SetLearningRateScale(0.25)


def test_batch_and_learning_rate_go_out_as_one_set_point_each() -> None:
    bench = Bench()
    grants = bench.go(
        lr(0.25), ("b", "act", SetBatchSize(16)), learning_rate_scale=0.5, tokens_per_s=100.0
    )
    assert grants == (SetLearningRateScale(0.25 * math.sqrt(2)), SetBatchSize(16))
    follows = bench.last[-1]
    assert follows.policy == "b"
    assert follows.requested == pytest.approx(0.25 * math.sqrt(2))
    # The policy's own part is confirmed although the batch's factor is in the reported value.
    bench.go(learning_rate_scale=0.25 * math.sqrt(2), global_batch_size=16)
    assert bench.state.knobs["learning_rate_scale"].pending.effective
    # A later cut is asked for in the policy's own unit and given out times the factor.
    for _ in range(6):
        bench.go(learning_rate_scale=0.25 * math.sqrt(2), global_batch_size=16)
    (cut,) = bench.go(lr(0.125), learning_rate_scale=0.25 * math.sqrt(2), global_batch_size=16)
    assert cut.value == pytest.approx(0.125 * math.sqrt(2))


def test_a_batch_that_does_not_obey_takes_its_learning_rate_back() -> None:
    bench = Bench()
    bench.go(("b", "act", SetBatchSize(16)), tokens_per_s=100.0)
    grants = []
    for _ in range(6):
        grants += bench.go(learning_rate_scale=math.sqrt(2), tokens_per_s=100.0)
    assert grants[0] == SetLearningRateScale(1.0)
    assert grants[1].id == "ineffective-global_batch_size"


def test_a_superseded_grant_says_so() -> None:
    bench = Bench()
    bench.go(lr(0.5))
    for _ in range(4):
        bench.go(learning_rate_scale=0.5)
    bench.go(lr(0.25), learning_rate_scale=0.5)
    assert bench.last[0].outcome == "not judged: superseded at step 6"

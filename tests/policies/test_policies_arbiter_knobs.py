"""The arbiter on knobs that can be off, that never move, and whose outcome is not a loss."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from mindtune.policies.arbiter import Arbitration
from mindtune.policies.arbiter_state import ArbiterState
from mindtune.policies.decisions import (
    Decision,
    RequestStop,
    Rewind,
    SetClipNorm,
    SetLossScale,
    SetSkipThreshold,
)
from mindtune.policies.facts import RunFacts
from mindtune.policies.limits import KnobLimits
from mindtune.policies.signals import Observation

INF = math.inf
COMMON = {"max_factor": 4.0, "cooldown": 1, "budget": 99, "check_after": 8}
TABLE = {
    "clip_norm": ("a", KnobLimits(low=0.1, high=100.0, check="loss", off=INF, **COMMON)),
    "skip_threshold": ("a", KnobLimits(low=0.1, high=100.0, check="skipped", off=INF, **COMMON)),
    "loss_scale": ("a", KnobLimits(low=1.0, high=2.0**24, check="overflow", **COMMON)),
}
FACTS = RunFacts(reachable=frozenset(TABLE))


class Bench:
    """One arbiter over steps; what it grants acts in the next one, if the knobs obey."""

    def __init__(self, *, obeys: bool = True, **acting: float | None) -> None:
        self.state, self.step, self.records, self.obeys = ArbiterState(), 0, [], obeys
        self.acting = acting

    def go(self, *actions, **signals) -> tuple:
        self.step += 1
        observation = Observation(step=self.step, **{"loss": 2.0, **self.acting, **signals})
        turn = Arbitration(TABLE, FACTS, observation, self.state)
        turn.review()
        if actions:
            turn.request("a", "act", Decision(actions=actions, reason="why"))
        grants, records, self.state = turn.finish()
        self.records.extend(records)
        for action in grants if self.obeys else ():
            if getattr(action, "knob", None) in self.acting:
                self.acting[action.knob] = action.value
        return grants


def test_a_knob_that_is_off_is_set_without_regard_to_the_largest_factor() -> None:
    bench = Bench(clip_norm=INF)
    assert bench.go(SetClipNorm(3.0)) == (SetClipNorm(3.0),)
    assert bench.go(SetClipNorm(50.0)) == (SetClipNorm(12.0),)
    assert bench.go(SetClipNorm(INF)) == (SetClipNorm(INF),)
    assert bench.go(SetClipNorm(INF)) == ()
    assert [r.before for r in bench.records if r.acted is None and r.outcome is None] == [
        INF, 3.0, 12.0,
    ]  # fmt: skip


def test_bounds_hold_for_a_knob_that_can_be_off() -> None:
    assert Bench(clip_norm=INF).go(SetClipNorm(1e9)) == (SetClipNorm(100.0),)
    assert Bench(clip_norm=None).go(SetClipNorm(0.0)) == (SetClipNorm(0.1),)


@pytest.mark.parametrize("value", [math.nan, -INF])
def test_what_is_neither_a_number_nor_off_is_refused(value) -> None:
    bench = Bench(clip_norm=INF, loss_scale=8.0)
    assert bench.go(SetClipNorm(value)) == ()
    assert bench.go(SetLossScale(INF)) == ()
    assert [r.verdict for r in bench.records] == ["refused", "refused"]


def test_off_that_was_set_is_confirmed() -> None:
    bench = Bench(clip_norm=3.0)
    bench.go(SetClipNorm(INF))
    bench.go()
    assert [r.acted for r in bench.records] == [None, INF]


@pytest.mark.parametrize(
    ("share", "undone"), [(0.0, False), (0.4, False), (0.7, True), (1.0, True)]
)
def test_a_threshold_that_skips_most_updates_is_taken_back(share, undone) -> None:
    bench = Bench(skip_threshold=INF)
    bench.go(SetSkipThreshold(3.0))
    for i in range(12):
        bench.go(update_skipped=float(i % 10 < 10 * share))
    assert bench.acting["skip_threshold"] == (INF if undone else 3.0)
    assert any("updates were skipped since" in (r.outcome or "") for r in bench.records)


def test_skips_by_overflow_do_not_count_against_the_threshold() -> None:
    bench = Bench(skip_threshold=INF)
    bench.go(SetSkipThreshold(3.0))
    for _ in range(12):
        bench.go(update_skipped=1.0, overflow=1.0)
    assert bench.acting["skip_threshold"] == 3.0


@pytest.mark.parametrize(("wanted", "after"), [(16.0, 8.0), (4.0, 4.0)])
def test_a_higher_loss_scale_that_overflows_is_taken_back_and_a_lower_one_is_kept(
    wanted, after
) -> None:
    bench = Bench(loss_scale=8.0)
    bench.go(SetLossScale(wanted))
    for _ in range(12):
        bench.go(overflow=1.0)
    assert bench.acting["loss_scale"] == after


def test_a_knob_that_is_turned_at_every_step_and_never_moves_is_found() -> None:
    bench = Bench(obeys=False, loss_scale=1024.0)
    for _ in range(4):
        bench.go(SetLossScale(512.0))
    assert bench.state.knobs["loss_scale"].blocked_until > 200
    assert bench.state.knobs["loss_scale"].feedback.effective is False


def test_a_knob_that_never_obeys_is_tried_more_and_more_seldom() -> None:
    bench, asked = Bench(obeys=False, loss_scale=1024.0), []
    for step in range(4000):
        asked += [step] * len(bench.go(SetLossScale(512.0), overflow=0.0))
    # Tried until it is found ineffective, then after 256, 512, 1024 and 2048 steps.
    tries = [b for a, b in pairwise([-1000, *asked]) if b - a > 100]
    assert [round((b - a) / 256) for a, b in pairwise(tries)] == [1, 2, 4, 8]


def test_a_knob_that_moves_one_step_late_obeys() -> None:
    bench, late = Bench(obeys=False, loss_scale=2.0**20), 2.0**20
    for _ in range(20):
        grants = bench.go(SetLossScale(bench.acting["loss_scale"] / 2))
        bench.acting["loss_scale"] = late
        late = next((a.value for a in grants if isinstance(a, SetLossScale)), late)
    assert bench.acting["loss_scale"] < 2.0**16
    assert bench.state.knobs["loss_scale"].blocked_until == 0


def test_a_stop_names_the_last_actions_and_no_guards() -> None:
    bench = Bench(clip_norm=INF, skip_threshold=INF, loss_scale=8.0)
    assert bench.go(RequestStop("early", "because."))[0].diagnosis == "because."
    bench.go(SetClipNorm(3.0), SetSkipThreshold(5.0))
    bench.go(Rewind("back", "lost"))
    for value in (4.0, 8.0, 4.0, 8.0, 4.0):
        bench.go(SetLossScale(value))
    (stop,) = [a for a in bench.go(RequestStop("late", "because.")) if isinstance(a, RequestStop)]
    assert stop.diagnosis == (
        "because. Last actions: step 3: a returned to an earlier state; step 4: a set loss_scale "
        "from 8 to 4; step 5: a set loss_scale from 4 to 8; step 6: a set loss_scale from 8 to 4; "
        "step 7: a set loss_scale from 4 to 8; step 8: a set loss_scale from 8 to 4."
    )


def test_the_step_of_the_last_rewind_is_remembered_in_act_mode_only() -> None:
    bench = Bench()
    turn = Arbitration(TABLE, FACTS, Observation(step=1), bench.state)
    turn.request("a", "observe", Decision(actions=(Rewind("r", "lost"),), reason="why"))
    assert turn.finish()[2].rewound_step is None
    bench.go(Rewind("r", "lost"))
    assert bench.state.rewound_step == 1

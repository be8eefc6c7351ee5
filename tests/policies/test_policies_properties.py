"""No sequence of observations breaks a bound, a cool-down or a budget, or raises."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindtune.policies.decisions import KNOBS, Rewind
from mindtune.policies.engine import build_engine
from mindtune.policies.facts import RunFacts
from mindtune.policies.ledger import after_resume
from mindtune.policies.limits import BUDGET_WINDOW
from mindtune.policies.rewind_settings import RewindLimits
from mindtune.policies.signals import Observation

FACTS = RunFacts(
    reachable=frozenset(KNOBS),
    micro_batch_size=2,
    optimizer_family="sgd",
    can_rewind=True,
)
REWINDS = RewindLimits()
ENGINE = build_engine({}, mode="act")

odd = st.sampled_from([None, math.nan, math.inf, -math.inf, 0.0, -1.0, 1e308, 5e-324])
flag = st.sampled_from([None, 0.0, 1.0, 0.1, math.nan])
number = st.one_of(odd, st.floats(0.01, 100.0))


@st.composite
def stretches(draw) -> list[dict]:
    """Stretches of steps of one kind: rules on steps in a row must come into play."""
    rows: list[dict] = []
    for _ in range(draw(st.integers(1, 8))):
        row = {
            "loss": draw(number),
            "grad_norm": draw(number),
            "overflow": draw(flag),
            "update_skipped": draw(flag),
            "device_utilization": draw(st.sampled_from([None, 0.1, 0.9, math.nan])),
            "data_time_s": draw(st.sampled_from([None, 0.0, 0.5, math.inf])),
            "step_time_s": draw(st.sampled_from([None, 0.0, 1.0, 0.5, math.inf])),
            "tokens": draw(st.sampled_from([None, 0, 1024])),
            "phase": draw(st.sampled_from([None, "train", "train", "train", "eval"])),
            "mfu": draw(number),
            "device_memory_used_bytes": draw(st.sampled_from([None, 1, 80, 99, 200, -1])),
            "device_memory_total_bytes": draw(st.sampled_from([None, 100, 0])),
            "update_norm": draw(number),
        }
        grows = draw(st.sampled_from([1.0, 1.0, 1.05, 1.5]))
        for _ in range(draw(st.integers(1, 60))):
            rows.append(dict(row))
            if row["loss"] is not None:
                row["loss"] = row["loss"] * grows
    return rows


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    rows=stretches(),
    obeys=st.booleans(),
    scale=st.sampled_from([None, 1.0, 2.0**16, 2.0**24, 2.0**32, math.inf, 0.0]),
    batch=st.sampled_from([None, 4, 16]),
    micro=st.sampled_from([None, 1, 2, 3, 0, 64]),
    clip=odd,
    skip=odd,
    gaps=st.sampled_from([1, 1, 1, 7, -3]),
)
def test_no_sequence_breaks_the_limits(rows, obeys, scale, batch, micro, clip, skip, gaps) -> None:
    acting = {
        "learning_rate_scale": 1.0,
        "loss_scale": scale,
        "global_batch_size": batch,
        "micro_batch_size": micro,
        "clip_norm": clip,
        "skip_threshold": skip,
    }
    limits = {knob: lim for seat in ENGINE.seats for knob, lim in seat.policy.knobs.items()}
    state, granted, step = ENGINE.init(FACTS), defaultdict(list), 0
    rewinds: list[int] = []
    for index, row in enumerate(rows):
        step = max(1, step + (gaps if index % 5 == 4 else 1))
        observation = Observation(step=step, **{**row, **acting})
        result = ENGINE.step(observation, state)
        assert repr(ENGINE.step(observation, state)) == repr(result)
        state = result.state
        for knob in {a.knob for a in result.grants if type(a) in KNOBS.values()}:
            (action,) = [a for a in result.grants if getattr(a, "knob", None) == knob]
            if action.value == limits[knob].off:
                acting[knob] = action.value if obeys else acting[knob]
                continue
            assert math.isfinite(action.value)
            own = action.value
            if knob == "learning_rate_scale":
                own /= state.arbiter.batch_factor
            assert limits[knob].low * 0.999999 <= own <= limits[knob].high * 1.000001
            if obeys:
                acting[knob] = action.value
        rewinds += [state.arbiter.clock for a in result.grants if isinstance(a, Rewind)]
        assert not (result.healthy and row["loss"] is not None and not math.isfinite(row["loss"]))
        for record in result.records:
            new = record.acted is None and record.outcome is None
            if record.verdict == "granted" and new and "follows the batch" not in record.reason:
                granted[record.action].append(state.arbiter.clock)
    for knob, lim in limits.items():
        clocks = granted[KNOBS[knob].__name__]
        assert all(later - earlier >= lim.cooldown for earlier, later in pairwise(clocks))
        for clock in clocks:
            inside = [c for c in clocks if clock <= c < clock + BUDGET_WINDOW]
            assert len(inside) <= lim.budget
    # The policy counts observations, so a gap only makes it stricter in steps.
    if gaps == 1:
        assert all(b - a >= REWINDS.cooldown for a, b in pairwise(rewinds))
        for clock in rewinds:
            inside = [c for c in rewinds if clock <= c < clock + BUDGET_WINDOW]
            assert len(inside) <= REWINDS.budget


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(rows=stretches())
def test_observe_mode_never_gives_anything_out(rows) -> None:
    engine = build_engine({}, mode="observe")
    state = engine.init(replace(FACTS, loss_scale_dynamic=True))
    for step, row in enumerate(rows, start=1):
        result = engine.step(Observation(step=step, loss_scale=1024.0, **row), state)
        state = result.state
        assert result.grants == ()
        assert all(record.verdict in ("observed", "refused") for record in result.records)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(rows=stretches(), at=st.floats(0, 1), obeys=st.booleans())
def test_a_run_interrupted_anywhere_goes_on_as_if_it_had_not_been(rows, at, obeys) -> None:
    cut = int(at * (len(rows) - 1))
    acting = {"learning_rate_scale": 1.0, "loss_scale": 2.0**16, "clip_norm": math.inf}
    acting |= {"skip_threshold": math.inf, "global_batch_size": 8, "micro_batch_size": 2}
    state = other = ENGINE.init(FACTS)
    for step, row in enumerate(rows, start=1):
        observation = Observation(step=step, **{**row, **acting})
        result = ENGINE.step(observation, state)
        state = result.state
        if step > cut + 1:
            again = ENGINE.step(observation, other)
            other = again.state
            assert repr(again) == repr(result)
        elif step == cut + 1:
            text = json.dumps(state.to_json(), allow_nan=False)
            restored = ENGINE.from_json(json.loads(text), FACTS)
            assert restored.message is None
            # But for this: what has ended it may end it again.
            state = replace(state, arbiter=after_resume(state.arbiter))
            other = restored.state
            assert repr(other) == repr(state)
        for action in result.grants if obeys else ():
            if getattr(action, "knob", None) in acting:
                acting[action.knob] = action.value
    assert len(json.dumps(state.to_json())) < 64 * 1024

"""One contract over all policies, and over the engine that holds them."""

from __future__ import annotations

import copy
import json
import math
import random
from dataclasses import replace

import pytest

from mindtune.policies.decisions import GUARDS, KNOBS, NO_CHANGE, SetLossScale
from mindtune.policies.detectors import DetectorState, update
from mindtune.policies.engine import build_engine
from mindtune.policies.facts import RunFacts
from mindtune.policies.policy import Feedback
from mindtune.policies.settings import PolicySettings
from mindtune.policies.signals import SIGNAL_NAMES, Observation
from mindtune.policies.state import from_json, to_json
from mindtune.policies.table import POLICIES

REACH = Feedback(
    facts=RunFacts(
        reachable=frozenset(KNOBS),
        micro_batch_size=2,
        can_rewind=True,
    )
)
policies = pytest.mark.parametrize("name", POLICIES)


def calm(step: int) -> Observation:
    generator = random.Random(step)
    return Observation(
        step=step, phase="train", loss=2 + 3 / step + generator.gauss(0, 0.05),
        grad_norm=1 + generator.gauss(0, 0.1), overflow=0.0, update_skipped=0.0,
        loss_scale=65536.0, learning_rate=1e-3, learning_rate_scale=1.0, clip_norm=1.0,
        global_batch_size=16, micro_batch_size=2, num_microbatches=8, tokens=2048,
        step_time_s=0.2 + 0.01 * generator.random(), data_time_s=0.005, device_utilization=0.9,
        device_memory_used_bytes=1, device_memory_total_bytes=4, mfu=0.3,
    )  # fmt: skip


def made(name: str):
    return POLICIES[name](PolicySettings())


@policies
def test_the_name_is_the_key(name) -> None:
    assert made(name).name == name


@policies
def test_knobs_have_sound_limits(name) -> None:
    for limits in made(name).knobs.values():
        assert 0 < limits.low < limits.high < math.inf
        assert limits.max_factor > 1
        assert limits.cooldown >= 1
        assert 1 <= limits.budget <= 1000


@policies
def test_nothing_measured_is_no_change(name) -> None:
    policy, state = made(name), made(name).init()
    for step in range(1, 100):
        decision, state = policy.decide(Observation(step=step), (), REACH, state)
        assert decision == NO_CHANGE


@policies
def test_a_calm_run_is_no_change(name) -> None:
    policy, state, detectors = made(name), made(name).init(), DetectorState()
    for step in range(1, 900):
        findings, detectors = update(calm(step), detectors)
        decision, state = policy.decide(calm(step), findings, REACH, state)
        assert decision == NO_CHANGE


def wild(seed: int, count: int) -> list[Observation]:
    generator = random.Random(seed)
    numbers = [None, math.nan, math.inf, -math.inf, 0.0, -1.0, 1e-320, 1e308, 1.0, 2.0, 65536.0]
    names = [name for name in SIGNAL_NAMES if name not in ("step", "phase", "run")]
    return [
        Observation(step=step, **{name: generator.choice(numbers) for name in names})
        for step in range(1, count + 1)
    ]


@policies
@pytest.mark.parametrize("seed", range(5))
def test_equal_inputs_give_equal_outputs_and_stay_as_they_were(name, seed) -> None:
    policy, state, detectors = made(name), made(name).init(), DetectorState()
    for observation in wild(seed, 200):
        findings, detectors = update(observation, detectors)
        before = copy.deepcopy((findings, state))
        first = policy.decide(observation, findings, REACH, state)
        second = policy.decide(observation, findings, REACH, state)
        assert repr(first) == repr(second)
        assert repr((findings, state)) == repr(before)
        state = first[1]
        text = json.dumps(to_json(state), allow_nan=False)
        assert from_json(type(state), json.loads(text)) == state


def test_the_engine_leaves_a_calm_run_alone() -> None:
    engine = build_engine({}, mode="act")
    state, guard = engine.init(REACH.facts), math.inf
    moves = 0
    for step in range(1, 999):
        result = engine.step(replace(calm(step), skip_threshold=guard), state)
        state = result.state
        assert all(isinstance(action, GUARDS) for action in result.grants)
        for action in result.grants:
            guard = action.value
            moves += 1
    assert moves <= 3


@pytest.mark.parametrize("phase", ["compile", "eval", "save"])
def test_a_step_of_another_phase_counts_without_its_times(phase) -> None:
    engine = build_engine({}, mode="act")
    state = engine.init(REACH.facts)
    untimed = replace(calm(1), step_time_s=None, data_time_s=None, tokens_per_s=None, mfu=None,
                      device_utilization=None)  # fmt: skip
    assert engine.step(replace(calm(1), phase=phase), state) == engine.step(untimed, state)


def test_an_overflow_in_the_step_that_compiles_lowers_the_scale() -> None:
    engine = build_engine({}, mode="act")
    facts = replace(REACH.facts, loss_scale_dynamic=True)
    first = Observation(step=1, phase="compile", loss=5.5, overflow=1.0, loss_scale=2.0**24)
    result = engine.step(first, engine.init(facts))
    assert result.grants == (SetLossScale(2.0**23),)


def test_a_step_that_was_seen_changes_nothing_and_one_before_it_starts_anew() -> None:
    engine = build_engine({}, mode="act")
    state = engine.init(REACH.facts)
    for step in range(1, 50):
        state = engine.step(calm(step), state).state
    assert engine.step(calm(49), state).state is state
    back = engine.step(calm(20), state).state
    assert len(back.detectors.loss.window) == 1
    assert back.arbiter.clock == 50


def test_findings_carry_their_step_and_a_message() -> None:
    engine = build_engine({}, mode="act")
    state = engine.init(REACH.facts)
    for observation in wild(1, 300):
        result = engine.step(observation, state)
        state = result.state
        for finding in result.findings:
            assert finding.step <= finding.last_step == observation.step
            assert finding.message.endswith(".")
        for record in result.records:
            assert record.reason.strip()
            assert record.step <= observation.step

"""What users may set, and what survives a restart."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from typing import Any

import pytest

from mindtune.policies.engine import build_engine
from mindtune.policies.errors import PolicyError
from mindtune.policies.facts import RunFacts
from mindtune.policies.findings import Severity
from mindtune.policies.policy import Feedback
from mindtune.policies.settings import PolicySettings
from mindtune.policies.signals import Observation
from mindtune.policies.state import from_json, to_json
from mindtune.policies.table import POLICIES

FACTS = RunFacts(
    reachable=frozenset({"learning_rate_scale", "loss_scale", "global_batch_size"}),
    micro_batch_size=2,
    optimizer_family="adam",
)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"gradnorm": PolicySettings()}, ["'gradnorm'", "loss_scale, skip_update, rewind, gradient_norm, clipping, memory_guard, batch_size, detectors"]),
        ({"loss_scale": PolicySettings(limits={"floor": 1})}, ["policies.loss_scale.limits", "'floor'", "hard_floor, cap, budget"]),
        ({"loss_scale": PolicySettings(thresholds={"hysteresis": 1.5})}, ["an integer from 1 to 100", "1.5", "default is 2"]),
        ({"gradient_norm": PolicySettings(limits={"min_scale": 2.0})}, ["a number from 1e-06 to 1", "2.0"]),
        ({"gradient_norm": PolicySettings(limits={"min_scale": math.nan})}, ["a number", "nan"]),
        ({"batch_size": PolicySettings(limits={"budget": True})}, ["an integer", "True"]),
        ({"batch_size": PolicySettings(limits={"budget": "4"})}, ["an integer", "'4'"]),
        ({"detectors": PolicySettings(limits={"a": 1})}, ["thresholds only"]),
        ({"detectors": PolicySettings(thresholds={"window": 4})}, ["from 16 to 1024"]),
    ],
)  # fmt: skip
def test_wrong_settings_say_what_is_allowed(settings, words) -> None:
    with pytest.raises(PolicyError) as caught:
        build_engine(settings, mode="act")
    for word in words:
        assert word in str(caught.value)


def test_a_wrong_mode_is_refused() -> None:
    with pytest.raises(PolicyError, match="observe or act"):
        PolicySettings(mode="dry")  # type: ignore[arg-type]


def test_a_disabled_policy_has_no_seat_and_owns_no_knob() -> None:
    engine = build_engine({"loss_scale": PolicySettings(enabled=False)}, mode="act")
    assert [seat.policy.name for seat in engine.seats] == [
        name for name in POLICIES if name != "loss_scale"
    ]
    assert engine.owned_knobs(FACTS) == {"learning_rate_scale", "global_batch_size"}
    everything = build_engine({}, mode="act")
    assert "loss_scale" in everything.owned_knobs(FACTS)
    fixed = RunFacts(reachable=FACTS.reachable, loss_scale_dynamic=False)
    assert "loss_scale" not in everything.owned_knobs(fixed)
    assert build_engine({}, mode="observe").owned_knobs(FACTS) == frozenset()
    mixed = build_engine({"loss_scale": PolicySettings(mode="act")}, mode="observe")
    assert mixed.owned_knobs(FACTS) == {"loss_scale"}


@dataclass(frozen=True)
class Leaf:
    value: float
    name: str | None
    severity: Severity


@dataclass(frozen=True)
class Tree:
    leaves: tuple[Leaf, ...]
    by_name: dict[str, Leaf]
    pair: tuple[int, float]
    flag: bool
    mixed: float | int | str | None
    names: frozenset[str]


TREE = Tree(
    leaves=(Leaf(math.inf, None, Severity.INFO), Leaf(-math.inf, "x", Severity.CRITICAL)),
    by_name={"a": Leaf(0.1, "nan", Severity.WARNING)},
    pair=(1, 2.5),
    flag=True,
    mixed=math.inf,
    names=frozenset({"b", "a"}),
)


def test_a_tree_of_dataclasses_survives_json() -> None:
    text = json.dumps(to_json(TREE), allow_nan=False)
    assert from_json(Tree, json.loads(text)) == TREE
    assert math.isnan(from_json(Leaf, {"value": "nan", "name": None, "severity": "info"}).value)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("flag", 1), ("pair", [1]), ("pair", [1.5, 1.0]), ("leaves", {}), ("by_name", []),
        ("mixed", []), ("names", "a"), ("leaves", [{"value": 1.0}]),
        ("leaves", [{"value": "1", "name": None, "severity": "info"}]),
        ("leaves", [{"value": 1.0, "name": 3, "severity": "info"}]),
        ("leaves", [{"value": 1.0, "name": None, "severity": "loud"}]),
    ],
)  # fmt: skip
def test_a_document_of_another_shape_is_refused(path, value) -> None:
    with pytest.raises(PolicyError, match="start without the stored state|must be"):
        from_json(Tree, {**to_json(TREE), path: value})


def test_a_value_of_a_foreign_type_is_refused() -> None:
    with pytest.raises(PolicyError, match="dataclasses, tuples"):
        to_json(object())


def observations(seed: int, count: int = 420) -> list[Observation]:
    """A run with every kind of trouble in it."""
    generator = random.Random(seed)
    made = []
    for step in range(1, count + 1):
        spike = 150 < step < 165
        hit = step < 6 or step in (90, 200, 201, 202)
        bad = step == 120
        made.append(
            Observation(
                step=step,
                loss=math.nan
                if bad
                else 2 + generator.gauss(0, 0.05) + (3 + 0.3 * (step - 150)) * spike,
                grad_norm=math.inf if hit or bad else 1 + generator.gauss(0, 0.05) + 30 * spike,
                overflow=float(hit or bad),
                update_skipped=float(hit or bad),
                loss_scale=2.0**16,
                learning_rate_scale=1.0,
                clip_norm=math.inf,
                global_batch_size=8,
                micro_batch_size=2,
                tokens=1024,
                step_time_s=0.1 + abs(generator.gauss(0, 0.01)),
                data_time_s=0.08 if 300 < step < 340 else 0.001,
                device_utilization=0.3 if step > 350 else 0.9,
            )
        )
    return made


@pytest.mark.parametrize("mode", ["act", "observe"])
@pytest.mark.parametrize("at", [1, 4, 91, 155, 160, 201, 320, 400])
def test_a_run_resumed_at_any_step_decides_as_if_it_had_not_stopped(mode, at) -> None:
    engine = build_engine({}, mode=mode)
    state, results = engine.init(FACTS), []
    for observation in observations(7):
        result = engine.step(observation, state)
        state = result.state
        if observation.step == at:
            stored = json.dumps(state.to_json(), allow_nan=False)
        if observation.step > at:
            results.append((result.findings, result.grants, result.records))
    restored = engine.from_json(json.loads(stored), FACTS)
    assert restored.message is None
    other, again = restored.state, []
    for observation in observations(7)[at:]:
        result = engine.step(observation, other)
        other = result.state
        again.append((result.findings, result.grants, result.records))
    assert again == results
    assert other == state
    assert len(json.dumps(state.to_json())) < 64 * 1024


@pytest.mark.parametrize(
    "document",
    [None, [], {}, {"schema": 0}, {"schema": 99}, {"schema": 1}, {"schema": 1, "policies": 3}],
)
def test_an_unknown_state_arms_anew_with_a_message(document) -> None:
    engine = build_engine({}, mode="act")
    restored = engine.from_json(document, FACTS)
    assert restored.state == engine.init(FACTS)
    assert "start afresh" in restored.message


def test_a_damaged_state_arms_anew_with_a_message() -> None:
    engine = build_engine({}, mode="act")
    document: dict[str, Any] = engine.init(FACTS).to_json()
    document["detectors"]["loss"]["consecutive"] = "many"
    restored = engine.from_json(document, FACTS)
    assert "consecutive" in restored.message
    assert restored.state == engine.init(FACTS)


@pytest.mark.parametrize(
    ("part", "kept"),
    [("detectors", "arbiter"), ("arbiter", "detectors"), ("health", "arbiter")],
)
def test_a_part_that_cannot_be_read_starts_afresh_and_the_others_go_on(part, kept) -> None:
    engine = build_engine({}, mode="act")
    state = engine.init(FACTS)
    for observation in observations(3, 170):
        state = engine.step(observation, state).state
    document = json.loads(json.dumps(state.to_json()))
    document[part] = {"of": "another version"}
    restored = engine.from_json(document, FACTS)
    assert getattr(restored.state, kept) == getattr(state, kept)
    assert getattr(restored.state, part) == getattr(engine.init(FACTS), part)
    assert restored.state.policies == state.policies
    assert "start afresh" in restored.message


def test_a_policy_whose_state_has_changed_starts_afresh_alone() -> None:
    engine = build_engine({}, mode="act")
    state = engine.init(FACTS)
    for observation in observations(3, 170):
        state = engine.step(observation, state).state
    document = json.loads(json.dumps(state.to_json()))
    del document["policies"]["rewind"]["clock"]
    document["policies"]["gone"] = {}
    restored = engine.from_json(document, FACTS)
    assert "the policy rewind" in restored.message
    fresh = engine.init(FACTS).policies["rewind"]
    assert restored.state.policies == {**state.policies, "rewind": fresh}


def test_a_state_from_before_health_was_kept_is_read() -> None:
    engine = build_engine({}, mode="act")
    document = engine.init(FACTS).to_json()
    del document["health"]
    assert engine.from_json(document, FACTS).message is None


def test_detectors_from_before_the_course_of_the_norm_was_kept_start_afresh_alone() -> None:
    engine = build_engine({}, mode="act")
    document = engine.init(FACTS).to_json()
    document["arbiter"]["clock"] = 7
    del document["detectors"]["course"]
    restored = engine.from_json(document, FACTS)
    assert "the detectors" in (restored.message or "")
    assert restored.state.arbiter.clock == 7


def test_a_policy_that_was_added_since_starts_afresh() -> None:
    few = build_engine({"batch_size": PolicySettings(enabled=False)}, mode="act")
    document = few.init(FACTS).to_json()
    restored = build_engine({}, mode="act").from_json(document, FACTS)
    assert restored.message is None
    assert set(restored.state.policies) == set(POLICIES)


def test_feedback_knows_no_reach_by_default() -> None:
    assert Feedback().facts.reachable == frozenset()


def test_a_guard_that_nobody_moves_any_more_is_not_set_again() -> None:
    knobs = {"clip_norm": 1.0, "skip_threshold": 5.0, "learning_rate_scale": 0.25}
    engine = build_engine({}, mode="act")
    stored = json.loads(json.dumps(engine.init(FACTS).to_json()))
    assert engine.restorable(stored, knobs) == knobs
    # Its policy would take the old threshold for the user's own, and skip every update.
    broken = {**stored, "policies": {**stored["policies"], "skip_update": {"from": "elsewhere"}}}
    left = {"clip_norm": 1.0, "learning_rate_scale": 0.25}
    assert engine.restorable(broken, knobs) == left
    off = build_engine({"clipping": PolicySettings(enabled=False)}, mode="act")
    assert off.restorable(stored, knobs) == {"skip_threshold": 5.0, "learning_rate_scale": 0.25}
    for document in (None, {}, {"policies": 3}):
        assert engine.restorable(document, knobs) == {"learning_rate_scale": 0.25}
    assert build_engine({}, mode="observe").restorable(stored, knobs) == {
        "learning_rate_scale": 0.25
    }


def test_a_step_leaves_the_state_that_it_was_given_as_it_was() -> None:
    """States are not frozen at run time, but nobody changes them all the same."""
    engine, g = build_engine({}, mode="act"), random.Random(0)
    state = engine.init(FACTS)
    for step in range(1, 400):
        hit = g.random() < 0.1
        observation = Observation(
            step=step, loss=math.nan if hit else g.lognormvariate(0, 0.5), overflow=float(hit),
            grad_norm=g.lognormvariate(0, 1), loss_scale=2.0 ** g.randrange(20),
            learning_rate=g.random(), learning_rate_scale=1.0, clip_norm=1.0,
            global_batch_size=4 + 4 * (step > 300), micro_batch_size=2,
            step_time_s=g.lognormvariate(0, 1),
            data_time_s=g.random(), device_utilization=g.random(), update_skipped=float(hit),
            device_memory_used_bytes=step, device_memory_total_bytes=400, straggler_rank=1,
            straggler_ratio=1 + g.random(), skip_threshold=math.inf,
        )  # fmt: skip
        before = json.dumps(state.to_json())
        following = engine.step(observation, state).state
        assert json.dumps(state.to_json()) == before
        state = following

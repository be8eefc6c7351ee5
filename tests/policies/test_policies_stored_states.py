"""A stored state that was changed since is refused, or read and trained with: it never raises."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import reduce
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindtune.policies.decisions import KNOBS
from mindtune.policies.engine import EngineState, build_engine
from mindtune.policies.facts import RunFacts
from mindtune.policies.settings import PolicySettings
from mindtune.policies.signals import Observation

FACTS = RunFacts(
    reachable=frozenset(KNOBS), micro_batch_size=2, optimizer_family="adam", can_rewind=True
)
ENGINE = build_engine({}, mode="act")


def observations(first: int, count: int) -> Iterator[Observation]:
    """A run in which every detector and every policy has something to do."""
    for step in range(first, first + count):
        wave = ((step * 37) % 11 - 5) / 100
        spike, hit, starved = 150 <= step < 165, step in (90, 200, 201, 202), 300 < step < 340
        loss = 2 + wave + (3 + 0.3 * (step - 150)) * spike
        yield Observation(
            step=step,
            loss=math.nan if step == 120 else loss,
            grad_norm=math.inf if hit else 1 + wave + 30 * spike,
            overflow=float(hit),
            update_skipped=float(hit),
            loss_scale=2.0**16,
            learning_rate_scale=1.0,
            clip_norm=math.inf,
            skip_threshold=math.inf,
            global_batch_size=8,
            micro_batch_size=2,
            num_microbatches=4,
            tokens=1024,
            step_time_s=0.1 + abs(wave) + (step % 50 == 0),
            data_time_s=0.08 if starved else 0.001,
            device_utilization=0.3 if step > 350 else 0.9,
            device_memory_used_bytes=800 + step // 8,
            device_memory_total_bytes=900,
            straggler_rank=3,
            straggler_ratio=1.5,
        )


def run(state: EngineState, first: int, count: int) -> EngineState:
    for observation in observations(first, count):
        result = ENGINE.step(observation, state)
        for grant in result.grants:
            value = getattr(grant, "value", 1.0)
            assert value >= 0.0
            assert math.isfinite(value) or grant.knob in ("clip_norm", "skip_threshold")
        state = result.state
    return state


def stored(at: int) -> dict[str, Any]:
    return json.loads(json.dumps(run(ENGINE.init(FACTS), 1, at).to_json(), allow_nan=False))


STOPS = (3, 40, 156, 203, 330)
DOCUMENTS = {at: stored(at) for at in STOPS}


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield every list and scalar in a document; of long lists the ends and the middle."""
    if isinstance(document, dict):
        for name, entry in document.items():
            yield from places(entry, (*path, name))
        return
    yield path
    if isinstance(document, list) and document:
        for index in {0, len(document) // 2, len(document) - 1}:
            yield from places(document[index], (*path, index))


ODD = [0, -1, 1, 3, 2**63, 10**400, -(10**400), 0.0, -1.0, 0.5, 1e308, -1e308, 5e-324]
ODD += ["nan", "inf", "-inf", "x", None, True, [], {}]  # type: ignore[list-item]


def changed(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return the document with `value` at `path`; a list may be changed by a function."""
    if not path:
        return value(document) if callable(value) else value
    copy = dict(document) if isinstance(document, dict) else list(document)
    copy[path[0]] = changed(document[path[0]], path[1:], value)
    return copy


CUTS = [
    lambda entries: entries[1:],
    lambda entries: entries[:-1],
    lambda entries: entries[::-1],
    lambda entries: entries * 2,
    lambda entries: [*entries, 0],
    lambda _: [0.0] * 1000,
    lambda _: [0.0] * 100_000,
]


@st.composite
def changes(draw: st.DrawFn) -> tuple[int, Any]:
    at = draw(st.sampled_from(STOPS))
    document = DOCUMENTS[at]
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(sorted(places(document), key=str)))
        entry = reduce(lambda part, step: part[step], path, document)
        cuts = CUTS if isinstance(entry, list) else []
        document = changed(document, path, draw(st.sampled_from([*ODD, *cuts])))
    return at, document


@settings(max_examples=300, deadline=None)
@given(changes())
def test_a_changed_state_is_refused_or_trains_on(case) -> None:
    at, document = case
    restored = ENGINE.from_json(document, FACTS)
    assert restored.message is None or "start afresh" in restored.message
    after = run(restored.state, at + 1, 50)
    json.dumps(after.to_json(), allow_nan=False)


@pytest.mark.parametrize(
    ("path", "value", "part"),
    [
        (("detectors", "loss", "window", "values", 0), 3, "detectors"),
        (("detectors", "loss", "window", "ordered"), [], "detectors"),
        (("detectors", "loss", "window", "values", 5), "nan", "detectors"),
        (("detectors", "loss", "held"), [0.0] * 2000, "detectors"),
        (("detectors", "performance", "waits"), [0.1], "detectors"),
        (("detectors", "course", "norms", 0), 0.0, "detectors"),
        (("detectors", "trend", "recent", 0), 10**400, "detectors"),
        (("detectors", "loss", "consecutive"), 10**400, "detectors"),
        (("detectors", "loss", "consecutive"), -2, "detectors"),
        (("detectors", "memory", "fast", "ends"), [], "detectors"),
        (("detectors", "straggler", "ranks"), [], "detectors"),
        (("detectors", "slow_steps", "onsets"), [9, 9], "detectors"),
        (("arbiter", "batch_factor"), 0, "budgets"),
        (("arbiter", "batch_factor"), "nan", "budgets"),
        (("arbiter", "base_batch"), 0, "budgets"),
        (("arbiter", "clock"), 0, "budgets"),
        (("arbiter", "knobs", "learning_rate_scale", "feedback", "granted"), -1.0, "budgets"),
    ],
)
def test_what_no_run_can_have_stored_is_refused_with_its_name(path, value, part) -> None:
    restored = ENGINE.from_json(changed(DOCUMENTS[156], path, value), FACTS)
    assert f"the {part}" in restored.message
    assert "start without the stored state" in restored.message
    assert len(restored.message) < 600


def test_a_state_goes_on_where_the_policy_that_waits_is_off_now() -> None:
    state = ENGINE.init(FACTS)
    for observation in observations(1, 160):
        state = ENGINE.step(observation, state).state
        waiting = [name for name, entry in state.arbiter.knobs.items() if entry.pending]
        if "skip_threshold" in waiting:
            break
    assert "skip_threshold" in waiting
    without = build_engine({"skip_update": PolicySettings(enabled=False)}, mode="act")
    restored = without.from_json(state.to_json(), FACTS)
    assert restored.message is None
    following = replace(observation, step=observation.step + 1)
    kept = without.step(following, restored.state).state.arbiter.knobs["skip_threshold"]
    assert kept.pending is None
    assert kept.grants == state.arbiter.knobs["skip_threshold"].grants

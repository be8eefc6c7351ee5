"""The plan of faults: what it refuses, when its faults act, and how a run is told of it."""

import pytest

from mindtune.controller.contract import FaultPlan, parse
from mindtune.controller.contract.fault_plan import KINDS
from mindtune.controller.errors import ConfigError
from mindtune.controller.live.settings import load_settings

NEEDED = {
    "burst": {"last_step": 5},
    "memory_climb": {"total": "2GB"},
    "slow_rank": {"rank": 1},
}


def fault(kind, **values):
    content = {"faults": [{"kind": kind, "first_step": 4, **NEEDED.get(kind, {}), **values}]}
    return parse(FaultPlan, content, source="faults.yaml").faults[0]


def steps_of(planted, until=12):
    return [step for step in range(1, until + 1) if planted.acts(step)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_defaults_and_round_trips(kind):
    planted = fault(kind)
    assert planted.kind == kind
    plan = FaultPlan(faults=(planted,))
    assert parse(FaultPlan, plan.to_plain(), source="again") == plan


@pytest.mark.parametrize(
    ("kind", "values", "steps"),
    [
        ("spike", {}, [4]),
        ("nan_loss", {}, [4]),
        ("nan_gradient", {}, [4]),
        ("poisoned_batch", {}, [4]),
        ("hang", {}, [4]),
        ("spike", {"every": 3}, [4, 7, 10]),
        ("spike", {"every": 3, "last_step": 9}, [4, 7]),
        ("nan_loss", {"last_step": 6}, [4, 5, 6]),
        ("burst", {}, [4, 5]),
        ("level_shift", {}, list(range(4, 13))),
        ("slow_data", {"last_step": 5}, [4, 5]),
        ("overflow_storm", {"every": 4}, [4, 8, 12]),
    ],
)
def test_a_fault_acts_in_the_steps_that_it_names(kind, values, steps):
    assert steps_of(fault(kind, **values)) == steps


def test_a_drift_grows_by_its_factor_and_stays_finite():
    drift = fault("drift", factor=2.0)
    assert [drift.factor_at(step) for step in (4, 5, 7)] == [2.0, 4.0, 16.0]
    assert drift.factor_at(1_000_000) == 1e30
    assert fault("drift", factor=0.5).factor_at(1_000_000) == 0.0


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ({"faults": []}, ["at least one fault"]),
        ({"faults": [{"kind": "nan", "first_step": 1}]}, ["whose kind is one of nan_loss, ", "'nan'"]),
        ({"faults": [{"first_step": 1}]}, ["whose kind is one of"]),
        ({"faults": ["spike"]}, ["whose kind is one of"]),
        ({"faults": [{"kind": "spike", "first_step": 1, "facto": 2}]},
         ["unknown key 'facto' at faults.0.spike; allowed: ", "factor, signal, kind"]),
        ({"faults": [{"kind": "memory_climb", "first_step": 1, "total": "2GB", "factor": 2}]},
         ["unknown key 'factor' at faults.0.memory_climb; allowed: ", "per_step, total"]),
        ({"faults": [{"kind": "spike", "first_step": 0}]}, ["first_step", "greater than or equal to 1"]),
        ({"faults": [{"kind": "spike", "first_step": 5, "last_step": 4}]},
         ["last_step must be at least first_step = 5, but got 4"]),
        ({"faults": [{"kind": "burst", "first_step": 5}]}, ["last_step is required"]),
        ({"faults": [{"kind": "slow_rank", "first_step": 5}]}, ["rank is required"]),
        ({"faults": [{"kind": "memory_climb", "first_step": 5}]}, ["total is required"]),
        ({"faults": [{"kind": "learning_rate_jump", "first_step": 5, "rank": 0}]}, ["rank", "None"]),
        ({"faults": [{"kind": "spike", "first_step": 5, "factor": "nan"}]}, ["factor", "'nan'"]),
        ({"faults": [{"kind": "slow_data", "first_step": 5, "seconds": "fast"}]}, ["duration", "'fast'"]),
    ],
)  # fmt: skip
def test_a_wrong_plan_is_refused_with_rule_and_value(content, parts):
    with pytest.raises(ConfigError) as refused:
        parse(FaultPlan, content, source="faults.yaml")
    for part in parts:
        assert part in str(refused.value)


SPIKE = {"kind": "spike", "first_step": 3}


def test_faults_stand_in_a_dict_or_beside_the_keys_of_a_best_config(tmp_path):
    path = tmp_path / "best_config.yaml"
    path.write_text("command: [x]\nfaults: [{kind: spike, first_step: 3}]\n")
    (planted,) = load_settings(path, {}).faults
    assert planted.kind == "spike"
    assert load_settings({"faults": [SPIKE]}, {}).faults == (planted,)
    assert load_settings({}, {}).faults == ()


def test_a_plan_named_by_the_environment_wins(tmp_path):
    path = tmp_path / "faults.yaml"
    path.write_text("faults: [{kind: hang, first_step: 9, seconds: 1min}]\n")
    (planted,) = load_settings({"faults": [SPIKE]}, {"MINDTUNE_FAULTS": str(path)}).faults
    assert (planted.kind, planted.seconds) == ("hang", 60.0)


def test_a_trial_with_faults_is_refused():
    with pytest.raises(ConfigError, match="faults must be empty in a trial.* but got spike"):
        load_settings({"faults": [SPIKE]}, {"MINDTUNE_TRIAL_DIR": "trial"})

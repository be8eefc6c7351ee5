"""A program finds its settings and leaves a typed result."""

import json

import pytest

from mindtune.controller.contract import (
    KnobsFile,
    TrialPlan,
    TrialResult,
    read_document,
    write_yaml,
)
from mindtune.controller.errors import ConfigError
from mindtune.controller.trials.worker import TrialContext, outcome_of, reporting, write_result
from mindtune.policies.errors import PolicyError
from mindtune.search.errors import SearchError


@pytest.fixture
def context(tmp_path, monkeypatch):
    plan = TrialPlan(number=3, repeat=1, seed=7, warmup_steps=2, measure_steps=10, deadline_s=60)
    write_yaml(tmp_path / "knobs.yaml", KnobsFile(knobs={"recompute": "full"}, trial=plan))
    monkeypatch.setenv("MINDTUNE_TRIAL_DIR", str(tmp_path))
    return TrialContext.from_env()


def test_settings_are_read_from_the_folder_in_the_environment(context, tmp_path):
    assert context.trial_dir == tmp_path
    assert context.knobs == {"recompute": "full"}
    assert (context.number, context.repeat, context.seed) == (3, 1, 7)
    assert (context.warmup_steps, context.measure_steps, context.deadline_s) == (2, 10, 60.0)


def test_outside_of_a_trial_there_is_no_context(monkeypatch):
    monkeypatch.delenv("MINDTUNE_TRIAL_DIR", raising=False)
    assert TrialContext.from_env() is None


def test_a_folder_without_settings_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("MINDTUNE_TRIAL_DIR", str(tmp_path))
    with pytest.raises(ConfigError, match="knobs.yaml must exist"):
        TrialContext.from_env()
    write_yaml(tmp_path / "knobs.yaml", KnobsFile(knobs={}))
    with pytest.raises(ConfigError, match="must hold `trial`"):
        TrialContext.from_env()


def test_results_of_ranks_lie_side_by_side_and_hold_non_finite_numbers(context, tmp_path):
    ok = TrialResult(outcome="ok", step_time_s=[0.5], loss=[float("nan")])
    write_result(context, ok)
    write_result(context, TrialResult(outcome="oom"), rank=2)
    assert json.loads((tmp_path / "result.json").read_text())["loss"] == ["nan"]
    assert read_document(TrialResult, tmp_path / "result.rank2.json").outcome == "oom"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "knobs.yaml", "result.json", "result.rank2.json",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (MemoryError(), "oom"),
        (RuntimeError("Memory not enough: alloc size[0]"), "oom"),
        (FloatingPointError("nan"), "non_finite"),
        (ConfigError("x"), "bad_config"),
        (SearchError("x"), "bad_config"),
        (PolicyError("x"), "bad_config"),
        (ValueError("x"), "crash"),
    ],
)
def test_exceptions_have_their_outcome(error, outcome):
    assert outcome_of(error) == outcome


def test_an_exception_goes_on_after_it_was_reported(context, tmp_path):
    with pytest.raises(ValueError, match="two"), reporting(context, rank=1):
        raise ValueError("one\ntwo")
    result = read_document(TrialResult, tmp_path / "result.rank1.json")
    assert (result.outcome, result.message) == ("crash", "ValueError: one\ntwo")


def test_a_result_that_was_left_stays(context, tmp_path):
    write_result(context, TrialResult(outcome="ok", step_time_s=1.0))
    with pytest.raises(ValueError), reporting(context):
        raise ValueError("late")
    assert read_document(TrialResult, tmp_path / "result.json").outcome == "ok"


def test_leaving_and_ctrl_c_report_nothing(context, tmp_path):
    for error in (SystemExit(1), KeyboardInterrupt()):
        with pytest.raises(type(error)), reporting(context):
            raise error
    assert not (tmp_path / "result.json").exists()

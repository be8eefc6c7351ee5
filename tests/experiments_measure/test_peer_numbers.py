"""Turns, costs, rescues and reports of the experiment in MindFormers' trainer; no training."""

import json
import math
import os
import subprocess
import sys

import pytest

from mindtune.controller.contract import DecisionRecord
from mindtune.controller.errors import ConfigError
from mindtune.controller.records import DecisionWriter, RunFolder
from mindtune.experiments.mindformers_peer import launch
from mindtune.experiments.mindformers_peer.__main__ import main
from mindtune.experiments.mindformers_peer.case import WAYS, PeerCase, PeerRun, Scale, Step, Turns
from mindtune.experiments.mindformers_peer.report import PeerReport, costs_of, markdown
from mindtune.experiments.mindformers_peer.rescues import CASES, MEANINGS, rescue_runs
from mindtune.experiments.mindformers_peer.workload import training_yaml
from mindtune.experiments.provenance import Provenance

PLACE = Provenance(
    processor="Test CPU", cores=2, python="3.11.0", mindspore="2.10.0", revision="abc",
    date="2026-01-02",
)  # fmt: skip


def a_step(number, loss, *, overflow=False):
    return Step(
        number=number, loss=loss, overflow=overflow, loss_scale=1.0, learning_rate=0.1,
        grad_norm=1.0,
    )  # fmt: skip


def a_run(losses, **changes):
    steps = [
        a_step(index + 1, loss, overflow=math.isnan(loss)) for index, loss in enumerate(losses)
    ]
    given = {
        "steps": steps, "failure": None, "stop_reason": None, "callbacks": [], "weights_finite": True,
        "epochs": 1,
    }  # fmt: skip
    return PeerRun(**(given | changes))


def test_every_way_has_one_turn_a_round_and_each_round_begins_with_another():
    plan = Turns(rounds=len(WAYS), block=2)
    seen = [plan.turn(index) for index in range(plan.steps)]
    assert seen[:7] == [(WAYS[0], 0), (WAYS[0], 1), (WAYS[0], 2), (WAYS[1], 0), (WAYS[1], 1),
                        (WAYS[1], 2), (WAYS[2], 0)]  # fmt: skip
    rounds = [seen[start : start + 18] for start in range(0, plan.steps, 18)]
    assert [turns[0][0] for turns in rounds] == list(WAYS)
    for turns in rounds:
        assert sorted(way for way, _ in turns) == sorted([*WAYS] * 3)


def test_costs_are_ratios_within_rounds_and_milliseconds():
    plan = Turns(rounds=2, block=1)
    # The machine is three times slower in the second round.
    times = {way: [[0.1 + 0.01 * place], [0.3 + 0.03 * place]] for place, way in enumerate(WAYS)}
    hooks = {way: [0.001 * place, 0.002 * place] for place, way in enumerate(WAYS) if place}
    costs = costs_of(a_run([1.0], times_s=times, hooks_s=hooks, parameters=9, actions=2), plan)
    assert costs.ways["off"].over_off is None
    assert costs.ways["off"].hook_ms is None
    assert costs.ways["observe"].over_off.median == pytest.approx(1.2)
    assert costs.ways["observe"].step_ms.median == pytest.approx(240)
    assert costs.ways["observe"].hook_ms.median == pytest.approx(3.0)
    assert (costs.actions, costs.parameters) == (2, 9)


def guarded_runs(tmp_path, stop_reason):
    def train(case, folder):
        acts = case.mindtune["mode"] == "act"
        assert case.plugged == "registry"
        records = RunFolder(folder / "run")
        writer = DecisionWriter(records.decisions)
        if acts:
            for step, verdict, acted in (
                (9, "granted", None),
                (9, "granted", 0.5),
                (10, "refused", None),
            ):
                writer.write(DecisionRecord(
                    step=step, policy="gradient_norm", action="SetLearningRateScale", requested=0.5,
                    before=1.0, verdict=verdict, reason="too high", evidence={}, acted=acted,
                ))  # fmt: skip
        writer.close()
        return a_run([4.0] * 10 + [2.0] * 20 if acts else [4.0, math.nan],
                     stop_reason=stop_reason if acts else None)  # fmt: skip

    return rescue_runs(["absurd_rate"], train, tmp_path / "rescues", lambda _line: None)


def test_a_rescue_is_counted_once_per_action_and_unguarded_first(tmp_path):
    unguarded, guarded = guarded_runs(tmp_path, "the weights are bad")
    assert (unguarded.guard, unguarded.steps, unguarded.updates_lost) == ("unguarded", 2, 1)
    assert math.isnan(unguarded.loss)
    assert unguarded.mean_loss == 4.0
    assert (guarded.actions, guarded.first_action) == (1, "step 9: SetLearningRateScale 0.5")
    assert (guarded.loss, guarded.steps) == (2.0, 30)


def test_the_report_round_trips_and_names_every_way_and_stop(tmp_path):
    plan = Turns(rounds=1, block=1)
    costs = costs_of(
        a_run([1.0], times_s={way: [[0.05]] for way in WAYS}, hooks_s={"observe": [0.0005]}), plan
    )
    report = PeerReport(
        costs=costs, rescues=guarded_runs(tmp_path, "the weights are bad"), load_1m=(0.5, None),
        mindformers="MindFormers 1.8.0, MindSpore 2.7.2", measured=PLACE,
    )  # fmt: skip
    assert PeerReport.model_validate_json(report.to_json()).costs == costs
    text = markdown(report)
    assert (
        "| `observe`: our callback, `observe` | 0.50 [0.50, 0.50] | 50.0 [50.0, 50.0] | 1.000 "
        in text
    )
    assert "- `absurd_rate`, guarded, was stopped: the weights are bad" in text
    assert "before and after: 0.5 and -; MindFormers 1.8.0, MindSpore 2.7.2" in text
    assert all(f"`{way}`" in text for way in WAYS)


def test_every_case_has_a_meaning():
    assert list(CASES) == list(MEANINGS)


def test_a_case_is_a_yaml_of_mindformers(tmp_path):
    case = PeerCase(
        steps=3, scale=Scale(initial=2.0**32), interleave=2, plugged="yaml", learning_rate=0.5,
        mindtune={"mode": "act"}, resume_from=tmp_path / "before",
    )  # fmt: skip
    content = training_yaml(case, tmp_path / "data", own_path=tmp_path / "train.yaml")
    assert content["runner_wrapper"]["scale_sense"] == {
        "type": "DynamicLossScaleUpdateCell", "loss_scale_value": 2.0**32, "scale_factor": 2.0,
        "scale_window": 1000,
    }  # fmt: skip
    assert content["micro_batch_interleave_num"] == 2
    assert content["mindtune"] == {"mode": "act"}
    assert content["lr_schedule"]["lr_end"] == 0.05
    assert content["callbacks"][-1] == {
        "type": "TuneCallback", "config": str(tmp_path / "train.yaml"),
        "auto_register": "tune.TuneCallback",
    }  # fmt: skip
    assert content["resume_training"] is True
    plain = training_yaml(PeerCase(steps=3), tmp_path, own_path=tmp_path)
    assert (plain["load_checkpoint"], plain["resume_training"]) == ("", False)
    assert plain["runner_wrapper"]["scale_sense"] == 1.0
    assert [entry["type"] for entry in plain["callbacks"]] == ["MFLossMonitor", "Witness"]


def test_only_mindtune_comes_along_into_the_other_environment(tmp_path):
    root = launch.import_root(tmp_path / "root")
    done = subprocess.run(
        [sys.executable, "-c", "import mindtune.policies as p; print(list(p.__path__)[0])"],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(root)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == str(root / "mindtune" / "policies")
    assert sorted(path.name for path in root.iterdir()) == ["mindtune"]


def test_a_training_that_cannot_run_says_why(tmp_path):
    with pytest.raises(
        ConfigError, match=r"code 0, but got 3; .*mindformers 1\.8\.0[\s\S]*no such"
    ):
        launch.run_case(
            PeerCase(steps=1), tmp_path, python=sys.executable, root=tmp_path,
            program=["-c", "import sys; print('no such module'); sys.exit(3)"],
        )  # fmt: skip
    assert json.loads((tmp_path / "case.json").read_text())["steps"] == 1


def test_without_the_other_python_the_command_says_what_is_missing(monkeypatch, capsys, tmp_path):
    monkeypatch.delenv(launch.PYTHON_VARIABLE, raising=False)
    assert main(["--out", str(tmp_path / "out")]) == 2
    assert launch.PYTHON_VARIABLE in capsys.readouterr().err
    assert not (tmp_path / "out").exists()

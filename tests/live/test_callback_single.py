"""TuneCallback and tune_loop around real trainings: one process per mode, many facts."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mindtune.controller.records import read_decisions, read_signals

pytestmark = pytest.mark.mindspore

HERE = Path(__file__).parent
GRAPH = (
    "three_lines", "identical", "foreign", "foreign_knobs", "foreign_rule", "untouched_in_observe_mode", "resize",
    "guarded", "stopped", "crashed", "broken", "trial", "evaluated", "resumed", "twice", "ragged",
    "host_cost", "model_signals", "handed_over",
)  # fmt: skip
PYNATIVE = ("loop", "foreign_knobs", "guarded", "model_signals")
KNOBS_OF_OUR_STEP = ["clip_norm", "compression_ratio", "global_batch_size", "micro_batch_size",
                     "skip_threshold"]  # fmt: skip


def run(folder, mode, scenarios):
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MINDTUNE_")
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "single_callback.py"), mode, *scenarios],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    seen = json.loads((folder / "seen.json").read_text(encoding="utf-8"))
    return seen | {"log": done.stderr}


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    return run(tmp_path_factory.mktemp("graph"), "graph", GRAPH)


@pytest.fixture(scope="module")
def pynative(tmp_path_factory):
    return run(tmp_path_factory.mktemp("pynative"), "pynative", PYNATIVE)


@pytest.fixture(params=["graph", "pynative"])
def both(request):
    return request.getfixturevalue(request.param)


def column(rows, name):
    return [row[name] for row in rows]


# The three lines ------------------------------------------------------------------------------


def test_three_lines_leave_a_run_folder_with_every_signal(graph):
    seen = graph["three_lines"]
    assert seen["files"] == [
        "conditions.json",
        "decisions.jsonl",
        "plan.json",
        "result.json",
        "signals.csv",
        "state",
    ]
    assert seen["plan"] == 100
    assert "plan.json" not in seen["looped_files"], "nobody knows how long a loop goes on"
    rows = seen["rows"]
    assert column(rows, "step") == list(range(1, 101))
    assert column(rows, "phase") == ["compile"] + ["train"] * 99
    assert set(column(rows, "run")) == {0}
    for row in rows:
        assert row["grad_norm"] > 0
        assert row["overflow"] == row["update_skipped"] == 0
        assert row["learning_rate"] == pytest.approx(1e-3)
        assert (row["learning_rate_scale"], row["clip_norm"]) == (1.0, "inf")
        assert (row["global_batch_size"], row["num_microbatches"]) == (32, 1)
        assert 0 <= row["data_time_s"] < row["step_time_s"]
        assert row["loss_scale"] is None
        # Integer data alone count as tokens; these are floats.
        assert row["tokens"] is None
    assert rows[-1]["device_memory_total_bytes"] > 0
    walls = column(rows, "wall_time_s")
    assert walls == sorted(walls)
    assert sum(column(rows, "step_time_s")) == pytest.approx(walls[-1], rel=1e-6)


def test_the_result_of_a_run_in_good_order(graph):
    result = graph["three_lines"]["result"]
    assert (result["outcome"], result["steps"], result["actions"]) == ("ok", 100, 0)
    assert result["final_loss"] == graph["three_lines"]["rows"][-1]["loss"]
    assert result["peak_memory_bytes"] > 2**27
    assert result["effective"] == {
        "micro_batch_num": 1, "micro_batch_size": 32, "gradient_compression": "none",
        "data_parallel": 1, "model_parallel": 1,
    }  # fmt: skip
    looped = graph["three_lines"]["looped"]
    assert looped["outcome"] == "ok"
    assert looped["final_loss"] < result["final_loss"]  # it goes on with the same weights


def test_observe_mode_leaves_every_bit_of_the_losses(graph):
    losses = graph["identical"]
    assert len(losses["theirs"]) == 50
    assert losses["ours"] == losses["theirs"]
    assert losses["recorded"] == losses["theirs"]


# Steps that are not ours -----------------------------------------------------------------------


@pytest.mark.parametrize("length", ["1", "3", "4", "5", "7"])
def test_a_foreign_step_is_read_as_far_as_it_tells(graph, length):
    rows = graph["foreign"][length]["rows"]
    assert column(rows, "step") == list(range(1, 9))
    told = {
        "overflow": int(length) >= 3, "update_skipped": int(length) >= 3,
        "loss_scale": int(length) >= 3, "learning_rate": int(length) >= 4,
        "grad_norm": int(length) >= 5, "learning_rate_scale": int(length) >= 4,
    }  # fmt: skip
    for name, is_told in told.items():
        assert all((value is not None) == is_told for value in column(rows, name)), name
    assert column(rows, "global_batch_size") == [8] * 8
    if length == "1":
        return
    assert column(rows, "overflow") == [0, 0, 0, 0, 1, 0, 0, 0]
    assert column(rows, "loss_scale")[:5] == [1024.0] * 5
    assert column(rows, "loss")[4] == "nan"
    assert all(isinstance(loss, float) for loss in column(rows, "loss")[5:])
    if told["learning_rate"]:
        assert column(rows, "learning_rate_scale") == [1.0] * 8
        assert column(rows, "learning_rate") == pytest.approx([0.05] * 8)
    if told["grad_norm"]:
        assert column(rows, "grad_norm")[4] == "nan"


def test_the_shapes_agree_where_they_tell_the_same(graph):
    losses = [column(graph["foreign"][length]["rows"], "loss")[:4] for length in "1345"]
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("length", ["1", "3", "4", "5", "7"])
def test_what_cannot_be_turned_is_named_once(graph, length):
    (advice,) = [
        entry
        for entry in graph["foreign"][length]["decisions"]
        if entry["requested"] == "unreachable_knobs"
    ]
    missing = KNOBS_OF_OUR_STEP + (["loss_scale"] if length == "1" else [])
    assert f"{', '.join(sorted(missing))} cannot be turned" in advice["reason"]
    reached = "learning_rate_scale" + ("" if length == "1" else ", loss_scale")
    assert f"reached: {reached}. Wrap the network" in advice["reason"]
    assert (advice["action"], advice["policy"], advice["step"]) == ("Advise", "sensors", 0)


@pytest.mark.parametrize("form", ["float", "schedule"])
def test_a_foreign_step_obeys_inside_its_branch(both, form):
    seen = both["foreign_knobs"][form]
    assert seen["moved"] == pytest.approx([0.05, 0.0, 0.05, 0.5, 0.05], rel=1e-3)
    assert seen["rates"] == pytest.approx([0.05, 0.0, 0.05, 0.5, 0.05], rel=1e-3)
    # Read back from inside the graph, not from what was written.
    assert seen["acted"] == [1.0, 0.0, 1.0, 10.0, 1.0]
    assert seen["scales"] == [2.0**10, 2.0**11, 2.0**12, 2.0**13, 2.0**14]
    assert seen["reachable"] == ["learning_rate_scale", "loss_scale"]
    assert seen["unreachable"] == KNOBS_OF_OUR_STEP


def test_once_a_policy_owns_the_loss_scale_the_own_rule_of_a_foreign_step_rests(graph):
    seen = graph["foreign_rule"]
    # An overflow in the second step, then a growth after three clean ones.
    assert seen["False"]["acted"] == [1024, 1024, 512, 512, 512, 1024, 1024, 1024]
    assert seen["True"]["acted"] == [1024] * 8
    assert seen["True"]["dynamic"] is True


def test_observe_mode_does_not_even_wrap_a_foreign_schedule(graph):
    assert graph["untouched_in_observe_mode"] == "CosineDecayLR"


# Acting ---------------------------------------------------------------------------------------


def test_in_observe_mode_decisions_are_written_and_nothing_acts(both):
    seen = both["guarded"]["observe"]
    assert set(column(seen["rows"], "learning_rate_scale")) == {1.0}
    wanted = [entry for entry in seen["decisions"] if entry["action"] == "SetLearningRateScale"]
    assert wanted
    assert {entry["verdict"] for entry in seen["decisions"]} <= {"observed", "refused"}
    assert seen["result"]["actions"] == 0


def test_in_act_mode_the_learning_rate_obeys_from_the_next_step_on(both):
    observed, acted = both["guarded"]["observe"], both["guarded"]["act"]
    granted = [
        entry
        for entry in acted["decisions"]
        if entry["action"] == "SetLearningRateScale" and entry["verdict"] == "granted"
    ]
    assert granted
    scales = column(acted["rows"], "learning_rate_scale")
    for entry in granted:
        assert scales[entry["step"]] == pytest.approx(entry["requested"])
        assert entry["acted"] == pytest.approx(entry["requested"])
        assert entry["reason"]
        assert entry["evidence"]
    for row in acted["rows"]:
        assert row["learning_rate"] == pytest.approx(0.001 * row["learning_rate_scale"])
    first = granted[0]["step"]
    assert acted["losses"][: first + 1] == observed["losses"][: first + 1]
    assert acted["losses"][first + 1 :] != observed["losses"][first + 1 :]
    assert acted["result"]["final_loss"] < observed["result"]["final_loss"]
    assert acted["result"]["actions"] >= len(granted)


def test_one_line_in_the_log_per_granted_action(graph):
    lines = [
        line
        for line in graph["log"].splitlines()
        if "SetLearningRateScale 1.0 -> " in line and "granted: " in line
    ]
    assert lines
    assert all(
        line.startswith("WARNING mindtune.controller.live.controller step") for line in lines
    )


def test_the_batch_is_resized_live_and_only_a_new_graph_compiles(graph):
    rows = graph["resize"]["rows"]
    assert column(rows, "num_microbatches")[:7] == [1, 1, 2, 2, 4, 4, 1]
    assert column(rows, "global_batch_size")[:7] == [8, 8, 16, 16, 32, 32, 8]
    phases = column(rows, "phase")
    assert phases[:7] == ["compile", "train", "compile", "train", "train", "train", "train"]
    assert graph["resize"]["result"]["steps"] == graph["resize"]["plan"] == 8
    assert "hidden_steps" not in graph["resize"]["result"]["findings"]


def test_a_scale_that_the_trials_found_to_run_clean_costs_one_update(graph):
    seen = graph["handed_over"]
    scales = [row["loss_scale"] for row in seen["known"]]
    assert scales == [2.0**24] + [1024.0] * 13
    assert [row["update_skipped"] for row in seen["known"]] == [1.0] + [0.0] * 13
    assert sum(row["update_skipped"] for row in seen["unknown"]) == 8


def test_a_lost_run_is_stopped_with_a_diagnosis(graph):
    seen = graph["stopped"]
    assert 10 < seen["calls"] < 100
    result = seen["result"]
    assert (result["outcome"], result["steps"]) == ("stopped", seen["calls"])
    assert result["message"] == seen["reason"]
    assert "non-finite" in result["message"]
    (stop,) = [entry for entry in seen["decisions"] if entry["action"] == "RequestStop"]
    assert (stop["step"], stop["verdict"]) == (seen["calls"], "granted")
    assert result["findings"]["non_finite_loss"] == 1


# Ends -----------------------------------------------------------------------------------------


def test_an_exception_in_training_leaves_a_typed_result_and_goes_on(graph):
    seen = graph["crashed"]
    assert seen["raised"] == "no room for the next batch"
    result = seen["result"]
    assert (result["outcome"], result["steps"]) == ("oom", 5)
    assert result["message"] == "MemoryError: no room for the next batch"
    assert column(seen["rows"], "step") == [1, 2, 3, 4, 5]


def test_a_failure_of_our_own_ends_a_trial_but_no_training(graph):
    seen = graph["broken"]
    run = seen["run"]
    assert (run["raised"], run["gave_up"], run["stop"], run["calls"]) == ("", True, None, 7)
    assert column(seen["rows"], "step") == [1, 2, 3]
    assert seen["result"]["outcome"] == "crash"
    assert "not callable" in seen["result"]["message"]
    assert "mindtune failed in step 4 and watches no more" in graph["log"]
    assert "not callable" in seen["trial"]["raised"]
    assert seen["trial"]["calls"] == 4


def test_a_training_that_cannot_begin_leaves_a_result_and_no_thread(graph):
    seen = graph["broken"]
    assert seen["threads"] == []
    assert seen["never_begun"]["outcome"] == "crash"
    assert "in the middle" in seen["never_begun"]["message"]


def test_a_trial_ends_itself_and_leaves_what_was_measured(graph):
    seen = graph["trial"]
    result = seen["result"]
    assert seen["calls"] == 2 * (3 + 5)
    assert result["outcome"] == "ok"
    rows = seen["rows"]
    assert len(rows) == 8
    for name in ("loss", "grad_norm", "overflow", "update_skipped", "step_time_s"):
        assert result[name] == column(rows, name)[3:]
    # A sleep between the two calls of step 4 is part of that step.
    assert result["step_time_s"][0] > 0.5
    assert rows[3]["data_time_s"] > 0.49
    assert (result["tokens_per_step"], result["samples_per_step"]) == (64, 16)
    assert (result["eval_loss"], result["memory_source"]) == (0.25, "rss")
    assert result["effective"] == {
        "micro_batch_num": 2, "micro_batch_size": 8, "gradient_compression": "none",
        "data_parallel": 1, "model_parallel": 1, "precision": "float32",
    }  # fmt: skip
    assert seen["reason"] == "the trial has measured its steps"


def test_evaluation_takes_no_step_time_and_its_loss_is_recorded(graph):
    seen = graph["evaluated"]
    rows = seen["rows"]
    known = [row["step"] for row in rows if row["eval_loss"] is not None]
    assert known == [5, 9]
    assert seen["result"]["eval_loss"] not in column(rows, "eval_loss")
    # Half a second of evaluation came before these steps; a slow batch before step 3.
    for step in (5, 9):
        assert rows[step - 1]["step_time_s"] < 0.5
    assert rows[2]["step_time_s"] > rows[2]["data_time_s"] > 0.29


def test_a_resumed_run_goes_on_with_step_knobs_and_a_new_segment(graph):
    seen = graph["resumed"]
    assert column(seen["rows"], "run") == [0] * 12 + [1] * 3 + [2] * 2
    assert column(seen["rows"], "step") == [*range(1, 13), 11, 12, 13, 14, 15]
    assert seen["plan"] == 15
    assert column(seen["rows"], "learning_rate_scale") == [1.0] * 4 + [0.5] * 13
    assert {"controller_000000005.json", "controller_000000010.json"} <= set(seen["states"])
    assert column(seen["rows"], "phase")[5] == "save"
    assert "start afresh" not in graph["log"]
    # A callback of the user's evaluated for 0.4 s after step 7.
    assert [row["eval_loss"] for row in seen["rows"][6:9]] == [None, 0.5, None]
    assert seen["rows"][7]["step_time_s"] < 0.4


def test_one_callback_in_two_trainings_is_one_run_of_two_segments(graph):
    seen = graph["twice"]
    assert column(seen["rows"], "step") == [1, 2, 3, 4, 5]
    assert column(seen["rows"], "run") == [0, 0, 0, 1, 1]
    assert seen["result"]["steps"] == 5


def test_a_ragged_last_batch_compiles_once_and_counts_its_own_tokens(graph):
    rows = graph["ragged"]["rows"]
    assert column(rows, "phase") == ["compile", "train", "compile", "train", "train", "train"]
    assert column(rows, "tokens") == [80, 80, 40, 80, 80, 40]
    assert set(column(rows, "global_batch_size")) == {8}


def test_the_host_side_costs_milliseconds_at_most(graph):
    # The limit only catches a blunder: other processes share the machine.
    assert graph["host_cost"]["cpu_us_50"] < 5000


# Hand-written loops ---------------------------------------------------------------------------


def test_a_tuned_loop_has_the_losses_of_a_plain_one(pynative):
    losses = pynative["loop"]["losses"]
    assert len(losses["theirs"]) == 20
    assert losses["ours"] == losses["theirs"]


def test_a_tuned_loop_records_like_the_callback(pynative):
    seen = pynative["loop"]
    rows = seen["rows"]
    assert column(rows, "step") == list(range(1, 21))
    assert column(rows, "loss") == seen["losses"]["ours"]
    assert column(rows, "tokens") == [32] * 20
    assert [row["step"] for row in rows if row["eval_loss"] is not None] == [11]
    # The validation took 0.4 s between the two rows, and no step's time.
    apart = rows[10]["wall_time_s"] - rows[9]["wall_time_s"]
    assert apart - rows[10]["step_time_s"] >= 0.4
    assert (seen["result"]["outcome"], seen["result"]["eval_loss"]) == ("ok", 0.125)
    assert (seen["plan"], seen["stale"]) == (20, False)


def test_a_loop_without_batches_knows_no_waiting_and_an_exception_is_a_crash(pynative):
    seen = pynative["loop"]
    assert seen["raised"] == "in the middle"
    assert [(row["step"], row["run"], row["data_time_s"]) for row in seen["after"]] == [
        (21, 1, None), (22, 1, None), (23, 1, None),
    ]  # fmt: skip
    assert (seen["crash"]["outcome"], seen["crash"]["steps"]) == ("crash", 23)


# Kill -----------------------------------------------------------------------------------------


def test_sigkill_in_mid_run_leaves_readable_records(tmp_path):
    process = subprocess.Popen(
        [sys.executable, str(HERE / "single_callback.py"), "graph", "endless"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    table = tmp_path / "endless" / "run" / "signals.csv"
    try:
        end = time.monotonic() + 120
        while not (table.exists() and table.stat().st_size > 20_000):
            assert time.monotonic() < end
            assert process.poll() is None
            time.sleep(0.1)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    steps = [row.observation.step for row in read_signals(table)]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > 50
    read_decisions(table.with_name("decisions.jsonl"))
    assert not table.with_name("result.json").exists()
    assert math.isfinite(read_signals(table)[-1].observation.loss)


# Inside the model ------------------------------------------------------------------------------


def test_sampling_only_looks(both):
    seen = both["model_signals"]
    off, on = seen["losses"]
    assert len(off) == 12
    assert on == off
    assert seen["same_weights"]
    assert seen["off_files"] == [
        "conditions.json",
        "decisions.jsonl",
        "plan.json",
        "result.json",
        "signals.csv",
        "state",
    ]


def test_nothing_is_compiled_for_what_is_off(graph):
    # In graph mode the two graphs of a sampled step are compiled once, with the first sample.
    assert graph["model_signals"]["compiled"] == [0, 1]


def test_samples_agree_with_the_weights_before_and_after(both):
    seen = both["model_signals"]
    assert [record["step"] for record in seen["records"]] == [3, 6, 9, 12]
    for record in seen["records"]:
        assert record["layers"] == ["first", "second"]
        step = record["step"]
        skipped = step == 6
        assert record["update_skipped"] == skipped
        layers = seen["expected"][str(step)]
        for layer, (moved, weight, entries) in enumerate(layers):
            assert record["weight_norms"][layer] == pytest.approx(weight, rel=1e-5)
            # Plain SGD at a rate of 1/8 moves by an eighth of the gradient.
            norm = record["gradient_norms"][layer]
            assert moved == pytest.approx(0.0 if skipped else norm / 8, rel=1e-4)
            assert record["update_ratios"][layer] == pytest.approx(moved / weight, rel=1e-4)
            counts = record["gradient_counts"][layer]
            assert len(counts) == len(record["log10_edges"]) + 1
            others = record["gradient_zeros"][layer] + record["gradient_non_finite"][layer]
            assert sum(counts) + others == entries
            # Most entries lie within a factor of 100 below the root of their mean square.
            top = math.floor(math.log10(norm / math.sqrt(entries))) + 12
            assert sum(counts[top - 1 : top + 3]) > entries / 2
        assert record["sample_time_s"] > 0


def test_norms_of_the_layers_make_the_norms_of_the_step(both):
    seen = both["model_signals"]
    rows = {row[0]: row for row in seen["rows"]}
    assert [step for step, row in rows.items() if row[3] is not None] == [3, 6, 9, 12]
    for record in seen["records"]:
        _, _, grad_norm, update_norm, _ = rows[record["step"]]
        assert math.hypot(*record["gradient_norms"]) == pytest.approx(grad_norm, rel=1e-5)
        moved = [moved for moved, _, _ in seen["expected"][str(record["step"])]]
        assert update_norm == record["update_norm"]
        assert update_norm == pytest.approx(math.hypot(*moved), rel=1e-4)
    assert rows[6][3] == 0


def test_the_layer_that_breaks_first_is_named(both):
    seen = both["model_signals"]["spoilt"]
    # 10: the step after the first overflow is looked at as well.
    assert [record["step"] for record in seen["records"]] == [4, 8, 10, 12]
    broken = [record["gradient_non_finite"] for record in seen["records"]]
    assert broken == [[0, 0], [0, 0], [128, 0], [128, 0]]
    advice = [entry for entry in seen["decisions"] if str(entry[1]).startswith("broken_gradient")]
    assert len(advice) == 1
    assert advice[0][:2] == [10, "broken_gradient:first"]
    assert "1 of 2 layers" in advice[0][2]


def test_a_missing_attention_entropy_is_said_once_with_the_remedy(both):
    told = [
        entry
        for entry in both["model_signals"]["spoilt"]["decisions"]
        if entry[1] == "attention_entropy_missing"
    ]
    assert len(told) == 1
    assert "model_signals=fn" in told[0][2]


def test_the_models_own_function_is_asked_and_may_not_give_whole_maps(both):
    seen = both["model_signals"]
    assert seen["shapes"] == [[8, 8]] * 4
    for record in seen["records"]:
        assert record["attention_entropy"] == [[0.5, "nan"]]
        assert record["token_confidence"] == 0.25
        # With the batch of the step, and the weights that it begins with.
        loss = seen["losses"][1][record["step"] - 1]
        assert record["layer_losses"] == [pytest.approx(loss, rel=1e-6)]
        assert 0 < record["arrays"]["largest"] < 1
    assert seen["decisions"] == []
    assert seen["hooks"] == 0
    steps, hooks, outcome, message = seen["refused"]
    assert (steps, hooks, outcome) == (3, 0, "bad_config")
    assert "maps of model_signals must have at most 2 dimensions" in message


def test_a_loss_without_weights_is_found(pynative):
    seen = pynative["model_signals"]["untrained"]
    assert seen["findings"]["no_trainable_parameters"] == 1
    assert seen["steps"][:2] == [4, 5]


def test_a_hand_written_loop_is_sampled_alike(pynative):
    seen = pynative["model_signals"]["by_hand"]
    (record,) = seen["records"]
    assert (record["step"], record["arrays"]) == (3, {"rows": 8})
    # Asked once, with the first of both micro-batches.
    assert seen["firsts"] == [seen["given"]]
    assert math.hypot(*record["gradient_norms"]) == pytest.approx(seen["rows"][2][2], rel=1e-5)
    assert seen["rows"][2][3] == record["update_norm"] > 0

"""The training step in one process, graph and PyNative mode: each mode runs once, many facts."""

import json
import math
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from mindtune.controller.live.packed import NUM_HOST_SIGNALS

pytestmark = pytest.mark.mindspore

HERE = Path(__file__).parent
FORMS = (
    "float",
    "sgd float",
    "table",
    "schedule",
    "groups of floats",
    "groups with a schedule",
    "experimental",
)


@pytest.fixture(scope="module", params=["graph", "pynative"])
def seen(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    done = subprocess.run(
        [sys.executable, str(HERE / "single_step.py"), request.param, str(folder)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads((folder / "seen.json").read_text(encoding="utf-8")) | {"mode": request.param}


@pytest.mark.parametrize("form", FORMS)
def test_neutral_knobs_give_the_losses_of_mindspores_own_step(seen, form):
    losses = seen["identity"][form]
    assert len(losses["theirs"]) == 50
    assert losses["ours"] == losses["theirs"]
    assert losses["reported"] == losses["theirs"]


def scheduled(form, step):
    """The rate of the first group that the schedule gives at a step."""
    if form == "table":
        return 0.1 / (step + 1)
    if "schedule" in form:
        return 0.005 * (1 + math.cos(math.pi * step / 50))
    return 0.01


@pytest.mark.parametrize("form", FORMS)
def test_learning_rate_scale_is_obeyed_and_reported(seen, form):
    rows = seen["obedience"][form]
    zero, back, high = rows[1:4]
    assert zero[1:3] == [0.0, 0.0]
    assert all(row[3] == row[0] for row in rows)
    assert back[1] > 0
    assert high[1] > 50 * back[1]
    for index, (scale, _, rate, _) in enumerate(rows):
        assert rate == pytest.approx(scale * scheduled(form, index), rel=1e-5)


def test_the_scale_lies_over_a_rate_that_somebody_else_writes(seen):
    rate, scale, left_behind, *decayed = seen["foreign_rate"]
    assert (rate, scale, left_behind) == (0.125, 0.5, 0.25)
    assert decayed == pytest.approx([0.005, 0.0025, 0.00125])


def test_any_split_into_micro_batches_gives_the_step_of_the_whole_batch(seen):
    accumulation = seen["accumulation"]
    assert [row[:2] for row in accumulation["rows"]] == [
        [count, count] for count in (1, 2, 4, 1, 2, 8, 3)
    ]
    for _, _, loss, split_loss, norm, split_norm in accumulation["rows"]:
        assert split_loss == pytest.approx(loss, rel=1e-6)
        assert split_norm == pytest.approx(norm, rel=1e-6)
    assert all(accumulation["accumulating"])
    assert accumulation["steps"] == 7


def test_knobs_set_while_accumulating_act_with_the_next_optimizer_step(seen):
    assert seen["knobs_wait"]["acted"] == [2, 4.0, 3, 8.0]


def test_a_new_number_of_micro_batches_compiles_nothing(seen):
    # PyNative mode compiles nothing at all.
    expected = [1, 1, 1] if seen["mode"] == "graph" else [0, 0, 0]
    assert seen["knobs_wait"]["compiled"] == expected


def test_a_skipped_update_leaves_weights_moments_and_schedule(seen):
    skipping = seen["skipping"]
    assert skipping["threshold"] == [True, False]
    assert skipping["threshold unchanged"]
    assert skipping["nan"] == [True, True]
    assert skipping["nan unchanged"]
    assert skipping["rates"][1] == skipping["rates"][2] != skipping["rates"][0]
    assert skipping["moves again"]
    assert skipping["clean_steps"] == 1


def test_an_enormous_finite_update_is_skipped_in_its_own_step(seen):
    enormous = seen["enormous"]
    assert (enormous["skipped"], enormous["overflow"]) == (True, False)
    assert enormous["over"] > 1e6
    assert enormous["threshold"] == pytest.approx(10, rel=1e-6)
    # Weights, moments and `global_step`: the schedule waits for a skipped update.
    assert enormous["unchanged"]
    assert enormous["next"] == [False, True]
    assert enormous["updates"] == 4
    # It was no overflow: the loss scale stays, and the steps without one go on being counted.
    assert enormous["scales"] == [8.0, 8.0]
    assert enormous["clean_steps"] == 4


def test_a_micro_batch_in_parts_gives_the_step_of_the_whole(seen):
    splitting = seen["splitting"]
    assert (splitting["before"], splitting["after"]) == (None, 6)
    for split, count, acted, micro_batches, *pairs in splitting["rows"]:
        assert (acted, micro_batches) == (split, split * count)
        loss, split_loss, norm, split_norm, distance, returned, split_returned = pairs
        assert split_loss == pytest.approx(loss, rel=1e-6)
        assert split_norm == pytest.approx(norm, rel=1e-6)
        assert split_returned == pytest.approx(returned, rel=1e-6)
        # Six steps of rounding.
        assert distance < 1e-6
    assert splitting["call"][0] == pytest.approx(splitting["call"][1], rel=1e-6)


def test_every_size_of_a_part_compiles_once(seen):
    # Parts of 4, 2 and 1 samples: the ragged micro-batch runs in single ones.
    assert seen["splitting"]["compiled"] == ([3, 1] if seen["mode"] == "graph" else [0, 0])


def test_a_micro_batch_of_unequal_inputs_is_run_whole_and_reported_so(seen):
    splitting = seen["splitting"]
    assert splitting["unequal"] is None
    parts, micro_batches, loss, expected = splitting["whole"]
    assert (parts, micro_batches) == (1, 1)
    assert loss == pytest.approx(expected, rel=1e-6)


RETURNS = [
    f"{form}, {kind}"
    for form in ("float", "schedule", "experimental", "sgd float")
    for kind in ("memory", "disk")
]


@pytest.mark.parametrize("name", RETURNS)
def test_a_return_restores_all_that_an_update_changes_without_a_compile(seen, name):
    found = seen["returns"][name]
    form = name.split(",")[0]
    assert found["moved"] >= 9
    # The schedule's position alone stays where it is.
    assert found["left"] == ([] if form == "experimental" else ["global_step"])
    if form != "schedule":
        assert found["again"] == found["straight"]
    assert found["compiled"] == ([1, 0] if seen["mode"] == "graph" else [0, 0])
    assert {"norm.moving_mean", "frozen", "mindtune.clean_steps"} <= set(found["names"])
    assert not any("learning_rate" in name or "scale" in name for name in found["names"])


def test_copies_share_what_never_changes_and_only_own_whole_files_are_read(seen):
    copies = seen["copies"]
    assert copies["shared"] == ["frozen"]
    for counted, stored in copies["bytes"]:
        assert counted == stored > 0
    assert copies["stuck"] == [5]
    # Another rank's half-written file is its own affair.
    assert copies["partial"] == [False, True]
    assert copies["files"] == [f"snapshot_rank3_{step:09d}.ckpt" for step in (2, 3)]
    assert copies["holds"] == [True, False, True, False]
    reasons = ("not there", "no longer in memory", "damaged", "damaged", "not written as",
               "damaged", "damaged", "not written as", "other Parameters")  # fmt: skip
    assert len(copies["refused"]) == len(reasons)
    for message, reason in zip(copies["refused"], reasons, strict=True):
        assert message.startswith("ConfigError")
        assert reason in message
    assert "cannot be written" in copies["unwritable"]


def test_states_are_kept_where_they_fit(seen):
    assert seen["opened"] == {
        "memory": True, "too large": False, "disk": True, "no folder": False,
    }  # fmt: skip


def test_without_skipping_a_nan_acts_as_in_mindspores_own_step(seen):
    assert seen["poison_acts"] == [True, True, True, False]


def test_clipping_bounds_the_move_and_reports_its_factor(seen):
    for bound, norm, factor, moved in seen["clipping"]:
        assert factor == pytest.approx(min(1.0, bound / norm), rel=1e-6)
        assert moved == pytest.approx(min(bound, norm), rel=1e-4)
    assert seen["clipping"][1][2] == 1.0


def test_loss_scale_follows_real_float16_overflows(seen):
    rows = seen["real_overflow"]["own"]
    assert rows[0][:4] == [2.0**24, True, True, True]
    assert sum(row[1] for row in rows) >= 5
    assert any(not row[1] for row in rows)
    for (scale, overflow, _, _, clean, _), following in pairwise(rows):
        if overflow:
            assert following[0] == scale / 2
        elif clean % 4 == 0:
            assert following[0] == scale * 2
        else:
            assert following[0] == scale
    for _, overflow, skipped, unchanged, _, loss in rows:
        assert overflow == skipped == unchanged
        assert math.isfinite(loss)


def test_a_policy_that_manages_the_loss_scale_is_left_alone(seen):
    assert seen["real_overflow"]["managed"] == [[2.0**24, True]] * 3


def test_model_trains_with_it(seen):
    in_model = seen["in_model"]
    assert in_model["same names"]
    assert in_model["steps"] == 3
    reports = [report for _, report in in_model["seen"]]
    assert [report is None for report in reports] == [True, False] * 3
    assert all(loss == report for loss, report in in_model["seen"] if report is not None)


def test_checkpoint_and_rewind_continue_bit_identically(seen):
    checkpoint = seen["checkpoint"]
    assert len(checkpoint["straight"]) == 4
    assert checkpoint["fresh"] == checkpoint["straight"]
    assert checkpoint["rewound"] == checkpoint["straight"]
    assert {row[2] for row in checkpoint["straight"]} == {8.0, 16.0}


def test_wrong_values_are_refused_with_rule_and_value(seen):
    expected = [
        ("num_microbatches", "0"),
        ("num_microbatches", "1.5"),
        ("learning_rate_scale", "-1"),
        ("learning_rate_scale", "nan"),
        ("loss_scale", "inf"),
        ("clip_norm", "-2"),
        ("skip_threshold", "nan"),
        ("compression_ratio", "none"),
        ("host signals", "got 1"),
        ("micro_batch_split", "0"),
        ("micro_batch_split", "1.5"),
        ("micro_batch_split", "got 2"),
        ("gradient_compression", "float16"),
        ("gradient_compression", "int8"),
        ("optimizer must be", "got a Net"),
        ("optimizer must be", "got a float"),
        ("one TuneCallback", "hold 2"),
    ]
    assert len(seen["refusals"]) == len(expected)
    for message, (rule, value) in zip(seen["refusals"], expected, strict=True):
        assert message.startswith("ConfigError")
        assert rule in message
        assert value in message


def test_a_hand_written_loop_shares_the_update(seen):
    own_loop = seen["own_loop"]
    assert own_loop["losses"] == own_loop["expected"]
    assert own_loop["row"] == [[float(index) for index in range(NUM_HOST_SIGNALS)]]
    assert own_loop["packed once"]


@pytest.mark.parametrize("count", [1, 2])
def test_a_hook_sees_and_changes_the_gradients_of_the_steps_it_wants(seen, count):
    found = seen["hooks"][str(count)]
    rows = found["rows"]
    # Both paths of a step give the same losses to the last bit until a gradient is changed.
    assert [row[0] for row in rows[:3]] == [row[1] for row in rows[:3]]
    assert rows[2][3] == pytest.approx(2 * rows[2][2], rel=1e-6)
    assert rows[3][1] != rows[3][0]
    assert [call[0] for call in found["called"]] == [3, 5]
    assert [call[1] / count for call in found["called"]] == pytest.approx([rows[2][1], rows[4][1]])

"""The training step on two ranks: one msrun job, many facts."""

import json
import math
import os
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from mindtune.controller.live.packed import NUM_HOST_SIGNALS

pytestmark = [pytest.mark.mindspore, pytest.mark.msrun]

HERE = Path(__file__).parent
COMPRESSIONS = ("none", "float16", "topk:1.0", "topk:0.1")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    command = [
        Path(sysconfig.get_path("scripts")) / "msrun",
        "--worker_num=2",
        "--local_worker_num=2",
        f"--master_port={free_port()}",
        f"--log_dir={folder / 'logs'}",
        "--join=True",
        HERE / "ranks_step.py",
        folder,
    ]
    # msrun starts its ranks with the `python` of the path.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    found = [folder / f"rank{rank}.json" for rank in range(2)]
    assert all(path.is_file() for path in found), done.stdout[-6000:] + done.stderr[-3000:]
    return [json.loads(path.read_text(encoding="utf-8")) for path in found]


def test_losses_are_those_of_mindspores_own_data_parallel_step(ranks):
    for seen in ranks:
        assert len(seen["own_step"]["theirs"]) == 6
        assert seen["own_step"]["ours"] == seen["own_step"]["theirs"]


@pytest.mark.parametrize(
    "run", [*COMPRESSIONS, "accumulated", "pynative none", "pynative topk:0.1"]
)
def test_ranks_agree_bit_for_bit(ranks, run):
    one, other = (seen[run] for seen in ranks)
    assert one["losses"] == other["losses"]
    assert one["norms"] == other["norms"]
    assert one["state"] == other["state"]


def test_all_entries_sent_by_top_k_is_the_dense_reduction(ranks):
    seen = ranks[0]
    assert seen["topk:1.0"]["losses"] == seen["none"]["losses"]
    assert seen["topk:1.0"]["state"] == seen["none"]["state"]


def test_float16_rounds_and_top_k_holds_back(ranks):
    seen = ranks[0]
    dense, half, top_k = (seen[run]["losses"] for run in ("none", "float16", "topk:0.1"))
    assert half != dense
    assert half == pytest.approx(dense, rel=1e-3)
    assert top_k[0] == dense[0]
    assert top_k[1:] != dense[1:]


def test_modes_agree_bit_for_bit(ranks):
    for run in ("none", "topk:0.1"):
        assert ranks[0][f"pynative {run}"]["state"] == ranks[0][run]["state"]


def test_accumulated_micro_batches_give_the_same_step(ranks):
    seen = ranks[0]
    assert seen["accumulated"]["losses"] == pytest.approx(seen["none"]["losses"], rel=1e-5)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_nan_on_one_rank_skips_the_step_on_both(ranks, compression):
    for seen in ranks:
        poison = seen[compression]["poison"]
        assert poison["overflow"]
        assert poison["update_skipped"]
        assert poison["unchanged"]
        assert poison["loss_is_nan"]
        assert poison["rank_losses_finite"] == [True, False]
        assert poison["recovered"]
    assert ranks[0][compression]["poison"]["state"] == ranks[1][compression]["poison"]["state"]


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_an_enormous_update_of_one_rank_is_skipped_on_both(ranks, compression):
    for seen in ranks:
        enormous = seen[compression]["enormous"]
        assert enormous["skipped"] == [True, False]
        assert enormous["norm"] > 1e6
        assert enormous["unchanged"]
        assert enormous["acts again"]
    assert ranks[0][compression]["enormous"]["state"] == ranks[1][compression]["enormous"]["state"]


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_ranks_return_together_or_not_at_all(ranks, compression):
    for rank, seen in enumerate(ranks):
        returned = seen[compression]["returned"]
        assert returned["moved"]
        assert returned["step"] == 10
        assert returned["left"] == returned["position"]
        # What compression held back, which differs by rank, goes back as well.
        assert returned["residual"]
        why = (
            "the state of step 10 is no longer in memory"
            if rank == 1
            else "hold no earlier state in common (the newest of this one: step 10)"
        )
        assert why in returned["refused"]
        assert returned["unchanged"]
    assert ranks[0][compression]["returned"]["state"] == ranks[1][compression]["returned"]["state"]


def test_every_rank_hears_every_host(ranks):
    nothing = ["nan"] * (NUM_HOST_SIGNALS - 2)
    assert ranks[0]["host_signals"] == [["10.0", "0.5", *nothing], ["11.0", "0.5", *nothing]]
    assert ranks[1]["host_signals"] == ranks[0]["host_signals"]


def test_compression_ratio_changes_live(ranks):
    for seen in ranks:
        live = seen["live_ratio"]
        assert live["moved"] == [round(0.5 * live["entries"]), round(0.02 * live["entries"])]
        assert live["ratio"] == pytest.approx(0.02)
        assert live["grad_norms"][0] == live["grad_norms"][1] > 0


def test_a_split_net_is_clipped_by_the_norm_of_the_whole(ranks):
    for seen in ranks:
        pairs = seen["tensor_parallel"]["pairs"]
        assert len(pairs) == 6
        for loss, whole_loss, norm, whole_norm, factor in pairs:
            assert loss == pytest.approx(whole_loss, rel=1e-6)
            assert norm == pytest.approx(whole_norm, rel=1e-6)
            assert factor == pytest.approx(0.2 / whole_norm, rel=1e-6)
    assert ranks[0]["tensor_parallel"]["bias"] == ranks[1]["tensor_parallel"]["bias"]


def test_a_sample_sees_the_mean_gradient_of_all_ranks(ranks):
    first, second = (seen["sampled"] for seen in ranks)
    assert math.hypot(*first["gradient_norms"]) == pytest.approx(first["norm"], rel=1e-6)
    for name in ("gradient_norms", "gradient_counts", "update_ratios", "update_norm"):
        assert first[name] == second[name]


def test_a_sample_counts_the_shards_of_all_ranks(ranks):
    for seen in ranks:
        whole, split = seen["tensor_parallel"]["sampled"]
        assert whole["layers"] == ["first", "second"]
        assert split["layers"] == ["first", "first_bias", "second", "second_bias"]
        for layer, parts in ((0, (0, 1)), (1, (2, 3))):
            norms = [split["gradient_norms"][part] for part in parts]
            assert math.hypot(*norms) == pytest.approx(whole["gradient_norms"][layer], rel=1e-5)
            weights = [split["weight_norms"][part] for part in parts]
            assert math.hypot(*weights) == pytest.approx(whole["weight_norms"][layer], rel=1e-5)
            counts = [sum(split["gradient_counts"][part]) for part in parts]
            assert sum(counts) == sum(whole["gradient_counts"][layer])
        assert split["update_norm"] == pytest.approx(whole["update_norm"], rel=1e-4)


def test_unmarked_shards_are_refused(ranks):
    no_mark, wrong_count = ranks[0]["tensor_parallel"]["refused"]
    assert "model_parallel = 2" in no_mark
    assert "3 weights" in wrong_count
    assert "got 0" in wrong_count

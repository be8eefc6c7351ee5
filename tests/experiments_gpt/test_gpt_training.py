"""Real trainings: every split, mode and precision against one process in graph mode."""

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("train_variants.py")
STEPS = 20
# Float32 sums in another order; the issue is the split, not the rounding.
RELATIVE = 1e-4


def _variant(*, degrees=None, **training):
    return {
        "config": {
            "model": {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "seq_length": 32},
            "parallel": degrees or {},
            "training": {
                "global_batch_size": 8,
                "micro_batch_size": 8,
                "recompute": "none",
                "warmup": 10,
                "eval_samples": 8,
                **training,
            },
        },
        "steps": STEPS,
    }


ONE_RANK = {
    "base": _variant(),
    "micro_batches": _variant(micro_batch_size=2),
    "interval": _variant(recompute="interval:2"),
    "full": _variant(recompute="full", micro_batch_size=4, lr_schedule="table"),
    "pynative": _variant(mode="pynative", recompute="interval:2"),
    "float16": _variant(precision="float16", loss_scale="dynamic"),
    "float16_overflow": _variant(precision="float16", loss_scale=2.0**32),
}
POISONED = {**_variant(precision="float16", loss_scale=1024.0)}
POISONED["config"] = {
    **POISONED["config"],
    "faults": {"poison": {"steps": [5], "kind": "scale", "factor": 1e6}},
}
ONE_RANK["float16_poisoned"] = POISONED

DATA, TENSOR = {"data_parallel": 2}, {"model_parallel": 2}
TWO_RANKS = {
    "data": _variant(degrees=DATA, micro_batch_size=2),
    "tensor": _variant(degrees=TENSOR, micro_batch_size=4, recompute="interval:2"),
    # Recomputed casts of weights once made a cycle in the compiled graph.
    "tensor_float16": _variant(
        degrees=TENSOR,
        micro_batch_size=4,
        recompute="interval:2",
        precision="float16",
        loss_scale="dynamic",
    ),
    "tensor_pynative": _variant(degrees=TENSOR, mode="pynative"),
    "float16_exchange": _variant(degrees=DATA, micro_batch_size=4, gradient_compression="float16"),
    "topk": _variant(degrees=DATA, micro_batch_size=4, gradient_compression="topk:0.1"),
}


def _run(command, variants, folder):
    (folder / "variants.json").write_text(json.dumps(variants), encoding="utf-8")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MINDTUNE_")}
    # msrun starts the ranks with whatever `python` the path finds first.
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    with (folder / "output.log").open("wb") as log:
        done = subprocess.run(
            [*command, str(SCRIPT), "variants.json", "."],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
            timeout=500,
        )
    logs = "".join(
        path.read_text(errors="replace")[-3000:] for path in sorted(folder.rglob("*.log"))
    )
    assert done.returncode == 0, logs


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one_rank")
    _run([sys.executable], ONE_RANK, folder)
    return json.loads((folder / "rank0.json").read_text())


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_ranks")
    launcher = [
        *(sys.executable, "-m", "mindspore.parallel.cluster.run"),
        *("--worker_num=2", "--local_worker_num=2", f"--master_port={_free_port()}"),
        *("--log_dir=log", "--join=True"),
    ]
    _run(launcher, TWO_RANKS, folder)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def _assert_same_training(result, reference):
    assert len(result["loss"]) == STEPS
    assert result["loss"] == pytest.approx(reference["loss"], rel=RELATIVE)
    assert result["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-3)
    assert result["eval_loss"] == pytest.approx(reference["eval_loss"], rel=RELATIVE)
    assert not any(result["overflow"])


@pytest.mark.mindspore
def test_the_model_learns(one_rank):
    losses = one_rank["base"]["loss"]
    assert losses[0] == pytest.approx(math.log(256), abs=0.1)
    assert losses[-1] < 4.0
    assert one_rank["base"]["eval_loss"] < 4.5


@pytest.mark.mindspore
@pytest.mark.parametrize("name", ["micro_batches", "interval", "full", "pynative"])
def test_one_rank_trains_alike_in_every_form(one_rank, name):
    _assert_same_training(one_rank[name], one_rank["base"])


@pytest.mark.mindspore
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("base", {"recompute": "none", "micro_batch_num": 1, "precision": "float32"}),
        ("micro_batches", {"micro_batch_num": 4}),
        ("interval", {"recompute": "interval:2"}),
        ("full", {"recompute": "full", "micro_batch_num": 2}),
        ("pynative", {"recompute": "interval:2"}),
        ("float16", {"precision": "float16"}),
    ],
)
def test_the_knobs_read_back_are_those_asked_for(one_rank, name, expected):
    effective = one_rank[name]["effective"]
    assert effective == effective | expected
    assert one_rank[name]["mode"] == ("pynative" if name == "pynative" else "graph")


def _assert_plausible(signals):
    entropy = signals["attention_entropy"]
    assert [len(heads) for heads in entropy] == [4, 4]
    # A query at position t sees t + 1 bytes.
    most = sum(math.log(t + 1) for t in range(32)) / 32
    assert all(0 < value < most for heads in entropy for value in heads)
    assert 1 / 256 < signals["token_confidence"] < 1
    assert len(signals["layer_losses"]) == 2
    assert signals["layer_losses"][-1] == pytest.approx(signals["loss"], rel=1e-5)


@pytest.mark.mindspore
@pytest.mark.parametrize("name", ["interval", "pynative"])
def test_the_model_tells_what_is_inside(one_rank, name):
    signals = one_rank[name]["signals"]
    _assert_plausible(signals)
    assert signals["attention_entropy"][0] == pytest.approx(signals["block_0"], rel=1e-4)


@pytest.mark.mindspore
@pytest.mark.msrun
@pytest.mark.parametrize("name", ["data", "tensor"])
def test_two_ranks_tell_what_one_does(one_rank, two_ranks, name):
    reference = one_rank["interval"]["signals"]
    for result in (ranks[name]["signals"] for ranks in two_ranks):
        _assert_plausible(result)
        for layer in (0, 1):
            assert result["attention_entropy"][layer] == pytest.approx(
                reference["attention_entropy"][layer], rel=1e-3
            )
        assert result["layer_losses"] == pytest.approx(reference["layer_losses"], rel=1e-3)
        assert result["token_confidence"] == pytest.approx(reference["token_confidence"], rel=1e-3)
    first, second = (ranks[name]["signals"] for ranks in two_ranks)
    assert first["attention_entropy"] == second["attention_entropy"]


@pytest.mark.mindspore
def test_float16_trains_close_to_float32(one_rank):
    half, full = one_rank["float16"], one_rank["base"]
    assert half["loss"] == pytest.approx(full["loss"], rel=2e-2)
    assert half["loss"] != full["loss"]
    assert not any(half["overflow"])


@pytest.mark.mindspore
def test_a_huge_loss_scale_really_overflows_in_float16_and_skips(one_rank):
    result = one_rank["float16_overflow"]
    assert all(result["overflow"])
    assert result["weights_finite"]
    assert result["loss_scale"] == [2.0**32] * STEPS


@pytest.mark.mindspore
def test_a_poisoned_batch_really_overflows_in_float16_and_only_there(one_rank):
    result = one_rank["float16_poisoned"]
    assert [step for step, overflow in enumerate(result["overflow"], 1) if overflow] == [5]
    assert result["loss"][4] > 1e6
    assert result["weights_finite"]


@pytest.mark.mindspore
@pytest.mark.msrun
@pytest.mark.parametrize("name", ["data", "tensor", "tensor_pynative"])
def test_two_ranks_train_as_one(one_rank, two_ranks, name):
    for result in (ranks[name] for ranks in two_ranks):
        _assert_same_training(result, one_rank["base"])


@pytest.mark.mindspore
@pytest.mark.msrun
def test_tensor_parallel_recomputes_in_float16(one_rank, two_ranks):
    result = two_ranks[0]["tensor_float16"]
    assert result["loss"] == pytest.approx(one_rank["float16"]["loss"], rel=1e-3)
    assert result["effective"]["recompute"] == "interval:2"
    assert result["effective"]["precision"] == "float16"


@pytest.mark.mindspore
@pytest.mark.msrun
@pytest.mark.parametrize("name", TWO_RANKS)
def test_replicated_weights_are_bit_equal_over_ranks(two_ranks, name):
    first, second = (ranks[name] for ranks in two_ranks)
    assert first["replicated_digest"] == second["replicated_digest"]
    assert first["loss"] == second["loss"]


@pytest.mark.mindspore
@pytest.mark.msrun
def test_tensor_parallel_splits_six_parameters_per_block(one_rank, two_ranks):
    assert two_ranks[0]["tensor"]["num_sharded"] == 2 * 6
    assert two_ranks[0]["data"]["num_sharded"] == 0
    assert one_rank["base"]["num_sharded"] == 0


@pytest.mark.mindspore
@pytest.mark.msrun
def test_compressed_gradients_train(one_rank, two_ranks):
    dense = one_rank["base"]["loss"]
    rounded, sparse = two_ranks[0]["float16_exchange"], two_ranks[0]["topk"]
    assert rounded["loss"] == pytest.approx(dense, rel=1e-2)
    assert rounded["loss"] != dense
    assert sparse["loss"][-1] < dense[0] - 1.0
    assert sparse["weights_finite"]


@pytest.mark.mindspore
@pytest.mark.msrun
def test_the_degrees_read_back_are_those_of_the_groups(two_ranks):
    for name, data_parallel, model_parallel in (("data", 2, 1), ("tensor", 1, 2)):
        effective = two_ranks[1][name]["effective"]
        assert effective["data_parallel"] == data_parallel
        assert effective["model_parallel"] == model_parallel
    assert two_ranks[0]["topk"]["effective"]["gradient_compression"] == "topk:0.1"

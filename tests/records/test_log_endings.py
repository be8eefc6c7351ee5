"""How logs end, and go on from epoch to epoch: the words of programs that end a training."""

import math

import pytest

from mindtune.controller.records.log_readers import open_log, read_log
from mindtune.controller.replay import load_engine, open_logs, replay


def iteration_line(step):
    return (
        f" iteration {step:8d}/    1000 | consumed samples: {step * 8} | elapsed time per iteration "
        f"(ms): 250.0 | learning rate: 1.500E-04 | global batch size: 8 | lm loss: 2.0E+00 | loss "
        "scale: 1.0 | grad norm: 1.500 | number of skipped iterations: 0 | number of nan "
        "iterations: 0 |\n"
    )


MINDSPORE = (
    'Traceback (most recent call last):\n    raise ValueError("In epoch: {} step: {}, loss is NAN or '
    'INF, training process cannot continue, "\nValueError: In epoch: 1 step: 4, loss is NAN or INF, '
    "training process cannot continue, terminating training.\n"
)
MEGATRON = "AssertionError: Rank {}: found NaN in {}. Device: 0, node: n1\n"
UPDATE = (
    '2021-03-08 12:31:36 | INFO | train_inner | {{"epoch": 1, "loss": "6.4", "num_updates": "{}", '
    '"lr": "2e-05", "gnorm": "1.5"}}\n'
)


@pytest.mark.parametrize(
    ("lines", "end", "signal"),
    [
        (
            [f"epoch: 1 step: {i}, loss is 2.5\n" for i in (1, 2, 3)],
            MINDSPORE,
            "loss",
        ),
        (
            [f"epoch: {e} step: {s}, loss is 2.5\n" for e, s in ((1, 2), (2, 1))],
            "ValueError: epoch: 2 step: 2. Invalid loss, terminating training.\n",
            "loss",
        ),
        (
            [f"Epoch: [0]  [{i:4d}/1251]  lr: 0.001  loss: 6.9 (6.9)\n" for i in range(1, 4)],
            "Loss is nan, stopping training\n",
            "loss",
        ),
        (
            [iteration_line(i) for i in (1, 2, 3)],
            "".join(MEGATRON.format(i, "local forward loss calculation") for i in range(8)),
            "loss",
        ),
        (
            [iteration_line(i) for i in (1, 2, 3)],
            MEGATRON.format(3, "local grad norm in backward pass"),
            "grad_norm",
        ),
        (
            [UPDATE.format(i) for i in (1, 2, 3)],
            "FloatingPointError: gradients are Nan/Inf\n",
            "grad_norm",
        ),
    ],
    ids=["mindspore", "mindspore1", "mae", "megatron", "megatron_gradient", "fairseq"],
)
def test_a_program_that_ends_a_training_which_is_not_finite_tells_its_step(
    tmp_path, lines, end, signal
):
    path = tmp_path / "log"
    path.write_text("".join(lines))
    assert all(getattr(o, signal) is None or getattr(o, signal) > 0 for o in open_log(path))
    path.write_text("".join(lines) + end)
    *before, last = open_log(path)
    assert math.isnan(getattr(last, signal))
    assert last.step == before[-1].step + 1
    assert len(before) == len(lines)
    told = replay(open_logs([path]), load_engine(None))
    assert told.verdict == "faulty"
    assert [(f.kind, f.severity, f.step) for f in told.findings if f.severity != "info"] == [
        (f"non_finite_{signal.removesuffix('_norm')}", "critical", last.step)
    ]


@pytest.mark.parametrize(
    "line",
    [
        "Train: {} [{:4d}/1251 ( 40%)]  Loss: 6.9 (6.9)  Time: 0.4s  LR: 1e-3\n",
        "Epoch: [{}][{:4d}/1251]\tTime  0.312 ( 0.401)\tData  0.001 ( 0.021)\tLoss 6.9 (6.95)\n",
        "Epoch: [{}]  [{:4d}/1251]  eta: 0:10:00  lr: 0.000040  loss: 6.9 (6.94)  time: 0.41\n",
        "INFO Train: [{}/300][{}/1251]\teta 0:11:22 lr 0.000001\tloss 6.9 (6.94)\tgrad_norm 1.2 (1)\n",
    ],
    ids=["timm", "pytorch", "torchvision", "swin"],
)
def test_epochs_that_count_from_zero_follow_each_other(tmp_path, line):
    path = tmp_path / "log"
    path.write_text("".join(
        line.format(epoch, step)
        for epoch in range(3)
        for step in (0, 500, 1000)
    ))  # fmt: skip
    read = read_log(path)
    assert [o.step for o in read.observations] == [
        1251 * epoch + step for epoch in range(3) for step in (0, 500, 1000)
    ]
    assert {(o.run, o.loss) for o in read.observations} == {(0, 6.9)}

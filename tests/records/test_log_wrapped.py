"""Records that a terminal has wrapped: whole where nothing was broken, never a wrong number."""

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindtune.controller.records.log_readers import detect, open_log
from mindtune.experiments.replay.families import log_of

CASES = int(os.environ.get("MINDTUNE_FUZZ_CASES", "40"))
SIGNALS = ("loss", "grad_norm", "learning_rate", "step_time_s")
JOINED = ("fairseq", "hf_trainer", "megatron", "mindformers", "mindformers pynative")
"""Families whose records have marks enough to be put together."""
NOISE = (
    "12",
    "3.5e-2",
    "wandb: 1.5",
    " 12%|#   | 12/100 [00:01<00:09,  9.5it/s]",
    "7 GPUs, 8.5 GB",
    "}",
)


def told(observation):
    return {name: getattr(observation, name) for name in SIGNALS}


def wrapped(line, width):
    return "".join(line[i : i + width] + "\n" for i in range(0, len(line), width))


@pytest.mark.parametrize("family", JOINED)
@given(random=st.randoms(), width=st.integers(40, 200), noise=st.booleans())
@settings(max_examples=CASES, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])  # fmt: skip
def test_a_wrapped_log_gives_no_number_that_was_not_written(
    tmp_path, family, random, width, noise
):
    lines, written = log_of(family, random, 4)
    parts = "".join(wrapped(line, width) for line in lines[1:]).splitlines(keepends=True)
    if noise:
        parts.insert(random.randrange(len(parts) + 1), random.choice((*NOISE, lines[0])) + "\n")
    path = tmp_path / "log"
    text = lines[0] + "\n" + "".join(parts)
    path.write_text(text)
    for o in open_log(path, family.partition(" ")[0]):
        known = written.get(o.step, {})
        for name, value in told(o).items():
            if value is not None:
                assert value == pytest.approx(known.get(name), rel=1e-12, nan_ok=True), text


def iteration(step, loss):
    return (
        f" iteration {step}/ 90 | consumed samples: 40 | elapsed time per iteration (ms): 1.0 | "
        f"learning rate: 1.0E-04 | {loss} | grad norm: 1.5 | number of skipped iterations: 0 | "
        "number of nan iterations: 0 |\n"
    )


@pytest.mark.parametrize(
    ("text", "records", "missed", "steps"),
    [
        (("{'loss': 2.5, 'grad_norm': 1.5, 'learning_rate': 1e-05, 'epoch': 0.01}\n"
         "{'loss': 2.25, 'grad_norm': 1.\n25, 'learning_rate': 2e-05, 'epoch': 0.02}\n"
         "{'loss': 2.0,\n 'grad_norm': 0.5,\n 'learning_rate': 3e-05,\n 'epoch': 0.03}\n"), 3, 0,
         [(1, 2.5, 1.5, 1e-5), (2, 2.25, None, 2e-5), (3, 2.0, 0.5, 3e-5)]),
        # Two records at once: whose the rest is cannot be told.
        (("{'loss': 2.5, 'grad_norm': 1.5, 'learning_rate': 1e-05, 'epoch': 0.01}\n"
         "{'loss': 2.25, 'gra\n{'loss': 9.0, 'gra\nd_norm': 1.25, 'epoch': 0.02}\n"), 1, 1,
         [(1, 2.5, 1.5, 1e-5)]),
        # The step is broken, so it is not known.
        (("{'loss': 2.5, 'global_step/max_steps': '5/\n90', 'epoch': 0.01}\n"
         "{'loss': 2.25, 'grad_norm': 1.5, 'learning_rate': 1e-05, 'global_step/max_steps': '7/90'}\n"),
         1, 0, [(7, 2.25, 1.5, 1e-5)]),
        (('| INFO | train_inner | {"epoch": 1, "loss": "16.5", "gno\nrm": "20.5", "lr": "2e-05",'
         ' "num_upda\ntes": "1"}\n'
         '| INFO | train_inner | {"epoch": 1, "loss": "8.5", "gnorm": \n"20.5", "lr": "2e-\n05", '
         '"num_updates": "2"}\n'), 1, 0, [(2, 8.5, 20.5, None)]),
        (("2026-11-29 22:26:53,647 - mf - INFO - { Epoch:[  1/  1], step:[    1/  120], loss:[5.5/5.5],\n"
         "per_step_time: 5207ms, lr: 0.5, overflow cond: False, loss_scale: 1.0,\n"
         "global_norm: [2.5], train_throughput_per_npu: 0.000T\n"
         "2026-11-29 22:26:54,647 - mf - INFO -    0.8% |        | 3.07254 samples/s/p  0:10:19 }\n"
         "2026-11-29 22:26:55,647 - mf - INFO - { Epoch:[  1/  1], step:[    2/  120], loss:[4.5/5.0], "
         "per_step_time: 76ms, lr: 0.2\n5, overflow cond: False, loss_scale: 1.0, global_norm: [1.5], "
         "train_throughput_per_npu: 0.000T\n"), 2, 0,
         [(1, 5.5, 2.5, 0.5), (2, 4.5, 1.5, None)]),
        # Another writer's line in the name of a loss, which is not lost, or in its number.
        *(
            (iteration(4, "lm loss: 2.75E+00") + iteration(5, loss), 2, 0,
             [(4, 2.75, 1.5, 1e-4), (5, None, 1.5, 1e-4)])
            for loss in ("lm lo\nwandb: 1.5\nss: 2.5E+00", "lm loss: 2.\n12\n5E+00",
                         "lm loss: 2.\n5E+00")
        ),
        # Not the rest of a record: a line of another program's, that names alike.
        (("- INFO - { Epoch:[  1/  1], step:[    1/  120], loss:[5.5/5.5], per_step_time: 9ms, lr: 0.5, ov\n"
         "2026-11-29 - INFO - loss_scale: 65536.0, global_norm: [9.0], end\n"), 1, 1,
         [(1, 5.5, None, 0.5)]),
    ],
)  # fmt: skip
def test_a_wrapped_record_is_one_and_only_what_was_broken_is_lost(
    tmp_path, text, records, missed, steps
):
    path = tmp_path / "log"
    path.write_text(text)
    log = open_log(path, detect(path).format.name)
    assert [(o.step, o.loss, o.grad_norm, o.learning_rate) for o in log] == steps
    assert (log.records, log.not_understood) == (records, missed)

"""Logs of PyTorch programs: small samples in the spelling of each program, with exact values."""

import json
import math

import pytest

from mindtune.controller.records.log_readers import hf_trainer, read_log


@pytest.fixture
def read(tmp_path):
    """Return a function that reads a text as a log."""

    def read_text(text, name="log"):
        path = tmp_path / name
        path.write_text(text)
        return read_log(path)

    return read_text


def column(log, name):
    return [getattr(o, name) for o in log.observations]


def iteration(number, *, samples=None, loss="2.0E+00", scale="65536.0", norm="1.500", skipped=0,
              nan=0, zeros="", time="(ms): 250.0", batch=8):  # fmt: skip
    parts = [f" iteration {number:8d}/    1000", f"consumed samples: {samples or number * batch}",
             f"elapsed time per iteration {time}", "learning rate: 1.500E-04",
             f"global batch size: {batch:5d}"]  # fmt: skip
    parts += [f"lm loss: {loss}"] if loss else []
    parts += [f"loss scale: {scale}"] if scale else []
    parts += [f"grad norm: {norm}"] if norm else []
    parts += [f"num zeros: {zeros}"] if zeros else []
    parts += [f"number of skipped iterations: {skipped:3d}",
              f"number of nan iterations: {nan:3d} |\n"]  # fmt: skip
    return " | ".join(parts)


def test_megatron_interval_of_ten(read):
    log = read(
        iteration(10, loss="", norm="", skipped=10, scale="8388608.0", time="(ms): 1210.0")
        + iteration(20, skipped=6, scale="131072.0")
        + iteration(30)
        + " validation loss at iteration 30 | lm loss value: 7.174200E+00 | lm loss PPL: 1.3E+03 |\n"
        " validation loss at iteration 30 on test set | lm loss value: 1.0E+00 | lm loss PPL: 2 |\n"
        "time (ms) | save-checkpoint: 57514.53\n" + iteration(40, loss="")
    )
    assert (log.format, log.records) == ("megatron", 5)
    assert column(log, "step") == [10, 20, 30, 40]
    assert column(log, "overflow") == [1.0, 0.6, 0.0, 0.0]
    assert column(log, "update_skipped") == [1.0, 0.6, 0.0, 0.0]
    assert column(log, "loss")[:3] == [None, 2.0, 2.0], "all of the first ten were skipped"
    assert math.isnan(column(log, "loss")[3]), "left out, though none was skipped: NaN"
    assert column(log, "step_time_s") == [1.21, 0.25, 0.25, 0.25]
    assert column(log, "eval_loss") == [None, None, 7.1742, None]
    assert column(log, "grad_norm") == [None, 1.5, 1.5, 1.5], "unscaled by Megatron itself"
    assert column(log, "learning_rate") == [1.5e-4] * 4
    assert column(log, "global_batch_size") == [8] * 4


def test_megatron_prints_the_scale_of_the_next_iteration(read):
    log = read(
        iteration(1, scale="4096.0") + iteration(2, scale="2048.0", skipped=1, loss="", nan=0)
        + iteration(3, scale="2048.0")
    )  # fmt: skip
    assert column(log, "loss_scale") == [4096.0, 4096.0, 2048.0]
    assert column(log, "overflow") == [0.0, 1.0, 0.0]
    assert column(log, "loss") == [2.0, None, 2.0]


def test_megatron_deepspeed_norms_and_overflows(read):
    overflow = (
        "[2022-01-19 13:09:13,305] [INFO] [stage_1_and_2.py:1644:step] [deepscale] OVERFLOW! Rank "
        "{rank} Skipping step. Attempted loss scale: {scale}, reducing to {reduced}\n"
    )
    log = read(
        iteration(100, samples=800, scale="65536.0", norm="0.000", zeros="0.0")
        + iteration(101, samples=808, scale="65536.0", norm="32768.000", zeros="0.0")
        + overflow.format(rank=0, scale="65536.0", reduced="32768.0")
        + overflow.format(rank=1, scale="65536.0", reduced="32768.0")
        + iteration(102, samples=816, scale="32768.0", norm="32768.000", zeros="0.0")
        + iteration(103, samples=824, scale="32768.0", norm="65536.000", zeros="0.0")
        + iteration(104, samples=832, scale="16384.0", norm="65536.000", zeros="0.0")
    )
    assert column(log, "grad_norm") == [None, 0.5, None, 2.0, 65536.0 / 32768.0]
    assert column(log, "overflow") == [None, None, 1.0, 0.0, 0.0], "unknown before the first line"
    assert column(log, "loss_scale") == [65536.0, 65536.0, 65536.0, 32768.0, 32768.0]


def test_megatron_deepspeed_without_overflow_lines_tells_by_the_scale(read):
    log = read(
        iteration(20, samples=160, scale="32768.0", norm="0.000", zeros="0.0")
        + iteration(30, samples=240, scale="65536.0", norm="0.000", zeros="0.0")
        + iteration(40, samples=320, scale="8192.0", norm="0.000", zeros="0.0", loss="7.3E+00")
    )
    assert column(log, "overflow") == [None, None, pytest.approx(0.3)], "three halvings in ten"
    assert column(log, "grad_norm") == [None] * 3


def test_megatron_bf16_wrapped_prefixed_in_seconds_and_restarted(read):
    whole = (
        "[default7]: iteration   42780/ 115311 | consumed samples:    71455664 | consumed tokens: "
        "146341199872 | elapsed time per iteration (s): 105.16 | learning rate: 4.475E-05 | "
        "global batch size: 2048 | lm loss: 2.117073E+00 | grad norm: 0.150 | num zeros: 0.0 | "
        "number of skipped iterations:  0 | number of nan iterations:  0 | samples per second: 19 |"
    )
    second = whole.replace("42780", "42781").replace("71455664", "71457712")
    second = second.replace("146341199872", "146345394176")
    wrapped = second[:170] + "\n" + second[170:250] + "\n" + second[250:] + "\n"
    log = read(whole + "\n" + wrapped + whole + "\n" + second[:200])
    assert log.records == 3, "a wrapped record is one line, a cut one none"
    assert [(o.run, o.step) for o in log.observations] == [(0, 42780), (0, 42781), (1, 42780),
                                                           (1, 42781)]  # fmt: skip
    first, after, *_, cut = log.observations
    assert (first.loss, first.grad_norm, first.loss_scale) == (2.117073, 0.15, None)
    assert (first.overflow, first.step_time_s) == (None, 105.16)
    assert (after.tokens, after.tokens_per_s) == (4194304, pytest.approx(4194304 / 105.16))
    assert (cut.loss, cut.step_time_s) == (None, 105.16), "what was cut off is not known"


def test_gpt_neox_and_new_megatron_names(read):
    log = read(
        " samples/sec: 4.2 | iteration       10/  320000 | elapsed time per iteration (ms): 760.0 | "
        "learning rate: 1.875E-06 | lm_loss: 1.03E+01 | loss scale: 65536.0 | number of skipped "
        "iterations:   0 | number of nan iterations:   0 |\n"
        " [2025-05-01 10:00:00] iteration       20/  320000 | elapsed time per iteration (ms): 760.0 "
        "| throughput per GPU (TFLOP/s/GPU): 310.1 | load_balancing_loss: 1.0E+00 | lm loss: "
        "9.5E+00 | grad norm: nan | number of skipped iterations:   0 | number of nan iterations: "
        "  0 |\n"
    )
    assert column(log, "loss") == [10.3, 9.5]
    assert math.isnan(column(log, "grad_norm")[1])


DS = "[2023-04-18 01:46:{second:02d},554] [INFO] "


def ds_overflow(second, scale, reduced=None, rank=0):
    text = f"reducing to {reduced}" if reduced else "but hysteresis is 2. Reducing hysteresis to 1"
    return (
        DS.format(second=second) + "[loss_scaler.py:188:update_scale] [deepspeed] OVERFLOW! Rank "
        f"{rank} Skipping step. Attempted loss scale: {scale}, {text}\n"
    )


def ds_step(second, step, skipped, rank=0):
    return (
        DS.format(second=second) + f"[logging.py:96:log_dist] [Rank {rank}] step={step}, "
        f"skipped={skipped}, lr=[9.65e-06, 4.8e-06], mom=[(0.9, 0.95), (0.9, 0.95)]\n"
    )


def test_deepspeed_engine_lines(read):
    log = read(
        "ppl: 2.718281828459045\n"
        + ds_overflow(1, 65536) + ds_overflow(2, 65536, 32768) + ds_overflow(2, 65536, 32768, 1)
        + ds_step(10, 10, 2) + ds_step(10, 10, 2, rank=1)
        + DS.format(second=10) + "[timer.py:199:stop] epoch=0/micro_step=10/global_step=10, "
        "RunningAvgSamplesPerSec=171.7, CurrSamplesPerSec=171.4, MemAllocated=3.5GB, "
        "MaxMemAllocated=22.95GB\n"
        + ds_step(20, 20, 2) + ds_step(30, 30, 3)
    )  # fmt: skip
    assert log.format == "deepspeed"
    assert column(log, "step") == [10, 20, 30]
    assert column(log, "overflow") == [0.2, 0.0, 0.1]
    assert column(log, "loss_scale")[0] == 65536.0
    assert column(log, "learning_rate") == [9.65e-06] * 3, "the first group's"
    assert column(log, "memory_allocated_bytes") == [round(3.5 * 2**30), None, None]
    assert column(log, "eval_loss")[0] == pytest.approx(1.0), "the perplexity is its exponential"


def test_deepspeed_fused_overflows_count_once_over_ranks(read):
    echo = DS.format(second=1) + "[fused_optimizer.py:363:_update_scale] Reducing dynamic loss "
    log = read(
        "Grad overflow on iteration 0\n" * 8
        + (echo + "scale from 65536 to 32768.0\n") * 8
        + DS.format(second=1) + "[logging.py:96:log_dist] [Rank 0] Overflow detected. Skipping "
        "step. Attempted loss scale: 65536, reducing to 32768.0\n"
        + ds_step(9, 10, 1)
    )  # fmt: skip
    assert column(log, "overflow") == [0.1]
    assert column(log, "loss_scale") == [65536.0]


def test_deepspeed_script_lines_carry_the_step(read):
    log = read(
        ds_overflow(1, 4294967296) + "step:0, loss:5.453125\n"
        + "".join(ds_overflow(2, 2.0**31 / 2**i, 2.0**30 / 2**i) for i in range(10))
        + "step:10, loss:3.65, Loss Scale: 2097152, LR: 3.33e-07\n"
        "step:20, loss:3.5\n"
        "step:0, loss:5.5\n"
        + ds_overflow(9, 2048, 1024)
    )  # fmt: skip
    assert [(o.run, o.step) for o in log.observations] == [
        (0, 0),
        (0, 10),
        (0, 20),
        (1, 0),
        (1, 1),
    ]
    assert column(log, "overflow") == [1.0, 1.0, 0.0, None, 1.0]
    assert column(log, "loss_scale")[:2] == [2.0**32, 2097152.0]
    assert log.observations[1].learning_rate == 3.33e-07
    assert log.observations[4].loss is None, "an overflow after the last line is told alone"


def test_deepspeed_chat_with_two_engines(read):
    log = read(
        ds_overflow(1, 65536) + ds_overflow(1, 65536)
        + "epoch: 0|step: 0|ppo_ep: 1|act_loss: 0.25|cri_loss: 0.12|unsuper_loss: 0.0\n"
        "average reward score: -0.67\n"
        "|E2E latency=7.99s |Gather latency=0.00s (0.00%) |Generate time=5.26s (65.81%)\n"
        + ds_step(5, 1, 1) + ds_step(5, 1, 0)
        + "epoch: 0|step: 1|ppo_ep: 1|act_loss: -0.5|cri_loss: 0.12|unsuper_loss: 0.0\n"
        "Epoch: 1 | Step: 0 | PPO Epoch: 1 | Actor Loss: nan | Critic Loss: 0.2\n"
    )  # fmt: skip
    assert column(log, "step") == [0, 1, 2]
    assert column(log, "loss")[:2] == [0.25, -0.5]
    assert math.isnan(column(log, "loss")[2])
    assert column(log, "step_time_s") == [7.99, None, None]
    assert column(log, "overflow") == [1.0, 0.0, 0.0], "of either engine, and at most one a step"


def test_deepspeed_pipeline_engine(read):
    log = read(
        "[2024-01-01 00:00:00,000] [INFO] [deepspeed] start\n"
        "steps: 10 loss: 5.4321 iter time (s): 0.123 samples/sec: 65.0\n"
    )
    assert column(log, "loss") == [5.4321]
    assert column(log, "step_time_s") == [0.123]


STATE = {
    "epoch": 1.0,
    "log_history": [
        {"loss": 2.5, "grad_norm": 1.5, "learning_rate": 5e-05, "epoch": 0.1, "step": 10,
         "num_input_tokens_seen": 1000},
        {"loss": 2.25, "grad_norm": math.nan, "learning_rate": 5, "step": 20,
         "num_input_tokens_seen": 3000},
        {"eval_loss": 2.0, "eval_runtime": 3.5, "epoch": 0.2, "step": 20},
        {"loss": -0.0, "lr": 1e-4, "grad_norm": math.inf, "loss_0": 9.0, "step": 30},
        {"train_loss": 2.3, "train_runtime": 100.0, "step": 30},
    ],
    "max_steps": 100,
}  # fmt: skip


@pytest.mark.parametrize("indent", [2, None, 0])
def test_trainer_state_however_it_is_laid_out(read, indent):
    log = read(json.dumps(STATE, indent=indent), "trainer_state.json")
    assert (log.format, log.records) == ("hf_trainer_state", 4)
    assert column(log, "step") == [10, 20, 30]
    assert column(log, "loss") == [2.5, 2.25, -0.0]
    assert column(log, "eval_loss") == [None, 2.0, None]
    assert column(log, "learning_rate") == [5e-05, 5.0, 1e-4]
    assert column(log, "tokens") == [None, 200, None], "of a step, from a running total"
    norms = column(log, "grad_norm")
    assert norms[0] == 1.5
    assert math.isnan(norms[1])
    assert norms[2] == math.inf


def test_an_array_of_records_is_read_as_the_history_of_a_state(read):
    history = [{"iteration": i, "loss": 3 - i, "lr": 0.1} for i in (1, 2)]
    for indent in (2, None):
        log = read(json.dumps(history, indent=indent))
        assert column(log, "loss") == [2, 1]


def test_a_cut_trainer_state_is_read_as_far_as_it_goes(read):
    text = json.dumps(STATE, indent=2)
    log = read(text[: text.index('"loss_0"')])
    assert column(log, "step") == [10, 20]


def test_a_long_entry_of_a_trainer_state_is_not_begun_anew_at_every_bracket(monkeypatch):
    begun = []

    class Counting(json.JSONDecoder):
        def raw_decode(self, text, idx=0):
            begun.append(len(text) - idx)
            return super().raw_decode(text, idx)

    monkeypatch.setattr(hf_trainer.json, "JSONDecoder", Counting)
    reader = hf_trainer.TRAINER_STATE.start()
    reader.feed('{"log_history": [{"step": 1, "loss": 2.0, "x": [\n')
    records = [record for _ in range(20_000) for record in reader.feed("{},\n") or ()]
    records += reader.feed('{}]},\n{"step": 2, "loss": 1.5}\n') or ()
    records += reader.finish()
    assert [record.observation.loss for record in records] == [2.0, 1.5]
    assert sum(begun) < 3_000_000, "20,000 times half of 80 KB would be 800 MB"


def test_trainer_console_takes_the_step_of_the_bar(read):
    log = read(
        "  1%|          | 10/1000 [00:12<20:00,  1.20s/it]\n"
        "{'loss': 2.5, 'grad_norm': 1.5, 'learning_rate': 5e-05, 'epoch': 0.01}\n"
        "  2%|          | 20/1000 [00:24<19:00,  1.20s/it]"
        "{'loss': '0.52', 'grad_norm': 'nan', 'learning_rate': '4e-05', 'epoch': '0.02'}\n"
        "100%|##########| 8/8 [00:01<00:00,  8.0it/s]\n"
        "{'eval_loss': 1.75, 'eval_runtime': 1.0, 'epoch': 0.02}\n"
        "{'train_runtime': 9.0, 'train_loss': 0.9, 'epoch': 1.0}\n"
    )
    assert (log.format, log.records) == ("hf_trainer", 3)
    assert column(log, "step") == [10, 20]
    assert column(log, "loss") == [2.5, 0.52]
    assert math.isnan(column(log, "grad_norm")[1])
    assert column(log, "eval_loss") == [None, 1.75]


def test_trainer_console_that_names_its_step(read):
    log = read("{'loss': 2.5, 'step': 20, 'epoch': 0.1}\n{'loss': 2.25, 'step': 40}\n")
    assert column(log, "step") == [20, 40]


def test_trainer_console_without_bars_counts(read):
    log = read("".join(f"{{'loss': {i}.5, 'learning_rate': 1e-05, 'epoch': {i}.0}}\n"
                       for i in range(1, 4)))  # fmt: skip
    assert column(log, "step") == [1, 2, 3]
    assert column(log, "loss") == [1.5, 2.5, 3.5]


def fairseq_line(kind="train_inner", **values):
    told = json.dumps({"epoch": 1, **{name: str(value) for name, value in values.items()}})
    return f"2021-03-08 12:31:36 | INFO | {kind} | {told}\n"


def test_fairseq_json_progress(read):
    note = ("2021-03-08 12:33:12 | INFO | fairseq.trainer | NOTE: gradient overflow detected, "
            "ignoring gradient, setting loss scale to: {}\n")  # fmt: skip
    log = read(
        fairseq_line(loss=16.475, wps=0, wpb=16384, bsz=8, num_updates=1, lr=2e-05, gnorm=20.7,
                     loss_scale=4, wall=105)
        + note.format(2.0) + note.format(1.0)
        + fairseq_line(loss=25.22, wps=128, wpb=16384, bsz=7.5, num_updates=2, lr=6e-05,
                       gnorm="nan", loss_scale=1, wall=294)
        + fairseq_line("valid", valid_loss=17.9, valid_num_updates=2)
        + fairseq_line("train", train_loss=19.3, train_num_updates=2)
        + note.format(0.5)
    )  # fmt: skip
    assert log.format == "fairseq"
    assert column(log, "step") == [1, 2, 3]
    assert column(log, "loss") == [16.475, 25.22, None]
    assert column(log, "overflow") == [0.0, pytest.approx(2 / 3), 1.0]
    assert column(log, "loss_scale") == [4.0, 1.0, 1.0], "the last note lowers 1 to 0.5"
    assert column(log, "step_time_s") == [None, 128.0, None]
    assert column(log, "tokens") == [16384, 16384, None]
    assert column(log, "global_batch_size") == [8, None, None], "7.5 samples are a mean"
    assert column(log, "eval_loss") == [None, 17.9, None]
    assert math.isnan(column(log, "grad_norm")[1])


def test_fairseq_epochs_count_where_nothing_else_is_told(read):
    log = read(
        "| epoch 001 | loss 9.8 | nll_loss 8.9 | wps 31194 | num_updates 300 | lr 0.0001 | "
        "gnorm 2.5 | loss_scale 128 | wall 60\n"
        "| valid | epoch 001 | valid on 'valid' subset | loss 9.1 | num_updates 300\n"
        + fairseq_line("train", train_loss=8.5, train_num_updates=600, train_gnorm=1.5)
    )
    assert column(log, "step") == [300, 600]
    assert column(log, "loss") == [9.8, 8.5]
    assert column(log, "grad_norm") == [2.5, 1.5]
    assert column(log, "eval_loss") == [9.1, None]


def test_fairseq_simple_progress(read):
    log = read(
        "2020-01-01 | INFO | train_inner | epoch 001:    100 / 5000 loss=9.803, nll_loss=8.89, "
        "ppl=474.5, wps=31194.9, ups=2.5, wpb=12477.9, bsz=300.2, num_updates=100, lr=1.2e-05, "
        "gnorm=2.5, loss_scale=128, train_wall=40, wall=60\n"
        "2020-01-01 | INFO | valid | epoch 001 | valid on 'valid' subset | loss 9.1 | ppl 400 | "
        "num_updates 100\n"
    )
    only = log.observations[0]
    assert (only.step, only.loss, only.grad_norm, only.eval_loss) == (100, 9.803, 2.5, 9.1)
    assert (only.learning_rate, only.loss_scale) == (1.2e-05, 128.0)


def factory_line(step, loss, elapsed):
    told = {"current_steps": step, "total_steps": 100, "lr": 1e-05, "elapsed_time": elapsed}
    return json.dumps(told if loss is None else {**told, "loss": loss}) + "\n"


def test_llama_factory_two_writers_and_a_resume(read):
    lines = [
        (10, 0.85, "0:02:12"), (10, 0.84, "0:02:13"), (20, 0.75, "0:04:43"), (20, 0.75, "0:04:45"),
        (30, 0.74, "0:07:10"), (40, 0.73, "0:09:38"), (30, 0.99, "0:07:11"), (50, 0.72, "0:12:00"),
        (40, 0.99, "0:09:39"), (60, 0.71, "1 day, 0:08:23"),
        (50, 0.60, "0:01:10"), (60, 0.59, "0:03:20"), (60, None, "0:03:21"),
    ]  # fmt: skip
    log = read("".join(factory_line(*line) for line in lines))
    assert (log.format, log.records) == ("llamafactory", 13)
    assert [(o.run, o.step) for o in log.observations] == [
        *((0, step) for step in range(10, 70, 10)), (1, 50), (1, 60),
    ]  # fmt: skip
    assert column(log, "loss") == [0.85, 0.75, 0.74, 0.73, 0.72, 0.71, 0.60, 0.59]


def test_json_lines_of_any_program(read):
    log = read(
        'not json\n{"name": "config"}\n'
        '{"step": 1, "train/loss": 2.5, "optim/total_grad_norm": 1.5, "note": "x"}\n'
        '{"step": 2, "train": {"loss": NaN}, "step_time_ms": 250}\n'
        '{"step": 3, "loss": "inf", "mfu": 0.4, "tokens_per_sec": 1000}\n'
        '{"step": 3, "eval_loss": 2.25}\n{"step": 4, "lo'
    )
    assert (log.format, log.records) == ("jsonl", 4)
    assert column(log, "step") == [1, 2, 3]
    assert column(log, "loss")[0] == 2.5
    assert math.isnan(column(log, "loss")[1])
    assert column(log, "loss")[2] == math.inf
    assert column(log, "grad_norm")[0] == 1.5
    assert column(log, "step_time_s")[1] == 0.25
    last = log.observations[2]
    assert (last.mfu, last.tokens_per_s, last.eval_loss) == (0.4, 1000.0, 2.25)


def test_llm_c_main_log_and_console(read):
    log = read(
        "s:0 tel:11.0092\ns:0 trl:11.0091 lr:0.000001 norm:15.37\n"
        "s:1 trl:nan lr:0.000002 norm:inf\ns:1 eval:0.25\n"
    )
    assert (log.format, column(log, "step")) == ("llm.c", [0, 1])
    first, second = log.observations
    assert (first.loss, first.eval_loss, first.learning_rate, first.grad_norm) == (
        11.0091, 11.0092, 1e-06, 15.37,
    )  # fmt: skip
    assert math.isnan(second.loss)
    assert second.grad_norm == math.inf
    log = read(
        "step    7/18865 | loss 11.009 (+nanz)| norm 15.36 (+nanz)| lr 2.00e-06 | 3312.01 ms | "
        "54.6% bf16 MFU | 158320 tok/s\nval loss 10.9\n"
    )
    only = log.observations[0]
    assert (only.step, only.loss, only.grad_norm, only.learning_rate) == (7, 11.009, 15.36, 2e-06)
    assert only.step_time_s == pytest.approx(3.31201)
    assert (only.mfu, only.tokens_per_s) == (pytest.approx(0.546), 158320.0)
    assert only.eval_loss == 10.9


def test_nanogpt_and_its_speed_run(read):
    log = read(
        "step 0: train loss 10.9, val loss 10.8\n"
        "iter 0: loss 10.95, time 26140.00ms, mfu -100.00%\n"
        "iter 10: loss 9.5, time 140.20ms, mfu 12.30%\n"
    )
    assert column(log, "loss") == [10.95, 9.5]
    assert column(log, "step_time_s") == [26.14, pytest.approx(0.1402)]
    assert column(log, "mfu") == [None, pytest.approx(0.123)]
    assert column(log, "eval_loss") == [10.8, None]
    log = read(
        "step:0/1875 val_loss:10.8 train_time:0ms step_avg:nanms\n"
        "step:1/1875 train_loss:10.7 train_time:44000ms step_avg:nanms\n"
        "step:2/1875 train_loss:10.1 train_time:44125ms step_avg:nanms\n"
        "step:3/1875 train_loss:9.0 train_time:150ms step_avg:150.00ms\n"
        "step:5/1875 train_loss:8.0 train_time:450ms step_avg:150.00ms\n"
    )
    assert (log.format, log.records) == ("nanogpt", 5)
    assert column(log, "loss") == [10.7, 10.1, 9.0, 8.0]
    times = column(log, "step_time_s")
    assert times == [None, 0.125, None, 0.15], "the clock is reset once; a mean of NaN is no fault"

"""Lines as the programs of each family print them, made of known values."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from random import Random

__all__ = ["FAMILIES", "Values", "log_of"]

Values = dict[str, str]
"""The texts that one line prints: loss, norm, mean (always finite), rate, ms."""
_Told = dict[str, str | tuple[str, float]]
"""Signal -> the text that tells it, with the factor to our unit where it is another."""
_Family = Callable[[int, Values], tuple[str, _Told]]

_NAN = ("nan", "NaN", "-nan", "nan(ind)", "-nan(ind)", "1.#QNAN", "-1.#IND")
_INF = ("inf", "Infinity", "INF", "1.#INF")
"""As Python, C, JSON and C on Windows spell them."""
_FORMS = ("{:.3f}", "{:.6f}", "{:.6e}", "{:.3E}", "{!r}")
_MILLISECOND = 1e-3
_SHARE_ODD = 0.1
_NOT_ZERO = "0.125"
"""Stands for 0, which Megatron prints for a norm that it does not know."""


def mindformers(step: int, v: Values) -> tuple[str, _Told]:
    """MFLossMonitor of MindFormers 1.x."""
    line = (
        f"{{ Epoch:[  1/  1], step:[{step:5d}/90000], loss:[{v['loss']}/{v['mean']}], "
        f"per_step_time: {v['ms']}ms, lr: {v['rate']}, overflow cond: False, loss_scale: 1.0, "
        f"global_norm: [{v['norm']}], train_throughput_per_npu: 0.017T"
    )
    return line, {
        "loss": v["loss"], "grad_norm": v["norm"], "learning_rate": v["rate"],
        "step_time_s": (v["ms"], _MILLISECOND),
    }  # fmt: skip


def mindformers_pynative(step: int, v: Values) -> tuple[str, _Told]:
    """MindFormers' PyNative trainer, where NaN is the word for a norm that there is not."""
    line = (
        f"{{ step:[{step:5d}/90000], loss:   {v['loss']}, per_step_time:     {v['ms']}ms, lr: "
        f"{v['rate']}, grad_norm:   {v['mean']}, throughput:   1.23T }}"
    )
    return line, {
        "loss": v["loss"], "grad_norm": v["mean"], "learning_rate": v["rate"],
        "step_time_s": (v["ms"], _MILLISECOND),
    }  # fmt: skip


def megatron(step: int, v: Values) -> tuple[str, _Told]:
    """Megatron-LM's iteration line; it leaves out a loss that is not finite."""
    line = (
        f" iteration {step:8d}/   90000 | consumed samples: {step * 8:12d} | elapsed time per "
        f"iteration (ms): {v['ms']}.0 | learning rate: {v['rate']} | global batch size:     8 | "
        f"lm loss: {v['mean']} | loss scale: 1.0 | grad norm: {v['norm']} | number of skipped "
        "iterations:   0 | number of nan iterations:   0 |"
    )
    return line, {
        "loss": v["mean"], "grad_norm": v["norm"], "learning_rate": v["rate"],
        "step_time_s": (v["ms"], _MILLISECOND),
    }  # fmt: skip


def loss_monitor(step: int, v: Values) -> tuple[str, _Told]:
    """MindSpore's LossMonitor."""
    return f"epoch: 1 step: {step}, loss is {v['loss']}", {"loss": v["loss"]}


def mindyolo(step: int, v: Values) -> tuple[str, _Told]:
    """A training script of mindyolo."""
    line = (
        f"Epoch 1/300, Step {step}/90000, imgsize (640, 640), loss: {v['loss']}, lbox: 1.6, lcls: "
        f"8.7, cur_lr: [{v['rate']}, 0.0, 0.0]"
    )
    return line, {"loss": v["loss"], "learning_rate": v["rate"]}


def torchtitan(step: int, v: Values) -> tuple[str, _Told]:
    """The console of torchtitan."""
    line = (
        f"step: {step:2}  loss: {v['loss']}  grad_norm: {v['norm']}  memory: 20.06GiB(25.32%)  "
        f"tps: 1,234  tflops: 20.10  mfu: 12.50%"
    )
    return line, {"loss": v["loss"], "grad_norm": v["norm"]}


def trainer(step: int, v: Values) -> tuple[str, _Told]:
    """A dictionary of the Hugging Face Trainer, with the step that ms-swift adds."""
    line = (
        f"{{'loss': {v['mean']}, 'grad_norm': '{v['norm']}', 'learning_rate': {v['rate']}, "
        f"'global_step/max_steps': '{step}/90000', 'epoch': 0.01}}"
    )
    return line, {"loss": v["mean"], "grad_norm": v["norm"], "learning_rate": v["rate"]}


def fairseq(step: int, v: Values) -> tuple[str, _Told]:
    """Fairseq and metaseq, JSON style."""
    told = {
        "epoch": 1, "loss": v["loss"], "gnorm": v["norm"], "lr": v["rate"], "wall": "9",
        "num_updates": str(step),
    }  # fmt: skip
    line = f"2021-03-08 12:31:36 | INFO | train_inner | {json.dumps(told)}"
    return line, {"loss": v["loss"], "grad_norm": v["norm"], "learning_rate": v["rate"]}


def fairseq_simple(step: int, v: Values) -> tuple[str, _Told]:
    """fairseq, plain style."""
    line = (
        f"2020-01-01 | INFO | train_inner | epoch 001:  {step} / 90000 loss={v['loss']}, "
        f"ppl=474.5, num_updates={step}, lr={v['rate']}, gnorm={v['norm']}, wall=60"
    )
    return line, {"loss": v["loss"], "grad_norm": v["norm"], "learning_rate": v["rate"]}


def llm_c(step: int, v: Values) -> tuple[str, _Told]:
    """main.log of llm.c."""
    line = f"s:{step} trl:{v['loss']} lr:{v['rate']} norm:{v['norm']}"
    return line, {"loss": v["loss"], "grad_norm": v["norm"], "learning_rate": v["rate"]}


def nano_gpt(step: int, v: Values) -> tuple[str, _Told]:
    """NanoGPT."""
    line = f"iter {step}: loss {v['loss']}, time {v['ms']}.25ms, mfu 12.30%"
    return line, {"loss": v["loss"], "step_time_s": (f"{v['ms']}.25", _MILLISECOND)}


def json_lines(step: int, v: Values) -> tuple[str, _Told]:
    """One JSON object per step."""
    line = (
        f'{{"step": {step}, "train/loss": "{v["loss"]}", "grad_norm": "{v["norm"]}", '
        f'"step_time_ms": {v["ms"]}}}'
    )
    return line, {
        "loss": v["loss"], "grad_norm": v["norm"], "step_time_s": (v["ms"], _MILLISECOND),
    }  # fmt: skip


FAMILIES: dict[str, _Family] = {
    "mindformers": mindformers, "mindformers pynative": mindformers_pynative,
    "megatron": megatron, "mindspore_monitor": loss_monitor, "key_value mindyolo": mindyolo,
    "key_value torchtitan": torchtitan, "hf_trainer": trainer, "fairseq": fairseq,
    "fairseq simple": fairseq_simple, "llm.c": llm_c, "nanogpt": nano_gpt, "jsonl": json_lines,
}  # fmt: skip
"""Format, and which of its forms -> the lines."""


def log_of(
    family: str, random: Random, steps: int
) -> tuple[list[str], dict[int, dict[str, float]]]:
    """Return the lines of a log without line ends, and step -> signal -> what they tell of it.

    Args:
        family: a key of `FAMILIES`.
        random: where the values come from.
        steps: how many lines.
    """
    step, lines, written = random.randrange(1, 2000), [], {}
    for _ in range(steps):
        line, told = FAMILIES[family](step, _values(random))
        lines.append(line)
        written[step] = {
            name: _number(entry) if isinstance(entry, str) else _number(entry[0]) * entry[1]
            for name, entry in told.items()
        }
        step += random.choice((1, 1, 10))
    return lines, written


def _values(random: Random) -> Values:
    return {
        "loss": _odd(random),
        "norm": _odd(random),
        "mean": f"{random.uniform(0.001, 12):.6f}",
        "rate": f"{random.uniform(0, 1):.6e}",
        "ms": str(random.randrange(1, 10**6)),
    }


def _odd(random: Random) -> str:
    if random.random() < _SHARE_ODD:
        return random.choice((*_NAN, *_INF))
    finite = random.choice(
        (random.uniform(0, 12), random.uniform(0, 1e-4), random.lognormvariate(0, 6))
    )
    text = random.choice(_FORMS).format(finite)
    return text if float(text) else _NOT_ZERO


def _number(text: str) -> float:
    if text in _NAN:
        return math.nan
    return math.inf if text in _INF else float(text)

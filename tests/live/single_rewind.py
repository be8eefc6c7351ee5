"""Runs in one process, in graph or PyNative mode; writes `seen.json` with what it saw.

A run with spikes and a burst of bad batches, and the same one interrupted and resumed.
Arguments: the mode, then the steps after which to interrupt.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
from pathlib import Path

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import nn
from mindspore.train import Callback, CheckpointConfig, Model, ModelCheckpoint
from step_toys import FEATURES, Net

from mindtune.controller import TrainStep, TuneCallback
from mindtune.controller.live.loss_scale import LossScale
from mindtune.controller.records import read_decisions, read_signals
from mindtune.policies.decisions import SetMicroBatch

STEPS = 62
ROWS = 8
SPIKES = (19, 21, 22)
BURST = range(45, 50)
SPLIT_AT = 5
COLUMNS = ("step", "loss", "grad_norm", "update_skipped", "loss_scale", "learning_rate",
           "learning_rate_scale", "clip_norm", "skip_threshold", "micro_batch_size",
           "num_microbatches", "global_batch_size")  # fmt: skip
# What the time of a step decides may differ from run to run.
OFF = {name: {"enabled": False} for name in ("batch_size", "memory_guard")}


def dataset(first):
    """The batches from step `first` + 1 on, counted from 1."""
    draw = np.random.RandomState(3)
    x = draw.randn(STEPS, ROWS, FEATURES).astype(np.float32)
    y = np.sin(x[:, :, :1] * 2).astype(np.float32)
    for step in SPIKES:
        y[step - 1] *= 300.0
    for step in BURST:
        x[step - 1, 0] = np.nan
    x, y = (array[first:].reshape(-1, array.shape[-1]) for array in (x, y))
    return ds.NumpySlicesDataset({"x": x, "y": y}, shuffle=False).batch(ROWS)


def fresh():
    net = Net()
    rate = nn.CosineDecayLR(0.0005, 0.002, STEPS)
    optimizer = nn.Adam(net.trainable_params(), rate)
    return TrainStep(net, optimizer, loss_scale=LossScale(initial=2.0**10, window=12))


def tuned(folder, *, mode="act", storage="disk"):
    rewind = {"every": 8, "keep": 2, "storage": storage}
    return TuneCallback({"out_dir": folder, "mode": mode, "policies": OFF, "rewind": rewind})


class Watch(Callback):
    """Splits the micro-batch at a step, and keeps losses and weights of every step."""

    def __init__(self, tune, first):
        super().__init__()
        self.tune = tune
        self.step = first
        self.losses = []
        self.weights = []

    def on_train_step_end(self, run_context):
        params = run_context.original_args()
        self.step += 1
        self.losses.append(repr(float(params.net_outputs.asnumpy())))
        if self.step == SPLIT_AT:
            self.tune._session.controller._actuators.apply(SetMicroBatch(ROWS // 2))
        weights = params.train_network.optimizer.parameters
        self.weights.append(b"".join(w.asnumpy().tobytes() for w in weights).hex())


class Copy(Callback):
    """Copies the run's folder once the state of a step has been saved."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def on_train_step_begin(self, run_context):
        done = run_context.original_args().cur_step_num - 1
        if done in self.steps:
            shutil.copytree("run", f"run{done}")


def records(folder):
    decisions = [entry.to_plain() for entry in read_decisions(Path(folder) / "decisions.jsonl")]
    rows = [row.observation for row in read_signals(Path(folder) / "signals.csv")]
    return {
        "decisions": [entry for entry in decisions if entry["policy"] not in OFF],
        "rows": [[repr(getattr(row, name)) for name in COLUMNS] for row in rows],
    }


def train(folder, tune, *, step=None, first=0, before=(), behind=()):
    step = fresh() if step is None else step
    watch = Watch(tune, first)
    Model(step).train(1, dataset(first), callbacks=[*before, tune, *behind, watch])
    return {
        "losses": watch.losses, "weights": watch.weights,
        "copies": tune._session._adapter.snapshots is not None, **records(folder),
    }  # fmt: skip


def main():
    mode, *steps = sys.argv[1:]
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
    stops = [int(step) for step in steps]
    keep = ModelCheckpoint(
        "toy", "checkpoints", CheckpointConfig(save_checkpoint_steps=1, keep_checkpoint_max=STEPS)
    )
    # The controller's state belongs to the checkpoint on whichever side of the callback it is.
    order = (
        {"behind": [keep, Copy(stops)]}
        if mode == "graph"
        else {"before": [keep], "behind": [Copy(stops)]}
    )
    seen = {"straight": train("run", tuned("run"), **order)}
    seen["files"] = sorted(path.name for path in Path("run/state").glob("*.ckpt"))
    seen["memory"] = train("memory", tuned("memory", storage="memory"))
    seen["observed"] = train("observed", tuned("observed", mode="observe"))
    for stop in stops:
        step = fresh()
        path = f"checkpoints/toy-1_{stop}.ckpt"
        ms.load_param_into_net(step, ms.load_checkpoint(path), strict_load=True)
        tune = tuned(f"run{stop}")
        seen[str(stop)] = train(f"run{stop}", tune, step=step, first=stop)
    Path("seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()

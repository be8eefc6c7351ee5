"""Three real trainings in one process: one that saves, one that raises, one whose data hangs.

The last ends the process from the watchdog, with exit code 3.
"""

from __future__ import annotations

import logging
import threading

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import nn, ops
from mindspore.train import Callback, CheckpointConfig, Model, ModelCheckpoint

from mindtune.controller import TrainStep, TuneCallback

logging.basicConfig(level=logging.DEBUG, filename="everything.log")
ms.set_context(mode=ms.GRAPH_MODE)


class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(8, 1)

    def construct(self, x, y):
        return ops.mean(ops.square(self.dense(x) - y))


class Fails(Callback):
    """Raises after the fourth step, as a callback that reaches no storage does."""

    def on_train_step_end(self, run_context):
        if run_context.original_args().cur_step_num == 4:
            raise RuntimeError("the storage is gone")


class Phases(Callback):
    """Notes what the watchdog believes after each step, where a checkpoint may be written."""

    def __init__(self, tune):
        super().__init__()
        self.tune = tune
        self.seen = []

    def on_train_step_end(self, run_context):
        self.seen.append(self.tune._session._watchdog._beat.phase)


class Source:
    """Six batches, then what `end` does; one batch may be poisoned."""

    def __init__(self, *, end=None, poisoned=None):
        self._end = end
        self._poisoned = poisoned

    def batches(self):
        for batch in range(6):
            x = np.full((4, 8), np.nan if batch == self._poisoned else 1.0, np.float32)
            yield x, np.ones((4, 1), np.float32)

    def __len__(self):
        # Without it MindSpore reads all there is before a training begins.
        return 7

    def __iter__(self):
        yield from self.batches()
        self._end()


def train(source, *others, save_every=None, **config):
    net = Net()
    model = Model(TrainStep(net, nn.SGD(net.trainable_params(), 0.01)))
    data = ds.GeneratorDataset(source, ["x", "y"], shuffle=False)
    tune = TuneCallback(config)
    phases = Phases(tune)
    savers = []
    if save_every is not None:
        saving = CheckpointConfig(save_checkpoint_steps=save_every)
        savers = [ModelCheckpoint(directory="checkpoints", config=saving)]
    model.train(1, data, callbacks=[tune, phases, *savers, *others], dataset_sink_mode=False)
    return phases.seen


print("phases", *train(list(Source().batches()), save_every=4, out_dir="saved"), flush=True)
alerts = {"urls": ["env:HOOK", "env:DEAD"]}
try:
    train(list(Source(poisoned=2).batches()), Fails(), out_dir="crashed", alerts=alerts)
except RuntimeError as error:
    print("raised", "the storage is gone" in str(error), flush=True)
train(
    Source(end=threading.Event().wait),
    out_dir="hung",
    alerts=alerts,
    watchdog={"train_min_s": 2.0, "exit_on_hang": True},
)

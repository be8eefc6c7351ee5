"""Two real trainings in one process: one whose data ends in an exception, one whose data hangs.

The second ends the process from the watchdog, with exit code 3.
"""

from __future__ import annotations

import logging
import threading

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import nn, ops
from mindspore.train import Model

from mindtune.controller import TrainStep, TuneCallback

logging.basicConfig(level=logging.DEBUG, filename="everything.log")
ms.set_context(mode=ms.GRAPH_MODE)


class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(8, 1)

    def construct(self, x, y):
        return ops.mean(ops.square(self.dense(x) - y))


class Source:
    """Six batches, then what `end` does; one batch may be poisoned."""

    def __init__(self, end, *, poisoned=None):
        self._end = end
        self._poisoned = poisoned

    def __iter__(self):
        for batch in range(6):
            x = np.full((4, 8), np.nan if batch == self._poisoned else 1.0, np.float32)
            yield x, np.ones((4, 1), np.float32)
        self._end()


def fail():
    raise RuntimeError("the storage is gone")


def train(source, **config):
    net = Net()
    model = Model(TrainStep(net, nn.SGD(net.trainable_params(), 0.01)))
    data = ds.GeneratorDataset(source, ["x", "y"], shuffle=False)
    config["alerts"] = {"urls": ["env:HOOK", "env:DEAD"]}
    model.train(1, data, callbacks=[TuneCallback(config)], dataset_sink_mode=False)


try:
    train(Source(fail, poisoned=2), out_dir="crashed")
except RuntimeError as error:
    print("raised", "the storage is gone" in str(error), flush=True)
train(
    Source(threading.Event().wait),
    out_dir="hung",
    watchdog={"train_min_s": 2.0, "exit_on_hang": True},
)

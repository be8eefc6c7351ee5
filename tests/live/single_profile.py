"""Trains with a profiler window on one rank; prints what came of it as one line of JSON."""

import json
import logging
from pathlib import Path

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import nn
from mindspore.profiler import ProfilerActivity, profile
from mindspore.profiler.profiler_interface import ProfilerInterface
from mindspore.train import Model

from mindtune.controller import TrainStep, TuneCallback
from mindtune.controller.metrics.run_metrics import read_metrics
from mindtune.controller.records import RunFolder, read_profiles, read_signals

logging.basicConfig(level=logging.INFO)
GENERATOR = np.random.default_rng(0)
IMAGES = GENERATOR.normal(size=(6 * 64, 128)).astype(np.float32)
LABELS = GENERATOR.integers(0, 4, size=(6 * 64,)).astype(np.int32)


class WithLoss(nn.Cell):
    """A small classifier with its loss."""

    def __init__(self):
        super().__init__()
        self.net = nn.SequentialCell(nn.Dense(128, 512), nn.ReLU(), nn.Dense(512, 4))
        self.loss = nn.CrossEntropyLoss()

    def construct(self, images, labels):
        """Return the loss of a batch."""
        return self.loss(self.net(images), labels)


def train(name, *, asked):
    """Train six steps, with a request from the first one on."""
    ms.set_seed(1)
    network = WithLoss()
    step = TrainStep(network, nn.SGD(network.trainable_params(), 0.1))
    data = ds.NumpySlicesDataset((IMAGES, LABELS), shuffle=False).batch(64)
    folder = RunFolder(Path(name))
    folder.create()
    if asked:
        folder.profile_request.touch()
    config = {"out_dir": name, "profiler": {"steps": 3}}
    Model(step).train(1, data, callbacks=[TuneCallback(config)], dataset_sink_mode=False)
    rows = [row.observation for row in read_signals(folder.signals)]
    return {
        "losses": [row.loss for row in rows],
        "phases": [row.phase for row in rows],
        "profiles": [record.to_plain() for record in read_profiles(folder.profiles)],
        "metrics": read_metrics(folder.path).values(),
        "conditions": read_metrics(folder.path).conditions.to_plain(),
    }


def main():
    """Train in both modes, and once beside a profiler of the program's own."""
    seen = {}
    ms.set_device("CPU")
    for mode, number in (("graph", ms.GRAPH_MODE), ("pynative", ms.PYNATIVE_MODE)):
        ms.set_context(mode=number)
        seen[mode] = train(mode, asked=True)
        seen[f"{mode}_closed"] = train(f"{mode}_closed", asked=False)
    own = profile(activities=[ProfilerActivity.CPU], start_profile=False)
    own.start()
    seen["busy"] = train("busy", asked=True)
    seen["busy"]["still_open"] = ProfilerInterface.is_initialized
    own.stop()
    print(json.dumps(seen))


if __name__ == "__main__":
    main()

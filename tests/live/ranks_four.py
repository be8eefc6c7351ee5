"""Runs on each of four ranks under msrun; writes `rank<R>.json` with what it decided and saw."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import mindspore as ms
import mindspore.dataset as ds
from mindspore import nn
from mindspore.communication import get_rank, init
from mindspore.train import Callback, Model
from step_toys import Net, arrays, state

from mindtune.controller import TrainStep, TuneCallback
from mindtune.controller.live.loss_scale import LossScale

BAD_RANK, BAD_STEP = 2, 7
LATE_RANK, SLOW_RANK, BUSY_RANK = 3, 1, 2
SLEEP_S = 0.3


class Spoil:
    """All ranks look at step 7; on one of them the gradient has a NaN."""

    def wants(self, step):
        return step == BAD_STEP

    def __call__(self, step, loss, gradients):
        bad = get_rank() == BAD_RANK
        return loss, (gradients[0] * (math.nan if bad else 1.0), *gradients[1:])


class Slow:
    """One rank computes longer."""

    def wants(self, step):
        return True

    def __call__(self, step, loss, gradients):
        if get_rank() == SLOW_RANK:
            time.sleep(SLEEP_S)
        return loss, gradients


class Late(Callback):
    """One rank waits for its data from step 9 on."""

    def on_train_step_begin(self, run_context):
        if get_rank() == LATE_RANK and run_context.original_args().cur_step_num >= 9:
            time.sleep(SLEEP_S)


class Busy(Callback):
    """The host of one rank is busy in steps 3 and 4, after the data is there."""

    def on_train_step_begin(self, run_context):
        if get_rank() == BUSY_RANK and run_context.original_args().cur_step_num in (3, 4):
            time.sleep(SLEEP_S)


class Decided(Callback):
    """Keeps what every step decided and observed on this rank."""

    def __init__(self, tune):
        super().__init__()
        self.tune = tune
        self.records, self.stragglers = [], []

    def on_train_begin(self, run_context):
        controller = self.tune._session.controller
        inner = controller.step

        def step(observation, **others):
            result = inner(observation, **others)
            self.records += [entry_of(record) for record in result.records]
            self.stragglers.append(
                [observation.step, observation.straggler_rank, observation.straggler_ratio]
            )
            return result

        controller.step = step


def entry_of(record):
    return [record.step, record.policy, record.action, record.requested, record.verdict]


def batches(count):
    x, y = arrays(10 + get_rank(), rows=count * 8)
    return ds.NumpySlicesDataset({"x": x, "y": y}, shuffle=False).batch(8)


def main():
    ms.set_context(mode=ms.GRAPH_MODE)
    init()
    ms.set_auto_parallel_context(
        parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=True, device_num=4
    )
    net = Net()
    step = TrainStep(
        net, nn.SGD(net.trainable_params(), 0.01), loss_scale=LossScale(initial=2.0**10)
    )
    step.gradient_hooks.append(Spoil())
    policies = {
        "batch_size": {"enabled": False},
        # One overflow is enough to act on.
        "loss_scale": {"thresholds": {"hysteresis": 1}},
    }
    tune = TuneCallback({"out_dir": "act", "mode": "act", "policies": policies})
    acting = Decided(tune)
    Model(step).train(1, batches(12), callbacks=[Late(), tune, Busy(), acting])
    scale = step.loss_scale
    weights = state(step)

    step.gradient_hooks.append(Slow())
    step.set_num_microbatches(2)
    tune = TuneCallback({"out_dir": "slow"})
    slow = Decided(tune)
    Model(step).train(1, batches(12), callbacks=[tune, slow])
    seen = {
        "records": acting.records,
        "scale": scale,
        "weights": weights,
        "late": acting.stragglers,
        "slow": slow.stragglers,
    }
    Path(f"rank{get_rank()}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()

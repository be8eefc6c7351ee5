"""Runs on each of two ranks under msrun; writes `rank<R>.json` with what it saw."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.communication import get_rank, init
from mindspore.train import Callback, Model
from single_callback import FIXED_BATCH, Foreign, adam, decisions_of, rows_of, samples
from step_toys import Net

from mindtune.controller import TrainStep, TuneCallback

STEPS = 60


class Observed(Callback):
    """Keeps what this rank decided by and how its knobs stand."""

    def __init__(self, tune):
        super().__init__()
        self.tune = tune
        self.scales = []
        self.engine = []

    def on_train_step_end(self, run_context):
        step = run_context.original_args().train_network
        self.scales.append(step.last_report.learning_rate_scale)
        state = self.tune._session.controller.engine_state
        self.engine.append(state.to_json())


class SlowOnRank1(Callback):
    """One rank waits for its data now and then."""

    def on_train_step_begin(self, run_context):
        if get_rank() == 1 and run_context.original_args().cur_step_num == 20:
            time.sleep(0.5)


def own_data(*, spoiled):
    x, y = samples(STEPS * 8, seed=10 + get_rank())
    if spoiled:
        # Only rank 1 has bad targets: rank 0 must see them too.
        for step in range(30, 44, 2):
            y[step * 8 : step * 8 + 8] *= 300.0 if get_rank() == 1 else 1.0
    return ds.NumpySlicesDataset({"x": x, "y": y}, shuffle=False).batch(8)


def train(folder, *, spoiled=True):
    net = Net()
    step = TrainStep(net, nn.SGD(net.trainable_params(), 0.001))
    alerts = {"urls": ["env:NOBODY_LISTENS"]}
    config = {"out_dir": folder, "mode": "act", "alerts": alerts, **FIXED_BATCH}
    tune = TuneCallback(config, tokens_per_sample=4)
    seen = Observed(tune)
    Model(step).train(1, own_data(spoiled=spoiled), callbacks=[SlowOnRank1(), tune, seen])
    weights = np.concatenate([weight.asnumpy().ravel() for weight in net.trainable_params()])
    return {
        "scales": seen.scales,
        "engine": seen.engine[-1],
        "weights": weights.tobytes().hex(),
        "actions": tune._session.controller.num_actions,
        "out_dir": str(tune.out_dir),
        "tells": tune._session._alerts is not None,
        "reason": tune.stop_reason,
    }


def trial():
    folder = Path("trial")
    if get_rank() == 0:
        folder.mkdir()
        (folder / "knobs.yaml").write_text(
            "schema: 1\nknobs: {data_parallel: 2}\ntrial: {number: 0, warmup_steps: 19, "
            "measure_steps: 3, deadline_s: 60}\n"
        )
    while not (folder / "knobs.yaml").exists():
        time.sleep(0.05)
    os.environ["MINDTUNE_TRIAL_DIR"] = str(folder)
    seen = train("unused", spoiled=False)
    del os.environ["MINDTUNE_TRIAL_DIR"]
    return seen


def resume(*, apart):
    """Goes on after `run`; `apart`: rank 1 cannot see the folder."""
    home = Path.cwd()
    if apart and get_rank() == 1:
        Path("elsewhere").mkdir()
        os.chdir("elsewhere")
    net = Net()
    optimizer = nn.SGD(net.trainable_params(), 0.001)
    ops.assign(optimizer.global_step, Tensor([STEPS], ms.int32))
    tune = TuneCallback({"out_dir": "run", "mode": "act", **FIXED_BATCH})
    data = own_data(spoiled=False).take(3)
    Model(TrainStep(net, optimizer)).train(1, data, callbacks=[tune])
    os.chdir(home)
    return {"step": tune.state_dict()["step"], "knobs": tune.state_dict()["knobs"]}


def foreign():
    """A step of somebody else's on several ranks: nobody may act."""
    net = Net()
    tune = TuneCallback({"out_dir": "foreign", "mode": "act", **FIXED_BATCH})
    Model(Foreign(net, adam(net), 5)).train(1, own_data(spoiled=True), callbacks=[tune])
    return {"actions": tune._session.controller.num_actions}


def main():
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    ms.set_context(mode=ms.GRAPH_MODE)
    init()
    ms.set_auto_parallel_context(
        parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=True, device_num=2
    )
    rank = get_rank()
    seen = {"run": train("run")}
    if rank == 0:
        seen["rows"] = rows_of("run")
    seen |= {
        "resumed": resume(apart=False),
        "apart": resume(apart=True),
        "trial": trial(),
        "foreign": foreign(),
    }
    if rank == 0:
        seen["foreign_decisions"] = decisions_of("foreign")
        seen["trial_result"] = json.loads(Path("trial/result.json").read_text())
        seen["trial_files"] = sorted(path.name for path in Path("trial").iterdir())
    Path(f"rank{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()

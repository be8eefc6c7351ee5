"""Plants every kind of fault in one process; writes `seen.json` with what the runs recorded."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.train import Model
from single_callback import FIXED_BATCH, adam, dataset, decisions_of, result_of
from step_toys import Net

from mindtune.controller import TrainStep, TuneCallback, tune_loop
from mindtune.controller.contract.fault_plan import PoisonedBatch
from mindtune.controller.errors import ConfigError
from mindtune.controller.live.faults.gradients import GradientFaults
from mindtune.controller.live.loss_scale import LossScale
from mindtune.controller.records import read_signals

COLUMNS = (
    "step", "phase", "loss", "grad_norm", "overflow", "update_skipped", "loss_scale",
    "learning_rate", "learning_rate_scale", "step_time_s", "data_time_s", "device_utilization",
    "device_memory_used_bytes", "device_memory_total_bytes",
)  # fmt: skip
NUMERIC = [
    {"kind": "spike", "first_step": 6, "every": 2, "last_step": 8, "factor": 50.0},
    {"kind": "spike", "first_step": 9, "factor": 50.0, "signal": "loss"},
    {"kind": "burst", "first_step": 10, "last_step": 11, "signal": "gradient"},
    {"kind": "nan_loss", "first_step": 13},
    {"kind": "nan_gradient", "first_step": 15, "parameter": "second.bias"},
    {"kind": "nan_gradient", "first_step": 16, "parameter": 0, "value": "inf"},
    {"kind": "level_shift", "first_step": 18, "last_step": 19},
    {"kind": "drift", "first_step": 21, "last_step": 23, "factor": 2.0, "signal": "both"},
    {"kind": "poisoned_batch", "first_step": 25, "factor": 1e4},
    {"kind": "learning_rate_jump", "first_step": 27, "last_step": 28, "factor": 10.0},
    {"kind": "overflow_storm", "first_step": 30, "last_step": 33, "max_loss_scale": 4.0},
    {"kind": "overflow_storm", "first_step": 35, "last_step": 36},
]
AROUND = [
    {"kind": "learning_rate_jump", "first_step": 3, "last_step": 4, "factor": 10.0},
    {"kind": "slow_data", "first_step": 4, "last_step": 5, "seconds": "400ms"},
    {"kind": "slow_rank", "first_step": 8, "last_step": 9, "seconds": 0.4, "rank": 0},
    {"kind": "hang", "first_step": 12, "seconds": 0.8},
    {"kind": "stuck_utilization", "first_step": 6, "last_step": 7, "value": 0.02},
    {"kind": "memory_climb", "first_step": 4, "last_step": 8, "per_step": "8MB", "total": "4GB"},
]


def rows_of(folder):
    rows = [row.observation for row in read_signals(Path(folder) / "signals.csv")]
    return [{name: spelled(getattr(row, name)) for name in COLUMNS} for row in rows]


def spelled(value):
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def train(out, faults, *, steps, rate=0.05, microbatches=1, **step):
    net = Net()
    optimizer = nn.Adam(net.trainable_params(), rate)
    cell = TrainStep(net, optimizer, num_microbatches=microbatches, **step)
    told = {"out_dir": out, **FIXED_BATCH}
    error = ""
    try:
        with TuneCallback({**told, "faults": faults} if faults else told) as tune:
            Model(cell).train(1, dataset(steps * microbatches), callbacks=[tune])
    except (ConfigError, MemoryError) as raised:
        error = f"{type(raised).__name__}: {raised}"
    seen = {"error": error, "hooks": len(cell.gradient_hooks)}
    if Path(out, "result.json").exists():
        seen |= {"rows": rows_of(out), "decisions": decisions_of(out), "result": result_of(out)}
        seen["files"] = sorted(path.name for path in Path(out).iterdir())
    return seen


def numeric():
    """All numeric kinds in one run, beside the same run without a plan."""
    settings = {"steps": 38, "loss_scale": LossScale(initial=64.0, window=1000)}
    rate = lambda: nn.CosineDecayLR(0.01, 0.05, 1000)  # noqa: E731
    return {
        "calm": train("calm", [], rate=rate(), **settings),
        "planted": train("planted", NUMERIC, rate=rate(), **settings),
    }


def around():
    """What needs no gradients, with two micro-batches a step and a plain learning rate."""
    return train("around", AROUND, steps=14, microbatches=2)


def full():
    climb = {"kind": "memory_climb", "first_step": 3, "per_step": "300MB", "total": "1GB"}
    return train("full", [climb], steps=6)


def refused():
    """What a run cannot have is told before anything is written."""
    seen = {
        "rank": train("r1", [{"kind": "nan_loss", "first_step": 1, "rank": 1}], steps=1),
        "name": train("r2", [{"kind": "nan_gradient", "first_step": 1, "parameter": "x"}], steps=1),
        "memory": train("r3", [{"kind": "memory_climb", "first_step": 1, "total": "900TB"}], steps=1),
    }  # fmt: skip
    net = Net()
    try:
        tune = TuneCallback({"out_dir": "r4", "faults": [{"kind": "spike", "first_step": 1}]})
        Model(nn.TrainOneStepCell(net, adam(net))).train(1, dataset(1), callbacks=[tune])
    except ConfigError as error:
        seen["foreign"] = {"error": str(error)}
    return seen | {"left": sorted(path.name for path in Path().glob("r?"))}


def loop():
    """A hand-written loop has the same faults."""
    net = Net()
    grad = ms.value_and_grad(net, None, net.trainable_params())
    faults = [
        {"kind": "nan_gradient", "first_step": 3},
        {"kind": "slow_data", "first_step": 5, "seconds": 0.3},
    ]
    with tune_loop({"out_dir": "loop", "faults": faults}, adam(net)) as tune:
        for batch in tune.batches(dataset(6).create_tuple_iterator()):
            tune.apply(*grad(*batch))
    return {"rows": rows_of("loop"), "result": result_of("loop")}


def half():
    """A gradient in bfloat16, as a hand-written loop may have."""
    poison = PoisonedBatch(kind="poisoned_batch", first_step=1, factor=100.0)
    hook = GradientFaults(
        [poison], names=["weight"], rank=0, loss_scale=lambda: 1.0, ahead=lambda: 0
    )
    gradient = ms.Tensor(np.full((4, 4), 0.5, np.float32), ms.bfloat16)
    _, (spoilt,) = hook(1, ms.Tensor(1.0), (gradient,))
    norm = float(np.linalg.norm(spoilt.astype(ms.float32).asnumpy()))
    return {"type": str(spoilt.dtype), "norm": norm}


def main():
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    mode, *names = sys.argv[1:]
    ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
    home = Path.cwd()
    seen = {}
    for name in names:
        folder = home / f"{name}_{mode}"
        folder.mkdir()
        os.chdir(folder)
        began = time.monotonic()
        seen[name] = globals()[name]()
        print("took", name, round(time.monotonic() - began, 1), flush=True)
    os.chdir(home)
    Path("seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()

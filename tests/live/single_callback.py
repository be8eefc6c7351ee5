"""Runs in one process of its own; writes `seen.json` with what every scenario left.

Arguments: the scenarios to run. Each runs in a folder of its own below the working directory.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import runpy
import sys
import threading
import time
from pathlib import Path

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.train import Callback, CheckpointConfig, Model, ModelCheckpoint
from single_model_signals import model_signals  # noqa: F401 - a scenario, found by its name
from step_toys import FEATURES, Net

from mindtune.controller import TrainStep, TuneCallback, tune_loop
from mindtune.controller.live.controller import LiveController
from mindtune.controller.live.foreign import ForeignActuators, ForeignStep
from mindtune.controller.live.foreign_outputs import decode
from mindtune.controller.live.loss_scale import LossScale
from mindtune.controller.records import read_decisions, read_signals
from mindtune.policies.decisions import SetBatchSize, SetLearningRateScale, SetLossScale

LEARNING_RATE = 0.05
FIXED_BATCH = {"policies": {"batch_size": {"enabled": False}}}


def samples(count, *, seed=3):
    draw = np.random.RandomState(seed)
    x = draw.randn(count, FEATURES).astype(np.float32)
    return x, np.sin(x[:, :1] * 2).astype(np.float32)


def dataset(steps, *, rows=8, change=None):
    """Batches in a fixed order; `change(x, y)` may spoil them first."""
    x, y = samples(steps * rows)
    if change is not None:
        x, y = change(x.copy(), y.copy())
    return ds.NumpySlicesDataset({"x": x, "y": y}, shuffle=False).batch(rows)


def adam(net):
    return nn.Adam(net.trainable_params(), LEARNING_RATE)


class Losses(Callback):
    """Records the loss of every call."""

    def __init__(self):
        super().__init__()
        self.values = []

    def step_end(self, run_context):
        outputs = run_context.original_args().net_outputs
        loss = outputs[0] if isinstance(outputs, tuple) else outputs
        self.values.append(float(loss.asnumpy()))


class At(Callback):
    """Does something after given calls."""

    def __init__(self, actions):
        super().__init__()
        self.actions = actions
        self.call = 0

    def step_end(self, run_context):
        self.call += 1
        if self.call in self.actions:
            self.actions[self.call](run_context)


def rows_of(folder):
    names = (
        "step", "run", "phase", "loss", "eval_loss", "grad_norm", "overflow", "update_skipped",
        "loss_scale", "learning_rate", "learning_rate_scale", "clip_norm", "global_batch_size",
        "micro_batch_size", "num_microbatches", "tokens", "step_time_s", "data_time_s",
        "tokens_per_s", "device_utilization", "device_memory_total_bytes", "wall_time_s",
    )  # fmt: skip
    rows = [row.observation for row in read_signals(Path(folder) / "signals.csv")]
    return [{name: plain(getattr(row, name)) for name in names} for row in rows]


def plain(value):
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def decisions_of(folder):
    return [entry.to_plain() for entry in read_decisions(Path(folder) / "decisions.jsonl")]


def result_of(folder):
    return json.loads((Path(folder) / "result.json").read_text())


def plan_of(folder):
    return json.loads((Path(folder) / "plan.json").read_text())["steps"]


def weights(net):
    return np.concatenate([weight.asnumpy().ravel() for weight in net.trainable_params()])


def three_lines():
    """The script of the README and its hand-written loop, run from the text as they stand."""
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    blocks = [part.split("```")[0] for part in readme.split("```python\n")[1:]]
    script, loop = blocks[0], next(block for block in blocks if "with tune_loop(" in block)
    assert "Model(TrainStep(net_with_loss, optimizer))" in script
    Path("first.py").write_text(script + loop, encoding="utf-8")
    runpy.run_path("first.py", run_name="__main__")
    folder, looped = sorted(Path("mindtune_runs").iterdir())
    return {
        "files": sorted(path.name for path in folder.iterdir()),
        "rows": rows_of(folder),
        "result": result_of(folder),
        "looped": result_of(looped),
        "plan": plan_of(folder),
        "looped_files": sorted(path.name for path in looped.iterdir()),
    }


def identical():
    """Fifty steps with and without everything."""
    losses = {}
    for name in ("theirs", "ours"):
        net = Net()
        own = Losses()
        if name == "theirs":
            Model(nn.TrainOneStepCell(net, adam(net))).train(1, dataset(50), callbacks=[own])
        else:
            tune = TuneCallback({"out_dir": "run"})
            Model(TrainStep(net, adam(net))).train(1, dataset(50), callbacks=[tune, own])
        losses[name] = own.values
    losses["recorded"] = [row["loss"] for row in rows_of("run")]
    return losses


class Foreign(nn.Cell):
    """A step that is not ours and returns a tuple of `length` values, as MindFormers' does.

    As that one it reports the rate of a copy of the optimizer's schedule, and may let a manager
    move its loss scale.
    """

    def __init__(self, network, optimizer, length, *, scale=1024.0, manager=None):
        super().__init__(auto_prefix=False)
        self.network = network
        self.optimizer = optimizer
        self.length = length
        self.scale_sense = Parameter(Tensor([scale], ms.float32), name="scale_sense")
        self.weights = optimizer.parameters
        self.grad = ops.GradOperation(get_by_list=True, sens_param=True)
        self.learning_rate = copy.deepcopy(optimizer.learning_rate)
        self.loss_scaling_manager = manager
        self.managed = manager is not None

    def construct(self, x, y):
        loss = self.network(x, y)
        scale = self.scale_sense.value()
        sens = ops.ones_like(loss) * scale.reshape(())
        grads = self.grad(self.network, self.weights)(x, y, sens)
        total = ops.zeros((), ms.float32)
        scaled = ()
        for grad in grads:
            total = total + ops.sum(ops.square(grad / scale.reshape(())))
            scaled += (grad / scale.reshape(()),)
        norm = ops.sqrt(total)
        overflow = ops.logical_not(ops.isfinite(norm))
        if self.managed:
            overflow = self.loss_scaling_manager(self.scale_sense, overflow)
            scale = self.scale_sense.value()
        rate = self.learning_rate
        if self.optimizer.dynamic_lr:
            rate = self.learning_rate(self.optimizer.global_step)
        if ops.logical_not(overflow):
            self.optimizer(scaled)
        if self.length == 3:
            return loss, overflow, scale
        if self.length == 4:
            return loss, overflow, scale, rate
        if self.length == 5:
            return loss, overflow, scale, rate, norm.reshape((1,))
        return loss, overflow, scale, rate, norm.reshape((1,)), norm * norm, (1, 2)


def poison(x, y):
    x[4 * 8, 0] = np.nan
    return x, y


def foreign():
    """Every shape trains for real; step 5 has a NaN in its batch."""
    seen = {}
    for length in (1, 3, 4, 5, 7):
        net = Net()
        step = (
            nn.TrainOneStepCell(net, adam(net)) if length == 1 else Foreign(net, adam(net), length)
        )
        out = f"run{length}"
        change = None if length == 1 else poison
        tune = TuneCallback({"out_dir": out, "mode": "act"})
        Model(step).train(1, dataset(8, change=change), callbacks=[tune])
        seen[str(length)] = {
            "rows": rows_of(out), "decisions": decisions_of(out), "result": result_of(out)
        }  # fmt: skip
    return seen


def foreign_knobs():
    """A branch around the optimizer, the worst case for writing to a Parameter."""
    seen = {}
    for form in ("float", "schedule"):
        rate = LEARNING_RATE if form == "float" else nn.CosineDecayLR(0.01, LEARNING_RATE, 1000)
        net = Net()
        optimizer = nn.SGD(net.trainable_params(), rate)
        step = Foreign(net, optimizer, 5)
        hands = ForeignActuators(step, optimizer, acts=True)
        x, y = (Tensor(array[:8]) for array in samples(8))
        moved, scales, rates, acted = [], [], [], []
        for scale in (1.0, 0.0, 1.0, 10.0, 1.0):
            hands.apply(SetLearningRateScale(scale))
            hands.apply(SetLossScale(2.0 ** (10 + len(moved))))
            before = weights(net)
            seen_step = decode(step(x, y))
            moved.append(float(np.linalg.norm(weights(net) - before)) / seen_step.grad_norm)
            rates.append(seen_step.learning_rate)
            acted.append(hands.acted_rate_scale(seen_step.learning_rate))
            scales.append(decode(step(x, y)).loss_scale)
        seen[form] = {"moved": moved, "scales": scales, "rates": rates, "acted": acted, "reachable": sorted(hands.reachable),
                      "unreachable": list(hands.unreachable)}  # fmt: skip
    return seen


def foreign_rule():
    """A step moves its loss scale by its own rule; once a policy owns the scale, it rests."""
    seen = {}
    x, y = (Tensor(array[:8]) for array in samples(8))
    bad = Tensor(np.full((8, FEATURES), np.nan, np.float32))
    for owned in (False, True):
        net = Net()
        optimizer = adam(net)
        manager = nn.DynamicLossScaleUpdateCell(1024.0, 2.0, 3)
        step = Foreign(net, optimizer, 5, manager=manager)
        adapter = ForeignStep(step, optimizer, acts=True, data_parallel=1, job_size=1)
        if owned:
            adapter.actuators.take_over(frozenset({"loss_scale"}))
        acted = []
        for number in range(8):
            adapter.begin_call()
            acted.append(adapter.take(step(bad if number == 1 else x, y)).loss_scale)
        facts = adapter.facts(micro_batch_size=8, max_num_microbatches=None, device="CPU")
        seen[str(owned)] = {"acted": acted, "dynamic": facts.loss_scale_dynamic}
    return seen


def untouched_in_observe_mode():
    """On a foreign step in observe mode not even the schedule is wrapped."""
    net = Net()
    optimizer = nn.SGD(net.trainable_params(), nn.CosineDecayLR(0.01, LEARNING_RATE, 1000))
    Model(nn.TrainOneStepCell(net, optimizer)).train(
        1, dataset(2), callbacks=[TuneCallback({"out_dir": "run"})]
    )
    return type(optimizer.learning_rate).__name__


def resize():
    """The number of micro-batches changes live, through the actuators, at a fixed micro-batch."""
    net = Net()
    step = TrainStep(net, adam(net))
    tune = TuneCallback({"out_dir": "run", "mode": "act", **FIXED_BATCH})
    # Calls: 1 2 | 3+4 5+6 | 7..10 11..14 | 15 16.
    to = {2: 16, 6: 32, 14: 8}
    at = At({
        call: lambda _context, size=size: tune._session.controller._actuators.apply(
            SetBatchSize(size)
        )
        for call, size in to.items()
    })  # fmt: skip
    Model(step).train(1, dataset(16), callbacks=[tune, at])
    return {"rows": rows_of("run"), "result": result_of("run"), "plan": plan_of("run")}


def spike(x, y):
    """From step 40 on the targets are far away, now and then."""
    for step in range(40, 60, 2):
        y[step * 8 : step * 8 + 8] *= 300.0
    return x, y


def guarded():
    """Gradient spikes: the policy lowers the learning rate for real."""
    seen = {}
    off = ("batch_size", "skip_update", "clipping", "rewind")
    alone = {"policies": {name: {"enabled": False} for name in off}}
    for mode in ("observe", "act"):
        net = Net()
        tune = TuneCallback({"out_dir": mode, "mode": mode, **alone})
        step = TrainStep(net, nn.SGD(net.trainable_params(), 0.001))
        own = Losses()
        Model(step).train(1, dataset(90, change=spike), callbacks=[tune, own])
        seen[mode] = {
            "rows": rows_of(mode), "decisions": decisions_of(mode), "result": result_of(mode),
            "losses": own.values,
        }  # fmt: skip
    return seen


def spoil(x, y):
    """From step 10 on every batch has a NaN."""
    x[10 * 8 :: 8, 0] = np.nan
    return x, y


def stopped():
    """A run that no policy can save ends with a diagnosis."""
    net = Net()
    step = TrainStep(net, adam(net), loss_scale=LossScale(initial=2.0**10, window=50))
    tune = TuneCallback({"out_dir": "run", "mode": "act", **FIXED_BATCH})
    own = Losses()
    Model(step).train(1, dataset(400, change=spoil), callbacks=[tune, own])
    return {
        "calls": len(own.values), "reason": tune.stop_reason, "result": result_of("run"),
        "decisions": decisions_of("run"),
    }  # fmt: skip


def handed_over():
    """A loss scale far above what the trials found to run clean, which is known or not."""
    seen = {}
    for name, learned in (("known", {"loss_scale_max": 1024.0}), ("unknown", {})):
        storm = {
            "kind": "overflow_storm", "first_step": 1, "last_step": 14, "max_loss_scale": 1024.0,
        }  # fmt: skip
        net = Net()
        step = TrainStep(net, adam(net), loss_scale=LossScale(initial=2.0**24, window=1000))
        tune = TuneCallback(
            {"out_dir": name, "mode": "act", "learned": learned, "faults": [storm], **FIXED_BATCH}
        )
        Model(step).train(1, dataset(14), callbacks=[tune])
        seen[name] = rows_of(name)
    return seen


def crashed():
    """An exception in the middle of training."""
    net = Net()

    def fail(_context):
        raise MemoryError("no room for the next batch")

    message = ""
    try:
        Model(TrainStep(net, adam(net))).train(
            1, dataset(9), callbacks=[TuneCallback({"out_dir": "run"}), At({5: fail})]
        )
    except MemoryError as error:
        message = str(error)
    return {"raised": message, "result": result_of("run"), "rows": rows_of("run")}


def broken():
    """A failure inside our own callback."""
    seen = {}
    for place in ("run", "trial"):
        if place == "trial":
            Path(place).mkdir()
            Path("trial/knobs.yaml").write_text(KNOBS)
            os.environ["MINDTUNE_TRIAL_DIR"] = place
        net = Net()
        tune = TuneCallback({"out_dir": "run", "mode": "act"})

        def fail(_context, tune=tune):
            tune._session.controller.step = None

        losses = Losses()
        raised = ""
        try:
            Model(TrainStep(net, adam(net))).train(
                1, dataset(7), callbacks=[losses, tune, At({3: fail})]
            )
        except TypeError as error:
            raised = str(error)
        os.environ.pop("MINDTUNE_TRIAL_DIR", None)
        seen[place] = {"raised": raised, "gave_up": tune.gave_up, "stop": tune.stop_reason,
                       "calls": len(losses.values)}  # fmt: skip
    seen |= {"result": result_of("run"), "rows": rows_of("run")}
    tune = TuneCallback({"out_dir": "never_begun"})
    take_over = LiveController.take_over
    LiveController.take_over = lambda self, facts: fail_in_the_middle()
    try:
        Model(TrainStep(net, adam(net))).train(1, dataset(2), callbacks=[tune])
    except RuntimeError:
        seen["threads"] = [
            thread.name for thread in threading.enumerate() if thread.name.startswith("mindtune")
        ]
        seen["never_begun"] = result_of("never_begun")
    LiveController.take_over = take_over
    return seen


KNOBS = """
schema: 1
knobs: {micro_batch_size: 8, data_parallel: 1}
trial: {number: 3, repeat: 0, seed: 0, warmup_steps: 3, measure_steps: 5, deadline_s: 60}
"""


def trial():
    """In a trial the callback ends training by itself and leaves the trial's result."""
    Path("knobs.yaml").write_text(KNOBS)
    os.environ["MINDTUNE_TRIAL_DIR"] = str(Path.cwd())
    try:
        net = Net()
        tune = TuneCallback(
            {"mode": "act"},
            tokens_per_sample=4,
            effective=lambda: {"precision": "float32"},
            eval_fn=lambda: 0.25,
        )
        slow = At({6: lambda _context: time.sleep(0.5)})
        own = Losses()
        model = Model(TrainStep(net, adam(net), num_microbatches=2))
        model.train(1, dataset(40), callbacks=[tune, own, slow])
    finally:
        del os.environ["MINDTUNE_TRIAL_DIR"]
    return {
        "calls": len(own.values), "result": result_of("."), "rows": rows_of("."),
        "reason": tune.stop_reason, "files": sorted(path.name for path in Path().iterdir()),
    }  # fmt: skip


class Evaluated(nn.Cell):
    """Loss, output and label, as MindSpore's evaluation wants them."""

    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, x, y):
        return self.network(x, y), y, y


def evaluated():
    """`fit` evaluates after every epoch; that takes no step's time."""

    class Slow(Callback):
        def on_eval_step_end(self, run_context):
            time.sleep(0.5)

        def on_train_step_begin(self, run_context):
            if run_context.original_args().cur_step_num == 3:
                time.sleep(0.3)

    net = Net()
    step = TrainStep(net, adam(net))
    model = Model(
        step, eval_network=Evaluated(net), metrics={"loss": nn.Loss()}, eval_indexes=[0, 1, 2]
    )
    tune = TuneCallback({"out_dir": "run"})
    model.fit(3, dataset(4), dataset(1), callbacks=[Slow(), tune], valid_dataset_sink_mode=False)
    return {"rows": rows_of("run"), "result": result_of("run")}


def resumed():
    """A checkpoint, a new process's worth of objects, and everything goes on."""

    def fresh():
        net = Net()
        return net, TrainStep(net, adam(net))

    tune = TuneCallback({"out_dir": "run"})
    keep = ModelCheckpoint("toy", "checkpoints", CheckpointConfig(save_checkpoint_steps=5))
    _, step = fresh()

    def turn(_context):
        tune._session.controller._actuators.apply(SetLearningRateScale(0.5))

    def evaluate(_context):
        with tune.paused("eval"):
            time.sleep(0.4)
        tune.report_eval_loss(0.5)

    Model(step).train(1, dataset(12), callbacks=[tune, keep, At({4: turn, 7: evaluate})])
    (path,) = Path("checkpoints").glob("toy-1_10.ckpt")
    _, step = fresh()
    ms.load_param_into_net(step, ms.load_checkpoint(str(path)), strict_load=True)
    again = TuneCallback({"out_dir": "run"})
    Model(step).train(1, dataset(3), callbacks=[again])
    state = json.loads(json.dumps(again.state_dict(), allow_nan=False))
    third = TuneCallback({"out_dir": "run"})
    third.load_state_dict(state)
    _, step = fresh()
    Model(step).train(1, dataset(2), callbacks=[third])
    return {
        "rows": rows_of("run"),
        "states": sorted(path.name for path in Path("run/state").iterdir()),
        "plan": plan_of("run"),
    }


def twice():
    """One callback in two trainings: one run of two segments."""
    net = Net()
    tune = TuneCallback({"out_dir": "run"})
    model = Model(TrainStep(net, adam(net)))
    model.train(1, dataset(3), callbacks=[tune])
    model.train(1, dataset(2), callbacks=[tune])
    return {"rows": rows_of("run"), "result": result_of("run")}


def ragged():
    """A last batch that is smaller: another shape compiles, its own tokens count."""
    x, y = samples(20)
    data = ds.NumpySlicesDataset({"x": x, "y": y}, shuffle=False).batch(8)
    net = Net()
    Model(TrainStep(net, adam(net))).train(
        2, data, callbacks=[TuneCallback({"out_dir": "run"}, tokens_per_sample=10)]
    )
    return {"rows": rows_of("run")}


def loop():
    """A hand-written loop around a plain gradient function."""
    x, y = samples(40 * 8)
    net = Net()
    optimizer = nn.SGD(net.trainable_params(), LEARNING_RATE)
    losses = {"theirs": [], "ours": []}
    batches = [(Tensor(x[i * 8 : i * 8 + 8]), Tensor(y[i * 8 : i * 8 + 8])) for i in range(20)]
    grad_fn = ms.value_and_grad(net, None, optimizer.parameters)
    for batch in batches:
        loss, grads = grad_fn(*batch)
        optimizer(grads)
        losses["theirs"].append(float(loss.asnumpy()))
    net = Net()
    optimizer = nn.SGD(net.trainable_params(), LEARNING_RATE)
    grad_fn = ms.value_and_grad(net, None, optimizer.parameters)
    with tune_loop({"out_dir": "run"}, optimizer, tokens_per_sample=4, planned_steps=20) as around:
        for batch in around.batches(batches):
            loss, grads = grad_fn(*batch)
            around.apply(loss, grads)
            losses["ours"].append(float(loss.asnumpy()))
            if around.report.learning_rate_scale and len(losses["ours"]) == 10:
                with around.paused("eval"):
                    time.sleep(0.4)
                around.report_eval_loss(0.125)
            if around.stop_requested:
                break
    first = rows_of("run")
    outcome, plan = result_of("run"), plan_of("run")
    raised = ""
    try:
        with tune_loop({"out_dir": "run"}, optimizer, num_microbatches=2) as around:
            for batch in batches[:6]:
                around.apply(*grad_fn(*batch))
            fail_in_the_middle()
    except RuntimeError as error:
        raised = str(error)
    return {
        "losses": losses, "rows": first, "result": outcome, "raised": raised,
        "after": rows_of("run")[len(first) :], "crash": result_of("run"), "plan": plan,
        "stale": Path("run/plan.json").exists(),
    }  # fmt: skip


def endless():
    """Trains until it is killed."""
    net = Net()
    tune = TuneCallback({"out_dir": "run"})
    Model(TrainStep(net, adam(net))).train(10**6, dataset(64), callbacks=[tune])


def fail_in_the_middle():
    raise RuntimeError("in the middle")


def host_cost():
    """Time per step of the host side: callback, sensors, engine, records; wall and own CPU."""
    net = Net()
    tune = TuneCallback({"out_dir": "run", "mode": "observe"}, tokens_per_sample=4)

    class Timed(Callback):
        """Stands in for a callback list and takes the time of its one member."""

        def __init__(self):
            super().__init__()
            self.spent = []
            self.spent_cpu = []

        def on_train_begin(self, run_context):
            tune.on_train_begin(run_context)

        def on_train_step_begin(self, run_context):
            began = time.perf_counter(), time.thread_time()
            tune.on_train_step_begin(run_context)
            self.first = time.perf_counter() - began[0], time.thread_time() - began[1]

        def on_train_step_end(self, run_context):
            began = time.perf_counter(), time.thread_time()
            tune.on_train_step_end(run_context)
            self.spent.append(self.first[0] + time.perf_counter() - began[0])
            self.spent_cpu.append(self.first[1] + time.thread_time() - began[1])

        def on_train_end(self, run_context):
            tune.on_train_end(run_context)

    timed = Timed()
    Model(TrainStep(net, adam(net))).train(1, dataset(400), callbacks=[timed])
    quantiles = {}
    for name, values in (("wall", timed.spent), ("cpu", timed.spent_cpu)):
        ordered = sorted(values[20:])
        for quantile in (25, 50, 75, 90):
            quantiles[f"{name}_us_{quantile}"] = round(
                1e6 * ordered[len(ordered) * quantile // 100]
            )
    return quantiles


def main():
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    mode, *names = sys.argv[1:]
    ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
    home = Path.cwd()
    seen = {}
    for name in names:
        folder = home / name
        folder.mkdir()
        os.chdir(folder)
        began = time.monotonic()
        print("scenario", name, flush=True)
        seen[name] = globals()[name]()
        print("took", name, round(time.monotonic() - began, 1), flush=True)
    os.chdir(home)
    Path("seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()

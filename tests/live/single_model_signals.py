"""A scenario of `single_callback`: what sampling sees, and that it only looks."""

from __future__ import annotations

import json
import math
from pathlib import Path

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.train import Callback, Model
from step_toys import Net, arrays

from mindtune.controller import TrainStep, TuneCallback, tune_loop
from mindtune.controller.records import read_decisions, read_model_signals, read_signals

RATE = 0.125
STEPS = 12
SKIPPED, SPOILED = 6, 9


def dataset():
    x, y = arrays(3, rows=STEPS * 8)
    return ds.NumpySlicesDataset({"x": x, "y": y}, shuffle=False).batch(8)


class Watched(Callback):
    """Losses, and the weights around every update; step 6 is skipped."""

    def __init__(self, net, step):
        super().__init__()
        self.net, self.step = net, step
        self.losses, self.weights = [], [self.now()]

    def now(self):
        return [weight.asnumpy().copy() for weight in self.net.trainable_params()]

    def on_train_step_end(self, run_context):
        self.losses.append(float(run_context.original_args().net_outputs.asnumpy()))
        self.weights.append(self.now())
        self.step.set_skip_threshold(1e-9 if len(self.losses) == SKIPPED - 1 else None)


class Spoil:
    """From step 9 on the gradient of the first weight, and of no other, is NaN."""

    def wants(self, step):
        return step >= SPOILED

    def __call__(self, step, loss, gradients):
        return loss, (gradients[0] * math.nan, *gradients[1:])


def adam(net):
    return nn.Adam(net.trainable_params(), RATE)


def trained(folder, every, *, asks=False, spoil=False):
    net = Net()
    function, shapes = asked(net) if asks else (None, [])
    # With a scale, even of 1, the step skips what is not finite while policies only observe.
    scale = 1.0 if spoil else None
    step = TrainStep(net, nn.SGD(net.trainable_params(), RATE), loss_scale=scale)
    if spoil:
        step.gradient_hooks.append(Spoil())
    tune = TuneCallback(
        {"out_dir": folder, "model_signals": {"every": every}, "mode": "observe"},
        model_signals=function,
    )
    watched = Watched(net, step)
    Model(step).train(1, dataset(), callbacks=[tune, watched])
    return step, watched, shapes


def plain(value):
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def rows_of(folder):
    rows = [row.observation for row in read_signals(Path(folder) / "signals.csv")]
    return [
        [row.step, plain(row.loss), plain(row.grad_norm), row.update_norm, row.update_skipped]
        for row in rows
    ]


def records_of(folder):
    path = Path(folder) / "model_signals.jsonl"
    return [record.to_plain() for record in read_model_signals(path)]


def decisions_of(folder):
    found = read_decisions(Path(folder) / "decisions.jsonl")
    return [[entry.step, entry.requested, entry.reason] for entry in found]


def expected(watched):
    """Per step and layer, from the weights before and after: norms, and the histogram."""
    seen = {}
    for step in range(1, STEPS + 1):
        before, after = watched.weights[step - 1], watched.weights[step]
        layers = []
        for layer in (slice(0, 2), slice(2, 4)):
            old = np.concatenate([array.ravel() for array in before[layer]]).astype(np.float64)
            new = np.concatenate([array.ravel() for array in after[layer]]).astype(np.float64)
            layers.append([float(np.linalg.norm(new - old)), float(np.linalg.norm(old)), old.size])
        seen[step] = layers
    return seen


class Inside(nn.Cell):
    """Runs the net again and reduces what is inside."""

    def __init__(self, net):
        super().__init__(auto_prefix=False)
        self.net = net

    def construct(self, x, y):
        hidden = ops.tanh(self.net.first(x))
        return ops.stack((hidden.abs().max(), self.net(x, y)))


def asked(net):
    """The model's own function, and the shapes it was asked with."""
    inside, shapes = Inside(net), []

    def function(x, y):
        shapes.append(list(x.shape))
        largest, loss = inside(x, y).asnumpy()
        return {
            "attention_entropy": Tensor(np.array([[0.5, math.nan]], np.float32)),
            "token_confidence": Tensor([0.25]),
            "layer_losses": [loss],
            "largest": largest,
        }

    return function, shapes


def refused():
    """A function that gives whole maps ends the watching, and not the training."""
    net = Net()
    tune = TuneCallback(
        {"out_dir": "refused", "model_signals": {"every": 1}},
        model_signals=lambda _x, _y: {"maps": np.zeros((2, 3, 4))},
    )
    step = TrainStep(net, adam(net))
    Model(step).train(1, dataset().take(3), callbacks=[tune])
    result = json.loads(Path("refused/result.json").read_text())
    return [step.optimizer_steps, len(step.gradient_hooks), result["outcome"], result["message"]]


class Unreached(nn.Cell):
    """A loss that no weight has a part in."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def construct(self, x, y):
        return ops.stop_gradient(self.net(x, y))


def untrained():
    net = Unreached()
    tune = TuneCallback({"out_dir": "untrained", "model_signals": {"every": 4}})
    step = TrainStep(net, nn.SGD(net.trainable_params(), RATE))
    Model(step).train(1, dataset(), callbacks=[tune])
    result = json.loads(Path("untrained/result.json").read_text())
    steps = [record["step"] for record in records_of("untrained")]
    return {"findings": result["findings"], "steps": steps}


def by_hand():
    """A hand-written loop is sampled alike."""
    net = Net()
    optimizer = nn.SGD(net.trainable_params(), RATE)
    grad_fn = ops.value_and_grad(net, None, optimizer.parameters)
    x, y = arrays(3, rows=48)
    batches = [(Tensor(x[i : i + 8]), Tensor(y[i : i + 8])) for i in range(0, 48, 8)]
    config = {"out_dir": "by_hand", "model_signals": {"every": 3}}
    firsts = []

    def function(x, y):
        firsts.append(float(x[0, 0].asnumpy()))
        return {"rows": x.shape[0]}

    with tune_loop(config, optimizer, num_microbatches=2, model_signals=function) as loop:
        for batch in loop.batches(batches):
            loop.apply(*grad_fn(*batch))
    return {
        "records": records_of("by_hand"), "rows": rows_of("by_hand"), "firsts": firsts,
        "given": float(x[32, 0]),
    }  # fmt: skip


def model_signals():
    off, one, _ = trained("off", 0)
    on, other, shapes = trained("on", 3, asks=True)
    trained("spoilt", 4, spoil=True)
    seen = {
        "losses": [one.losses, other.losses],
        "same_weights": all(
            np.array_equal(a, b) for a, b in zip(one.weights[-1], other.weights[-1], strict=True)
        ),
        "compiled": [len(step._gradients.compile_cache) for step in (off, on)],
        "off_files": sorted(path.name for path in Path("off").iterdir()),
        "records": records_of("on"),
        "rows": rows_of("on"),
        "decisions": decisions_of("on"),
        "expected": expected(other),
        "spoilt": {"records": records_of("spoilt"), "decisions": decisions_of("spoilt")},
        "shapes": shapes,
        "hooks": len(on.gradient_hooks),
        "refused": refused(),
    }
    if ms.get_context("mode") == ms.PYNATIVE_MODE:
        # The same on the host's side in both modes; here nothing compiles for long.
        seen |= {"untrained": untrained(), "by_hand": by_hand()}
    return seen

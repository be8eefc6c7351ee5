"""Runs in one process, in graph or PyNative mode; writes `seen.json` with what it saw."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.experimental import optim
from mindspore.train import LossMonitor, Model
from mindspore.train.callback import Callback
from step_toys import FEATURES, Net, arrays, batch, poisoned, state

from mindtune.controller import TuneCallback
from mindtune.controller.errors import ConfigError
from mindtune.controller.live.packed import NUM_HOST_SIGNALS
from mindtune.controller.live.ranks import JobRank
from mindtune.controller.live.settings import RewindSection
from mindtune.controller.live.snapshot_storage import (
    DiskStorage,
    MemoryStorage,
    changed_by_updates,
    open_snapshots,
)
from mindtune.controller.live.snapshots import Snapshots
from mindtune.controller.live.train_step import LossScale, TrainStep
from mindtune.controller.live.update_step import UpdateStep

STEPS = 50


def groups(net, first_rate):
    return [
        {"params": net.first.trainable_params(), "lr": first_rate},
        {"params": net.second.trainable_params()},
    ]


def cosine():
    return nn.CosineDecayLR(0.0, 0.01, STEPS)


FORMS = {
    "float": lambda net: nn.AdamWeightDecay(net.trainable_params(), 0.01),
    "sgd float": lambda net: nn.SGD(net.trainable_params(), 0.01),
    "table": lambda net: nn.Momentum(
        net.trainable_params(), [0.1 / (i + 1) for i in range(2 * STEPS)], 0.9
    ),
    "schedule": lambda net: nn.Adam(net.trainable_params(), cosine()),
    "groups of floats": lambda net: nn.Adam(groups(net, 0.01), 0.003),
    "groups with a schedule": lambda net: nn.AdamWeightDecay(groups(net, cosine()), 0.003),
    "experimental": lambda net: optim.AdamW(groups(net, 0.01), 0.003),
}


def weights(net):
    return np.concatenate([p.asnumpy().ravel() for p in net.trainable_params()])


def identity(form):
    """Losses of MindSpore's own step and of ours with neutral knobs."""
    net = Net()
    theirs = nn.TrainOneStepCell(net, FORMS[form](net))
    their_losses = [float(theirs(*batch(i)).asnumpy()) for i in range(STEPS)]
    net = Net()
    step = TrainStep(net, FORMS[form](net))
    returned, reported = [], []
    for index in range(STEPS):
        returned.append(float(step(*batch(index)).asnumpy()))
        reported.append(step.last_report.loss)
    return {"theirs": their_losses, "ours": returned, "reported": reported}


def obedience(form):
    """Distance that the weights move, and reported rates, as the scale is changed and back."""
    net = Net()
    step = TrainStep(net, FORMS[form](net))
    seen = []
    for scale in (1.0, 0.0, 1.0, 500.0, 0.5, 1.0):
        step.set_learning_rate_scale(scale)
        before = weights(net)
        step(*batch(0))
        moved = float(np.abs(weights(net) - before).max())
        report = step.last_report
        seen.append([scale, moved, report.learning_rate, report.learning_rate_scale])
    return seen


def foreign_rate():
    """Somebody else writes the rate: the scale lies over it, and they read what they wrote."""
    net = Net()
    optimizer = FORMS["float"](net)
    step = TrainStep(net, optimizer)
    step.set_learning_rate_scale(0.5)
    step(*batch(0))
    ops.assign(optimizer.learning_rate, Tensor(0.25, ms.float32))
    step(*batch(1))
    seen = [step.last_report.learning_rate, step.last_report.learning_rate_scale]
    seen.append(float(optimizer.learning_rate.asnumpy()))
    optimizer = FORMS["experimental"](net)
    step = TrainStep(net, optimizer)
    step.set_learning_rate_scale(0.5)
    scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for index in range(3):
        step(*batch(index))
        seen.append(step.last_report.learning_rate)
        scheduler.step()
    return seen


def accumulation():
    """The same 32 samples per optimizer step, whole or in k micro-batches; k changes live."""
    net = Net()
    whole = TrainStep(net, FORMS["float"](net))
    net = Net()
    parts = TrainStep(net, FORMS["float"](net))
    rows, accumulating = [], []
    for index, count in enumerate((1, 2, 4, 1, 2, 8, 3)):
        x, y = arrays(index, rows=24)
        whole(Tensor(x), Tensor(y))
        parts.set_num_microbatches(count)
        size = 24 // count
        for part in range(count):
            parts(
                Tensor(x[part * size : (part + 1) * size]),
                Tensor(y[part * size : (part + 1) * size]),
            )
            if part < count - 1:
                accumulating.append(parts.last_report is None and parts.is_accumulating)
        one, other = whole.last_report, parts.last_report
        rows.append([count, other.num_microbatches, one.loss, other.loss])
        rows[-1] += [one.grad_norm, other.grad_norm]
    return {"rows": rows, "accumulating": accumulating, "steps": parts.optimizer_steps}


def knobs_wait():
    """What is set in mid-accumulation acts with the next optimizer step; shapes compile once."""
    net = Net()
    step = TrainStep(net, FORMS["float"](net), num_microbatches=2, loss_scale=4.0)
    step(*batch(0))
    step.set_num_microbatches(3)
    step.set_loss_scale(8.0)
    step(*batch(1))
    acted = [step.last_report.num_microbatches, step.last_report.loss_scale]
    for index in range(3):
        step(*batch(index))
    acted += [step.last_report.num_microbatches, step.last_report.loss_scale]
    for count in (2, 5, 4, 2):
        step.set_num_microbatches(count)
        for index in range(count):
            step(*batch(index))
    compiled = [len(cell.compile_cache) for cell in (step._gradients, step.update, step._sum)]
    return {"acted": acted, "compiled": compiled}


class Doubling:
    """Doubles the gradients of some steps, and keeps what it was called with."""

    def __init__(self, steps):
        self.steps, self.called = steps, []

    def wants(self, optimizer_step):
        return optimizer_step in self.steps

    def __call__(self, optimizer_step, loss, gradients):
        self.called.append([optimizer_step, float(loss.asnumpy())])
        return loss, tuple(gradient * 2 for gradient in gradients)


def hooks(count):
    """Two equal trainings of `count` micro-batches a step, one with hooked steps 3 and 5."""
    hook, rows = Doubling((3, 5)), []
    net, hooked_net = Net(), Net()
    plain = TrainStep(net, FORMS["float"](net), num_microbatches=count)
    hooked = TrainStep(hooked_net, FORMS["float"](hooked_net), num_microbatches=count)
    hooked.gradient_hooks.append(hook)
    for index in range(5 * count):
        plain(*batch(index))
        hooked(*batch(index))
        if plain.last_report is not None:
            one, other = plain.last_report, hooked.last_report
            rows.append([one.loss, other.loss, one.grad_norm, other.grad_norm])
    return {"rows": rows, "called": hook.called}


def skipping():
    """A threshold or a NaN skips: weights, moments and schedule stay, bit for bit."""
    net = Net()
    step = TrainStep(net, FORMS["schedule"](net))
    for index in range(3):
        step(*batch(index))
    seen = {"rates": [step.last_report.learning_rate]}
    before = state(step)
    step.set_skip_threshold(1e-3)
    step(*batch(3))
    seen["threshold"] = [step.last_report.update_skipped, step.last_report.overflow]
    seen["threshold unchanged"] = state(step) == before
    seen["rates"].append(step.last_report.learning_rate)
    step.set_skip_threshold(None)
    step(*poisoned(4))
    seen["nan"] = [step.last_report.update_skipped, step.last_report.overflow]
    seen["nan unchanged"] = state(step) == before
    seen["rates"].append(step.last_report.learning_rate)
    step(*batch(5))
    seen["moves again"] = state(step) != before
    seen["clean_steps"] = step.last_report.clean_steps
    return seen


def enormous():
    """A batch with a finite but enormous norm is skipped in its own step; the next one acts."""
    net = Net()
    step = TrainStep(net, FORMS["schedule"](net), loss_scale=LossScale(initial=8.0))
    for index in range(3):
        step(*batch(index))
    usual = step.last_report.grad_norm
    before = state(step)
    step.set_skip_threshold(10 * usual)
    x, y = arrays(3)
    step(Tensor(x), Tensor(y * 1e8))
    report = step.last_report
    seen = {
        "skipped": report.update_skipped,
        "overflow": report.overflow,
        "over": report.grad_norm / usual,
        "threshold": report.skip_threshold / usual,
        "unchanged": state(step) == before,
        "scales": [report.loss_scale],
        "clean_steps": report.clean_steps,
    }
    step(*batch(4))
    seen["scales"].append(step.last_report.loss_scale)
    seen["next"] = [step.last_report.update_skipped, state(step) != before]
    seen["updates"] = int(step.optimizer.global_step.asnumpy()[0])
    return seen


class Weighted(Net):
    """`Net` with a third input that is no sample."""

    def construct(self, x, y, weight):
        return super().construct(x, y) * ops.sum(weight)


def splitting():
    """The same micro-batches, whole and in parts; the number of parts changes live."""
    nets = [Net(), Net()]
    whole, parts = (TrainStep(net, nn.SGD(net.trainable_params(), 0.1)) for net in nets)
    rows, seen = [], {"before": parts.micro_batch_rows}
    for index, (split, count) in enumerate(((1, 1), (2, 1), (4, 1), (2, 2), (1, 1), (4, 1))):
        whole.set_num_microbatches(count)
        parts.set_num_microbatches(count)
        parts.set_micro_batch_split(split)
        # The last one is ragged: 6 samples cannot be cut into 4 equal parts.
        for call in range(count):
            data = batch(10 * index + call, rows=6 if index == 5 else 8)
            expected = whole(*data)
            found = parts(*data)
        one, other = whole.last_report, parts.last_report
        distance = (
            np.abs(weights(nets[0]) - weights(nets[1])).max() / np.abs(weights(nets[0])).max()
        )
        rows.append([split, count, other.micro_batch_split, other.num_microbatches])
        rows[-1] += [one.loss, other.loss, one.grad_norm, other.grad_norm, float(distance)]
        rows[-1] += [float(expected.asnumpy()), float(found.asnumpy())]
    seen |= {"rows": rows, "after": parts.micro_batch_rows}
    seen["compiled"] = [len(cell.compile_cache) for cell in (parts._gradients, parts.update)]
    # A call that completes no step returns the mean loss of its own micro-batch.
    parts.set_micro_batch_split(2)
    parts.set_num_microbatches(2)
    seen["call"] = [float(parts(*batch(0)).asnumpy()), float(nets[1](*batch(0)).asnumpy())]
    net = Weighted()
    step = TrainStep(net, nn.SGD(net.trainable_params(), 0.1))
    third = Tensor([0.25, 0.5, 0.25], ms.float32)
    step(*batch(1), third)
    seen["unequal"] = step.micro_batch_rows
    step.set_micro_batch_split(2)
    expected = float(net(*batch(1), third).asnumpy())
    step(*batch(1), third)
    report = step.last_report
    seen["whole"] = [report.micro_batch_split, report.num_microbatches, report.loss, expected]
    return seen


class Normed(Net):
    """`Net` behind a normalisation with running statistics, and with frozen weights."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)
        self.frozen = Parameter(Tensor(np.ones(FEATURES, np.float32)), "frozen", False)

    def construct(self, x, y):
        return super().construct(self.norm(x) * self.frozen, y)


def returns(folder):
    """Back to a copy and on from there: bit-identical where no schedule moves, and no compile."""
    seen = {}
    for form in ("float", "schedule", "experimental", "sgd float"):
        net = Normed()
        net.set_train()
        step = TrainStep(net, FORMS[form](net), loss_scale=LossScale(initial=8.0, window=100))
        for index in range(3):
            step(*batch(index))
        copied = changed_by_updates(step)
        storages = {
            "memory": MemoryStorage(copied),
            "disk": DiskStorage(copied, folder / form, rank=0),
        }
        for storage in storages.values():
            storage.write(3)
        before = state(step)
        straight = [losses(step, index) for index in range(3, 7)]
        for name, storage in storages.items():
            step.set_learning_rate_scale(0.5)
            step(*batch(7))
            later = state(step)
            storage.assign(storage.load(3))
            after = state(step)
            step.set_learning_rate_scale(1.0)
            again = [losses(step, index) for index in range(3, 7)]
            seen[f"{form}, {name}"] = {
                "moved": sum(before[name] != later[name] for name in before),
                "left": [name for name in after if after[name] != before[name]],
                "straight": straight,
                "again": again,
                "compiled": [len(cell.compile_cache) for cell in (step._fused, step.update)],
                "names": [parameter.name for parameter in copied],
            }
    return seen


def losses(step, index):
    step(*batch(index))
    return [step.last_report.loss, step.last_report.grad_norm, step.last_report.clean_steps]


def copies(folder):
    """What is shared, what is refused, what is left on disk."""
    net = Normed()
    net.set_train()
    step = TrainStep(net, FORMS["float"](net))
    copied = changed_by_updates(step)
    memory = MemoryStorage(copied)
    step(*batch(0))
    memory.write(1)
    step(*batch(1))
    memory.write(2)
    shared = [
        parameter.name
        for parameter, one, other in zip(copied, memory.load(1), memory.load(2), strict=True)
        if one is other
    ]
    memory.retain({2})
    disk = DiskStorage(copied, folder / "disk", rank=3)
    for number in (1, 2, 3):
        disk.write(number)
    disk.write(3)
    disk.retain({2, 3})
    files = sorted(path.name for path in (folder / "disk").iterdir())
    one, other = (folder / "disk" / name for name in files)
    content = one.read_bytes()
    found = [refusal(lambda: disk.load(1)), refusal(lambda: memory.load(1))]
    damage = bytearray(content)
    damage[len(content) // 2] ^= 1
    for spoiled in (content[: len(content) // 2], bytes(damage), other.read_bytes(), b"", b"{}"):
        one.unlink()
        one.write_bytes(spoiled)
        found.append(refusal(lambda: disk.load(2)))
    one.unlink()
    ms.save_checkpoint(step, str(one))
    found.append(refusal(lambda: disk.load(2)))
    other_net = Net(hidden=8)
    other_step = TrainStep(other_net, FORMS["float"](other_net))
    DiskStorage(changed_by_updates(other_step), folder / "disk", rank=3).write(2)
    found.append(refusal(lambda: disk.load(2)))
    (folder / "file").write_text("no folder")
    nowhere = DiskStorage(copied, folder / "file" / "state", rank=0)
    # As on a disk that has turned read-only: it cannot be removed.
    (folder / "stuck" / "snapshot_rank3_000000009.ckpt").mkdir(parents=True)
    killed = [folder / "stuck" / f".snapshot_rank{rank}_1.ckpt.partial.ckpt" for rank in (3, 4)]
    for partial in killed:
        partial.write_bytes(b"half")
    snapshots = Snapshots(DiskStorage(copied, folder / "stuck", rank=3), every=8, keep=2)
    snapshots.begin(5)
    half = Parameter(Tensor(np.ones(8), ms.bfloat16), name="half")
    halves = MemoryStorage((half,))
    halves.write(1)
    return {
        "shared": shared,
        "bytes": [
            [storage.num_bytes, sum(array.nbytes for array in storage.load(number))]
            for storage, number in ((memory, 2), (halves, 1))
        ],
        "stuck": snapshots.healthy,
        "partial": [path.exists() for path in killed],
        "files": files,
        "holds": [disk.holds(2), disk.holds(1), memory.holds(2), memory.holds(1)],
        "refused": found,
        "unwritable": refusal(lambda: nowhere.write(1)),
    }


def opened(folder):
    """What the section asks for, and what cannot be had."""
    net = Net()
    step = TrainStep(net, FORMS["float"](net))
    place = JobRank(0, 1)
    sections = {
        "memory": RewindSection(),
        "too large": RewindSection(max_memory=MemoryStorage(changed_by_updates(step)).num_bytes),
        "disk": RewindSection(storage="disk"),
    }
    found = {
        name: open_snapshots(section, step, place, folder=folder / "opened") is not None
        for name, section in sections.items()
    }
    found["no folder"] = open_snapshots(sections["disk"], step, place, folder=None) is not None
    return found


def poison_acts():
    """Without skipping, a NaN acts as it does in MindSpore's own step."""
    net = Net()
    theirs = nn.TrainOneStepCell(net, FORMS["float"](net))
    theirs(*poisoned(0))
    their_weights = weights(net)
    net = Net()
    step = TrainStep(net, FORMS["float"](net), skip_non_finite=False)
    step(*poisoned(0))
    same = np.array_equal(weights(net), their_weights, equal_nan=True)
    report = step.last_report
    return [same, bool(np.isnan(their_weights).any()), report.overflow, report.update_skipped]


def clipping():
    """SGD at rate 1 moves by exactly the clipped gradient."""
    net = Net()
    step = TrainStep(net, nn.SGD(net.trainable_params(), 1.0), clip_norm=0.01)
    seen = []
    for norm in (0.01, 100.0, 0.02):
        step.set_clip_norm(norm)
        before = weights(net)
        step(*batch(1))
        moved = float(np.linalg.norm(weights(net) - before))
        report = step.last_report
        seen.append([report.clip_norm, report.grad_norm, report.clip_factor, moved])
    return seen


def real_overflow():
    """float16 gradients overflow from 2^24 on, until the scale is low enough."""
    net = Net().to_float(ms.float16)
    step = TrainStep(net, FORMS["float"](net), loss_scale=LossScale(initial=2.0**24, window=4))
    seen = []
    for index in range(24):
        before = state(step)
        step(*batch(index))
        report = step.last_report
        seen.append(
            [report.loss_scale, report.overflow, report.update_skipped, state(step) == before]
        )
        seen[-1] += [report.clean_steps, report.loss]
    step.loss_scale_managed_by_policy = True
    step.set_loss_scale(2.0**24)
    managed = []
    for index in range(3):
        step(*batch(index))
        managed.append([step.last_report.loss_scale, step.last_report.overflow])
    return {"own": seen, "managed": managed}


class Reports(Callback):
    def __init__(self):
        self.seen = []

    def on_train_step_end(self, run_context):
        params = run_context.original_args()
        report = params.train_network.last_report
        loss = float(params.net_outputs.asnumpy())
        self.seen.append([loss, None if report is None else report.loss])


def in_model():
    """`Model.train` drives it; the step's weights keep their names."""

    def samples():
        for index in range(6):
            yield arrays(index)

    net = Net()
    names = [parameter.name for parameter in net.trainable_params()]
    step = TrainStep(net, FORMS["float"](net), num_microbatches=2)
    reports = Reports()
    dataset = ds.GeneratorDataset(samples, ["x", "y"], shuffle=False)
    Model(step).train(1, dataset, callbacks=[LossMonitor(1), reports], dataset_sink_mode=False)
    after = [parameter.name for parameter in net.trainable_params()]
    return {"seen": reports.seen, "same names": names == after, "steps": step.optimizer_steps}


def resumable():
    net = Net()
    return TrainStep(
        net,
        FORMS["schedule"](net),
        num_microbatches=2,
        loss_scale=LossScale(initial=8.0, window=5),
    )


def run_on(step, start, count):
    losses = []
    for index in range(start, start + count):
        step(*batch(index, rows=8))
        if step.last_report is not None:
            report = step.last_report
            losses.append([report.loss, report.learning_rate, report.loss_scale])
    return losses


def checkpoint(folder):
    """A fresh step that loads a checkpoint goes on bit-identically; so does one rewound."""
    path = str(folder / "step.ckpt")
    step = resumable()
    step.set_learning_rate_scale(0.5)
    step.set_clip_norm(0.7)
    run_on(step, 0, 6)
    ms.save_checkpoint(step, path)
    copies = [(p, Tensor(p.asnumpy())) for p in step.get_parameters()]
    straight = run_on(step, 6, 8)
    for parameter, value in copies:
        ops.assign(parameter, value)
    rewound = run_on(step, 6, 8)
    fresh = resumable()
    ms.load_param_into_net(fresh, ms.load_checkpoint(path), strict_load=True)
    return {"straight": straight, "rewound": rewound, "fresh": run_on(fresh, 6, 8)}


class WithOutput(nn.Cell):
    """Returns a tuple whose first element is the loss."""

    def __init__(self, net):
        super().__init__(auto_prefix=False)
        self.net = net

    def construct(self, x, y):
        loss = self.net(x, y)
        return loss, x


def own_loop():
    """A hand-written loop over `UpdateStep`, and a network that returns a tuple."""
    net = Net()
    step = TrainStep(WithOutput(net), FORMS["float"](net), num_microbatches=2)
    expected = run_on(step, 0, 6)
    net = Net()
    loop = UpdateStep(FORMS["float"](net), num_microbatches=2)
    gradient = ms.value_and_grad(net, None, net.trainable_params())
    losses = []
    for index in range(6):
        loop.apply(*gradient(*batch(index)))
        if loop.last_report is not None:
            report = loop.last_report
            losses.append([report.loss, report.learning_rate, report.loss_scale])
    row = [float(index) for index in range(NUM_HOST_SIGNALS)]
    loop.set_host_signals(row)
    loop.set_num_microbatches(1)
    loop.apply(*gradient(*batch(0)))
    return {
        "expected": expected,
        "losses": losses,
        "row": [list(seen) for seen in loop.last_report.rank_rows],
        "packed once": loop.last_report.rank_losses == (loop.last_report.loss,),
    }


def refusal(call):
    try:
        call()
    except ConfigError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def refusals():
    """Every wrong value raises ConfigError and changes nothing."""
    net = Net()
    optimizer = FORMS["float"](net)
    step = TrainStep(net, optimizer)
    tune, data = TuneCallback({"out_dir": None}), ds.NumpySlicesDataset([[0.0]]).batch(1)
    wrong = [
        lambda: step.set_num_microbatches(0),
        lambda: step.set_num_microbatches(1.5),
        lambda: step.set_learning_rate_scale(-1.0),
        lambda: step.set_learning_rate_scale(float("nan")),
        lambda: step.set_loss_scale(float("inf")),
        lambda: step.set_clip_norm(-2.0),
        lambda: step.set_skip_threshold(float("nan")),
        lambda: step.set_compression_ratio(0.5),
        lambda: step.set_host_signals([1.0]),
        lambda: step.set_micro_batch_split(0),
        lambda: step.set_micro_batch_split(1.5),
        lambda: UpdateStep(optimizer).set_micro_batch_split(2),
        lambda: TrainStep(net, optimizer, compression="float16"),
        lambda: TrainStep(net, optimizer, compression="int8"),
        lambda: TrainStep(optimizer, net),
        lambda: TrainStep(net, 1e-3),
        lambda: Model(step).train(1, data, callbacks=[tune, tune], dataset_sink_mode=False),
    ]
    return [refusal(call) for call in wrong]


def main(mode, folder):
    ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
    seen = {
        "identity": {form: identity(form) for form in FORMS},
        "obedience": {form: obedience(form) for form in FORMS},
        "foreign_rate": foreign_rate(),
        "accumulation": accumulation(),
        "knobs_wait": knobs_wait(),
        "hooks": {str(count): hooks(count) for count in (1, 2)},
        "skipping": skipping(),
        "enormous": enormous(),
        "splitting": splitting(),
        "returns": returns(folder),
        "copies": copies(folder),
        "opened": opened(folder),
        "poison_acts": poison_acts(),
        "clipping": clipping(),
        "real_overflow": real_overflow(),
        "in_model": in_model(),
        "checkpoint": checkpoint(folder),
        "own_loop": own_loop(),
        "refusals": refusals(),
    }
    (folder / "seen.json").write_text(json.dumps(seen), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

"""Runs on each of two ranks under msrun; writes `rank<R>.json` with what it saw."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.communication import GlobalComm, get_rank, init
from step_toys import Net, arrays, batch, poisoned, state

from mindtune.controller.errors import ConfigError
from mindtune.controller.live.layout import ParallelLayout
from mindtune.controller.live.model_signals import ModelSignals
from mindtune.controller.live.packed import NUM_HOST_SIGNALS
from mindtune.controller.live.ranks import JobRank, numbers_of_all_ranks
from mindtune.controller.live.sensors import StepSignals
from mindtune.controller.live.snapshot_storage import MemoryStorage, changed_by_updates
from mindtune.controller.live.snapshots import Snapshots
from mindtune.controller.live.train_step import TrainStep

STEPS = 6
POISONED_STEP = 3
WORLD = 2


def data_parallel():
    return ParallelLayout(
        data_parallel=WORLD,
        data_parallel_group=GlobalComm.WORLD_COMM_GROUP,
        rank=get_rank(),
        world_size=WORLD,
    )


def adam(net):
    return nn.AdamWeightDecay(net.trainable_params(), 0.01)


def shared_state(step):
    """Digest of what must be equal on all ranks: weights and moments, not a rank's residual."""
    text = json.dumps(state(step), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def own_batch(index):
    x, y = arrays(index, rows=16)
    rows = slice(get_rank() * 8, get_rank() * 8 + 8)
    return Tensor(x[rows]), Tensor(y[rows])


def trained(compression, *, num_microbatches=1, steps=STEPS):
    net = Net()
    step = TrainStep(
        net,
        adam(net),
        compression=compression,
        layout=data_parallel(),
        clip_norm=0.5,
        num_microbatches=num_microbatches,
    )
    losses, norms = [], []
    for index in range(steps):
        x, y = own_batch(index)
        size = 8 // num_microbatches
        for part in range(num_microbatches):
            rows = slice(part * size, (part + 1) * size)
            step(x[rows], y[rows])
        losses.append(step.last_report.loss)
        norms.append(step.last_report.grad_norm)
    return step, {"losses": losses, "norms": norms, "state": shared_state(step)}


def with_poison(step):
    """One rank alone gets a NaN: both must skip, and nothing may move."""
    before = state(step), residual(step)
    step(*(poisoned(90) if get_rank() == 1 else batch(90)))
    report = step.last_report
    after = state(step), residual(step)
    step(*own_batch(91))
    return {
        "overflow": report.overflow,
        "update_skipped": report.update_skipped,
        "unchanged": before == after,
        "loss_is_nan": report.loss != report.loss,
        "rank_losses_finite": [loss == loss for loss in report.rank_losses],
        "recovered": not step.last_report.update_skipped,
        "state": shared_state(step),
    }


def with_enormous(step):
    """One rank alone gets enormous finite targets: both must skip, and nothing may move."""
    usual = step.last_report.grad_norm
    step.set_skip_threshold(10 * usual)
    before = state(step), residual(step)
    x, y = arrays(93)
    step(Tensor(x), Tensor(y * (1e8 if get_rank() == 1 else 1.0)))
    report = step.last_report
    after = state(step), residual(step)
    step.set_skip_threshold(None)
    step(*own_batch(94))
    return {
        "skipped": [report.update_skipped, report.overflow],
        "norm": report.grad_norm / usual,
        "unchanged": before == after,
        "acts again": not step.last_report.update_skipped,
        "state": shared_state(step),
    }


def returned(step):
    """Both ranks go back to a copy, or, where one has lost its own, neither does."""
    place = JobRank(get_rank(), WORLD)
    storage = MemoryStorage(changed_by_updates(step))
    snapshots = Snapshots(
        storage, every=8, keep=2, of_all_ranks=lambda number: numbers_of_all_ranks(number, place)
    )
    snapshots.begin(10)
    before = state(step), residual(step)
    step(*own_batch(95))
    moved = (state(step), residual(step)) != before
    seen = {"moved": moved, "step": snapshots.rewind()}
    position = step.optimizer.global_step.name
    after = state(step), residual(step)
    seen["left"] = [name for name in after[0] if after[0][name] != before[0][name]]
    seen["residual"] = after[1] == before[1]
    seen["position"] = [position]
    step(*own_batch(96))
    seen["state"] = shared_state(step)
    if get_rank() == 1:
        storage.retain(())
    try:
        snapshots.rewind()
    except ConfigError as error:
        seen["refused"] = str(error)
    seen["unchanged"] = shared_state(step) == seen["state"]
    return seen


def residual(step):
    found = [p.asnumpy() for p in step.get_parameters() if p.name == "mindtune.residual"]
    return [array.tobytes() for array in found]


def host_signals(step):
    row = [float("nan")] * NUM_HOST_SIGNALS
    row[0], row[1] = 10.0 + get_rank(), 0.5
    step.set_host_signals(row)
    step(*own_batch(92))
    return [list(map(repr, row)) for row in step.last_report.rank_rows]


def sampled(step, data):
    """One more step, looked into."""
    look = ModelSignals(every=1, step=step, function=None)
    look.begin(step=0, exclude=lambda _seconds: None)
    step(*data)
    look.after_call()
    sample = look.take(1, StepSignals.from_report(step.last_report), run=0)
    look.end()
    return sample.record.to_plain() | {"norm": step.last_report.grad_norm}


def live_ratio():
    net = Net()
    sgd = nn.SGD(net.trainable_params(), 1.0)
    step = TrainStep(net, sgd, compression="topk:0.5", layout=data_parallel())
    entries = sum(p.size for p in net.trainable_params())
    moved = []
    for ratio in (0.5, 0.02):
        step.set_compression_ratio(ratio)
        before = np.concatenate([p.asnumpy().ravel() for p in net.trainable_params()])
        step(*batch(0))  # the same samples on both ranks: the same entries are sent
        after = np.concatenate([p.asnumpy().ravel() for p in net.trainable_params()])
        moved.append(int((before != after).sum()))
    return {
        "entries": entries,
        "moved": moved,
        "ratio": step.last_report.compression_ratio,
        "grad_norms": step.last_report.rank_grad_norms,
    }


def own_step_of_mindspore():
    """MindSpore's own data-parallel step, and ours under the same context (no layout given)."""
    ms.set_auto_parallel_context(
        parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=True, device_num=WORLD
    )
    net = Net()
    theirs = nn.TrainOneStepCell(net, adam(net))
    their_losses = [float(theirs(*own_batch(index)).asnumpy()) for index in range(STEPS)]
    net = Net()
    step = TrainStep(net, adam(net))
    our_losses = []
    for index in range(STEPS):
        step(*own_batch(index))
        our_losses.append(step.last_report.rank_losses[get_rank()])
    ms.reset_auto_parallel_context()
    return {"theirs": their_losses, "ours": our_losses}


class SumOverRanks(nn.Cell):
    """Identity backward: every rank's partial product gets the same gradient."""

    def __init__(self):
        super().__init__()
        self.all_reduce = ops.AllReduce()

    def construct(self, x):
        return self.all_reduce(x)

    def bprop(self, x, out, dout):
        return (dout,)


class SplitNet(nn.Cell):
    """`Net` with its hidden units split over the ranks."""

    def __init__(self, *, mark):
        super().__init__()
        whole = Net()
        half = slice(get_rank() * 8, get_rank() * 8 + 8)
        self.first = Parameter(Tensor(whole.first.weight.asnumpy()[half]), name="first")
        self.first_bias = Parameter(Tensor(whole.first.bias.asnumpy()[half]), name="first_bias")
        self.second = Parameter(Tensor(whole.second.weight.asnumpy()[:, half]), name="second")
        self.second_bias = Parameter(Tensor(whole.second.bias.asnumpy()), name="second_bias")
        for shard in (self.first, self.first_bias, self.second):
            if mark:
                shard.tp_sharded = True
        self.sum_over_ranks = SumOverRanks()

    def construct(self, x, y):
        hidden = ops.tanh(ops.matmul(x, self.first.T) + self.first_bias)
        out = self.sum_over_ranks(ops.matmul(hidden, self.second.T)) + self.second_bias
        return ops.mean(ops.square(out - y))


def tensor_parallel():
    net = Net()
    one = TrainStep(net, adam(net), clip_norm=0.2)
    layout = ParallelLayout(
        model_parallel=WORLD,
        model_parallel_group=GlobalComm.WORLD_COMM_GROUP,
        rank=get_rank(),
        world_size=WORLD,
    )
    split_net = SplitNet(mark=True)
    split = TrainStep(
        split_net, adam(split_net), clip_norm=0.2, layout=layout, num_sharded_parameters=3
    )
    pairs = []
    for index in range(STEPS):
        one(*batch(index))
        split(*batch(index))
        ours, theirs = split.last_report, one.last_report
        pairs.append([ours.loss, theirs.loss, ours.grad_norm, theirs.grad_norm, ours.clip_factor])
    looks = [sampled(step, batch(STEPS)) for step in (one, split)]
    refused = []
    for unmarked in ({}, {"num_sharded_parameters": 3}):
        other = SplitNet(mark=False)
        try:
            TrainStep(other, adam(other), layout=layout, **unmarked)
        except Exception as error:
            refused.append(f"{type(error).__name__}: {error}")
    return {
        "pairs": pairs,
        "sampled": looks,
        "bias": split_net.second_bias.asnumpy().tobytes().hex(),
        "refused": refused,
    }


def main(folder):
    init()
    seen = {}
    ms.set_context(mode=ms.GRAPH_MODE)
    seen["own_step"] = own_step_of_mindspore()
    for compression in ("none", "float16", "topk:1.0", "topk:0.1"):
        step, seen[compression] = trained(compression)
        seen[compression]["poison"] = with_poison(step)
        if compression == "none":
            seen["sampled"] = sampled(step, own_batch(93))
        seen[compression]["enormous"] = with_enormous(step)
        seen[compression]["returned"] = returned(step)
    seen["host_signals"] = host_signals(step)
    seen["accumulated"] = trained("none", num_microbatches=2)[1]
    seen["live_ratio"] = live_ratio()
    seen["tensor_parallel"] = tensor_parallel()
    ms.set_context(mode=ms.PYNATIVE_MODE)
    for compression in ("none", "topk:0.1"):
        seen[f"pynative {compression}"] = trained(compression)[1]
    Path(folder, f"rank{get_rank()}.json").write_text(json.dumps(seen), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])

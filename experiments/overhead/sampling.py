"""What a sample of model signals costs: `python -m mindtune.experiments.overhead.sampling`.

Two runs of the same `TrainStep` with everything that `TuneCallback` puts around it, alternating in
one process: one samples nothing, the other every step. Their difference is the cost of a sampled
step: the step in two graphs, layer norms and histograms, the copy of the weights, and the second
forward pass of the reference workload's own function.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import mindspore as ms
import numpy as np

from mindtune.controller import TrainStep
from mindtune.controller.contract import write_atomic
from mindtune.controller.live.layout import ParallelLayout
from mindtune.controller.records import read_model_signals
from mindtune.experiments.gpt.config import GptConfig, parse_config
from mindtune.experiments.gpt.model import Gpt, GptLoss
from mindtune.experiments.gpt.model_signals import GptSignals
from mindtune.experiments.gpt.ranks import Ranks
from mindtune.experiments.gpt.schedule import build_optimizer
from mindtune.experiments.gpt.tensor_parallel import ONE_SHARD
from mindtune.experiments.overhead.cells import ControlledStep
from mindtune.experiments.overhead.measure import Rounds, alternate, training_batches
from mindtune.experiments.overhead.report import quartiles
from mindtune.experiments.provenance import load_1m, provenance

__all__ = ["main"]

_EVERY = 50


def main(arguments: list[str] | None = None) -> int:
    """Measure, write sampling.md into --out and print it."""
    parser = argparse.ArgumentParser(
        prog="python -m mindtune.experiments.overhead.sampling",
        description="Milliseconds of a sample of model signals on the reference workload.",
    )
    parser.add_argument("--out", type=Path, default=Path("overhead"), help="default: overhead")
    parser.add_argument("--rounds", type=int, default=20, help="turns of each way (default: 20)")
    parser.add_argument("--block", type=int, default=5, help="steps of a turn (default: 5)")
    options = parser.parse_args(arguments)
    before = load_1m()
    out = options.out.resolve()
    back = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="mindtune_sampling_") as folder:
        # MindSpore leaves its own folders in the working directory.
        os.chdir(folder)
        try:
            times = _measure(options.rounds, options.block, Path(folder))
        finally:
            os.chdir(back)
    text = _table(times)
    text += (
        f"\n{options.rounds} rounds of {options.block} steps; load before and after: {before} and "
        f"{load_1m()}. {provenance().sentence()}\n"
    )
    write_atomic(out / "sampling.md", text)
    print(text)
    return 0


def _config() -> GptConfig:
    return parse_config(
        {
            "training": {
                "global_batch_size": 4,
                "micro_batch_size": 4,
                "recompute": "none",
                "lr_schedule": "float",
                "warmup": 0,
                "learning_rate": 1e-4,
            }
        }
    )


def _measure(rounds: int, block: int, folder: Path) -> Rounds:
    config = _config()
    ms.set_context(mode=ms.GRAPH_MODE)
    network = GptLoss(Gpt(config.model, seed=0))
    optimizer = build_optimizer(network, config, num_updates=1)
    step = TrainStep(network, optimizer, clip_norm=1.0)
    step.set_train()
    signals = GptSignals(network, Ranks(ParallelLayout(), 0, ONE_SHARD))
    runners = {
        "plain": ControlledStep(step, mode="observe", config=config, folder=folder / "plain"),
        "sampled": ControlledStep(
            step,
            mode="observe",
            config=config,
            folder=folder / "sampled",
            sample_every=1,
            model_signals=signals,
        ),
    }
    batches = training_batches(config)
    for runner in runners.values():
        # What compiles is not measured.
        runner.open()
        runner(batches[0])
        runner.close()
    times = alternate(runners, batches, rounds=rounds, block=block, tell=print)
    taken = [
        record.sample_time_s or 0.0
        for record in read_model_signals(runners["sampled"].folder.model_signals)
    ]
    return {**times, "recorded": [taken[1:]]}


def _table(times: Rounds) -> str:
    cost = [
        float(np.median(sampled) - np.median(plain))
        for sampled, plain in zip(times["sampled"], times["plain"], strict=True)
    ]
    rows = {
        "a step without a sample": [second for turn in times["plain"] for second in turn],
        "a step with one": [second for turn in times["sampled"] for second in turn],
        "difference, within rounds": cost,
        "of it `sample_time_s` in the records": times["recorded"][0],
    }
    lines = ["| model signals | ms: median [quartiles] |", "| --- | --- |"]
    for name, seconds in rows.items():
        spread = quartiles(seconds, unit=1e-3)
        lines.append(f"| {name} | {spread.median:.1f} [{spread.low:.1f}, {spread.high:.1f}] |")
    share = np.percentile(np.asarray(cost) / _EVERY / np.median(times["plain"]), [25, 50, 75])
    low, median, high = (float(value) for value in share * 100)
    lines.append(
        f"\nAt `every: {_EVERY}`: {median:.2f} % [{low:.2f}, {high:.2f}] of the training time."
    )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())

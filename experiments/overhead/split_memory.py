"""How far the peak of device memory falls when micro-batches are run in parts.

Command line: `python -m mindtune.experiments.overhead.split_memory`.

Each split trains in a process of its own, since MindSpore's memory pool tells its peak in the log
at the end of a process; on a CPU no counter shows it.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time

from mindtune.controller.errors import ConfigError
from mindtune.experiments.gpt.config import parse_config

__all__ = ["main", "pool_peak_mb"]

_BATCH = 16
_SPLITS = (1, 2, 4, 16)
_NUM_STEPS = 8
_PEAK = re.compile(r"peak used mem:\s*(\d+)M")


def main(arguments: list[str] | None = None) -> int:
    """Train once per split and print a table; with `--split` train in this process."""
    parser = argparse.ArgumentParser(
        prog="python -m mindtune.experiments.overhead.split_memory",
        description="Peak of MindSpore's memory pool with micro-batches of 16 samples in parts.",
    )
    parser.add_argument("--split", type=int, help="parts: train with them, in this process")
    options = parser.parse_args(arguments)
    if options.split is not None:
        _train(options.split)
        return 0
    print("| parts | loss | gradient norm | ms a step, fastest | peak of the pool, MB |")
    print("| --- | --- | --- | --- | --- |")
    for split in _SPLITS:
        print(_measure(split), flush=True)
    return 0


def pool_peak_mb(log: str) -> int:
    """Return the last peak that MindSpore's memory pool logged, in MB.

    Raises:
        ConfigError: There is none.
    """
    found = _PEAK.findall(log)
    if not found:
        raise ConfigError("MindSpore's memory pool told no peak; this needs MindSpore on a CPU.")
    return int(found[-1])


def _measure(split: int) -> str:
    with tempfile.TemporaryDirectory(prefix="mindtune_split_") as folder:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "mindtune.experiments.overhead.split_memory",
                "--split",
                str(split),
            ],
            cwd=folder,
            env={**os.environ, "MS_SUBMODULE_LOG_v": "{PRE_ACT:1}"},
            capture_output=True,
            text=True,
            errors="replace",
            check=True,
        )
    (cells,) = (line for line in done.stdout.splitlines() if line.startswith("| "))
    return f"{cells} {pool_peak_mb(done.stdout + done.stderr)} |"


def _train(split: int) -> None:
    import mindspore as ms  # noqa: PLC0415 - the parent process needs none

    from mindtune.controller import TrainStep  # noqa: PLC0415
    from mindtune.experiments.gpt.model import Gpt, GptLoss  # noqa: PLC0415
    from mindtune.experiments.gpt.schedule import build_optimizer  # noqa: PLC0415
    from mindtune.experiments.overhead.measure import training_batches  # noqa: PLC0415

    ms.set_context(mode=ms.GRAPH_MODE)
    config = parse_config(
        {
            "training": {
                "global_batch_size": _BATCH,
                "micro_batch_size": _BATCH,
                "recompute": "none",
                "lr_schedule": "float",
                "warmup": 0,
                "learning_rate": 1e-4,
            }
        }
    )
    network = GptLoss(Gpt(config.model, seed=0))
    step = TrainStep(network, build_optimizer(network, config, num_updates=1), clip_norm=1.0)
    step.set_train()
    batches = training_batches(config)
    step.set_micro_batch_split(split)
    seconds = []
    for batch in batches[:_NUM_STEPS]:
        begin_s = time.perf_counter()
        step(*batch)
        seconds.append(time.perf_counter() - begin_s)
    report = step.last_report
    assert report is not None, "one call is one step here"  # noqa: S101
    print(
        f"| {report.micro_batch_split} | {report.loss:.6f} | {report.grad_norm:.6f} | "
        f"{min(seconds[1:]) * 1e3:.0f} |"
    )


if __name__ == "__main__":
    sys.exit(main())

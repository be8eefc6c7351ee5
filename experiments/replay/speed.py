"""How long a replay takes: a log of many steps with every signal, all policies, our own reader."""

from __future__ import annotations

import math
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from mindtune.controller.contract import SignalRow, format_header, format_row
from mindtune.controller.records.log_readers import open_log
from mindtune.controller.replay import load_engine, replay
from mindtune.policies.signals import Observation

__all__ = ["Speed", "measure_speed"]


@dataclass(frozen=True)
class Speed:
    """CPU seconds of this process for one log, and of reading it alone."""

    steps: int
    replayed_s: tuple[float, ...]
    read_s: tuple[float, ...]

    def __str__(self) -> str:
        replayed, read = statistics.median(self.replayed_s), statistics.median(self.read_s)
        return (
            f"{self.steps} steps, {len(self.replayed_s)} repeats: {replayed:.2f} s of CPU "
            f"({min(self.replayed_s):.2f} - {max(self.replayed_s):.2f}), of these {read:.2f} s to "
            f"read the log; {replayed / self.steps * 1e6:.0f} us a step"
        )


def measure_speed(steps: int, repeats: int) -> Speed:
    """Return how long the replay of a healthy run with every signal takes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "signals.csv"
        _write(path, steps)
        replayed, read = [], []
        for _ in range(repeats):
            start = time.process_time()
            for _observation in open_log(path):
                pass
            middle = time.process_time()
            replay(open_log(path), load_engine(None))
            replayed.append(time.process_time() - middle)
            read.append(middle - start)
    return Speed(steps, tuple(replayed), tuple(read))


def _write(path: Path, steps: int) -> None:
    g = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        file.write(format_header() + "\n")
        for step in range(1, steps + 1):
            file.write(format_row(SignalRow(_observation(g, step, steps))) + "\n")


def _observation(g: random.Random, step: int, steps: int) -> Observation:
    step_time = 0.4 * g.lognormvariate(0, 0.05)
    hit = step % 2000 == 0
    return Observation(
        step=step,
        wall_time_s=0.4 * step,
        phase="train",
        run=0,
        loss=(2.2 + 8 * math.exp(-step / 500)) * g.lognormvariate(0, 0.03),
        grad_norm=(0.4 + 5 * math.exp(-step / 200)) * g.lognormvariate(0, 0.3),
        overflow=float(hit),
        update_skipped=float(hit),
        loss_scale=65536.0 * (1 + hit),
        learning_rate=3e-4 * (0.1 + 0.9 * (1 - step / steps)),
        learning_rate_scale=1.0,
        clip_norm=1.0,
        skip_threshold=math.inf,
        global_batch_size=64,
        micro_batch_size=4,
        num_microbatches=2,
        tokens=64 * 2048,
        step_time_s=step_time,
        data_time_s=0.02 * g.lognormvariate(0, 0.5),
        tokens_per_s=64 * 2048 / step_time,
        mfu=0.4 * 0.4 / step_time,
        device_utilization=min(1.0, g.gauss(0.93, 0.02)),
        device_memory_used_bytes=50 * 2**30 + g.randrange(2**28),
        device_memory_total_bytes=80 * 2**30,
        memory_allocated_bytes=48 * 2**30 + g.randrange(2**28),
        device_temperature_c=g.gauss(62, 1),
        device_power_w=g.gauss(410, 10),
    )

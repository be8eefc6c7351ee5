"""Lines a second and memory of the readers: `python -m mindtune.experiments.replay.read_speed`."""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

from mindtune.controller.records.log_readers import open_log
from mindtune.experiments.replay.families import FAMILIES, log_of

__all__ = ["main"]

_DIFFERENT = 5000
"""Lines of each family that differ; a log repeats them with other steps, each as a new run."""
_NOISE = "2026-11-30 13:30:00,123 - INFO - checkpoint written to /data/run/step, took 3.2 s\n"

_NOISE_LINES = 4
"""Other lines per line of the family in the large log."""


def _write(path: Path, family: str, lines: int, *, noise: int) -> int:
    """Write a log, and return its lines; `noise` other ones stand before each of the family's."""
    told, _ = log_of(family, Random(0), min(lines, _DIFFERENT))
    block = "".join(f"{_NOISE * noise}{line}\n" for line in told)
    blocks = max(1, lines // (len(told) * (1 + noise)))
    with path.open("w") as file:
        for _ in range(blocks):
            file.write(block)
    return blocks * len(told) * (1 + noise)


def _read(path: Path) -> float:
    """Return the CPU seconds of finding the format and reading all of a log."""
    began_s = time.process_time()
    for _ in open_log(path):
        pass
    return time.process_time() - began_s


def _rates(folder: Path, lines: int, rounds: int) -> Iterator[str]:
    """Yield a row per family; the families take turns in each round."""
    logs = {}
    for noise in (0, 1):
        for family in FAMILIES:
            path = folder / f"{family}-{noise}.log".replace(" ", "_")
            logs[f"{family}{', every other line noise' * noise}"] = (
                path,
                _write(path, family, lines, noise=noise),
            )
    rates: dict[str, list[float]] = {name: [] for name in logs}
    for _ in range(rounds):
        for name, (path, count) in logs.items():
            rates[name].append(count / _read(path))
    yield "| family | lines/s, median of rounds | lowest - highest | MB/s |"
    yield "| --- | --- | --- | --- |"
    for name, (path, count) in logs.items():
        median = statistics.median(rates[name])
        spread = f"{min(rates[name]):,.0f} - {max(rates[name]):,.0f}"
        size = path.stat().st_size / count / 1e6
        yield f"| {name} | {median:,.0f} | {spread} | {median * size:.1f} |"


def _memory(folder: Path, family: str, size: int) -> str:
    """Return what reading a log of a size, in bytes, takes of memory."""
    path = folder / "large.log"
    lines, _ = log_of(family, Random(0), _DIFFERENT)
    block = "".join(f"{_NOISE * _NOISE_LINES}{line}\n" for line in lines)
    with path.open("w") as file:
        for _ in range(max(1, size // len(block))):
            file.write(block)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    took_s = _read(path)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (
        f"{family}: {path.stat().st_size / 1e9:.2f} GB read in {took_s:.0f} s of CPU; largest "
        f"resident size of the process {after / 1024:.0f} MiB, {before / 1024:.0f} MiB before"
    )


def main(arguments: list[str] | None = None) -> int:
    """Print the table of rates, or the memory for one large log."""
    parser = argparse.ArgumentParser(
        prog="python -m mindtune.experiments.replay.read_speed",
        description="Measure how fast logs are read, format detection included.",
    )
    parser.add_argument("--lines", type=int, default=50_000, help="lines per log (50,000)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (5)")
    parser.add_argument("--memory", type=int, metavar="MB", help="read one log of so many MB")
    parser.add_argument("--family", choices=sorted(FAMILIES), default="megatron")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        if options.memory:
            print(_memory(Path(name), options.family, options.memory * 1_000_000))
            return 0
        for row in _rates(Path(name), options.lines, options.rounds):
            print(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())

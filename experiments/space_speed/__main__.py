"""Time `check` on large spaces and print a Markdown table with the spread."""

from __future__ import annotations

import argparse
import statistics
import time

from mindtune.experiments.provenance import load_1m, provenance
from mindtune.experiments.space_speed.spaces import SPACES
from mindtune.search.constraints import check

__all__ = ["main"]


def _timed(name: str, rounds: int) -> str:
    walls, cpus = [], []
    for _ in range(rounds):
        wall, cpu = time.perf_counter(), time.process_time()
        space = SPACES[name]()  # a new space each time: nothing is remembered between rounds
        report = check(space)
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    per_100k = statistics.median(walls) * 1e5 / report.total
    return (
        f"| {name} | {report.total} | {report.feasible} | {statistics.median(walls):.2f} "
        f"[{min(walls):.2f}, {max(walls):.2f}] | {statistics.median(cpus):.2f} | {per_100k:.2f} |"
    )


def main() -> None:
    """Run the experiment."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="times that each space is checked")
    arguments = parser.parse_args()
    before = load_1m()
    print(
        "| space | configs | feasible | s: median [lowest, highest] | CPU s | s per 100,000 |\n"
        "| --- | --- | --- | --- | --- | --- |"
    )
    for name in SPACES:
        print(_timed(name, arguments.rounds), flush=True)
    print(f"\n{provenance().sentence()} {arguments.rounds} rounds, load {before:.1f} before.")


if __name__ == "__main__":
    main()

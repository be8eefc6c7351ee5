"""Time the check of large spaces and our proposals in them; print Markdown tables with spread."""

from __future__ import annotations

import argparse
import gc
import statistics
import time

import optuna

from mindtune.experiments.provenance import load_1m, provenance
from mindtune.experiments.space_speed.proposals import proposals
from mindtune.experiments.space_speed.spaces import SPACES
from mindtune.search.constraints import check

__all__ = ["main"]


def _timed(name: str, rounds: int) -> str:
    walls, cpus = [], []
    for _ in range(rounds):
        gc.collect()  # the round before is gone, as in a command of its own
        wall, cpu = time.perf_counter(), time.process_time()
        # A new space and cost model each time: nothing is remembered between rounds.
        report = check(SPACES[name]())
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
        total, feasible = report.total, report.feasible
        del report
    cpu_s = statistics.median(cpus)
    return (
        f"| {name} | {total:,} | {feasible:,} | {cpu_s:.2f} [{min(cpus):.2f}, "
        f"{max(cpus):.2f}] | {statistics.median(walls):.2f} | {cpu_s * 1e5 / total:.2f} |"
    )


def main() -> None:
    """Run the experiment."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="times that each space is checked")
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    before = load_1m()
    print(
        "| space | configs | feasible | CPU s: median [lowest, highest] | wall s | CPU s per "
        "100,000 |\n"
        "| --- | --- | --- | --- | --- | --- |"
    )
    for name in SPACES:
        print(_timed(name, arguments.rounds), flush=True)
    print(
        "\n| space | feasible | trials | ask, CPU ms: median [lowest, highest] | of that the "
        "sampler | calibration and new verdicts | once, CPU s |\n"
        "| --- | --- | --- | --- | --- | --- | --- |"
    )
    for name in SPACES:
        for trials in (15, 500):
            print(proposals(name, trials, arguments.rounds), flush=True)
    print(f"\n{provenance().sentence()} {arguments.rounds} rounds, load {before:.1f} before.")


if __name__ == "__main__":
    main()

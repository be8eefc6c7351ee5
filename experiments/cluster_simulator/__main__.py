"""Simulated clusters: `trial` plays one trial, `study` writes a study file, `survey` measures."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mindtune.controller.errors import ConfigError
from mindtune.experiments.cluster_simulator.problems import KINDS
from mindtune.search.errors import SearchError

__all__ = ["main"]

_WRONG_USE = 2


def main(arguments: list[str] | None = None) -> int:
    """Run a command; return the exit code (0 done, 2 wrong use)."""
    parser = argparse.ArgumentParser(
        prog="python -m mindtune.experiments.cluster_simulator", description=__doc__
    )
    commands = parser.add_subparsers(dest="command", required=True)
    trial = commands.add_parser("trial", help="play the trial of this process")
    trial.add_argument("--config", type=Path, required=True)
    study = commands.add_parser("study", help="write study.yaml and base.yaml of a problem")
    study.add_argument("kind", choices=KINDS)
    study.add_argument("--seed", type=int, default=0, help="of the cluster")
    study.add_argument("--time-scale", type=float, default=0.0,
                       help="seconds that a simulated second takes")  # fmt: skip
    study.add_argument("--out", type=Path, required=True, help="folder for both files")
    measured = commands.add_parser("survey", help="print what the problems are like")
    measured.add_argument("--seeds", type=int, default=5, help="clusters per problem")
    measured.add_argument("kinds", nargs="*", help="problems; all if none is given")
    options = parser.parse_args(arguments)
    try:
        if options.command == "trial":
            from mindtune.experiments.cluster_simulator.trial import play_trial  # noqa: PLC0415

            play_trial(options.config)
        elif options.command == "study":
            from mindtune.experiments.cluster_simulator.study import write_study  # noqa: PLC0415

            print(write_study(
                options.kind, options.seed, options.out, time_scale=options.time_scale
            ))  # fmt: skip
        else:
            from mindtune.experiments.cluster_simulator.survey import survey  # noqa: PLC0415

            survey(options.kinds or list(KINDS), options.seeds)
    except (ConfigError, SearchError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return _WRONG_USE
    return 0


if __name__ == "__main__":
    sys.exit(main())

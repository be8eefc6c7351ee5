"""Record the exhaustive table of a study; goes on where it was stopped."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mindtune.controller.errors import ConfigError
from mindtune.controller.trials.study_setup import load_study
from mindtune.experiments.exhaustive_table.problem import load_table
from mindtune.experiments.exhaustive_table.recorder import TABLE, Progress, open_recorder
from mindtune.experiments.exhaustive_table.rows import MOST_OTHER_WORK
from mindtune.experiments.exhaustive_table.summary import summary
from mindtune.search.errors import SearchError
from mindtune.search.knobs import describe

__all__ = ["main"]

_STUDY = Path(__file__).resolve().parents[1] / "gpt" / "study.yaml"
_WRONG_USE = 2


def _tell(progress: Progress) -> None:
    row = progress.row
    value = "" if row.value is None else f", value {row.value:.4f}"
    busy = (
        ""
        if progress.counts
        else (f"; does not count, since others took {row.others_share:.0%} of the machine:")
    )
    print(
        f"{progress.done} of {progress.planned}: {describe(row.config)} (repeat {row.repeat}) "
        f"{row.outcome}{value}, took {row.wall_s:.0f} s{busy} {row.message}".rstrip(),
        flush=True,
    )


def main(arguments: list[str] | None = None) -> int:
    """Record; return the exit code (0 done, 2 wrong use)."""
    parser = argparse.ArgumentParser(
        prog="python -m mindtune.experiments.exhaustive_table", description=__doc__
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of table and trials")
    parser.add_argument("--study", type=Path, default=_STUDY, help="study file; default: gpt's")
    parser.add_argument("--limit", type=int, help="measurements to make now; default: all")
    parser.add_argument("--leaders", type=int, default=20, help="best configs measured again")
    parser.add_argument("--repeats", type=int, default=2, help="how often they are")
    parser.add_argument(
        "--most-other-work", type=float, default=MOST_OTHER_WORK,
        help="share of the machine above which a measurement does not count",
    )  # fmt: skip
    parser.add_argument("--measure-steps", type=int, help="of a trial; default: the study file's")
    parser.add_argument(
        "--summary", action="store_true", help="measure nothing, say what a whole table says"
    )
    options = parser.parse_args(arguments)
    try:
        if options.summary:
            setup = load_study(options.study)
            table = load_table(options.study, options.out / TABLE)
            print(summary(table, table.space.named(setup.base)), end="")
            return 0
        recorder = open_recorder(
            options.study, options.out, leaders=options.leaders, repeats=options.repeats,
            most_other_work=options.most_other_work, measure_steps=options.measure_steps,
        )  # fmt: skip
        missing = recorder.record(limit=options.limit, tell=_tell)
    except (ConfigError, SearchError) as error:
        sys.stderr.write(f"error: {error}\n")
        return _WRONG_USE
    print(f"{recorder.table}: {missing} measurements are missing" if missing else recorder.table)
    return 0


if __name__ == "__main__":
    sys.exit(main())

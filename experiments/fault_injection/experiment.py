"""Runs the missing rows, each in a fresh process, and keeps the table up to date."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from mindtune.controller.contract import BestConfig, write_atomic, write_yaml
from mindtune.controller.errors import ConfigError
from mindtune.controller.trials.production import EXIT_FAILED, run_best_config
from mindtune.experiments.fault_injection.cases import Case, Guard
from mindtune.experiments.fault_injection.measure import RowFacts, measure_run
from mindtune.experiments.fault_injection.rows import FaultRow, RowKey, append_row, read_rows
from mindtune.experiments.fault_injection.summary import summary
from mindtune.experiments.provenance import OtherWork, load_1m, provenance

__all__ = ["PlannedRow", "plan", "run_rows"]

_LOGGER = logging.getLogger(__name__)
_COMMAND = ("python", "-m", "mindtune.experiments.gpt", "--config", "{config}")
_ROWS = "rows.jsonl"
_RESULTS = "results.md"


@dataclass(frozen=True)
class PlannedRow:
    """One run to make."""

    case: Case
    guard: Guard
    seed: int
    steps: int

    @property
    def key(self) -> RowKey:
        """The key of its row."""
        return (self.case.name, self.guard.name, self.seed)

    @property
    def best_config(self) -> BestConfig:
        """What the run is started from, like any production run."""
        return BestConfig(
            command=list(_COMMAND),
            base_config="base.yaml",
            overrides=self.case.overrides(self.guard, seed=self.seed, steps=self.steps),
        )

    @property
    def config_hash(self) -> str:
        """Digest of everything that the user decides about the run."""
        content = json.dumps([self.guard.mode, self.best_config.to_plain()], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def plan(cases: Sequence[Case], seeds: Sequence[int], steps: int | None) -> list[PlannedRow]:
    """Return all rows, guards side by side and seeds outermost.

    So that what the machine does over the hours meets all guards alike, and a part of the rows is
    a whole experiment with fewer seeds.

    Args:
        cases: The faults.
        seeds: Seeds of weights and samples.
        steps: Optimizer steps of every run; None: each case's own.
    """
    return [
        PlannedRow(case, guard, seed, steps or case.steps)
        for seed in seeds
        for case in cases
        for guard in case.guards
    ]


def run_rows(out: Path, planned: Sequence[PlannedRow]) -> int:
    """Run what `out` does not hold yet.

    Args:
        out: Folder of the experiment: rows.jsonl, results.md and runs/.
        planned: Every row that is wanted.

    Returns:
        How many rows failed; they are tried again the next time.

    Raises:
        ConfigError: The folder cannot be used, or holds a row of another size.
    """
    path = out / _ROWS
    failed = 0
    missing = list(_missing(read_rows(path), planned, path))
    for number, row in enumerate(missing, start=1):
        name = _name(row)
        _LOGGER.info("row %d of %d: %s", number, len(missing), name)
        measured = _run(out / "runs" / name, row)
        if measured is None:
            _LOGGER.error("%s failed; see %s", name, out / "runs" / name)
            failed += 1
            continue
        append_row(path, measured)
        _LOGGER.info(
            "%s: %s after %d steps and %.0f s, validation loss %s, actions %s",
            name, measured.outcome, measured.steps, measured.wall_s,
            measured.validation_loss, measured.actions or "none",
        )  # fmt: skip
        write_atomic(out / _RESULTS, summary(read_rows(path).values()))
    write_atomic(out / _RESULTS, summary(read_rows(path).values()))
    return failed


def _missing(
    known: dict[RowKey, FaultRow], planned: Sequence[PlannedRow], path: Path
) -> Iterator[PlannedRow]:
    for row in planned:
        found = known.get(row.key)
        if found is None:
            yield row
        elif found.config_hash != row.config_hash:
            raise ConfigError(
                f"{path} must hold rows of one size, but {_name(row)} in it was run with another "
                "config; give another folder with --out."
            )


def _name(row: PlannedRow) -> str:
    return f"{row.case.name}-{row.guard.name}-{row.seed}"


def _run(folder: Path, row: PlannedRow) -> FaultRow | None:
    """Run one row in a folder that holds nothing else; None: it failed."""
    if folder.exists():
        # Left by a run that was ended before its time.
        shutil.rmtree(folder)
    base = resources.files("mindtune.experiments.gpt").joinpath("base.yaml")
    write_atomic(folder / "base.yaml", base.read_text(encoding="utf-8"))
    write_yaml(folder / BestConfig.FILE, row.best_config)
    run_dir = folder / "run"
    fault_step, _ = row.case.plant(row.steps)
    load, others = load_1m(), OtherWork()
    begin_s = time.monotonic()
    code = run_best_config(folder / BestConfig.FILE, run_dir, row.guard.mode)
    wall_s = time.monotonic() - begin_s
    facts = RowFacts(
        fault=row.case.name,
        guard=row.guard.name,
        seed=row.seed,
        config_hash=row.config_hash,
        fault_step=fault_step,
        wall_s=wall_s,
        load_1m=load,
        others_busy=others.share(),
        measured=provenance(),
    )
    measured = measure_run(run_dir, facts)
    # A run whose loss is not finite in the end has failed as a run, but it is what was measured.
    if code == EXIT_FAILED and measured.outcome != "non_finite":
        return None
    return measured

"""Runs the missing rows, each in a fresh process, and keeps the table up to date."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from mindtune.controller.contract import BestConfig, dump_yaml, write_atomic
from mindtune.controller.errors import ConfigError
from mindtune.controller.trials.production import EXIT_FAILED, run_best_config
from mindtune.experiments.fault_injection.case import Case, Guard
from mindtune.experiments.fault_injection.cases import FAULT_FREE, GUARDS, healthy_case
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
    def best_config(self) -> dict[str, Any]:
        """What the run is started from, like any production run."""
        case = self.case
        best = BestConfig(
            command=list(_COMMAND),
            launcher="none" if case.num_ranks == 1 else "msrun",
            base_config="base.yaml",
            overrides=case.overrides(self.guard, seed=self.seed, steps=self.steps),
            knobs={} if case.num_ranks == 1 else {"data_parallel": case.num_ranks},
        )
        # Without defaults: a key that a later version adds makes no row another one.
        own = best.model_dump(mode="json", exclude_defaults=True)
        planted = [fault.to_plain() for fault in case.faults(self.steps)]
        return {**own, **case.live, **({"faults": planted} if planted else {})}

    @property
    def config_hash(self) -> str:
        """Digest of everything that the user decides about the run."""
        content = json.dumps([self.guard.mode, self.best_config], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def plan(
    cases: Sequence[Case],
    seeds: Sequence[int],
    steps: Mapping[str, int],
    guards: Sequence[str] = GUARDS,
) -> list[PlannedRow]:
    """Return all rows, guards side by side and seeds outermost.

    So that what the machine does over the hours meets all guards alike, and a part of the rows is
    a whole experiment with fewer seeds.

    Args:
        cases: The faults.
        seeds: Seeds of weights and samples.
        steps: Name of a case -> optimizer steps of its runs; the others have their own.
        guards: Which of their guards; with `fault_free` the healthy cases that they are compared
            with come along.
    """
    chosen = {case.name: case for case in cases}
    rows: dict[RowKey, PlannedRow] = {}
    for seed in seeds:
        for case in cases:
            length = steps.get(case.name, case.steps)
            for guard in case.guards:
                if guard.name in guards:
                    row = PlannedRow(case, guard, seed, length)
                    rows.setdefault(row.key, row)
            healthy = healthy_case(case)
            if FAULT_FREE in guards and healthy is not None and healthy.name not in chosen:
                row = PlannedRow(healthy, healthy.guards[0], seed, length)
                rows.setdefault(row.key, row)
    return list(rows.values())


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
        try:
            measured = _run(out / "runs" / name, row)
        except _RowFailedError as error:
            _LOGGER.error("%s failed: %s; see %s", name, error, out / "runs" / name)  # noqa: TRY400
            failed += 1
            continue
        append_row(path, measured)
        _LOGGER.info(
            "%s: %s after %d steps and %.0f s, validation loss %s, seen after %s, actions %s",
            name, measured.outcome, measured.steps, measured.wall_s, measured.validation_loss,
            measured.detection_delay, measured.actions or "none",
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


def _run(folder: Path, row: PlannedRow) -> FaultRow:
    """Run one row in a folder that holds nothing else.

    Raises:
        _RowFailedError: The run has failed in another way than its fault may.
    """
    if folder.exists():
        # Left by a run that was ended before its time.
        shutil.rmtree(folder)
    base = resources.files("mindtune.experiments.gpt").joinpath("base.yaml")
    write_atomic(folder / "base.yaml", base.read_text(encoding="utf-8"))
    write_atomic(folder / BestConfig.FILE, dump_yaml(row.best_config))
    run_dir = folder / "run"
    load, others = load_1m(), OtherWork()
    begin_s = time.monotonic()
    code = run_best_config(folder / BestConfig.FILE, run_dir, row.guard.mode)
    wall_s = time.monotonic() - begin_s
    facts = RowFacts(
        fault=row.case.name,
        guard=row.guard.name,
        seed=row.seed,
        config_hash=row.config_hash,
        fault_step=row.case.first_step(row.steps),
        wall_s=wall_s,
        load_1m=load,
        others_busy=others.share(),
        measured=provenance(),
        expected=row.case.expected,
        justified=row.case.justified,
    )
    try:
        measured = measure_run(run_dir, facts)
    except ConfigError as error:
        raise _RowFailedError(str(error)) from None
    # A run that ends as its fault lets it has failed as a run, but it is what was measured.
    right = measured.outcome in {"non_finite", *row.case.also_ends}
    if measured.outcome == "crash" and measured.detected_step is None:
        right = False
    if code == EXIT_FAILED and not right:
        raise _RowFailedError(f"{measured.outcome}: {measured.message}")
    return measured


class _RowFailedError(Exception):
    """A run that tells nothing about its fault."""

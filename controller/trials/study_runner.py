"""Run a study: measure configs, confirm the leaders, export the winner.

Theory of operation. The database says which configs were proposed and what they measured, the
trials' folders hold their files. On every start, what has the same identity is taken as it is; a
config that was running when the search was killed is measured once more under a new number;
everything else goes on from there. Folder and lock are taken before the database, so that two
searches of one folder never meet in it. Any number of workers may join by the database alone
(`worker_runner`); each has a folder of its own, and what they measure is copied into this one.
They leave when the search ends: its one process confirms, so that the leaders and the base run
one after the other on the same devices.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from mindtune.controller.contract import StudyFile, dump_yaml, write_atomic, write_yaml
from mindtune.controller.errors import NothingFeasibleError
from mindtune.controller.trials.ablate import ablate
from mindtune.controller.trials.export import export
from mindtune.controller.trials.identity import keep_identity, study_identity
from mindtune.controller.trials.local_workers import LocalWorkers, choose_slots
from mindtune.controller.trials.peak import PeakFile, needs_measuring, resolve_peak
from mindtune.controller.trials.preflight import check_launcher, check_ranks
from mindtune.controller.trials.progress import (
    CalibrationStarted,
    Listener,
    RejectedBy,
    StudyEnded,
    StudyEvent,
    StudyNote,
    StudyStarted,
)
from mindtune.controller.trials.storage import (
    StorageAddress,
    open_storage,
    storage_address,
    storage_errors,
)
from mindtune.controller.trials.study_folder import (
    WORKERS,
    StudyFolder,
    relocated,
    relocated_command,
)
from mindtune.controller.trials.study_opening import open_search
from mindtune.controller.trials.study_setup import StudySetup, load_study
from mindtune.controller.trials.study_state import StudyState
from mindtune.controller.trials.summary import StudySummary
from mindtune.search.constraints import check

__all__ = ["StudyResult", "run_study"]

EXIT_DONE = 0
EXIT_FAILED = 3


@dataclass(frozen=True, kw_only=True)
class StudyResult:
    """How a study ended."""

    folder: StudyFolder
    summary: StudySummary
    best_config: Path | None
    """None: no config ended ok."""

    @property
    def exit_code(self) -> int:
        """0 with a winner; 3 if no config ended ok."""
        return EXIT_FAILED if self.best_config is None else EXIT_DONE


def run_study(
    study_file: Path,
    out: Path,
    *,
    trials: int | None = None,
    storage: str | None = None,
    ablate_winner: bool = False,
    workers: int | None = None,
    on_event: Listener | None = None,
) -> StudyResult:
    """Start a study, or go on with the one in the folder.

    Args:
        study_file: the study file.
        out: folder of the study.
        trials: configs to measure, the base config included; None: as the study file says.
        storage: database URL or env:NAME; None: as the study file says.
        ablate_winner: measure besides what each knob of the winner gave, where it is not known.
        workers: trials at the same time on this machine, each with devices of its own; None: one,
            with all devices.
        on_event: called with every `StudyEvent`.

    Raises:
        ConfigError: if the study file, the folder or the storage cannot be used; then nothing is
            left behind.
        SearchError: if the space is not valid or has changed.
        PolicyError: if a policy's settings are not valid.
        NothingFeasibleError: if the rules leave no config.
    """
    setup = load_study(study_file)
    # Not in load_study: a space may be looked at on a smaller machine.
    check_launcher(setup.study.trial.launcher)
    cluster = setup.study.cluster
    check_ranks(
        setup.study.trial.launcher, cluster.num_devices, cluster.devices_per_node,
        num_hosts=len(setup.study.trial.hosts or [""]),
    )  # fmt: skip
    report = check(setup.space)
    if report.emptied_by is not None:
        raise NothingFeasibleError(report.emptied_by)
    setting = storage or setup.study.study.storage
    base = setup.folder if storage is None else None
    address = storage_address(setting, out, base=base)
    slots = choose_slots(setup, workers, os.environ, at_most=True)
    folder = StudyFolder(out)
    identity = study_identity(setup)
    created = folder.topmost_missing()
    emit = on_event or (lambda _event: None)
    started = time.monotonic()
    folder.check_free()
    folder.check_writable()
    with contextlib.ExitStack() as stack:
        stack.enter_context(folder.locked())
        with folder.undone_on_failure(created):
            setup.check_hosts(folder.root)
            keep_identity(folder, identity)
            database = open_storage(address)
            peak = _peak(setup, folder, emit)
            loop = open_search(
                stack, setup, folder, identity, database, address,
                peak_flops=peak.flops_per_device, trials=trials, slot=slots[0], emit=emit,
            )  # fmt: skip
            _keep_inputs(setup, folder, address if setting is not None else None)
        stack.enter_context(storage_errors(address))
        emit(_started(loop.state, address, loop.finished))
        local = LocalWorkers(
            study_file, out / WORKERS, address, slots[1:],
            say=lambda text: emit(StudyNote(message=text)), first=2,
        )  # fmt: skip
        with local:
            loop.on_turn = local.look
            loop.search()
        loop.confirm()
        best = None
        if loop.state.summary().winner is not None:
            best = folder.best_config
            export(out, out=best)
        # After the export: whatever becomes of the ablation, the winner is there.
        ablate(loop.state, loop.measurer, emit, measure=ablate_winner)
        summary = loop.state.summary()
        if summary.winner is not None:
            emit(
                StudyEnded(
                    winner=summary.winner,
                    reason=summary.reason,
                    wall_s=time.monotonic() - started,
                )
            )
    return StudyResult(folder=folder, summary=summary, best_config=best)


def _peak(setup: StudySetup, folder: StudyFolder, emit: Listener) -> PeakFile:
    if needs_measuring(setup.study, folder):
        emit(CalibrationStarted(precision=setup.study.training.precision))
    return resolve_peak(setup.study, folder)


def _keep_inputs(setup: StudySetup, folder: StudyFolder, address: StorageAddress | None) -> None:
    """Keep study file and base config in the folder, for exports and reports."""
    old, new = setup.folder, folder.root
    content = setup.study.to_plain()
    trial = content["trial"]
    for name in ("command", "remote_shell"):
        trial[name] = relocated_command(trial[name], old=old, new=new)
    for name in ("base_config", "load_checkpoint"):
        if trial[name] is not None:
            trial[name] = relocated(trial[name], old=old, new=new)
    if "candidates" in content["space"]:
        path = relocated(content["space"]["candidates"], old=old, new=new)
        content["space"]["candidates"] = path
    content["study"]["storage"] = None if address is None else address.shown
    write_yaml(
        folder.study_file,
        StudyFile.model_validate(content),
        header="The study as it was started; paths are relative to this folder.",
    )
    write_atomic(folder.base_config, dump_yaml(setup.config.base))


def _started(state: StudyState, address: StorageAddress, finished: int) -> StudyEvent:
    report = state.report
    return StudyStarted(
        name=state.setup.study.study.name,
        folder=str(state.folder.root),
        storage=address.shown,
        trials=state.planned,
        finished=finished,
        total=report.total,
        feasible=report.feasible,
        rejected=tuple(
            RejectedBy(rule.rule, rule.count, rule.reason)
            for rule in report.rejected
            if rule.count
        ),
        objective=state.scorer.objective,
    )

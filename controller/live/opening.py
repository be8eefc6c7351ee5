"""Opens a session for a training step, from settings and what the process is."""

from __future__ import annotations

import logging
import os
from typing import Any

import mindspore as ms

from mindtune.controller.alerts.run_alerts import open_alerts
from mindtune.controller.contract import ENV_MARK, FaultPlan, write_yaml
from mindtune.controller.live.conditions import write_conditions
from mindtune.controller.live.faults.planted import PlantedFaults
from mindtune.controller.live.foreign import ForeignStep
from mindtune.controller.live.model_signals import ModelSignals
from mindtune.controller.live.observing import Machine
from mindtune.controller.live.profiler_window import ProfilerWindow
from mindtune.controller.live.ranks import (
    JobRank,
    data_parallel_degree,
    equal_on_all_ranks,
    has_loss,
    job_rank,
)
from mindtune.controller.live.session import LiveSession
from mindtune.controller.live.settings import DEFAULT_PARENT, LiveSettings
from mindtune.controller.live.snapshot_storage import open_snapshots
from mindtune.controller.live.snapshots import Snapshots
from mindtune.controller.live.state import ControllerState, find_state
from mindtune.controller.live.step_adapter import OwnStep, StepAdapter
from mindtune.controller.live.trial_report import TrialReport
from mindtune.controller.live.update_step import UpdateStep
from mindtune.controller.live.workload import Workload
from mindtune.controller.records import Recorder, RunFolder, new_run_folder
from mindtune.controller.trials.process_tree import peak_rss_bytes
from mindtune.controller.trials.worker import TrialContext
from mindtune.policies.engine import Engine, build_engine
from mindtune.policies.settings import PolicySettings

__all__ = ["find_own_step", "make_engine", "open_session"]

_LOGGER = logging.getLogger(__name__)


def make_engine(settings: LiveSettings, *, observe_only: bool = False) -> Engine:
    """Return the engine that the settings ask for.

    Args:
        settings: Mode, policies, prior.
        observe_only: Whether all policies observe, whatever is asked for.

    Raises:
        PolicyError: A policy, limit or threshold is unknown or out of range.
    """
    force = observe_only or settings.observes_only
    policies = {
        name: PolicySettings(
            enabled=section.enabled,
            mode="observe" if force else section.mode,
            limits=section.limits,
            thresholds=section.thresholds,
        )
        for name, section in settings.policies_with_known_scale.items()
    }
    return build_engine(policies, mode="observe" if force else settings.mode, prior=settings.prior)


def find_own_step(train_network: Any) -> UpdateStep | None:
    """Return our training step: the network itself or a cell inside; None if there is none."""
    if isinstance(train_network, UpdateStep):
        return train_network
    cells = getattr(train_network, "cells_and_names", None)
    if cells is None:
        return None
    return next((cell for _, cell in cells() if isinstance(cell, UpdateStep)), None)


def open_session(
    settings: LiveSettings,
    workload: Workload,
    train_network: Any,
    *,
    folder: RunFolder | None = None,
    resumed: ControllerState | None = None,
) -> tuple[LiveSession, RunFolder | None]:
    """Open the records, bind the step and begin.

    Args:
        settings: What the user asked for.
        workload: What the user told about the training.
        train_network: The training step.
        folder: Folder of an earlier session of this process; None: from the settings.
        resumed: State to go on with; None: look for one in the folder if the optimizer has
            already made updates.

    Returns:
        The session, and its folder on rank 0.

    Raises:
        ConfigError: A folder cannot be written, a saved state cannot be read, an alert could not
            be sent, or a fault cannot be planted.
        PolicyError: The policies' settings are not valid.
    """
    place = job_rank()
    own = find_own_step(train_network)
    agrees = place.size == 1 or (own is not None and own.layout.world_size == place.size)
    engine = make_engine(settings, observe_only=not agrees)
    acts = any(seat.mode == "act" for seat in engine.seats)
    faults = None
    if settings.faults:
        faults = PlantedFaults(settings.faults, step=own, place=place)
    if place.rank == 0 and settings.keeps_records and folder is None:
        folder = _folder(settings)
    adapter: StepAdapter
    if own is not None:
        snapshots = _snapshots(settings, engine, own, place, folder)
        adapter = OwnStep(own, acts=acts, job_size=place.size, snapshots=snapshots)
    else:
        optimizer = getattr(train_network, "optimizer", None)
        adapter = ForeignStep(
            train_network,
            optimizer,
            acts=acts,
            data_parallel=data_parallel_degree(place),
            job_size=place.size,
            has_loss=has_loss(place),
        )
    context = TrialContext.from_env()
    trial = None if context is None else TrialReport(context, rank=place.rank)
    alerts = None
    if place.rank == 0:
        alerts = open_alerts(
            settings.alerts,
            folder=None if folder is None else folder.path,
            exits_on_hang=settings.watchdog.exit_on_hang,
            # `mindtune run` tells about its own child itself.
            with_will=ENV_MARK not in os.environ,
            planted=bool(settings.faults),
        )
    recorder = None if folder is None else Recorder(folder)
    machine = _machine(place)
    if folder is not None:
        write_conditions(
            folder.path,
            workload,
            num_devices=place.size,
            device=machine.device,
            seed=ms.get_seed(),
        )
    if folder is not None and settings.faults:
        write_yaml(folder.path / FaultPlan.FILE, FaultPlan(faults=settings.faults))
    session = LiveSession(
        settings,
        workload,
        adapter,
        engine,
        recorder=recorder,
        machine=machine,
        trial=trial,
        alerts=alerts,
        faults=faults,
        model_signals=ModelSignals(
            every=settings.sample_every, step=own, function=workload.model_signals
        )
        if settings.sample_every
        else None,
        profiler=_profiler(settings, folder),
    )
    if resumed is None:
        resumed = _saved_state(settings, adapter)
    if acts:
        resumed = _agreed(resumed, place)
    try:
        session.begin(resumed=resumed)
    except BaseException as error:
        # Its threads live already; the watchdog's would take the silence that follows for a hang.
        session.end(error)
        raise
    if not agrees and not settings.observes_only and settings.wants_to_act:
        session.advise(
            "ranks_not_agreed",
            f"policies only observe: the {place.size} ranks of this job do not all take part in "
            f"{adapter.name}'s reduction, so they could decide differently; use TrainStep with a "
            "ParallelLayout whose world_size is that of the job.",
        )
    return session, folder


def _folder(settings: LiveSettings) -> RunFolder:
    if settings.out_dir is not None:
        return RunFolder(settings.out_dir)
    folder = new_run_folder(DEFAULT_PARENT)
    _LOGGER.warning("mindtune records this run in %s", folder.path)
    return folder


def _profiler(settings: LiveSettings, folder: RunFolder | None) -> ProfilerWindow | None:
    if folder is None or settings.in_trial or not settings.profiler.max_windows:
        return None
    from mindtune.controller.live.mindspore_profiler import (  # noqa: PLC0415 - only where used
        MindSporeProfiler,
    )

    return ProfilerWindow(settings.profiler, MindSporeProfiler(), folder)


def _snapshots(
    settings: LiveSettings,
    engine: Engine,
    step: UpdateStep,
    place: JobRank,
    folder: RunFolder | None,
) -> Snapshots | None:
    """Return what keeps earlier states, where a policy that returns to them acts."""
    returns = any(seat.policy.name == "rewind" and seat.mode == "act" for seat in engine.seats)
    if not (settings.rewind.enabled and returns):
        return None
    if folder is None and settings.keeps_records and settings.out_dir is not None:
        folder = RunFolder(settings.out_dir)
    return open_snapshots(
        settings.rewind, step, place, folder=None if folder is None else folder.state
    )


def _saved_state(settings: LiveSettings, adapter: StepAdapter) -> ControllerState | None:
    """Return the state that fits the weights, where training goes on from a checkpoint."""
    updates = adapter.updates()
    if not updates or settings.out_dir is None or settings.in_trial:
        return None
    return find_state(RunFolder(settings.out_dir).state, updates=updates)


def _agreed(state: ControllerState | None, place: JobRank) -> ControllerState | None:
    """Return the state if all ranks have it: with unequal states they would decide differently."""
    if equal_on_all_ranks(-1 if state is None else state.step, place):
        return state
    _LOGGER.warning(
        "the ranks found different controller states (this one: %s), so all start afresh; put "
        "out_dir where every rank can read it.",
        "none" if state is None else f"step {state.step}",
    )
    return None


def _machine(place: JobRank) -> Machine:
    device = str(ms.get_context("device_target"))
    # On CPU the framework's counters stay at 0.
    counts = device != "CPU"
    return Machine(
        rank=place.rank,
        num_ranks=place.size,
        device=device,
        memory_allocated=_memory_allocated if counts else lambda: None,
        peak_memory=_peak_allocated if counts else _peak_resident,
        peak_reserved=_peak_reserved if counts else lambda: None,
    )


def _memory_allocated() -> int | None:
    return int(ms.runtime.memory_allocated()) or None


def _peak_allocated() -> tuple[int, str] | None:
    peak = int(ms.runtime.max_memory_allocated())
    return (peak, "allocator") if peak else None


def _peak_reserved() -> int | None:
    return int(ms.runtime.max_memory_reserved()) or None


def _peak_resident() -> tuple[int, str] | None:
    peak = peak_rss_bytes(os.getpid())
    return (peak, "rss") if peak else None

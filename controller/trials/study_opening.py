"""Open a study in its storage: to search it, or to join it as a worker.

The search leaves its plan with the study: what identifies it, on what it runs, how many configs
it is to measure, and the peak that MFU is taken of. A worker takes the plan, and is refused where
its own code, study file or hardware would measure something else.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, ClassVar

from pydantic import ValidationError

from mindtune.controller.contract import Document
from mindtune.controller.device.hardware import describe_hardware
from mindtune.controller.errors import ConfigError
from mindtune.controller.trials.budget import span_s
from mindtune.controller.trials.confirm import num_leaders
from mindtune.controller.trials.crew import Crew
from mindtune.controller.trials.identity import Identity
from mindtune.controller.trials.measure import Measurer
from mindtune.controller.trials.progress import Listener, StudyNote, TimeLeft
from mindtune.controller.trials.scores import Scorer
from mindtune.controller.trials.search_loop import SearchLoop
from mindtune.controller.trials.storage import (
    StorageAddress,
    named_variable,
    open_storage,
    storage_errors,
)
from mindtune.controller.trials.study_folder import StudyFolder
from mindtune.controller.trials.study_setup import StudySetup
from mindtune.controller.trials.study_state import StudyState
from mindtune.controller.trials.trial_loop import OVER, TrialLoop
from mindtune.search.constraints import SpaceReport, check

if TYPE_CHECKING:
    import optuna

    from mindtune.search.study import Proposer

__all__ = ["SearchPlan", "follow_plan", "join_study", "open_search"]

_JOIN_WAIT_S = 60.0
"""A worker that is started together with the search waits so long for it."""
_POLL_S = 0.5


class SearchPlan(Document):
    """What a search leaves for its workers, as an attribute of the study."""

    FILE: ClassVar[str] = "search_plan"

    parts: dict[str, str]
    """Identity: part of the study -> hash of its content."""
    trials: int
    hardware: str
    """As `describe_hardware` gives it, of the machine that searches."""
    peak_flops: float | None
    """Of one device; null: unknown."""
    deadline: float | None = None
    """End of the time budget in seconds since 1970, by the search's clock; null: none."""


def open_search(
    stack: ExitStack,
    setup: StudySetup,
    folder: StudyFolder,
    identity: Identity,
    database: optuna.storages.BaseStorage,
    address: StorageAddress,
    *,
    peak_flops: float | None,
    trials: int | None,
    slot: Mapping[str, str],
    emit: Listener,
) -> SearchLoop:
    """Open a study, new or resumed, as the one process that searches it.

    Args:
        stack: ends the membership in the study's crew.
        setup: the study.
        folder: its folder.
        identity: what its measurements depend on.
        database: its storage.
        address: where that is.
        peak_flops: of one device; None: unknown.
        trials: configs to measure; None: as the study file says.
        slot: environment that says which devices the trials get.
        emit: told what the user should know.

    Raises:
        ConfigError: if the storage cannot be used, or holds another study of this name, or
            another process searches this one.
    """
    import optuna  # noqa: PLC0415 - the light commands do without it

    from mindtune.search.sampler import make_sampler  # noqa: PLC0415 - as above

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    options = setup.study.study
    planned = trials or options.trials
    report = check(setup.with_peak(peak_flops))
    with storage_errors(address):
        study = optuna.create_study(
            storage=database,
            study_name=options.name,
            directions=["maximize"] * (2 if setup.study.score.pareto else 1),
            load_if_exists=True,
        )
        study.sampler = make_sampler(options.sampler, report, seed=_seed(study, setup))
        known = study.user_attrs.get(Identity.FILE)
        if known is None:
            study.set_user_attr(Identity.FILE, identity.combined)
        elif known != identity.combined:
            raise ConfigError(
                f"the storage {address.shown} holds another study called {options.name!r}; give "
                "study.name another name."
            )
        crew = Crew(study, "search")
        crew.refuse_rivals(lambda text: emit(StudyNote(message=text)))
        stack.enter_context(crew)
        crew.refuse_late_rivals()
        proposer = _proposer(study, report, crew, setup, trials=planned)
        _leave_plan(study, setup, identity, planned, peak_flops, emit)
        loop = SearchLoop(
            state=_state(setup, folder, report, proposer, planned),
            proposer=proposer,
            measurer=Measurer(setup, folder, identity, slot, _hidden(setup, address)),
            emit=emit,
            time_left=TimeLeft(),
            crew=crew,
            num_leaders=1,
        )
        loop.num_leaders = num_leaders(loop.state.planned)
        loop.take_over()
    return loop


def join_study(
    stack: ExitStack,
    setup: StudySetup,
    folder: StudyFolder,
    identity: Identity,
    address: StorageAddress,
    *,
    slot: Mapping[str, str],
    emit: Listener,
) -> TrialLoop:
    """Open a study that is being searched, as one more worker; arguments as in `open_search`.

    Raises:
        ConfigError: if the storage cannot be used, holds no such study within a minute, or one
            that this machine would not measure alike.
    """
    import optuna  # noqa: PLC0415 - the light commands do without it

    from mindtune.search.sampler import make_sampler  # noqa: PLC0415 - as above

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    options = setup.study.study
    database, plan = _wait_for_plan(setup, address, emit)
    _check_alike(setup, identity, plan, address)
    report = check(setup.with_peak(plan.peak_flops))
    with storage_errors(address):
        study = optuna.load_study(storage=database, study_name=options.name)
        crew = stack.enter_context(Crew(study, "worker"))
        seed = _seed(study, setup, worker=crew.me.id)
        study.sampler = make_sampler(options.sampler, report, seed=seed)
        proposer = _proposer(study, report, crew, setup, trials=plan.trials)
        loop = TrialLoop(
            state=_state(setup, folder, report, proposer, plan.trials),
            proposer=proposer,
            measurer=Measurer(setup, folder, identity, slot, _hidden(setup, address)),
            emit=emit,
            time_left=TimeLeft(),
            crew=crew,
            deadline=lambda: _deadline(study),
        )
        loop.take_over()
    return loop


def _seed(study: optuna.Study, setup: StudySetup, *, worker: str = "") -> int:
    """Return the seed of a sampler.

    Optuna's own draw the same again from the same seed, whatever was tried: a start of its own
    for every worker and every resume. Ours are fixed by seed and trials, as they should be.
    """
    options = setup.study.study
    number = len(study.get_trials(deepcopy=False))
    if options.sampler not in ("tpe", "random") or (not worker and not number):
        return options.seed
    text = f"{options.seed}:{worker}:{number}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def _hidden(setup: StudySetup, address: StorageAddress) -> tuple[str, ...]:
    """Return the variables with which the storage is told, which may hold a password."""
    named = {address.variable, named_variable(setup.study.study.storage)}
    return tuple(sorted(name for name in named if name is not None))


def _proposer(
    study: optuna.Study, report: SpaceReport, crew: Crew, setup: StudySetup, *, trials: int
) -> Proposer:
    from mindtune.search.study import Proposer  # noqa: PLC0415 - the light commands do without it

    options = setup.study.study
    return Proposer(
        study,
        report,
        trials=trials,
        # The search alone keeps the time: it knows when it began.
        time_budget_s=options.time_budget if crew.me.role == "search" else None,
        stop=None if options.stop is None else options.stop.rule(),
        seed=options.seed,
        peers=crew,
        worker=crew.me.id,
    )


def _state(
    setup: StudySetup, folder: StudyFolder, report: SpaceReport, proposer: Proposer, planned: int
) -> StudyState:
    return StudyState(
        setup=setup,
        folder=folder,
        scorer=Scorer(setup.study, report.space.facts),
        report=report,
        planned=_reachable(planned, report, proposer),
        # Slurm starts the trials elsewhere; each of them tells.
        hardware=None
        if setup.study.trial.launcher == "slurm"
        else describe_hardware(setup.study.cluster.device),
    )


def _reachable(planned: int, report: SpaceReport, proposer: Proposer) -> int:
    """Return how many configs can be measured of those that are planned."""
    is_listed = report.space.key(proposer.baseline.config) in report.keys
    return min(planned, report.feasible + (not is_listed))


def follow_plan(loop: TrialLoop) -> None:
    """Let a worker measure as many configs as the search plans now: it may have been extended."""
    plan = _plan(loop.proposer.study)
    if plan is not None:
        loop.proposer.plan_trials(plan.trials)
        loop.state.planned = _reachable(plan.trials, loop.state.report, loop.proposer)


def _leave_plan(
    study: optuna.Study,
    setup: StudySetup,
    identity: Identity,
    planned: int,
    peak_flops: float | None,
    emit: Listener,
) -> None:
    hardware = describe_hardware(setup.study.cluster.device)
    known = _plan(study)
    if known is not None and known.hardware != hardware and setup.study.trial.launcher != "slurm":
        emit(
            StudyNote(
                message=f"earlier trials of this study ran on {known.hardware}, this machine is "
                f"{hardware}: their step times may not be comparable; give another --out and "
                "study.name to start afresh"
            )
        )
    budget = setup.study.study.time_budget
    left_s = None if budget is None else budget - span_s(study.get_trials(deepcopy=False))
    plan = SearchPlan(
        parts=identity.parts,
        trials=planned,
        hardware=hardware,
        peak_flops=peak_flops,
        deadline=None if left_s is None else time.time() + left_s,
    )
    study.set_user_attr(SearchPlan.FILE, json.dumps(plan.to_plain()))


def _plan(study: optuna.Study) -> SearchPlan | None:
    text = study.user_attrs.get(SearchPlan.FILE)
    try:
        return None if text is None else SearchPlan.model_validate(json.loads(text))
    except ValidationError:
        return None  # of another version, which the identity tells as well


def _deadline(study: optuna.Study) -> float | None:
    """Return the end of the time budget, which a search that goes on moves."""
    plan = _plan(study)
    return None if plan is None else plan.deadline


def _wait_for_plan(
    setup: StudySetup, address: StorageAddress, emit: Listener
) -> tuple[optuna.storages.BaseStorage, SearchPlan]:
    """Return the storage and the plan of its study, as soon as a search has left one there.

    A search that is over may be about to go on, with more trials than before.
    """
    name = setup.study.study.name
    database: optuna.storages.BaseStorage | None = None
    has_told = False
    deadline = time.monotonic() + _JOIN_WAIT_S
    while True:
        if database is None and (address.file is None or address.file.exists()):
            database = open_storage(address)
        plan, is_over = None, False
        if database is not None:
            plan, is_over = _stored_plan(database, name, address)
        is_late = time.monotonic() >= deadline
        if database is not None and plan is not None and (is_late or not is_over):
            return database, plan
        if is_late:
            raise ConfigError(
                f"the storage {address.shown} must hold a study called {name!r} that `mindtune "
                "search` has started, but does not; start that with the same --storage."
            )
        if not has_told:
            has_told = True
            then = "go on: the last one is over" if is_over else "start"
            message = f"waiting up to {_JOIN_WAIT_S:g} s for a search of study {name!r} to {then}"
            emit(StudyNote(message=message))
        time.sleep(_POLL_S)


def _stored_plan(
    database: optuna.storages.BaseStorage, name: str, address: StorageAddress
) -> tuple[SearchPlan | None, bool]:
    """Return the plan of a study, and whether its search is over; None: there is none yet."""
    import optuna  # noqa: PLC0415 - the light commands do without it

    with storage_errors(address):
        try:
            study = optuna.load_study(storage=database, study_name=name)
        except KeyError:
            return None, False
        return _plan(study), bool(study.user_attrs.get(OVER))


def _check_alike(
    setup: StudySetup, identity: Identity, plan: SearchPlan, address: StorageAddress
) -> None:
    """Refuse to measure what could not be compared with what others measure."""
    different = [name for name, part in plan.parts.items() if identity.parts.get(name) != part]
    if different:
        raise ConfigError(
            f"a worker must have the study file and code of the search in {address.shown}, but "
            f"these differ here: {', '.join(different)}; copy them from there."
        )
    hardware = describe_hardware(setup.study.cluster.device)
    # Slurm starts the trials elsewhere, on machines of one partition.
    if hardware != plan.hardware and setup.study.trial.launcher != "slurm":
        raise ConfigError(
            f"a worker must have the hardware of the search, {plan.hardware}, since step times "
            f"are compared, but this machine is {hardware}; join from an equal machine, or give "
            "this kind of machine a study of its own."
        )

"""Join a study that another process searches, and measure configs of it until there are none."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from mindtune.controller.errors import ConfigError
from mindtune.controller.trials.identity import study_identity
from mindtune.controller.trials.local_workers import LocalWorkers, choose_slots
from mindtune.controller.trials.preflight import check_launcher, check_ranks
from mindtune.controller.trials.progress import Listener, StudyNote
from mindtune.controller.trials.storage import storage_address, storage_errors
from mindtune.controller.trials.study_folder import WORKERS, StudyFolder
from mindtune.controller.trials.study_opening import follow_plan, join_study
from mindtune.controller.trials.study_setup import load_study

__all__ = ["run_worker"]


def run_worker(
    study_file: Path,
    out: Path | None,
    *,
    storage: str | None = None,
    workers: int | None = None,
    on_event: Listener | None = None,
) -> int:
    """Measure configs of a running study until its search ends.

    Args:
        study_file: the study file, equal to that of the search.
        out: folder for the trials of this worker alone; None: one of its own, beside those of the
            search's workers.
        storage: database URL or env:NAME; None: as the study file says.
        workers: trials at the same time; None: as many as devices allow, one on the host's cores.
        on_event: called with every `StudyEvent`.

    Returns:
        How many configs this process measured.

    Raises:
        ConfigError: if the study file, the folder or the storage cannot be used, or this machine
            would measure something else than the search.
        SearchError: if the space is not valid or has changed.
        PolicyError: if a policy's settings are not valid.
    """
    emit = on_event or (lambda _event: None)
    setup = load_study(study_file)
    check_launcher(setup.study.trial.launcher)
    cluster = setup.study.cluster
    check_ranks(
        setup.study.trial.launcher, cluster.num_devices, cluster.devices_per_node,
        num_hosts=len(setup.study.trial.hosts or [""]),
    )  # fmt: skip
    setting = storage or setup.study.study.storage
    if setting is None:
        raise ConfigError(
            "a worker must be told where the study is stored; give --storage with the URL that "
            "`mindtune search` was given, or env:NAME."
        )
    own = f"{socket.gethostname()}_{os.getpid()}"
    root = out or study_file.parent / study_file.stem / WORKERS / own
    base = setup.folder if storage is None else None
    address = storage_address(setting, root, base=base)
    slots = choose_slots(setup, workers, os.environ)
    folder = StudyFolder(root)
    missing = [path for path in (root, *root.parents) if not path.exists()]
    folder.check_writable()
    with contextlib.ExitStack() as stack:
        stack.enter_context(folder.locked())
        with _undone_on_failure(folder, missing):
            setup.check_hosts(folder.root)
            loop = join_study(
                stack, setup, folder, study_identity(setup), address, slot=slots[0], emit=emit
            )
        local = LocalWorkers(
            study_file, root / WORKERS, address, slots[1:],
            say=lambda text: emit(StudyNote(message=text)), first=2,
        )  # fmt: skip
        stack.enter_context(storage_errors(address))
        with local:

            def on_turn() -> None:
                local.look()
                follow_plan(loop)

            loop.on_turn = on_turn
            emit(
                StudyNote(
                    message=f"joined study {setup.study.study.name} in {address.shown}, "
                    f"{loop.finished} of {loop.state.planned} trials are done; trials of this "
                    f"worker are in {root}"
                )
            )
            loop.run()
            local.wait()
    emit(StudyNote(message=f"the search is over: {loop.proposer.stopped}"))
    return loop.measured


@contextlib.contextmanager
def _undone_on_failure(folder: StudyFolder, missing: Sequence[Path]) -> Iterator[None]:
    """Remove what the block has added if it fails; of the folders above, those left empty.

    Unlike a search's, they are not this process's alone: the search may begin in them just now.
    """
    try:
        with folder.undone_on_failure(folder.root if folder.root in missing else None):
            yield
    except BaseException:
        for path in missing:
            with contextlib.suppress(OSError):
                path.rmdir()
        raise

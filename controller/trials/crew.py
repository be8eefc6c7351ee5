"""Who works on a study, and who of them is still alive.

Theory of operation. Every process that measures trials of a study keeps an entry in the study's
storage: who it is, and a count that a thread of it raises every ten seconds, whatever the process
does meanwhile. Others never compare clocks: they note on their own clock when they last saw the
count change, and take a member for gone after a minute without. A process of the same machine is
looked up besides, so its end is known at once, and is given five minutes: one that is stopped
(Ctrl-Z) is there, but works no more. Who leaves says so. A running trial is alive while the member
that it names is. One that names nobody yet, since it is just being asked for, is alive for a
minute while anybody else is: its member may have been killed before it could sign.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from mindtune.controller.errors import ConfigError
from mindtune.controller.trials.process_tree import Process, identify, is_running
from mindtune.search.attributes import WORKER

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial

__all__ = ["Crew", "Member"]

_LOGGER = logging.getLogger(__name__)
_PREFIX = "worker:"
_BEAT_S = 10.0
_GONE_AFTER_S = 60.0
"""Six beats: a database that stalls, or a machine that swaps, must not cost a trial."""
_STOPPED_AFTER_S = 300.0
"""Without a sign of a process that is there: swapping may silence it, a debugger too."""
_POLL_S = 0.5
_GIVE_WAY_S = 5.0
"""Longest time for a search that has to give way to do so: it has to read the storage once."""
_LEAVE_WAIT_S = 15.0
"""Longest wait for a last sign of life under way; the storage may be away."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """A process that works on a study, as others see it."""

    id: str
    role: Literal["search", "worker"]
    """search: the one process that also confirms and exports."""
    host: str
    machine: str
    """Says whether a process id means the same process: boot, id namespace and user."""
    pid: int
    start_ticks: int
    beats: int = 0
    has_left: bool = False

    @property
    def name(self) -> str:
        """Name for messages."""
        return f"{self.host} (process {self.pid})"


_FIELDS = tuple(entry.name for entry in fields(Member))


@dataclass
class _Sighting:
    member: Member
    changed_at: float


class Crew:
    """The members of a study, this process among them; a context manager."""

    def __init__(
        self,
        study: optuna.Study,
        role: Literal["search", "worker"],
        *,
        beat_s: float = _BEAT_S,
        gone_after_s: float = _GONE_AFTER_S,
        stopped_after_s: float = _STOPPED_AFTER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Look at who is there.

        Args:
            study: the study.
            role: of this process.
            beat_s: seconds between two signs of life.
            gone_after_s: seconds without a sign, after which a member elsewhere is gone.
            stopped_after_s: the same of a member of this machine whose process is there.
            clock: in seconds; differs from machine to machine.
        """
        own = identify(os.getpid())
        self.me = Member(
            id=uuid.uuid4().hex[:12],
            role=role,
            host=socket.gethostname(),
            machine=_machine(),
            pid=os.getpid(),
            start_ticks=0 if own is None else own.start_ticks,
        )
        self.gone_after_s = gone_after_s
        self._stopped_after_s = stopped_after_s
        self._study = study
        self._beat_s = beat_s
        self._clock = clock
        self._seen: dict[str, _Sighting] = {}
        self._unsigned: dict[int, float] = {}
        """Running trial that names nobody -> when this process first saw it."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="signs of life", daemon=True)

    def __enter__(self) -> Crew:  # noqa: PYI034 - typing.Self needs Python 3.11
        self._write()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join(_LEAVE_WAIT_S)
        if not self._thread.is_alive():  # else the storage is away, and this would wait as well
            self.me = replace(self.me, has_left=True)
            self._try_to_write()

    @property
    def size(self) -> int:
        """Members that were alive when this process last looked, itself included."""
        return 1 + sum(self._is_there(sighting) for sighting in self._seen.values())

    def others(self) -> list[Member]:
        """Return the other members that are alive now."""
        self.look()
        return [sighting.member for sighting in self._seen.values() if self._is_there(sighting)]

    def refuse_rivals(self, emit: Callable[[str], None]) -> None:
        """Make sure that this is the only process that searches the study.

        Args:
            emit: told if it has to be waited for whether one elsewhere still gives signs of life.

        Raises:
            ConfigError: if another one does.
        """
        first: dict[str, int] = {}
        has_told = False
        while rivals := [member for member in self.others() if member.role == "search"]:
            for rival in rivals:
                is_certain = rival.machine == self.me.machine
                if is_certain or rival.beats != first.setdefault(rival.id, rival.beats):
                    raise ConfigError(
                        "a study must be searched by one process, but "
                        f"{rival.name} does so now; join it with `mindtune worker`, or end it."
                    )
            if not has_told:
                has_told = True
                emit(
                    f"{rivals[0].name} has searched this study: waiting {self.gone_after_s:g} s "
                    "for a sign of life"
                )
            self.wait()

    def refuse_late_rivals(self) -> None:
        """Make sure that no other search was started at the same moment; once this one is seen.

        Of two that see each other the one with the higher id gives way. One that stays though its
        id is the higher has not seen this one: it came first.

        Raises:
            ConfigError: if this one has to give way.
        """
        last_look = self._clock() + _GIVE_WAY_S
        while rivals := [member for member in self.others() if member.role == "search"]:
            if any(rival.id < self.me.id for rival in rivals) or self._clock() >= last_look:
                raise ConfigError(
                    "a study must be searched by one process, but "
                    f"{rivals[0].name} was started at the same moment; join it with "
                    "`mindtune worker`."
                )
            self.wait()

    def is_alive(self, trial: FrozenTrial) -> bool:
        """Return whether another member still works on a running trial."""
        owner = trial.user_attrs.get(WORKER)
        if owner == self.me.id:
            return False
        if owner is None:
            first_seen = self._unsigned.setdefault(trial.number, self._clock())
            if self._clock() - first_seen >= self.gone_after_s:
                return False
        if self._is_known(owner):
            return True
        # Nobody is declared gone without a fresh look: this process may have measured for long.
        self.look()
        return self._is_known(owner)

    def _is_known(self, owner: str | None) -> bool:
        """Tell whether a member, or anybody for None, was alive at the last look."""
        return any(
            self._is_there(sighting)
            for name, sighting in self._seen.items()
            if owner in (None, name)
        )

    def wait(self) -> None:
        """Let a moment pass, and look."""
        time.sleep(_POLL_S)
        self.look()

    def name_of(self, trial: FrozenTrial) -> str:
        """Return who measures or has measured a trial; empty: this process, or nobody."""
        sighting = self._seen.get(str(trial.user_attrs.get(WORKER)))
        return "" if sighting is None else sighting.member.name

    def look(self) -> None:
        """Read the signs of life of all members."""
        now = self._clock()
        for key, text in self._study.user_attrs.items():
            if not key.startswith(_PREFIX) or key == _PREFIX + self.me.id:
                continue
            member = _member(text)
            if member is None:
                continue
            known = self._seen.get(member.id)
            if known is None or known.member != member:
                self._seen[member.id] = _Sighting(member, now)

    def _is_there(self, sighting: _Sighting) -> bool:
        member = sighting.member
        if member.has_left:
            return False
        silence_s = self._clock() - sighting.changed_at
        if member.machine == self.me.machine:
            is_there = is_running(Process(member.pid, member.start_ticks))
            return is_there and silence_s < self._stopped_after_s
        return silence_s < self.gone_after_s

    def _beat(self) -> None:
        while not self._ended.wait(self._beat_s):
            self.me = replace(self.me, beats=self.me.beats + 1)
            self._try_to_write()

    def _try_to_write(self) -> None:
        import optuna  # noqa: PLC0415 - the light commands do without it
        from sqlalchemy.exc import SQLAlchemyError  # noqa: PLC0415 - as above

        try:
            self._write()
        except (SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
            # The next sign follows soon; if the storage stays away, the search itself says so.
            _LOGGER.warning("no sign of life was left in the storage: %s", type(error).__name__)

    def _write(self) -> None:
        self._study.set_user_attr(_PREFIX + self.me.id, json.dumps(asdict(self.me)))


def _member(text: str) -> Member | None:
    """Return a member as it was stored; None: by a version that cannot be read."""
    try:
        entry = json.loads(text)
        return Member(**{name: entry[name] for name in _FIELDS if name in entry})
    except (ValueError, TypeError):
        return None


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        # Processes of other users may be hidden from this one.
        return f"{boot} {Path('/proc/self/ns/pid').readlink()} {os.getuid()}"
    except OSError:
        return uuid.uuid4().hex  # nobody else is known to share the process ids

"""Further hosts that msrun's ranks run on: how their shell is asked, and whether they can be used.

Another host has the same interpreter and study folder under the same paths (a shared file system);
what it is asked to do goes over the standard input of a remote shell, so that no secret stands in
a command line. Any program that runs a command line elsewhere will do as the shell: ssh, or what a
cluster has in its place.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mindtune.controller.errors import ConfigError
from mindtune.controller.trials.commands import module_path
from mindtune.controller.trials.failure_text import shorten
from mindtune.controller.trials.node_facts import NodeFacts, node_facts

__all__ = ["Hosts", "check_hosts", "shared_mark"]

_ANSWER_S = 60.0
"""Longest wait for a host's answer: its interpreter may lie on a file system that wakes up."""


@dataclass(frozen=True)
class Hosts:
    """Where the ranks of several nodes run."""

    names: tuple[str, ...]
    """As the shell takes them, `USER@` in front where it is needed; the first is this machine,
    under the name that the others know it by."""
    shell: tuple[str, ...]
    """Program and options, to which host and command line are added."""

    @classmethod
    def of(cls, names: Sequence[str] | None, shell: Sequence[str]) -> Hosts | None:
        """Return the hosts that a file names; None: it names none."""
        return None if names is None else cls(tuple(names), tuple(shell))

    @property
    def master(self) -> str:
        """Address of this machine, where msrun's scheduler runs."""
        return self.names[0].rpartition("@")[2]

    def command(self, number: int, words: Sequence[str], *, folder: Path, mark: Path) -> list[str]:
        """Return what runs a module of ours on another host.

        Args:
            number: of the host.
            words: module and arguments.
            folder: working directory there.
            mark: file in it that was made here (see `shared_mark`); without it nothing starts.
        """
        path = [f"{name}={value}" for name, value in module_path(os.environ).items()]
        # In words that all shells understand.
        line = " && ".join(
            [
                shlex.join(["cd", str(folder)]),
                shlex.join(["ls", str(mark.relative_to(folder))]) + " >/dev/null",
                "exec " + shlex.join(["env", *path, sys.executable, "-m", *words]),
            ]
        )
        return [*self.shell, self.names[number], line]


@contextmanager
def shared_mark(folder: Path) -> Iterator[Path]:
    """Hold a file in a folder, which another host sees if it is the same folder there.

    Raises:
        ConfigError: the folder cannot be written.
    """
    path = folder / f".shared.{uuid.uuid4().hex}"
    try:
        path.touch()
    except OSError as error:
        raise ConfigError(f"{folder} must be writable, but: {error.strerror}.") from None
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def check_hosts(hosts: Hosts, *, folder: Path, device: str) -> None:
    """Make sure that ranks can be started on every host; takes a second or two.

    Args:
        hosts: all that a launch may use.
        folder: that of the study or run.
        device: `cluster.device` of the study, which all hosts must have alike.

    Raises:
        ConfigError: a host is not reached, does not share the folder, or is not like this one.
    """
    if len(hosts.names) == 1:
        return
    _check_first(hosts)
    if shutil.which(hosts.shell[0]) is None:
        raise ConfigError(
            f"trial.remote_shell must name a program, but got {hosts.shell[0]!r}, which is not on "
            "the PATH; install it (ssh: openssh-client), or name another one."
        )
    here = node_facts(device)
    folder = folder.resolve()
    with shared_mark(folder) as mark, ThreadPoolExecutor(len(hosts.names)) as pool:
        words = ["mindtune.controller.trials.node_facts", device]
        asked = [
            pool.submit(_answer, name, hosts.command(number, words, folder=folder, mark=mark))
            for number, name in enumerate(hosts.names)
            if number > 0
        ]
        for name, answer in zip(hosts.names[1:], asked, strict=True):
            there = answer.result()
            for what, own, other in (
                ("versions", here.versions, there.versions),
                ("hardware", here.hardware, there.hardware),
            ):
                if own != other:
                    raise ConfigError(
                        f"all of trial.hosts must have the {what} of this machine, {own}, since "
                        f"their ranks work together, but {name} has {other}; make them alike, or "
                        "leave it out."
                    )


def _check_first(hosts: Hosts) -> None:
    """Refuse a first host that is not this machine, or that the others would take for themselves.

    msrun starts a scheduler wherever the master's address is one of its own.
    """
    try:
        address = socket.getaddrinfo(hosts.master, None, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(
            f"the first of trial.hosts must be a name or address of this machine, but "
            f"{hosts.master!r} is not known here: {error.strerror}."
        ) from None
    family, kind, _, _, place = address
    with socket.socket(family, kind) as probe:
        try:
            probe.bind((place[0], 0))
        except OSError:
            raise ConfigError(
                f"the first of trial.hosts must be this machine, {socket.gethostname()}, which "
                f"runs the scheduler, but got {hosts.master!r} ({place[0]}); start there, or put "
                "this machine first."
            ) from None
    if str(place[0]).startswith("127.") or place[0] == "::1":
        raise ConfigError(
            "the first of trial.hosts must be an address that the others reach, but "
            f"{hosts.master!r} is {place[0]} here, which is each machine's own; use its address "
            "in the network, or correct /etc/hosts."
        )


def _answer(name: str, command: Sequence[str]) -> NodeFacts:
    """Return what a host says of itself.

    Raises:
        ConfigError: it does not.
    """
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=_ANSWER_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"host {name} of trial.hosts gave no answer within {_ANSWER_S:g} s; see whether "
            f"`{shlex.join([*command[:-1], 'true'])}` does."
        ) from None
    said = done.stdout.strip().rpartition("\n")[2]
    if done.returncode == 0 and said.startswith("{"):
        return NodeFacts(**json.loads(said))
    words = shorten(" ".join(done.stderr.split())) or "it said nothing"
    raise ConfigError(
        f"host {name} of trial.hosts must run this interpreter and share this folder, but its "
        f"shell ended with code {done.returncode}: {words}; see whether "
        f"`{shlex.join([*command[:-1], 'true'])}` works, and whether {sys.executable} and the "
        "folder are there under these paths."
    )

"""Turn a study's command into what is really executed."""

from __future__ import annotations

import os
import random
import shutil
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from mindtune.controller.contract import (
    ENV_CONFIG,
    ENV_FAULTS,
    ENV_MODE,
    ENV_RUN_DIR,
    ENV_TRIAL_DIR,
)
from mindtune.controller.errors import ConfigError
from mindtune.controller.trials.memory_log import log_environment

__all__ = ["CONFIG_PLACEHOLDER", "ENV_STORAGE", "free_port", "module_path", "msrun_command",
           "names_file", "resolve_command", "trial_environment", "with_files"]  # fmt: skip

CONFIG_PLACEHOLDER = "{config}"
_INTERPRETER = "python"
ENV_STORAGE = "MINDTUNE_STORAGE"
"""Tells a local worker where the study is stored; it may hold a password."""
_TOLD = (ENV_TRIAL_DIR, ENV_RUN_DIR, ENV_CONFIG, ENV_MODE, ENV_FAULTS, ENV_STORAGE)
_MODULE_PATH = "PYTHONPATH"
_PORTS = range(20000, 32000)
"""Below Linux's ephemeral ports (32768 up), where an outgoing connection may sit."""


def names_file(word: str, folder: Path) -> bool:
    """Tell whether a word of a command names a file in `folder`."""
    if not word or word.startswith("-"):
        return False
    try:
        return (folder / word).is_file()
    except OSError:  # such as a text that is too long for a name
        return False


def with_files(words: Sequence[str], folder: Path) -> list[str]:
    """Return words with the absolute path of a file in `folder` for each that names one."""
    return [str((folder / w).resolve()) if names_file(w, folder) else w for w in words]


def module_path(environ: Mapping[str, str]) -> dict[str, str]:
    """Return PYTHONPATH with its entries as they are meant here; nothing where it is not set.

    Whatever is started runs in a folder of its own, where a relative entry names another one.
    """
    entries = environ.get(_MODULE_PATH)
    if not entries:
        return {}
    absolute = (str(Path(entry).absolute()) for entry in entries.split(os.pathsep))
    return {_MODULE_PATH: os.pathsep.join(absolute)}


def resolve_command(command: Sequence[str], *, config: Path, base_dir: Path) -> list[str]:
    """Return the command with its config, interpreter and files filled in.

    `{config}` becomes the path of the config, a first word `python` the running interpreter, and
    every argument that names a file in `base_dir` the absolute path of that file, since a trial
    runs in a folder of its own.

    Args:
        command: program and arguments as the user wrote them.
        config: config file of the trial.
        base_dir: folder of the file that holds the command.

    Raises:
        ConfigError: the program, or a Python script that the command names, does not exist.
    """
    here = str(config.resolve())
    resolved = [
        word.replace(CONFIG_PLACEHOLDER, here) if CONFIG_PLACEHOLDER in word else found
        for word, found in zip(command, with_files(command, base_dir), strict=True)
    ]
    if command[0] == _INTERPRETER:
        resolved[0] = sys.executable
        script = resolved[1] if len(resolved) > 1 else ""
        if script.endswith(".py") and not Path(script).is_file():
            raise ConfigError(
                f"the script in the command must exist, but got {command[1]!r} and there is no "
                f"{base_dir / command[1]}; give it relative to the file that names it."
            )
    elif shutil.which(resolved[0]) is None:
        raise ConfigError(
            f"the program in the command must exist, but got {command[0]!r}, which is neither a "
            f"file in {base_dir} nor on the PATH."
        )
    return resolved


def trial_environment(
    extra: Mapping[str, str],
    *,
    trial_dir: Path | None,
    mark: str,
    hidden: Collection[str] = (),
    base: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the whole environment of a trial.

    Args:
        extra: variables of the config (knobs `env.NAME`); they win.
        trial_dir: the trial's folder; None: this is no trial but a production run.
        mark: entry ("NAME=value") that all processes of the trial carry.
        hidden: variables that are no concern of a trial's, such as one with a password.
        base: what to start from; None: the environment of this process.
    """
    environment = dict(os.environ if base is None else base)
    # A search may be started from inside a run: what its callback was told is not for a trial.
    for name in (*_TOLD, *hidden):
        environment.pop(name, None)
    # A log that is still in a buffer when a process is killed is lost.
    environment.setdefault("PYTHONUNBUFFERED", "1")
    # msrun starts whatever is called `python` on the path: it must be this interpreter.
    interpreter_dir = str(Path(sys.executable).parent)
    environment["PATH"] = os.pathsep.join(
        [interpreter_dir, *filter(None, [environment.get("PATH")])]
    )
    environment.update(module_path(environment))
    environment.update(extra)
    environment.update(log_environment(environment))
    if trial_dir is not None:
        environment[ENV_TRIAL_DIR] = str(trial_dir)
    name, _, value = mark.partition("=")
    environment[name] = value
    return environment


def msrun_command(
    command: Sequence[str],
    *,
    num_ranks: int,
    rank_dir: Path,
    port: int,
    cluster_timeout_s: float,
    local_ranks: int | None = None,
    master: str = "127.0.0.1",
    node: int = 0,
) -> list[str]:
    """Return `command` under msrun.

    Every process is started through `rank_process`, which keeps its exit code in `rank_dir`.

    Args:
        command: program and arguments.
        num_ranks: ranks in all.
        rank_dir: for logs and exit codes.
        port: of the scheduler.
        cluster_timeout_s: longest time for the ranks to find together.
        local_ranks: ranks of this machine; None: all.
        master: address of the machine whose msrun runs the scheduler: that of node 0.
        node: number of this machine.
    """
    # msrun takes only these names for an interpreter and looks them up on the path.
    has_python = (Path(sys.executable).parent / _INTERPRETER).exists()
    return [
        sys.executable, "-m", "mindspore.parallel.cluster.run",
        f"--worker_num={num_ranks}",
        f"--local_worker_num={num_ranks if local_ranks is None else local_ranks}",
        f"--master_addr={master}",
        f"--master_port={port}",
        *([] if local_ranks in (None, num_ranks) else [f"--node_rank={node}"]),
        f"--log_dir={rank_dir}",
        "--join=True",
        # The number of a rank that does not exist: copies of the logs are of no use, and the
        # `tail` processes that make them outlive msrun.
        f"--tail_worker_log={num_ranks}",
        f"--cluster_time_out={max(1, round(cluster_timeout_s))}",
        _INTERPRETER if has_python else "python3",
        "-m", "mindtune.controller.trials.rank_process", str(rank_dir), *command,
    ]  # fmt: skip


def free_port() -> int:
    """Return a TCP port that nobody listens on now; launches at the same time get others."""
    for port in random.SystemRandom().sample(_PORTS, 64):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise ConfigError(
        f"msrun needs a free TCP port between {_PORTS[0]} and {_PORTS[-1]}, but 64 tries found "
        "none; end the programs that hold them."
    )

"""Stand between msrun and one of its processes to keep what msrun loses.

Started as `python -m mindtune.controller.trials.rank_process DIR COMMAND...`: by msrun once per
rank and once for the scheduler, by srun for a rank that is alone. It runs the command and leaves
`DIR/exit.NAME.json` with the exit code, the peak memory and what the kernel of this machine killed
for want of memory meanwhile; msrun itself always exits with 1. It
also lets msrun, which only knows how to start `python SCRIPT`, start any program.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

from mindtune.controller.trials.memory_limit import kernel_oom_kills
from mindtune.controller.trials.process_tree import die_with_parent

__all__ = ["main"]

_POLL_S = 1.0
_ALONE_LIMIT_S = 20.0
"""Longer than the grace of an ordinary stop, in which msrun goes first."""


def _name() -> str:
    if os.environ.get("MS_ROLE") == "MS_SCHED":
        return "scheduler"
    return f"rank{os.environ.get('RANK_ID', '0')}"


def _run(command: list[str]) -> int:
    """Run the command; kill it when msrun has gone for long, since then nobody else may."""
    parent, alone_s = os.getppid(), 0.0
    process = subprocess.Popen(
        command,
        preexec_fn=die_with_parent,  # noqa: PLW1509 - this process has one thread
    )
    while alone_s < _ALONE_LIMIT_S:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=_POLL_S)
        alone_s += _POLL_S if os.getppid() != parent else 0.0
    process.kill()
    return process.wait()


def main() -> None:
    """Run the command given on the command line and record how it ended."""
    rank_dir, command = Path(sys.argv[1]), sys.argv[2:]
    name = _name()
    (rank_dir / f"begun.{name}").touch()
    oom_kills = kernel_oom_kills()
    # The command gets the signal itself (the whole tree is signalled): this process only has to
    # stay until the code is known. A handler, unlike SIG_IGN, is not passed on to the command.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    try:
        code = _run(command)
    except OSError as error:
        sys.stderr.write(f"cannot start {command[0]}: {error}\n")
        code = 127
    record = {
        "exit_code": code,
        "kernel_oom_kills": kernel_oom_kills() - oom_kills,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        "ended_at": time.time(),  # of all nodes: monotonic clocks begin with their machine
    }
    partial = rank_dir / f".{name}.{os.getpid()}"
    partial.write_text(json.dumps(record))
    partial.replace(rank_dir / f"exit.{name}.json")
    # A negative code is a signal; the shell's spelling of it is what an exit status can carry.
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()

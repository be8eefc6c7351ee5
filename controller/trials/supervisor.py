"""Run one command as a process tree that can neither outlive its parent nor its deadlines.

Started as `python -m mindtune.controller.trials.supervisor`. Theory of operation:

- The launcher sends a `SupervisorSpec` as the first line on standard input and keeps the pipe
  open. The line "stop" asks for a normal stop; an empty line is a sign of life. End of file means
  that the launcher is gone, even by SIGKILL: then the whole tree ends within 5 s and the trial is
  recorded as interrupted.
- The command runs in a session of its own. Orphans are adopted (PR_SET_CHILD_SUBREAPER), so
  every process stays a descendant; the mark in the environment is the second net.
- Ten times a second `verdict` looks at exits, failures, deadlines and orders, in this order; the
  first verdict ends the tree, and a `SupervisorReport` goes to standard output.
- A failed rank is known by its exit file or by its result file, never by msrun, which comes back
  half a minute later with code 1 whatever happened.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from mindtune.controller.trials.memory_limit import kernel_oom_kills, memory_limit_bytes
from mindtune.controller.trials.process_tree import (
    adopt_orphans,
    descendants,
    die_with_parent,
    end_processes,
    marked,
    peak_rss_bytes,
    rss_bytes,
)
from mindtune.controller.trials.protocol import EndedBy, SupervisorReport, SupervisorSpec
from mindtune.controller.trials.slurm import cancel_job, cancellation

__all__ = ["main", "supervise"]

_TICK_S = 0.1
_SAMPLE_S = 0.5
"""Between two looks at the memory; the kernel's own high-water marks bridge the gaps."""

_GOOD_ENDS = ("ok", "stopped")
"""Outcomes after which a program ends by itself, be it by a save that takes long: `stopped` is
what a run records that a policy has ended in good order."""
_ERRORS_READ = 1 << 16
"""Bytes of the end of a log, where Slurm says why a job is over."""


class _Supervision:
    """The state of one launch."""

    def __init__(self, spec: SupervisorSpec) -> None:
        self.spec = spec
        self.trial_dir = Path(spec.trial_dir)
        self.started = time.monotonic()
        self.main: subprocess.Popen[bytes] | None = None
        self.exits: dict[str, int] = {}
        self.progress_at: float | None = None
        self.failed_at: float | None = None
        self.peak = 0
        self.oom_kills = 0
        self.tree_peak = 0
        self.sampled_at = 0.0
        self.ordered: EndedBy | None = None
        self.orphaned = False
        self.is_queued = spec.job_name is not None
        self.heard_at = self.started
        errors = self.trial_dir / spec.errors
        # Of an earlier attempt, or segment of a run, which this launch goes on with.
        self.old_errors = errors.stat().st_size if errors.is_file() else 0

    def start(self) -> None:
        """Start the command.

        Raises:
            OSError: it cannot be started.
        """
        with (
            (self.trial_dir / self.spec.output).open("ab") as out,
            (self.trial_dir / self.spec.errors).open("ab") as err,
        ):
            self.main = subprocess.Popen(
                self.spec.command,
                cwd=self.spec.trial_dir,
                env=self.spec.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                # Should this process be killed, nobody else may be left to end the command.
                preexec_fn=die_with_parent,  # noqa: PLW1509 - this process has one thread
            )

    def reap(self) -> None:
        """Collect every ended child, adopted ones too."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.peak = max(self.peak, usage.ru_maxrss * 1024)
            if self.main is not None and pid == self.main.pid:
                self.main.returncode = os.waitstatus_to_exitcode(status)
                self.exits["command"] = self.main.returncode

    def read_exit_files(self) -> None:
        """Take over the exits that the ranks' wrappers recorded, oldest first."""
        if self.spec.rank_dir is None:
            return
        found = []
        for path in Path(self.spec.rank_dir).glob("exit.*.json"):
            name = path.name.split(".")[1]
            if name not in self.exits:
                record = json.loads(path.read_text())
                self.peak = max(self.peak, record["peak_rss_bytes"])
                self.oom_kills = max(self.oom_kills, record["kernel_oom_kills"])
                found.append((record["ended_at"], name, record["exit_code"]))
        self.exits.update({name: code for _, name, code in sorted(found)})

    def sample_memory(self) -> None:
        """Update the memory peaks of the tree."""
        now = time.monotonic()
        if now - self.sampled_at < _SAMPLE_S:
            return
        self.sampled_at = now
        pids = [process.pid for process in descendants(os.getpid())]
        self.tree_peak = max(self.tree_peak, sum(rss_bytes(pid) for pid in pids))
        self.peak = max([self.peak, *(peak_rss_bytes(pid) for pid in pids)])

    def made_progress(self) -> bool:
        """Tell whether a step was recorded (a line below the header) or a result left."""
        if (self.trial_dir / "result.json").exists():
            return True
        path = self.trial_dir / "signals.csv"
        if not path.is_file():
            return False
        try:
            with path.open("rb") as table:
                return table.read(1 << 16).count(b"\n") > 1
        except OSError:
            return False

    def has_failure(self) -> bool:
        """Tell whether a rank has failed, by its exit code or by its own result."""
        if any(code != 0 for name, code in self.exits.items() if name != "command"):
            return True
        # Not result*.json: a run that goes on keeps the failed results of its earlier segments.
        results = [self.trial_dir / "result.json", *self.trial_dir.glob("result.rank*.json")]
        for path in results:
            # A half-written file is judged when the process has ended.
            with contextlib.suppress(OSError, ValueError, RecursionError):
                # A pipe of that name would be waited for without end.
                result = json.loads(path.read_bytes()) if path.is_file() else None
                if isinstance(result, dict) and result.get("outcome", "ok") not in _GOOD_ENDS:
                    return True
        return False

    def is_over(self) -> bool:
        """Tell whether the command, or every rank that it was to start, has ended."""
        return self._all_ranks_ended() or "command" in self.exits

    def _all_ranks_ended(self) -> bool:
        ranks = [f"rank{number}" for number in range(self.spec.num_ranks)]
        return self.spec.rank_dir is not None and all(rank in self.exits for rank in ranks)

    def verdict(self) -> EndedBy | None:
        """Return why the launch is over, or None while it goes on."""
        self.reap()
        self.read_exit_files()
        self._leave_queue()
        if self.is_over():
            return "exit"
        now = time.monotonic()
        if self.failed_at is None and self.has_failure():
            self.failed_at = now
        if self.failed_at is not None and now - self.failed_at >= self.spec.failure_grace_s:
            return "rank_failed"
        if self.progress_at is None and self.made_progress():
            self.progress_at = now
        if self.progress_at is None:
            late = now - self.started >= self.spec.startup_deadline_s
            if late and not self.is_queued:
                return "startup_deadline"
        elif now - self.progress_at >= self.spec.deadline_s:
            return "deadline"
        if self.parent_is_gone():
            return "parent_died"
        return self.ordered

    def _leave_queue(self) -> None:
        """Let the trial's time begin with its first node."""
        if not self.is_queued:
            return
        begun = [file.stat().st_mtime for file in Path(self.spec.rank_dir or ".").glob("begun.*")]
        if begun:
            now = time.monotonic()
            # A program may be over when this is looked at; the clock of the node may be another.
            since = now - max(0.0, time.time() - min(begun))
            self.is_queued, self.started = False, max(self.started, since)

    def parent_is_gone(self) -> bool:
        """Read what the launcher sent; tell whether there is no launcher any more."""
        while not self.orphaned and select.select([0], [], [], 0)[0]:
            received = os.read(0, 4096)
            self.heard_at = time.monotonic()
            if not received:
                self.orphaned = True
            elif received.strip():  # the only order is "stop", so any text is that order
                self.ordered = self.ordered or "stop"
        limit = self.spec.silence_limit_s
        if limit is not None and time.monotonic() - self.heard_at >= limit:
            self.orphaned = True
        return self.orphaned or _has_other_parent(self.spec)

    def wait(self, wake: int) -> None:
        """Sleep for a tick, or until an order or a signal comes."""
        ready, _, _ = select.select([0, wake], [], [], _TICK_S)
        if wake in ready:
            os.read(wake, 4096)

    def end(self, ended_by: EndedBy) -> SupervisorReport:
        """End whatever is left of the tree and report."""
        own_exits = tuple(self.exits)
        # Read before this process cancels the job itself, of which Slurm says the same.
        slurm_said = self._cancellation()
        must_cancel = self.spec.job_name is not None and not self._job_is_over()
        if must_cancel:
            cancel_job(str(self.spec.job_name))
        hurried_at: float | None = None

        def between() -> bool:
            nonlocal hurried_at
            self.reap()
            if hurried_at is None and self.parent_is_gone():
                hurried_at = time.monotonic()
            return (
                hurried_at is not None
                and time.monotonic() - hurried_at >= self.spec.orphan_grace_s
            )

        grace = {
            "startup_deadline": self.spec.stop_grace_s,
            "deadline": self.spec.stop_grace_s,
            "stop": self.spec.stop_grace_s,
        }.get(ended_by, self.spec.orphan_grace_s)
        left = end_processes(
            lambda: descendants(os.getpid()) | marked(self.spec.mark),
            grace_s=grace,
            between=between,
        )
        self.reap()
        self.read_exit_files()
        ranks = [f"rank{n}" for n in range(self.spec.num_ranks)] if self.spec.rank_dir else []
        if not must_cancel:
            slurm_said = self._cancellation()  # it may come after the ranks' exit codes
        known = own_exits if ended_by in ("exit", "rank_failed") else tuple(self.exits)
        return SupervisorReport(
            ended_by=ended_by,
            exit_codes={
                name: self.exits[name] if name in known else None
                for name in dict.fromkeys(["command", *ranks, *self.exits])
            },
            own_exits=own_exits,
            wall_s=time.monotonic() - self.started,
            made_progress=self.progress_at is not None or self.made_progress(),
            peak_rss_bytes=self.peak,
            peak_tree_rss_bytes=self.tree_peak,
            memory_limit_bytes=self._memory_limit(),
            processes_left=left,
            slurm_said=slurm_said,
        )

    def _memory_limit(self) -> int | None:
        """Return the memory of the machine that ran the ranks: of the smallest node of a job."""
        if self.spec.job_name is None:
            return memory_limit_bytes()
        nodes = Path(self.spec.rank_dir or ".").glob("node*.json")
        limits = [json.loads(path.read_text())["memory_limit_bytes"] for path in nodes]
        return min((limit for limit in limits if limit is not None), default=None)

    def _job_is_over(self) -> bool:
        """Tell whether nothing of the Slurm job is left: srun may die and leave it running."""
        return self._all_ranks_ended() or self.exits.get("command") == 0

    def _cancellation(self) -> str:
        """Return what Slurm has said about a job that it ended; empty: nothing."""
        if self.spec.job_name is None:
            return ""
        said = b""
        # Of a rank that is alone, srun sends the errors of its node to the log of the rank.
        for name, begin in ((self.spec.errors, self.old_errors), ("ranks/worker_0.log", 0)):
            with contextlib.suppress(OSError), (self.trial_dir / name).open("rb") as log:
                log.seek(max(begin, log.seek(0, os.SEEK_END) - _ERRORS_READ))
                said += log.read() + b"\n"
        return cancellation(said.decode(errors="replace"))


def _has_other_parent(spec: SupervisorSpec) -> bool:
    """Tell whether this process has another parent by now than the one that started it.

    A forked copy of the launcher may hold the pipe open; the parent's id still changes.
    """
    return spec.parent_pid is not None and os.getppid() != spec.parent_pid


def supervise(spec: SupervisorSpec) -> SupervisorReport:
    """Run the command of `spec` to its end; see the head of this module.

    Orders are read from file descriptor 0. Nothing of the tree is left when this returns or
    raises.
    """
    adopt_orphans()
    oom_kills = kernel_oom_kills()
    supervision = _Supervision(spec)
    wake, wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)

    def order_end(_number: int, _frame: object) -> None:
        supervision.ordered = supervision.ordered or "terminated"

    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, order_end)
    try:
        supervision.start()
    except OSError as error:
        return SupervisorReport(ended_by="not_started", error=str(error))
    ended_by: EndedBy | None = None
    try:
        while (ended_by := supervision.verdict()) is None:
            supervision.sample_memory()
            supervision.wait(wake)
    finally:
        report = supervision.end(ended_by or "terminated")
    # The nodes of a job are other machines.
    here = kernel_oom_kills() - oom_kills if spec.job_name is None else 0
    counted = {"kernel_oom_kills": max(here, supervision.oom_kills)}
    return SupervisorReport(**{**report.__dict__, **counted})


def _record_interruption(spec: SupervisorSpec, report: SupervisorReport) -> None:
    """Write trial.json in place of the launcher, which is gone."""
    record = {
        "schema": 1,
        "outcome": "interrupted",
        "exit_codes": report.exit_codes,
        "wall_s": report.wall_s,
        "message": "the process that had started this trial went away",
    }
    path = Path(spec.trial_dir) / "trial.json"
    partial = path.with_name(f".trial.json.{os.getpid()}")
    partial.write_text(json.dumps(record, indent=2) + "\n")
    partial.replace(path)


def main() -> None:
    """Read a spec from standard input, run it, print the report as one line."""
    line = bytearray()
    # Read byte by byte: what follows the spec belongs to `select` on the descriptor.
    while not line.endswith(b"\n"):
        received = os.read(0, 1)
        if not received:
            sys.exit("the supervisor is started by mindtune's launcher, not by hand")
        line += received
    spec = SupervisorSpec.from_line(line.decode())
    report = supervise(spec)
    orphaned = _has_other_parent(spec) or report.ended_by == "parent_died"
    if orphaned and spec.is_trial:
        _record_interruption(spec, report)
    with contextlib.suppress(BrokenPipeError):
        os.write(1, report.to_line().encode() + b"\n")


if __name__ == "__main__":
    main()

"""Run a launch through its supervisors, one per host, and tell how it ended as a whole.

Theory of operation. The supervisor of this machine is a child; that of another host is started
through a remote shell and speaks the same protocol (protocol.py) over the shell's standard input
and output. So each of them ends its own tree when this process goes, whatever kills it: the pipe
ends, or the network's silence outlasts the limit. All see the ranks' exit files in the shared
folder and come to the same verdict; once one of them has ended for another reason than that all is
done, the others are told to end. A host whose shell ends without a report was lost: that is no
fault of what was measured.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mindtune.controller.trials.commands import module_path
from mindtune.controller.trials.failure_text import read_tail, shorten
from mindtune.controller.trials.process_tree import end_processes, marked
from mindtune.controller.trials.protocol import SupervisorReport, SupervisorSpec
from mindtune.controller.trials.slurm import cancel_job

__all__ = ["Supervised", "merged", "run_supervisors"]

_POLL_S = 0.25
_SUPERVISOR_GRACE_S = 2.0
_LINK_GRACE_S = 15.0
"""For another host's supervisor to end and report: its tree is over within 5 s."""
_ORDERLY = ("stop", "startup_deadline", "deadline")
"""Ends that give the ranks time to clean up."""
_SIGN_EVERY_S = 10.0
"""Between two signs of life to another host."""


@dataclass(frozen=True, kw_only=True)
class Supervised:
    """A command under a supervisor of its own."""

    spec: SupervisorSpec
    host: str | None = None
    """Another host, by the name that its shell is asked for; None: this machine."""
    link: tuple[str, ...] = ()
    """What starts the supervisor there."""
    log: Path | None = None
    """What the remote shell says."""


class _Supervisor:
    """A supervisor that runs, and what it has answered."""

    def __init__(self, supervised: Supervised) -> None:
        self.supervised = supervised
        self.report: SupervisorReport | None = None
        self.answer = b""
        self.is_open = True
        self.end_by = float("inf")
        """When a silent link is cut, by the monotonic clock."""
        self.is_cut = False
        self._told_at = time.monotonic()
        here = [sys.executable, "-m", "mindtune.controller.trials.supervisor"]
        with contextlib.ExitStack() as stack:
            log = None
            if supervised.log is not None:
                log = stack.enter_context(supervised.log.open("ab"))
            self.process = subprocess.Popen(
                supervised.link or here,
                # `-m` puts the working directory in front of the path: not the user's, whose
                # files may be called like modules of Python.
                cwd=supervised.spec.trial_dir,
                env={**os.environ, **module_path(os.environ)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                # Ctrl-C in a terminal reaches this process, which then tells the supervisor.
                start_new_session=True,
            )
        self._tell(supervised.spec.to_line().encode() + b"\n")

    @property
    def fd(self) -> int:
        """Where its answer is read from."""
        assert self.process.stdout is not None  # noqa: S101 - opened by PIPE above
        return self.process.stdout.fileno()

    def read(self) -> None:
        """Read what there is; at the end of it the supervisor is over."""
        received = os.read(self.fd, 1 << 16)
        self.answer += received
        if not received:
            self.finish()

    def stop(self) -> None:
        """Ask for a normal stop."""
        self._tell(b"stop\n")

    def give_sign(self) -> None:
        """Tell another host now and then that this process is there."""
        now = time.monotonic()
        if self.supervised.host is not None and now - self._told_at >= _SIGN_EVERY_S:
            self._told_at = now
            self._tell(b"\n")

    def close(self) -> None:
        """Have the tree ended: the supervisor, if it is still there, does so within 5 s."""
        assert self.process.stdin is not None  # noqa: S101 - opened by PIPE above
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        if self.supervised.host is not None:
            self.end_by = min(self.end_by, time.monotonic() + _LINK_GRACE_S)

    def is_late(self) -> bool:
        """Tell whether another host's supervisor has had its time to end."""
        return self.supervised.host is not None and time.monotonic() >= self.end_by

    def finish(self) -> None:
        """Wait for the process, and make a report of how it ended; harmless when called twice."""
        if not self.is_open:
            return
        self.close()
        if self.supervised.host is not None:
            try:
                self.process.wait(max(0.0, self.end_by - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.is_cut = True
                self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.is_open = False
        # A login script of the other host may have printed something first.
        line = self.answer.rpartition(b"\n")[0].rpartition(b"\n")[2]
        if line.startswith(b"{"):
            self.report = SupervisorReport.from_line(line.decode())
        elif self.supervised.host is None:
            self.report = self._killed()
        else:
            self.report = SupervisorReport(ended_by="host_lost", error=self._lost())

    def _tell(self, text: bytes) -> None:
        assert self.process.stdin is not None  # noqa: S101 - opened by PIPE above
        with contextlib.suppress(BrokenPipeError, ValueError):  # it is closed, on either side
            self.process.stdin.write(text)
            self.process.stdin.flush()

    def _killed(self) -> SupervisorReport:
        """End the tree of a supervisor that was itself killed: nobody else does."""
        spec = self.supervised.spec
        if spec.job_name is not None:
            cancel_job(spec.job_name)
        left = end_processes(lambda: marked(spec.mark), grace_s=_SUPERVISOR_GRACE_S)
        return SupervisorReport(
            ended_by="terminated",
            processes_left=left,
            error=f"the trial's supervisor was ended with code {self.process.returncode}",
        )

    def _lost(self) -> str:
        log = self.supervised.log
        said = "" if log is None else shorten(" ".join(read_tail(log).split()))
        how = f"the remote shell ended with code {self.process.returncode}"
        if self.is_cut:
            how = "it gave no answer when it was told to end"
        return f"host {self.supervised.host} was lost: {f'{said} ({how})' if said else how}"


def run_supervisors(
    launches: Sequence[Supervised],
    should_stop: Callable[[], str | None] | None,
    interrupt: threading.Event | None,
) -> tuple[SupervisorReport, str | None]:
    """Run supervisors to their end.

    Args:
        launches: that of this machine first.
        should_stop: asked four times a second; a text stops the launch for that reason.
        interrupt: ends the launch within 5 s once it is set.

    Returns:
        One report of all, and the reason of a stop.
    """
    running: list[_Supervisor] = []
    ended: list[SupervisorReport] = []
    reason: str | None = None
    try:
        for launch in launches:
            # One by one: those that run are ended if the next cannot be started.
            running.append(_Supervisor(launch))  # noqa: PERF401
        while open_now := [supervisor for supervisor in running if supervisor.is_open]:
            ready, _, _ = select.select([s.fd for s in open_now], [], [], _POLL_S)
            for supervisor in open_now:
                if supervisor.fd in ready:
                    supervisor.read()
                elif supervisor.is_late():
                    supervisor.finish()
                if supervisor.report is not None:
                    ended.append(supervisor.report)
                    _end_others(running, supervisor)
                else:
                    supervisor.give_sign()
            if ready:
                continue
            if interrupt is not None and interrupt.is_set():
                for supervisor in open_now:
                    supervisor.close()
            elif reason is None and should_stop is not None:
                reason = should_stop()
                if reason is not None:
                    for supervisor in open_now:
                        supervisor.stop()
    finally:
        for supervisor in running:
            if supervisor.is_open:
                supervisor.close()
        for supervisor in running:
            supervisor.finish()
    report = merged(ended, num_ranks=launches[0].spec.num_ranks)
    return report, reason if report.ended_by == "stop" else None


def _end_others(running: Sequence[_Supervisor], ended: _Supervisor) -> None:
    """Let the other supervisors end with one that has; those of a launch that is done will."""
    report = ended.report
    for other in running:
        if report is None or not other.is_open:
            continue
        spec, now = other.supervised.spec, time.monotonic()
        if report.ended_by in _ORDERLY:
            other.stop()  # with the same time to clean up
            other.end_by = min(other.end_by, now + spec.stop_grace_s + _LINK_GRACE_S)
        elif not _is_clean(report):
            other.close()
        elif ended is running[0]:
            other.end_by = min(other.end_by, now + spec.deadline_s)


def _is_clean(report: SupervisorReport) -> bool:
    return report.ended_by == "exit" and not any(report.exit_codes.values())


def merged(reports: Sequence[SupervisorReport], *, num_ranks: int) -> SupervisorReport:
    """Return one report of a launch on several hosts.

    Args:
        reports: of all supervisors, in the order in which they ended; that of this machine is one.
        num_ranks: ranks in all.
    """
    if len(reports) == 1:
        return reports[0]
    own = {name: r.exit_codes[name] for r in reversed(reports) for name in r.own_exits}
    is_done = all(own.get(f"rank{number}") == 0 for number in range(num_ranks))
    lost = [report for report in reports if report.ended_by == "host_lost"]
    heard = [report for report in reports if report.ended_by != "host_lost"]
    # A host that is lost once all is done has cost nothing; before, it is why others failed.
    order = [] if is_done else lost
    order += sorted(heard, key=_is_clean)
    telling = order[0]
    exits = {**heard[0].exit_codes, **telling.exit_codes}
    for name, code in own.items():
        if exits.get(name) is None:
            exits[name] = code
    return replace(
        telling,
        exit_codes=exits,
        own_exits=tuple(dict.fromkeys(name for r in reports for name in r.own_exits)),
        wall_s=max(report.wall_s for report in reports),
        made_progress=any(report.made_progress for report in reports),
        peak_rss_bytes=max(report.peak_rss_bytes for report in reports),
        peak_tree_rss_bytes=max(report.peak_tree_rss_bytes for report in reports),
        kernel_oom_kills=max(report.kernel_oom_kills for report in reports),
        processes_left=sum(report.processes_left for report in reports),
    )

"""What the launcher and its supervisor tell each other: one JSON line each way.

Standard library only: a supervisor has to start fast and to stay small next to a training.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

__all__ = ["EndedBy", "SupervisorReport", "SupervisorSpec"]

EndedBy = Literal[
    "exit",
    "startup_deadline",
    "deadline",
    "stop",
    "rank_failed",
    "host_lost",
    "parent_died",
    "terminated",
    "not_started",
]
"""Why a launch is over: by itself, or what made the supervisor end it. Of `host_lost` the launcher
knows: the supervisor of another host cannot be started, or is heard of no more."""


@dataclass(frozen=True, kw_only=True)
class SupervisorSpec:
    """One launch, as the launcher asks for it."""

    command: list[str]
    trial_dir: str
    """Working directory of the command, where it leaves its results."""
    environment: dict[str, str]
    """Whole environment of the command, the mark included."""
    mark: str
    """The environment entry ("NAME=value") that all its processes carry."""
    parent_pid: int | None
    """Process that started the supervisor; None: one on another host, known by its pipe alone."""
    startup_deadline_s: float
    """From the start to the first progress; a Slurm job starts when its wait in the queue ends."""
    deadline_s: float
    """From the first progress to the end."""
    rank_dir: str | None = None
    """Where the ranks' exit files appear; None: the command is the only rank known."""
    num_ranks: int = 1
    job_name: str | None = None
    """Name of the Slurm job that the command waits for and runs in; None: it runs here at once."""
    is_trial: bool = True
    """Whether an interruption is recorded in trial.json."""
    output: str = "stdout.log"
    """File in the trial's folder that standard output is added to; other hosts have their own."""
    errors: str = "stderr.log"
    silence_limit_s: float | None = None
    """Without a word from the launcher for so long, it is taken for gone: the network may have
    cut it off. None: it need not say anything."""
    stop_grace_s: float = 10.0
    """Between SIGTERM and SIGKILL."""
    orphan_grace_s: float = 2.0
    """The same when the parent died: all must be over within 5 s."""
    failure_grace_s: float = 5.0
    """Time for a failed rank to end by itself and for the others to leave their own outcome."""

    def to_line(self) -> str:
        """Return the spec as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> SupervisorSpec:
        """Read what `to_line` wrote."""
        return cls(**json.loads(line))


@dataclass(frozen=True, kw_only=True)
class SupervisorReport:
    """How a launch ended."""

    ended_by: EndedBy
    exit_codes: dict[str, int | None] = field(default_factory=dict)
    """"command", "rank0", "scheduler" ... -> exit code, negative: the signal; None: unknown.

    Also None, if the launch was over by itself or by a failure, for what was then ended: msrun
    and its scheduler are not waited for once all ranks have ended.
    """
    own_exits: tuple[str, ...] = ()
    """Names among `exit_codes` that ended before the supervisor sent any signal, oldest first."""
    wall_s: float = 0.0
    made_progress: bool = False
    peak_rss_bytes: int = 0
    """Largest high-water mark of a single process: the worst rank."""
    peak_tree_rss_bytes: int = 0
    """Largest sampled sum over all processes."""
    memory_limit_bytes: int | None = None
    """Memory of the machine that ran it or of the control group, whichever is less."""
    kernel_oom_kills: int = 0
    """Out-of-memory kills that the kernel counted meanwhile, on the whole machine of a rank."""
    processes_left: int = 0
    slurm_said: str = ""
    """Slurm's line on a job that it or a person has cancelled; empty: it was not, or by us."""
    error: str = ""
    """Why the command could not be started."""

    def to_line(self) -> str:
        """Return the report as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> SupervisorReport:
        """Read what `to_line` wrote."""
        values: dict[str, Any] = json.loads(line)
        values["own_exits"] = tuple(values["own_exits"])
        return cls(**values)

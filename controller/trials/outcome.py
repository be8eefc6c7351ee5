"""Give a finished launch its typed outcome.

Order of precedence: what the launcher did (deadline, stop, interruption), unless it ended a
program whose log holds all planned steps, then the outcome that a rank wrote itself, then exit
codes, then the exception in a log. A trial that wrote "ok" and then failed is a crash whose
measurements are kept.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mindtune.controller.contract import (
    KnobsFile,
    Outcome,
    TrialPlan,
    TrialRecord,
    TrialResult,
    read_document,
    write_json,
)
from mindtune.controller.errors import ConfigError
from mindtune.controller.trials.failure_text import is_out_of_memory, last_exception, read_tail
from mindtune.controller.trials.launcher import LaunchReport
from mindtune.controller.trials.log_result import (
    LARGEST_LOG,
    complete_result,
    result_from_logs,
    telling_logs,
)
from mindtune.controller.trials.memory_log import worst_pool_peak
from mindtune.controller.trials.node_facts import read_facts
from mindtune.controller.units import format_size
from mindtune.search.errors import SearchError
from mindtune.search.knobs import KnobValue, canonical_or_derived

__all__ = ["TrialOutcome", "differing_knobs", "judge", "record_outcome"]

_RSS = "rss"
_SLURM_OOM = re.compile(r"slurmstepd(?:-\S+)?: error: Detected \d+ oom[_-]kill event")
_SLURM_ERROR = re.compile(r"^srun: error: .*", re.MULTILINE)
_SLURM_LIMIT = "DUE TO TIME LIMIT"
_OUR_ENDS: Mapping[str, str] = {
    "stop": "ended",
    "deadline": "ended at its deadline",
    "startup_deadline": "ended at its deadline",
}
"""How we end a program that may have logged enough -> in words."""
_NEAR_LIMIT = 0.8
"""Share of the machine's memory from which on an unexplained SIGKILL is taken for the kernel's."""


@dataclass(frozen=True, kw_only=True)
class TrialOutcome:
    """The outcome of a trial with what it measured."""

    record: TrialRecord
    result: TrialResult | None
    """What rank 0 left; None: nothing readable. A failed trial's measurements may be partial."""
    attempts: int = 1


@dataclass(frozen=True, kw_only=True)
class _Finding:
    outcome: Outcome
    message: str = ""


def judge(report: LaunchReport, *, knobs: Mapping[str, KnobValue]) -> TrialOutcome:
    """Return the typed outcome of a launch.

    Args:
        report: how the launch ended.
        knobs: the config that was asked for, compared with `effective` of the result.
    """
    result, unreadable = _read_result(report.trial_dir / "result.json")
    finding = None
    if result is None and not unreadable:
        result, finding = _ended_with_enough(report, knobs)
    if finding is None:
        finding = _launcher_finding(report)
    if finding is None:
        finding = _worker_finding(report, result)
    if finding is None and unreadable:
        finding = _Finding(outcome="crash", message=unreadable)
    if finding is None and result is None and not _failed_exits(report):
        result = _logged_result(report, knobs)
    if finding is None:
        finding = _exit_finding(report, result)
    if finding is None and result is not None:
        finding = _settings_finding(result, knobs)
    if finding is None:
        finding = _Finding(outcome="ok", message=result.message if result is not None else "")
    memory, source = _memory(report, result)
    record = TrialRecord(
        outcome=finding.outcome,
        exit_codes=report.supervised.exit_codes,
        wall_s=report.supervised.wall_s,
        message=_with_left(finding.message, report.supervised.processes_left),
        peak_memory_bytes=memory,
        memory_source=source,
    )
    return TrialOutcome(record=record, result=result, attempts=report.attempts)


def _with_left(message: str, processes: int) -> str:
    """Say of processes that no signal has ended: what is measured next shares the devices."""
    if not processes:
        return message
    left = f"{processes} of its processes could not be ended, and may disturb what follows"
    return f"{message}; {left}" if message else left


def record_outcome(
    report: LaunchReport, *, knobs: Mapping[str, KnobValue], config_hash: str | None = None
) -> TrialOutcome:
    """Judge a launch and write its trial.json, and a result.json of what only a log told."""
    outcome = judge(report, knobs=knobs)
    path = report.trial_dir / TrialResult.FILE
    if outcome.result is not None and not path.exists():
        # The log may be gone when the study is resumed, confirmed or reported on.
        write_json(path, outcome.result)
    hardware = sorted({node.hardware for node in read_facts(report.trial_dir / "ranks")})
    told = {"config_hash": config_hash, "hardware": "; ".join(hardware) or None}
    record = outcome.record.model_copy(update=told)
    write_json(report.trial_dir / TrialRecord.FILE, record)
    return replace(outcome, record=record)


def differing_knobs(
    effective: Mapping[str, Any], knobs: Mapping[str, KnobValue]
) -> dict[str, tuple[KnobValue, Any]]:
    """Return knob -> (asked for, read back) for every knob that was read back differently.

    Values are compared in canonical spelling. A knob that was not read back is not judged.
    """
    return {
        name: (asked, effective[name])
        for name, asked in knobs.items()
        if name in effective and _spelled(name, effective[name]) != _spelled(name, asked)
    }


def _spelled(name: str, value: Any) -> object:
    try:
        return canonical_or_derived(name, value)
    except SearchError:
        return value


def _read_result(path: Path) -> tuple[TrialResult | None, str]:
    """Return the result and "", or None and why it cannot be read ("" when there is none)."""
    if not path.exists():
        return None, ""
    if not path.is_file():
        return None, f"{path.name} must be a file, but it is something else"
    try:
        return read_document(TrialResult, path), ""
    except ConfigError as error:
        return None, f"{path.name} is not readable: {error}"


def _logged_result(report: LaunchReport, knobs: Mapping[str, KnobValue]) -> TrialResult | None:
    """Return what the logs of a program without our callback tell."""
    try:
        plan = _plan(report)
    except ConfigError:
        # Spoilt by the program: nobody knows which steps are warm-up.
        return None
    logs = telling_logs(report.logs, knobs)
    return result_from_logs(logs, warmup_steps=0 if plan is None else plan.warmup_steps)


def _plan(report: LaunchReport) -> TrialPlan | None:
    path = report.trial_dir / KnobsFile.FILE
    return read_document(KnobsFile, path).trial if path.is_file() else None


def _ended_with_enough(
    report: LaunchReport, knobs: Mapping[str, KnobValue]
) -> tuple[TrialResult | None, _Finding | None]:
    """Return what a program without our callback had logged when it was ended, if it was enough.

    It does not know when its steps are done, so that a stop or a deadline is its ordinary end. A
    rank that failed while the others waited is none.
    """
    how = _OUR_ENDS.get(report.supervised.ended_by)
    if how is None or (report.trial_dir / "signals.csv").exists():
        return None, None
    try:
        plan = _plan(report)
    except ConfigError:
        plan = None
    if plan is None:
        return None, None
    result = complete_result(telling_logs(report.logs, knobs), plan)
    if result is None or list(report.trial_dir.glob("result.rank*.json")):
        return None, None
    if report.supervised.ended_by != "stop" and _logged_exception(report, list(report.logs)):
        return None, None
    message = f"{result.message}; {how} with its planned steps done"
    return result.model_copy(update={"message": message}), _Finding(outcome="ok", message=message)


def _launcher_finding(report: LaunchReport) -> _Finding | None:
    supervised = report.supervised
    match supervised.ended_by:
        case "not_started":
            message = f"the command could not be started: {supervised.error}"
            return _Finding(outcome="crash", message=message)
        case "startup_deadline" | "deadline":
            message = (
                "no step was recorded within the startup deadline"
                if supervised.ended_by == "startup_deadline"
                else "the trial had not ended at its deadline"
            )
            # A rank that failed while the others wait is the usual cause of a hang.
            cause = _logged_exception(report, list(report.logs))
            message += f" ({supervised.wall_s:.0f} s)" + (
                f"; last exception: {cause}" if cause else ""
            )
            return _Finding(outcome="timeout", message=message)
        case "stop":
            return _Finding(outcome="pruned", message=report.stop_reason or "")
        case "parent_died" | "terminated":
            message = supervised.error or "the trial was ended from outside"
            return _Finding(outcome="interrupted", message=message)
        case "host_lost":
            return _Finding(outcome="interrupted", message=supervised.error)
        case "exit" | "rank_failed":
            # How its ranks then failed, if they left a word at all, is no fault of the config.
            said = supervised.slurm_said
            if not said or not _failed_exits(report):
                return None
            outcome: Outcome = "timeout" if _SLURM_LIMIT in said else "interrupted"
            return _Finding(outcome=outcome, message=said)


def _worker_finding(report: LaunchReport, result: TrialResult | None) -> _Finding | None:
    """Return the failure that a rank wrote itself; the root cause when there are several."""
    failures = []
    if result is not None and result.outcome != "ok":
        failures.append(((report.trial_dir / "result.json").stat().st_mtime, 0, result))
    for path in report.trial_dir.glob("result.rank*.json"):
        rank_result, unreadable = _read_result(path)
        if unreadable:
            return _Finding(outcome="crash", message=unreadable)
        number = path.name.split(".")[1].removeprefix("rank")
        if rank_result is not None and rank_result.outcome != "ok" and number.isdecimal():
            failures.append((path.stat().st_mtime, int(number), rank_result))
    if not failures:
        return None
    # When one rank runs out of memory the others crash in their next collective: a cause that has
    # a type of its own comes before a crash, then the earlier before the later.
    failures.sort(key=lambda failure: (failure[2].outcome == "crash", failure[0]))
    _, rank, cause = failures[0]
    message = cause.message or _logged_exception(report, [f"rank{rank}"]) or ""
    outcome: Outcome = cause.outcome
    if outcome == "crash" and is_out_of_memory(message):
        outcome = "oom"
    return _Finding(outcome=outcome, message=_with_rank(report, rank, message))


def _with_rank(report: LaunchReport, rank: int, message: str) -> str:
    return f"rank {rank}: {message}" if report.num_ranks > 1 else message


def _exit_finding(report: LaunchReport, result: TrialResult | None) -> _Finding | None:
    """Return the failure that exit codes tell, of processes that ended by themselves."""
    failed = _failed_exits(report)
    if not failed:
        if result is not None:
            return None
        message = (
            "the program ended with exit code 0 but left no result.json, and no reader found "
            f"step times in its logs (none larger than {format_size(LARGEST_LOG)} is read)"
        )
        return _Finding(outcome="crash", message=message)
    name, code = next(iter(failed.items()))
    cause = _logged_exception(report, [name]) or ""
    after = " after an ok result" if result is not None and result.outcome == "ok" else ""
    how = _exit_text(code) + after
    message = f"{cause} ({how})" if cause else how
    if name.startswith("rank"):
        message = _with_rank(report, int(name.removeprefix("rank")), message)
    if is_out_of_memory(cause) or _killed_for_memory(report, code):
        return _Finding(outcome="oom", message=message)
    return _Finding(outcome="crash", message=message)


def _failed_exits(report: LaunchReport) -> dict[str, int]:
    """Return the non-zero exit codes of processes that ended by themselves."""
    supervised = report.supervised
    own = {name: supervised.exit_codes[name] for name in supervised.own_exits}
    ranks = {name: code for name, code in own.items() if name.startswith("rank")}
    # msrun's own code says nothing about the ranks once they have left theirs.
    return {name: code for name, code in (ranks or own).items() if code}


def _exit_text(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit code {code}"
    # Not every number of a real-time signal has a name.
    names = {number.value: number.name for number in signal.Signals}
    return f"killed by {names.get(-code, f'signal {-code}')}"


def _killed_for_memory(report: LaunchReport, code: int | None) -> bool:
    """Tell whether a SIGKILL that was not ours was the kernel's for lack of memory."""
    supervised = report.supervised
    if code != -signal.SIGKILL:
        return False
    # Of another machine, Slurm tells: "Detected 1 oom_kill event in StepId=...".
    for log in (report.trial_dir / "stderr.log", *report.logs.get("rank0", ())):
        if _SLURM_OOM.search(read_tail(log)):
            return True
    limit = supervised.memory_limit_bytes
    used = max(supervised.peak_rss_bytes, supervised.peak_tree_rss_bytes)
    return supervised.kernel_oom_kills > 0 or (limit is not None and used >= _NEAR_LIMIT * limit)


def _settings_finding(result: TrialResult, knobs: Mapping[str, KnobValue]) -> _Finding | None:
    different = differing_knobs(result.effective, knobs)
    if not different:
        return None
    listed = ", ".join(
        f"{name}: {asked!r}, but {got!r} acted" for name, (asked, got) in different.items()
    )
    return _Finding(outcome="bad_config", message=f"a knob did not take effect: {listed}")


def _logged_exception(report: LaunchReport, processes: Iterable[str]) -> str | None:
    """Return the last exception in the logs of the first process that has one."""
    for name in [*processes, "command"]:
        for path in report.logs.get(name, ()):
            found = last_exception(read_tail(path))
            if found is not None:
                return found
    refused = _SLURM_ERROR.search(read_tail(report.trial_dir / "stderr.log"))
    return refused[0] if refused else None


def _memory(report: LaunchReport, result: TrialResult | None) -> tuple[int | None, str | None]:
    """Return the worst rank's peak and its source, the most telling one that there is."""
    reported = result.peak_memory_bytes if result is not None else None
    source = (result.memory_source if result is not None else None) or "allocator"
    if reported is not None and source != _RSS:
        return reported, source
    logs = [path for name, paths in report.logs.items() if name != "scheduler" for path in paths]
    pool = worst_pool_peak(logs, num_ranks=report.num_ranks)
    if pool is not None:
        return pool, "pool"
    resident = reported or report.supervised.peak_rss_bytes
    return (resident, _RSS) if resident else (None, None)

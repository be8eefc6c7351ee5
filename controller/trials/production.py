"""Start a production run from a best_config.yaml and tell how it ended."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from mindtune.controller.alerts.run_alerts import check_alerts, open_alerts
from mindtune.controller.config_tree import dotted_keys, set_key
from mindtune.controller.contract import (
    ENV_CONFIG,
    ENV_FAULTS,
    ENV_MODE,
    ENV_RUN_DIR,
    MINDFORMERS_KEY,
    REMOTE_SHELL,
    AnyFault,
    BestConfig,
    FaultPlan,
    KnobsFile,
    RunResult,
    dump_yaml,
    read_yaml,
    write_json,
)
from mindtune.controller.device.hardware import describe_hardware
from mindtune.controller.errors import ConfigError
from mindtune.controller.live.settings import split_best_config
from mindtune.controller.mindformers.base_yaml import MindFormersYaml, is_mindformers
from mindtune.controller.mindformers.plug_in import (
    ENV_REGISTER_PATH,
    check_command,
    in_own_folder,
    register_folder,
    with_callback,
)
from mindtune.controller.records import read_signals
from mindtune.controller.trials.commands import resolve_command, with_files
from mindtune.controller.trials.failure_text import last_exception, read_tail
from mindtune.controller.trials.hosts import Hosts, check_hosts
from mindtune.controller.trials.launcher import LaunchReport, launch
from mindtune.controller.trials.preflight import (
    check_batch,
    check_launcher,
    check_policies,
    check_ranks,
)
from mindtune.controller.trials.run_folder import claim, own_result
from mindtune.controller.trials.trial_config import knob_environment
from mindtune.search.knobs import canonical_or_derived
from mindtune.search.layout import num_ranks

__all__ = ["EXIT_DONE", "EXIT_FAILED", "EXIT_STOPPED", "RunPlan", "read_best_config",
           "run_best_config"]  # fmt: skip

EXIT_DONE = 0
EXIT_STOPPED = 1
"""A policy ended the run."""
EXIT_FAILED = 3

_LOGGER = logging.getLogger(__name__)
_CHANGEABLE = ("alerts", "watchdog", "hosts", "remote_shell", "launch")
_LATER = ("callback", "devices_per_node")
"""Keys that came later: a run that was started before them goes on with them unset."""


@dataclass(frozen=True)
class RunPlan:
    """A best config with the base config that it changes."""

    best: BestConfig
    config: dict[str, Any]
    """Base config with the overrides merged in, and nothing else."""
    path: Path
    faults: tuple[AnyFault, ...] = ()
    """Faults that it plants on purpose."""

    @property
    def hosts(self) -> Hosts | None:
        """Machines that msrun's ranks run on; None: this one alone."""
        shell = with_files(self.best.remote_shell or REMOTE_SHELL, self.path.parent)
        return Hosts.of(self.best.hosts, shell)

    def program_config(self) -> dict[str, Any]:
        """Return what the program is given: the config, with our callback where it takes one."""
        if self.best.callback != "mindformers":
            return self.config
        base = self.path.parent / (self.best.base_config or "")
        folders = [self.path.resolve().parent, base.resolve().parent]
        return with_callback(in_own_folder(self.config, folders=folders))


def read_best_config(path: Path) -> RunPlan:
    """Read a best_config.yaml, or a MindFormers YAML that carries one under `mindtune`.

    Raises:
        ConfigError: if it, or the base config that it names, is missing or not valid.
        PolicyError: if a policy's settings are not valid.
        SearchError: if a knob or its value is not allowed.
    """
    content = read_yaml(path)
    if isinstance(content, dict) and isinstance(content.get(MINDFORMERS_KEY), dict):
        best, faults = _checked(content[MINDFORMERS_KEY], source=f"{path}, key {MINDFORMERS_KEY}")
        # Such a file differs from its base in the tuned keys: it is the merged config itself.
        rest = {key: value for key, value in content.items() if key != MINDFORMERS_KEY}
        if is_mindformers(rest):
            MindFormersYaml.of(rest, source=str(path)).check_mode()
        return RunPlan(best, rest, path, faults)
    best, faults = _checked(content, source=str(path))
    base: Any = {}
    if best.base_config is not None:
        source = path.parent / best.base_config
        base = read_yaml(source, repeated_keys=True)
        if base is None:
            base = {}
        if not isinstance(base, dict):
            raise ConfigError(
                f"{source} must hold a mapping of keys, but got {type(base).__name__}."
            )
    known = set(dotted_keys(base))
    for key, value in best.overrides.items():
        if key not in known:
            _LOGGER.warning(
                "%s: the base config has no key %s; it is added, and acts only if the program "
                "reads it", path, key,
            )  # fmt: skip
        set_key(base, key, value, source=str(path), create=True)
    return RunPlan(best, base, path, faults)


def _checked(content: object, *, source: str) -> tuple[BestConfig, tuple[AnyFault, ...]]:
    best, live = split_best_config(content, source=source)
    knobs = {name: canonical_or_derived(name, value) for name, value in best.knobs.items()}
    check_batch(knobs)
    check_ranks(
        best.launcher, num_ranks(knobs), best.devices_per_node, num_hosts=len(best.hosts or [""])
    )
    check_policies(best.policies)
    if best.callback == "mindformers":
        check_command(best.command)
    return best, live.faults


def run_best_config(
    best: Path,
    out: Path,
    mode: Literal["observe", "act"] = "act",
    *,
    faults: FaultPlan | None = None,
) -> int:
    """Run the program of a best config under its policies until it ends.

    The policies act inside the run, through its callback; a Ctrl-C here ends the whole process
    tree. Exit code of the program and its result.json together decide how the run ended. Where
    the program leaves no result, as when it is killed, the alert of its end leaves from here.

    Args:
        best: best_config.yaml.
        out: folder of the run: new, empty, or of the same run, which did not finish.
        mode: whether policies act or only record.
        faults: faults to plant instead of those that the best config names.

    Returns:
        0 done, 1 stopped by a policy, 3 failed.

    Raises:
        ConfigError, PolicyError, SearchError: if the config or the folder cannot be used; nothing
            is left behind.
    """
    plan = read_best_config(best)
    check_launcher(plan.best.launcher)
    out = out.resolve()
    command = resolve_command(
        plan.best.command, config=out / "config.yaml", base_dir=best.parent.resolve()
    )
    check_alerts(plan.best.alerts)
    _tell_of_other_hardware(plan.best)
    if faults is not None:
        plan = replace(plan, faults=faults.faults)
    if plan.hosts is not None:
        there = next(folder for folder in (out, *out.parents) if folder.is_dir())
        check_hosts(plan.hosts, folder=there, device=_device(plan.best))
    with claim(out, _config_hash(plan), mode, _inputs(plan)):
        return _run(plan, out, command, best=best, mode=mode)


def _tell_of_other_hardware(best: BestConfig) -> None:
    """Say what of a study holds no longer, where the run is on other hardware.

    Under Slurm this machine only submits the run.
    """
    there = _provenance(best).get("hardware")
    if there is None or best.launcher == "slurm":
        return
    here = describe_hardware(_device(best))
    if here != there:
        _LOGGER.warning(
            "the study ran on %s, this machine is %s: which config is best, its MFU, step time, "
            "share of data wait and peak memory hold no longer (gradient norms and loss scales "
            "do, until the run has its own); a new baseline is what `mindtune search` measures "
            "here, in a folder of its own",
            there, here,
        )  # fmt: skip


def _provenance(best: BestConfig) -> dict[str, Any]:
    return {} if best.provenance is None else best.provenance.model_extra or {}


def _device(best: BestConfig) -> str:
    """Return `cluster.device` of the study."""
    return str(_provenance(best).get("device", "cpu"))


def _inputs(plan: RunPlan) -> dict[str, str]:
    """Return the files that the program finds in the run's folder: name -> text."""
    inputs = {
        "config.yaml": _fault_note(plan.faults) + dump_yaml(plan.program_config()),
        KnobsFile.FILE: dump_yaml(KnobsFile(knobs=plan.best.knobs).to_plain()),
    }
    if plan.faults:
        # A copy, so that nobody changes what a run that goes on plants.
        inputs[FaultPlan.FILE] = dump_yaml(FaultPlan(faults=plan.faults).to_plain())
    return inputs


def _run(plan: RunPlan, out: Path, command: list[str], *, best: Path, mode: str) -> int:
    """Run the program in a folder that is this run's alone, and tell how it ended."""
    environment = knob_environment(plan.best.knobs) | {
        ENV_RUN_DIR: str(out),
        ENV_CONFIG: str(best.resolve()),
        ENV_MODE: mode,
    }
    if plan.best.callback == "mindformers":
        own = environment.get(ENV_REGISTER_PATH) or os.environ.get(ENV_REGISTER_PATH)
        environment[ENV_REGISTER_PATH] = str(register_folder(out, own))
    if plan.faults:
        environment[ENV_FAULTS] = str(out / FaultPlan.FILE)
    started = time.monotonic()
    try:
        report = launch(
            command,
            trial_dir=out,
            startup_deadline_s=math.inf,
            deadline_s=math.inf,
            num_ranks=num_ranks(plan.best.knobs),
            launcher=plan.best.launcher,
            ranks_per_node=plan.best.devices_per_node,
            hosts=plan.hosts,
            device=_device(plan.best),
            env=environment,
            in_trial=False,
        )
    except KeyboardInterrupt as end:
        if not (out / RunResult.FILE).exists():
            message = f"ended by {end}" if str(end) else "ended by Ctrl-C"
            result = _write_result(
                out, "interrupted", time.monotonic() - started, message, plan.faults
            )
            _tell(plan, out, result)
        raise
    code, written = _conclude(out, report, plan.faults)
    if written is not None:
        _tell(plan, out, written)
    return code


def _config_hash(plan: RunPlan) -> str:
    """Return what a run is known by."""
    # Who is told, how long a silence may last and which machines run it make it no other run.
    best = {
        key: value
        for key, value in plan.best.to_plain().items()
        if key not in _CHANGEABLE and not (key in _LATER and value is None)
    }
    content = dump_yaml([plan.config, best, *(fault.to_plain() for fault in plan.faults)])
    return hashlib.sha256(content.encode()).hexdigest()


def _tell(plan: RunPlan, out: Path, result: RunResult) -> None:
    """Send the alert of an end that the program itself could not tell about."""
    try:
        alerts = open_alerts(plan.best.alerts, folder=out, planted=bool(plan.faults))
    except ConfigError as error:  # it was valid when the run began
        _LOGGER.warning("%s", error)
        return
    if alerts is not None:
        alerts.end(result)
        alerts.close()


def _fault_note(faults: tuple[AnyFault, ...]) -> str:
    """Return the head of a run's config.yaml, a comment: the keys are the program's own."""
    if not faults:
        return ""
    kinds = ", ".join(fault.kind for fault in faults)
    return f"# NO REAL RUN: faults are planted on purpose ({kinds}); see {FaultPlan.FILE}.\n"


def _conclude(
    out: Path, report: LaunchReport, faults: tuple[AnyFault, ...]
) -> tuple[int, RunResult | None]:
    """Write a result where the run left none that holds.

    Returns:
        The exit code, and the result that was written here.
    """
    supervised = report.supervised
    failed = {name: code for name, code in supervised.exit_codes.items() if code}
    clean = supervised.ended_by == "exit" and not failed
    result = own_result(out)
    if result is not None and faults and not result.planted_faults:
        _LOGGER.warning(
            "%s names no planted faults: the program's training does not read them",
            out / RunResult.FILE,
        )
    if result is not None and result.outcome != "ok":
        return EXIT_STOPPED if result.outcome == "stopped" else EXIT_FAILED, None
    if clean:
        if result is not None:
            return EXIT_DONE, None
        # Without our callback the exit code is all there is to know.
        message = "the program left no result of its own"
        return EXIT_DONE, _write_result(out, "ok", supervised.wall_s, message, faults)
    name, code = next(iter(failed.items()), ("command", None))
    cause = next(
        (
            found
            for logs in report.logs.values()
            for log in logs
            if (found := last_exception(read_tail(log))) is not None
        ),
        None,
    )
    how = supervised.slurm_said or supervised.error or f"{name} ended with code {code}"
    from_outside = supervised.ended_by in ("terminated", "host_lost") or bool(
        supervised.slurm_said
    )
    outcome: Literal["crash", "interrupted"] = "interrupted" if from_outside else "crash"
    message = f"{cause} ({how})" if cause else how
    if result is None:
        return EXIT_FAILED, _write_result(out, outcome, supervised.wall_s, message, faults)
    # It failed after an ok result: what it measured is kept, as in a trial.
    failure = {"outcome": outcome, "message": f"{message}, after an ok result"}
    failed_result = result.model_copy(update=failure)
    write_json(out / RunResult.FILE, failed_result)
    return EXIT_FAILED, failed_result


def _write_result(
    out: Path,
    outcome: Literal["ok", "crash", "interrupted"],
    wall_s: float,
    message: str,
    faults: tuple[AnyFault, ...],
) -> RunResult:
    steps, loss = _last_step(out)
    result = RunResult(
        outcome=outcome,
        steps=steps,
        wall_s=wall_s,
        final_loss=loss,
        message=message,
        planted_faults=faults,
    )
    write_json(out / RunResult.FILE, result)
    return result


def _last_step(out: Path) -> tuple[int, float | None]:
    """Return the last recorded step and the last loss; 0 and None where nothing was recorded."""
    path = out / "signals.csv"
    if not path.is_file():  # a pipe of that name would be waited for without end
        return 0, None
    step, loss = 0, None
    try:
        for row in read_signals(path):
            step = max(0, row.observation.step)
            loss = loss if row.observation.loss is None else row.observation.loss
    except ConfigError as error:
        # A table of the program's own must not hide how the run ended.
        _LOGGER.warning("%s", error)
    return step, loss

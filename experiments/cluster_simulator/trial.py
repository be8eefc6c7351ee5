"""A program that plays a trial of a simulated cluster, or of a recorded table, for a search.

It reads what any training reads (its config and `knobs.yaml`), and leaves what any training
leaves: `signals.csv`, `result.json`, or an exception and an exit code.
"""

from __future__ import annotations

import math
import time
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import Literal

from pydantic import Field

from mindtune.controller.contract import ContractModel, TrialResult, parse, read_yaml
from mindtune.controller.errors import ConfigError
from mindtune.controller.records import SignalWriter
from mindtune.controller.trials.worker import TrialContext, reporting, write_result
from mindtune.experiments.cluster_simulator.luck import Run
from mindtune.experiments.cluster_simulator.problems import KINDS, problem
from mindtune.experiments.exhaustive_table.problem import load_table
from mindtune.policies.signals import Observation
from mindtune.search.knobs import Config

__all__ = ["SimulatedCluster", "knobs_of", "leave", "play_trial"]

_FIRST_LOSS = 9.0
_LOSS_NOISE = 0.01


class SimulatedCluster(ContractModel):
    """The trial's config: a simulated cluster, or a table that was recorded on a real machine."""

    kind: str | None = None
    """Name of a problem."""
    seed: int = 0
    """Of the cluster."""
    study: Path | None = None
    """Study file of a recorded table, in place of a problem; absolute, as is the next."""
    table: Path | None = None
    """The table."""
    time_scale: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Seconds that a simulated second takes; 0: no time passes."""


def play_trial(config_file: Path) -> None:
    """Play the trial of this process.

    Raises:
        ConfigError: this is no trial, the config is not valid, or its knobs are not the problem's.
        RuntimeError: the simulated run failed.
    """
    context = TrialContext.from_env()
    if context is None:
        raise ConfigError("a simulated trial is started by `mindtune search`, not by hand.")
    with reporting(context):
        tree = read_yaml(config_file)
        settings = parse(SimulatedCluster, tree or {}, source=str(config_file))
        if settings.table is not None and settings.study is not None:
            run, samples, drag = _recorded(settings.study, settings.table, context)
        elif settings.kind in KINDS:
            run, samples, drag = _simulated(settings.kind, settings.seed, context)
        else:
            raise ConfigError(
                f"{config_file} must name study and table, or a kind out of {', '.join(KINDS)}, "
                f"but got {settings.kind!r}."
            )
    leave(context, run, samples=samples, time_scale=settings.time_scale, drag=drag)


def _simulated(kind: str, seed: int, context: TrialContext) -> tuple[Run, int, float]:
    """Return a run, the samples of its step, and by how much its loss stays up."""
    known = problem(kind, seed)
    config = knobs_of(context, known.space.knobs)
    run = known.draw(config, seed=context.seed, measure_steps=context.measure_steps)
    truth = known.truth(config)
    if run is None or truth is None:
        raise ConfigError(f"this config cannot be laid out on {kind}")
    return run, known.space.facts.training.global_batch_size, truth.loss_drag


def _recorded(study: Path, table: Path, context: TrialContext) -> tuple[Run, int, float]:
    known = load_table(study, table)
    row = known.draw(knobs_of(context, known.space.knobs), seed=context.seed)
    if row is None:
        raise ConfigError(f"{table} has no row of this config")
    samples = known.space.facts.training.global_batch_size
    if row.outcome not in ("ok", "infeasible"):
        outcome: Literal["oom", "crash"] = "oom" if row.outcome == "oom" else "crash"
        run = Run(outcome=outcome, step_time_s=(), bad=(), wall_s=row.wall_s,
                  memory_bytes=row.peak_memory_bytes or 0)  # fmt: skip
        return run, samples, 0.0
    # A longer trial goes on as the recorded one did.
    times = tuple(islice(cycle(row.step_times_s), context.measure_steps))
    bad_steps = round(row.bad_steps / len(row.step_times_s) * len(times))
    return (
        Run(
            outcome="ok",
            step_time_s=times,
            bad=tuple(index < bad_steps for index in range(len(times))),
            memory_bytes=row.peak_memory_bytes or 0,
            wall_s=max(row.wall_s, math.fsum(times)),
        ),
        samples,
        0.0,
    )


def knobs_of(context: TrialContext, names: tuple[str, ...]) -> Config:
    """Return the knobs of a problem out of those of the trial.

    Raises:
        ConfigError: if one is missing.
    """
    missing = [name for name in names if name not in context.knobs]
    if missing:
        raise ConfigError(f"the study's space must name {', '.join(missing)}, but does not.")
    return {name: context.knobs[name] for name in names}


def leave(
    context: TrialContext, run: Run, *, samples: int, time_scale: float, drag: float = 0.0
) -> None:
    """Let the time of a run pass and leave its records.

    Args:
        context: The trial.
        run: What is to come of it.
        samples: Of a step.
        time_scale: Seconds that a simulated second takes.
        drag: By how much the loss stays up.

    Raises:
        RuntimeError: if the run ran out of memory or broke off.
    """
    if run.outcome == "oom":
        time.sleep(time_scale * run.wall_s)
        # As MindSpore's memory pool says it.
        raise RuntimeError(
            "Device(id:0) memory isn't enough and alloc failed, kernel name: Default/MatMul-op1, "
            f"alloc size: {run.memory_bytes:.0f}B."
        )
    if run.outcome == "crash":
        time.sleep(time_scale * run.wall_s)
        raise RuntimeError("a device of the simulated cluster has stopped answering")
    losses = _losses(context, samples, drag)
    first_s = run.wall_s - math.fsum(run.step_time_s)
    warm_up = [first_s / (context.warmup_steps or 1)] * context.warmup_steps
    signals = SignalWriter(context.trial_dir / "signals.csv")
    wall_s = 0.0
    for step, seconds in enumerate([*warm_up, *run.step_time_s], 1):
        time.sleep(time_scale * seconds)
        wall_s += seconds
        bad = step > len(warm_up) and run.bad[step - 1 - len(warm_up)]
        signals.write(
            Observation(
                step=step,
                wall_time_s=wall_s,
                phase="train",
                loss=losses[step - 1],
                update_skipped=float(bad),
                step_time_s=seconds,
            )
        )
    signals.close()
    write_result(
        context,
        TrialResult(
            outcome="ok",
            step_time_s=list(run.step_time_s),
            samples_per_step=samples,
            peak_memory_bytes=round(run.memory_bytes),
            memory_source="allocator",
            loss=losses[len(warm_up) :],
            update_skipped=[float(bad) for bad in run.bad],
        ),
    )


def _losses(context: TrialContext, samples: int, drag: float) -> list[float]:
    """Return a loss that falls with the samples seen; its noise depends on the seed alone."""
    draw = Random(context.seed)
    steps = context.warmup_steps + context.measure_steps
    return [
        _FIRST_LOSS * (1.0 + step * samples / 1000) ** -0.1
        + drag * (1.0 - 1.0 / step)
        + draw.gauss(0.0, _LOSS_NOISE)
        for step in range(1, steps + 1)
    ]

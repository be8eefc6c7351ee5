"""Puts together the observation of each optimizer step from everything that measures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from mindtune.controller.device import DeviceReading
from mindtune.controller.live.sensors import (
    PHASES,
    BatchFacts,
    HostSignals,
    StepSignals,
    observe,
    reduce_rows,
)
from mindtune.controller.live.step_adapter import StepAdapter
from mindtune.controller.live.timing import StepTimer
from mindtune.controller.live.workload import Workload
from mindtune.policies.signals import Observation

__all__ = ["Machine", "SensedStep", "Sensors", "StepTime"]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """This process's place in the job and on the device."""

    rank: int = 0
    num_ranks: int = 1
    device: str = "CPU"
    """MindSpore's name of the device target."""
    memory_allocated: Callable[[], int | None] = lambda: None
    """Bytes that the framework's allocator holds now; None where it does not count."""
    peak_memory: Callable[[], tuple[int, str] | None] = lambda: None
    """Peak in bytes so far and how it was taken; None where unknown."""
    peak_reserved: Callable[[], int | None] = lambda: None
    """Most bytes that the framework's allocator had taken from the device; None: not counted."""


class StepTime(NamedTuple):
    """How long a step took, by the slowest rank."""

    step: int
    step_time_s: float
    phase: str | None


class SensedStep(NamedTuple):
    """What is known at the end of an optimizer step."""

    observation: Observation
    """Equal on all ranks: what they decide by."""
    recorded: Observation
    """The row to write, which may hold what only this rank knows."""
    agreed: StepTime | None
    """Time that all ranks agree on: of this step, or of the one before if there are several."""
    own: StepTime
    """Time of this step by this rank's clock."""
    own_data_s: float | None
    """Of it, waiting for data; None: not known."""


class Sensors:
    """Measures around the calls of the training step.

    Args:
        adapter: The training step.
        workload: What the user told about the training.
        machine: This process's place.
        timer: Clock of steps.
        read_device: Returns the newest reading of the device.
    """

    def __init__(
        self,
        adapter: StepAdapter,
        workload: Workload,
        machine: Machine,
        *,
        timer: StepTimer,
        read_device: Callable[[], DeviceReading],
    ) -> None:
        self._adapter = adapter
        self._workload = workload
        self._machine = machine
        self._timer = timer
        self._read_device = read_device
        self._several = machine.num_ranks > 1 and adapter.ranks_agree
        peak = workload.peak_flops
        self._peak_flops = None if peak is None else peak * machine.num_ranks
        self._phase = "compile"
        self._graphs: set[tuple[str, Any]] = set()
        self._samples = 0
        self._samples_known = True
        self._tokens_per_sample = workload.tokens_per_sample
        self._previous_batch = BatchFacts()
        self.micro_batch_size: int | None = None
        """Samples of the first call on one rank; None before it, or where unknown."""
        self.eval_loss: float | None = None
        """Validation loss for the next row."""

    def begin_call(
        self, *, shapes: Any, samples: int | None, tokens: int | None, waited: bool
    ) -> bool:
        """The data of the next call is there; tell whether it is going to compile.

        Args:
            shapes: Anything hashable that differs when the batch has another shape or type.
            samples: Samples of this call on this rank; None: unknown.
            tokens: Tokens of one of them, where the user did not say; None: unknown.
            waited: Whether the time since the call before was waiting for data; False: unknown.
        """
        self._timer.begin_call(waited=waited)
        if samples is not None and self.micro_batch_size is None:
            self.micro_batch_size = samples
            self._adapter.actuators.learn_batch(samples)
        if self._tokens_per_sample is None:
            self._tokens_per_sample = tokens
        if samples is None:
            self._samples_known = False
        else:
            self._samples += samples
        graph = (self._adapter.graph_key(), shapes)
        compiles = graph not in self._graphs
        if compiles:
            self._graphs.add(graph)
            self.note_phase("compile")
        self._adapter.begin_call()
        return compiles

    def end_call(self, outputs: Any) -> StepSignals | None:
        """A call has returned `outputs`; return the signals of the step that it completed."""
        self._timer.end_call()
        return self._adapter.take(outputs)

    def note_phase(self, phase: str) -> None:
        """The step in progress spent time on this; the weightiest phase names it."""
        if PHASES.index(phase) > PHASES.index(self._phase):
            self._phase = phase

    def complete(self, signals: StepSignals, *, step: int, num_steps: int) -> SensedStep:
        """Return all that is known about the optimizer step that just ended.

        Args:
            signals: What the training step reported.
            step: Optimizer steps attempted, this one included.
            num_steps: Steps that the call stands for; times are per step.
        """
        timing = self._timer.lap()
        time_s = timing.step_time_s / num_steps
        local = HostSignals(
            step_time_s=time_s,
            data_time_s=None if timing.data_time_s is None else timing.data_time_s / num_steps,
            wall_time_s=self._timer.elapsed_s,
            phase=self._phase,
            reading=self._read_device(),
            memory_allocated_bytes=self._machine.memory_allocated(),
            own_time_s=None if timing.own_time_s is None else timing.own_time_s / num_steps,
            host_time_s=timing.host_time_s / num_steps,
        )
        own = StepTime(step, time_s, self._phase)
        batch = self._batch(signals)
        host, timed_batch = local, batch
        agreed: StepTime | None = own
        if self._several:
            host, timed_batch = self._agree(signals, local), self._previous_batch
            agreed = None
            if host.step_time_s is not None:
                agreed = StepTime(step - num_steps, host.step_time_s, host.phase)
        observation = observe(
            step,
            signals,
            host=host,
            batch=batch,
            timed_batch=timed_batch,
            peak_flops=self._peak_flops,
        )
        recorded = observation
        if self._several:
            # What only this rank knows is written, but no rank decides by it.
            recorded = replace(
                observation,
                eval_loss=self.eval_loss,
                device_temperature_c=local.reading.device_temperature_c,
                device_power_w=local.reading.device_power_w,
            )
        elif self.eval_loss is not None:
            observation = recorded = replace(observation, eval_loss=self.eval_loss)
        self.eval_loss = None
        self._previous_batch = batch
        self._phase = "train"
        return SensedStep(observation, recorded, agreed, own, local.data_time_s)

    def _agree(self, signals: StepSignals, local: HostSignals) -> HostSignals:
        """Return what all ranks measured about the step before, and send what this one did."""
        host = reduce_rows(signals.rank_rows)
        self._adapter.send_host_signals(local.to_row())
        # Nothing has travelled yet in the first step, which compiles.
        return replace(host, phase="compile") if host.phase is None else host

    def _batch(self, signals: StepSignals) -> BatchFacts:
        """Sizes of the step that is complete; a ragged last batch counts its own tokens."""
        size = self.micro_batch_size
        if size is not None:
            size //= signals.micro_batch_split
        degree = self._adapter.data_parallel
        known = self._samples_known and degree is not None
        samples = self._samples * (degree or 1) if known else None
        told = self._workload.global_batch_size
        if told is not None:
            samples = told
        self._samples = 0
        self._samples_known = True
        tokens = None
        if samples is not None and self._tokens_per_sample is not None:
            tokens = samples * self._tokens_per_sample
        global_batch_size = told
        if told is None and size is not None and degree is not None:
            global_batch_size = size * (signals.num_microbatches or 1) * degree
        return BatchFacts(
            micro_batch_size=size,
            global_batch_size=global_batch_size,
            tokens=tokens,
            flops=self._workload.step_flops(tokens),
        )

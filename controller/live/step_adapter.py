"""One face for every kind of training step: what it reports, and the hands that turn its knobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from mindtune.controller.live.actuators import Actuators, UpdateStepActuators
from mindtune.controller.live.hooks import GradientClock
from mindtune.controller.live.sensors import StepSignals
from mindtune.controller.live.snapshots import Snapshots
from mindtune.controller.live.timing import StepTimer
from mindtune.policies.facts import RunFacts

if TYPE_CHECKING:
    from mindtune.controller.live.update_step import UpdateStep

__all__ = ["DEVICES", "OwnStep", "StepAdapter", "optimizer_family", "optimizer_updates"]

DEVICES: Final = {"CPU": "cpu", "GPU": "gpu", "Ascend": "npu"}
"""MindSpore's name of a device target -> that in `RunFacts`."""
_SGD_FAMILY: Final = frozenset({"SGD", "Momentum"})
_ADAM_FAMILY: Final = frozenset({"Lamb", "LazyAdam", "NAdam", "RAdam"})


class StepAdapter(Protocol):
    """A training step as the session sees it."""

    @property
    def name(self) -> str:
        """What to call the step in messages."""

    @property
    def actuators(self) -> Actuators:
        """What turns its knobs."""

    @property
    def snapshots(self) -> Snapshots | None:
        """Earlier states that it can return to; None: it keeps none."""

    @property
    def data_parallel(self) -> int | None:
        """Ranks with different samples; None: unknown, then so are sizes over all ranks."""

    @property
    def ranks_agree(self) -> bool:
        """Whether all ranks of the job get equal signals, the hosts' included."""

    @property
    def unreachable(self) -> tuple[str, ...]:
        """Knobs to tell the user about."""

    def graph_key(self) -> str:
        """Name the graphs that the next call runs; a new name means a compile."""

    def begin_call(self) -> None:
        """The step is about to be called."""

    def take(self, outputs: Any) -> StepSignals | None:
        """Return the signals of the optimizer step that a call completed; None if it did not."""

    def send_host_signals(self, row: Sequence[float]) -> None:
        """Give the numbers that the next optimizer step brings to all ranks."""

    def watch_own_time(self, timer: StepTimer | None) -> None:
        """Tell a timer what a step spends before it meets the other ranks.

        That ends where its gradients are there or, if one graph makes and applies them, where the
        graph is launched. None ends it. Where a step does not tell, nothing happens.
        """

    def facts(
        self, *, micro_batch_size: int | None, max_num_microbatches: int | None, device: str
    ) -> RunFacts:
        """Return what holds for the whole run; `device` is MindSpore's name of the target."""

    def updates(self) -> int | None:
        """Return the optimizer's own count of updates; None where it has none."""

    def effective(self, *, micro_batch_size: int | None) -> dict[str, Any]:
        """Return the knobs that can be read back, by their canonical names."""


class OwnStep:
    """Our training step: every knob can be turned, every value that acted is reported.

    Args:
        step: The step.
        acts: Whether any policy acts. If none does, nothing is skipped that MindSpore's own step
            would not skip.
        job_size: Ranks of the job.
        snapshots: Keeps earlier states of the step; None: nothing does.
    """

    unreachable: tuple[str, ...] = ()

    def __init__(
        self,
        step: UpdateStep,
        *,
        acts: bool,
        job_size: int,
        snapshots: Snapshots | None = None,
    ) -> None:
        self._step = step
        self.snapshots = snapshots
        self._job_size = job_size
        self.name = type(step).__name__
        rule = step.loss_scale_rule
        step.set_skip_non_finite(step.skip_non_finite and (acts or rule is not None))
        self.actuators: Actuators = UpdateStepActuators(
            step,
            data_parallel=step.layout.data_parallel,
            loss_scale_dynamic=None if rule is None else rule.dynamic,
            compresses_top_k=step.compression.kind == "topk",
        )

    @property
    def data_parallel(self) -> int:
        """Ranks with different samples."""
        return self._step.layout.data_parallel

    @property
    def ranks_agree(self) -> bool:
        """The step gathers a row from each of the ranks that its layout names."""
        return self._step.layout.world_size == self._job_size

    def graph_key(self) -> str:
        """One micro-batch runs as one graph, several as two, and so does what a hook wants."""
        if self._step.micro_batch_split > 1:
            return f"accumulated in {self._step.micro_batch_split} parts"
        if self._step.num_microbatches > 1 or self._step.hooks_gradients:
            return "accumulated"
        return "fused"

    def begin_call(self) -> None:
        """Nothing to prepare."""

    def take(self, outputs: Any) -> StepSignals | None:
        """Return the report of the completed optimizer step."""
        del outputs
        report = self._step.last_report
        return None if report is None else StepSignals.from_report(report)

    def send_host_signals(self, row: Sequence[float]) -> None:
        """Give this rank's row to the step."""
        self._step.set_host_signals(row)

    def watch_own_time(self, timer: StepTimer | None) -> None:
        """Look where several ranks take part; at gradients where there are two graphs anyway."""
        if self._step.layout.world_size == 1:
            return
        hooks = self._step.gradient_hooks
        hooks[:] = [hook for hook in hooks if not isinstance(hook, GradientClock)]
        self._step.on_launch = None if timer is None else timer.launch
        if timer is not None:
            hooks.append(GradientClock(self._step, timer.gradients_ready))

    def facts(
        self, *, micro_batch_size: int | None, max_num_microbatches: int | None, device: str
    ) -> RunFacts:
        """Return what the step and its optimizer are built for."""
        rule = self._step.loss_scale_rule
        return RunFacts(
            reachable=self.actuators.reachable,
            data_parallel=self.data_parallel,
            num_ranks=self._job_size,
            micro_batch_size=micro_batch_size,
            optimizer_family=optimizer_family(self._step.optimizer),
            loss_scale_dynamic=rule is not None and rule.dynamic,
            max_num_microbatches=max_num_microbatches,
            can_rewind=self.snapshots is not None,
            device=DEVICES.get(device, device.lower()),
        )

    def updates(self) -> int | None:
        """Return the optimizer's own count."""
        return optimizer_updates(self._step.optimizer)

    def effective(self, *, micro_batch_size: int | None) -> dict[str, Any]:
        """Return batch, compression and, where the layout holds the whole job, the degrees."""
        layout = self._step.layout
        parts = self._step.micro_batch_split
        found: dict[str, Any] = {
            "micro_batch_num": self._step.num_microbatches * parts,
            "gradient_compression": str(self._step.compression),
        }
        if micro_batch_size is not None:
            found["micro_batch_size"] = micro_batch_size // parts
        if layout.world_size == self._job_size:
            found["data_parallel"] = layout.data_parallel
            found["model_parallel"] = layout.model_parallel
        return found


def optimizer_family(optimizer: Any) -> str:
    """Return adam, sgd or unknown: decides how the learning rate follows the batch size."""
    for kind in type(optimizer).__mro__:
        if kind.__name__.startswith("Adam") or kind.__name__ in _ADAM_FAMILY:
            return "adam"
        if kind.__name__ in _SGD_FAMILY:
            return "sgd"
    return "unknown"


def optimizer_updates(optimizer: Any) -> int | None:
    """Return an optimizer's own count of updates; None where it has none."""
    count = getattr(optimizer, "global_step", None)
    if count is None or not hasattr(count, "asnumpy"):
        return None
    return int(count.asnumpy().reshape(-1)[0])

"""Looks at gradients, or changes them, between the backward pass and the update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["GradientClock", "GradientHook", "HookedStep"]


class GradientHook(Protocol):
    """Taken in by `UpdateStep.gradient_hooks`.

    The step computes gradients and update in one graph where it can. In steps that a hook wants,
    it runs two instead, with the gradients on the host's side in between; the first such step
    compiles them.
    """

    def wants(self, optimizer_step: int) -> bool:
        """Tell whether this optimizer step's gradients must pass through; steps count from 1."""

    def __call__(
        self, optimizer_step: int, loss: Any, gradients: tuple[Any, ...]
    ) -> tuple[Any, tuple[Any, ...]]:
        """Return what goes on to the update, in place of what the micro-batches made.

        Args:
            optimizer_step: The step, from 1.
            loss: Sum of the unscaled losses of its micro-batches, a scalar; parts count where a
                micro-batch is run in parts.
            gradients: Sums of their gradients, scaled by the loss scale, one per weight in the
                optimizer's order, before any reduction over ranks.
        """


class HookedStep(Protocol):
    """What is needed of `UpdateStep`; named here so that this module loads no framework."""

    gradient_hooks: list[GradientHook]
    fuses_gradients: bool

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of the step in progress."""

    @property
    def micro_batch_split(self) -> int:
        """Parts that each of them runs in."""


class GradientClock:
    """Tells when this rank's own gradients are there: a `GradientHook` that changes nothing.

    It wants the steps that run as two graphs anyway: it never splits a step in two.

    Args:
        step: The training step.
        ready: Called then, after the device has done its part.
    """

    def __init__(self, step: HookedStep, ready: Callable[[], None]) -> None:
        self._step = step
        self._ready = ready

    def wants(self, optimizer_step: int) -> bool:
        """Tell whether the step runs as two graphs."""
        step = self._step
        others = [hook for hook in step.gradient_hooks if hook is not self]
        apart = not step.fuses_gradients or step.num_microbatches * step.micro_batch_split > 1
        return apart or any(hook.wants(optimizer_step) for hook in others)

    def __call__(
        self, optimizer_step: int, loss: Any, gradients: tuple[Any, ...]
    ) -> tuple[Any, tuple[Any, ...]]:
        """Wait for the device, tell, and hand everything on."""
        del optimizer_step
        loss.asnumpy()
        self._ready()
        return loss, gradients

"""Looks at gradients, or changes them, between the backward pass and the update."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["GradientHook"]


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
            loss: Sum of the unscaled losses of its micro-batches, a scalar.
            gradients: Sums of their gradients, scaled by the loss scale, one per weight in the
                optimizer's order, before any reduction over ranks.
        """

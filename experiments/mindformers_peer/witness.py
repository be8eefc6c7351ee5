"""A callback that notes what MindFormers' step returns, without any of mindtune's own reading."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from mindspore import Tensor
from mindspore.train import Callback

from mindtune.experiments.mindformers_peer.case import PeerRun, Step
from mindtune.experiments.mindformers_peer.turns import Turns

__all__ = ["Witness"]


class Witness(Callback):
    """Stands before the user's callbacks in the list, and so sees each step as it was returned.

    Args:
        sees_steps: Whether it looks at the steps, which takes time.
    """

    latest: ClassVar[Witness | None] = None
    """The one that MindFormers has made."""

    def __init__(self, *, sees_steps: bool = True) -> None:
        super().__init__()
        Witness.latest = self
        self._sees_steps = sees_steps
        self.steps: list[Step] = []
        self.callbacks: list[Any] = []
        self.network: Any = None
        self.epochs = 0
        self._weight: Any = None
        self._before: Any = None

    def on_train_begin(self, run_context: Any) -> None:
        """Take in the network and its callbacks."""
        params = run_context.original_args()
        self.network = params.train_network
        self.callbacks = list(params.list_callback)
        self.epochs = params.epoch_num
        self._weight = next(iter(params.train_network.trainable_params()))

    def on_train_step_begin(self, run_context: Any) -> None:
        """Note a weight."""
        del run_context
        if not self._sees_steps:
            return
        self._before = self._weight.asnumpy().astype(np.float64)

    def on_train_step_end(self, run_context: Any) -> None:
        """Note what the step returned, and how far that weight moved."""
        if not self._sees_steps:
            return
        params = run_context.original_args()
        loss, overflow, scale, rate, norm, *_ = params.net_outputs
        moved = np.linalg.norm(self._weight.asnumpy().astype(np.float64) - self._before)
        self.steps.append(
            Step(
                number=params.cur_step_num,
                loss=_value(loss),
                overflow=bool(_value(overflow)),
                loss_scale=_value(scale),
                learning_rate=_value(rate),
                grad_norm=None if norm is None else _value(norm),
                moved=float(moved),
            )
        )

    def report(
        self, failure: str | None, turns: Turns | None, *, stop_reason: str | None
    ) -> PeerRun:
        """Return all that was seen."""
        weights = self.network.trainable_params()
        return PeerRun(
            steps=self.steps,
            failure=failure,
            stop_reason=stop_reason,
            callbacks=[type(callback).__name__ for callback in self.callbacks],
            weights_finite=all(bool(np.isfinite(each.asnumpy()).all()) for each in weights),
            epochs=self.epochs,
            times_s={} if turns is None else turns.times_s(),
            hooks_s={} if turns is None else turns.hooks_s,
            actions=0 if turns is None else turns.num_actions(),
            parameters=sum(each.size for each in weights),
        )


def _value(value: Any) -> float:
    array = value.asnumpy() if isinstance(value, Tensor) else np.asarray(value)
    return float(array.reshape(-1)[0])

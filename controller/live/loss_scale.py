"""The built-in management of the loss scale."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mindtune.controller.errors import ConfigError

__all__ = ["LossScale"]


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """Initial value and update rule of the loss scale.

    The rule is that of MindSpore's `nn.DynamicLossScaleUpdateCell` (floor 1) with a cap: an
    overflow divides the scale by `factor`; `window` steps in a row without one multiply it. Unlike
    MindSpore's own it needs no float-status kernel: an overflow is a non-finite gradient or loss.
    """

    initial: float = 2.0**16
    """Scale of the first step."""
    dynamic: bool = True
    """Whether the scale changes by itself."""
    factor: float = 2.0
    window: int = 1000
    """Clean steps before the scale grows; MindFormers' usual value."""
    floor: float = 1.0
    cap: float = 2.0**24
    """MindSpore's usual starting value, above which float16 gradients always overflow."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.initial) and self.initial > 0):
            raise ConfigError(
                f"initial loss scale must be finite and above 0, but got {self.initial}; "
                "use a power of two such as 65536."
            )
        if not self.dynamic:
            return
        if self.factor <= 1 or self.window < 1:
            raise ConfigError(
                "a dynamic loss scale needs factor > 1 and window >= 1, but got "
                f"factor={self.factor}, window={self.window}; use 2 and 1000."
            )
        if not 0 < self.floor <= self.initial <= self.cap:
            raise ConfigError(
                "0 < floor <= initial <= cap must hold, but got "
                f"floor={self.floor}, initial={self.initial}, cap={self.cap}."
            )

    def following(self, scale: float, *, overflow: bool, clean_steps: int) -> float:
        """Return the scale of the next step.

        Args:
            scale: The scale that the finished step used.
            overflow: Whether that step overflowed.
            clean_steps: Steps without overflow in a row, the finished one included.
        """
        if not self.dynamic:
            return scale
        if overflow:
            return max(scale / self.factor, self.floor)
        if clean_steps > 0 and clean_steps % self.window == 0:
            return min(scale * self.factor, self.cap)
        return scale

"""What is known of the training program besides its knobs."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Program"]


@dataclass(frozen=True, kw_only=True)
class Program:
    """How the program keeps its state; the defaults are Megatron-LM's and MindFormers'."""

    gradient_bytes: float = 4.0
    """Bytes per parameter and gradient. Both accumulate in float32; programs that keep a
    half-precision gradient beside have 6, those that accumulate in half precision 2."""

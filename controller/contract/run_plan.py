"""plan.json: how many steps a run is going to make."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from mindtune.controller.contract.base import Document, PositiveCount

__all__ = ["RunPlan"]


class RunPlan(Document):
    """How far a run is to go, where its program says.

    Rank 0 writes it with the first step, and again where another batch makes the steps fewer or
    more. A run whose end nobody knows has none.
    """

    FILE: ClassVar[str] = "plan.json"

    steps: PositiveCount
    """Number of its last optimizer step, as signals.csv counts them."""
    basis: str = Field(min_length=1)
    """What that follows from."""

"""Times as median and quartiles."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import Field

from mindtune.controller.contract import ContractModel

__all__ = ["Quartiles", "quartiles"]


class Quartiles(ContractModel):
    """Median and quartiles of some times."""

    low: float
    """First quartile."""
    median: float
    high: float
    """Third quartile."""
    count: int = Field(ge=1)


def quartiles(values: Sequence[float], *, unit: float = 1.0) -> Quartiles:
    """Return median and quartiles of values, each divided by `unit`."""
    low, median, high = np.percentile(np.asarray(values) / unit, [25, 50, 75])
    return Quartiles(low=float(low), median=float(median), high=float(high), count=len(values))

"""Step time and memory of many configs as functions of the logarithms of the rates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mindtune.search.memory_model import MemoryParts
from mindtune.search.time_model import DEVICE, HOST, OVERLAP_POWER, TimeParts

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Forecast = Callable[[Floats], tuple[Floats, Floats]]

__all__ = ["memory_forecast", "time_forecast"]


def time_forecast(parts: Sequence[TimeParts]) -> Forecast:
    """Return the forecast of steps whose parts are all known, as `TimeParts.total` sums them."""
    import numpy as np  # noqa: PLC0415 - `space` must start without it

    amounts = np.array([step.amounts for step in parts])

    def forecast(log_rates: Floats) -> tuple[Floats, Floats]:
        seconds = amounts * np.exp(log_rates)
        device, host = seconds[:, DEVICE].sum(axis=1), seconds[:, HOST].sum(axis=1)
        longer = np.maximum(device, host)
        device, host = device / longer, host / longer
        both = (device**OVERLAP_POWER + host**OVERLAP_POWER) ** (1 / OVERLAP_POWER)
        total = longer * both + seconds[:, HOST.stop :].sum(axis=1)
        slopes = np.ones_like(seconds)
        slopes[:, DEVICE] = ((device / both) ** (OVERLAP_POWER - 1))[:, None]
        slopes[:, HOST] = ((host / both) ** (OVERLAP_POWER - 1))[:, None]
        return np.log(total), slopes * seconds / total[:, None]

    return forecast


def memory_forecast(stages: Sequence[Sequence[MemoryParts]]) -> Forecast:
    """Return the forecast of the worst of each config's stages.

    Args:
        stages: For each config the stages that may be the worst, at least one.
    """
    import numpy as np  # noqa: PLC0415 - `space` must start without it

    most = max(map(len, stages))
    # A config with fewer stages repeats its last one.
    amounts = np.array(
        [[parts.amounts for parts in (*own, *[own[-1]] * (most - len(own)))] for own in stages]
    )
    each = np.arange(len(amounts))

    def forecast(log_rates: Floats) -> tuple[Floats, Floats]:
        sizes = amounts * np.exp(log_rates)
        totals = sizes.sum(axis=2)
        worst = totals.argmax(axis=1)
        total = totals[each, worst]
        return np.log(total), sizes[each, worst] / total[:, None]

    return forecast

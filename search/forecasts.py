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

__all__ = ["MemoryForecast", "TimeForecast", "memory_forecast", "time_forecast"]


def time_forecast(parts: Sequence[TimeParts]) -> TimeForecast:
    """Return the forecast of steps whose parts are all known, as `TimeParts.total` sums them."""
    return TimeForecast(parts)


def memory_forecast(stages: Sequence[Sequence[MemoryParts]]) -> MemoryForecast:
    """Return the forecast of the worst of each config's stages, of which it has at least one."""
    return MemoryForecast(stages)


class TimeForecast:
    """Log step times of many configs."""

    def __init__(self, parts: Sequence[TimeParts]) -> None:
        import numpy as np  # noqa: PLC0415 - `space` must start without it

        self._amounts: Floats = np.array([step.amounts for step in parts])

    def log_totals(self, log_rates: Floats) -> Floats:
        """Return the logarithm of each step's seconds."""
        return self._summed(log_rates)[0]

    def __call__(self, log_rates: Floats) -> tuple[Floats, Floats]:
        """Return the same, and its derivatives by the log rates, shape (n, rates)."""
        import numpy as np  # noqa: PLC0415 - `space` must start without it

        log_total, device, host = self._summed(log_rates)
        seconds = self._amounts * np.exp(log_rates)
        slopes = np.ones_like(seconds)
        slopes[:, DEVICE] = device[:, None]
        slopes[:, HOST] = host[:, None]
        return log_total, slopes * seconds / np.exp(log_total)[:, None]

    def _summed(self, log_rates: Floats) -> tuple[Floats, Floats, Floats]:
        """Return log totals, and their slopes over the seconds of the device and of the host."""
        import numpy as np  # noqa: PLC0415 - `space` must start without it

        amounts, rates = self._amounts, np.exp(log_rates)
        device = amounts[:, DEVICE] @ rates[DEVICE]
        host = amounts[:, HOST] @ rates[HOST]
        longer = np.maximum(device, host)
        device, host = device / longer, host / longer
        both = (device**OVERLAP_POWER + host**OVERLAP_POWER) ** (1 / OVERLAP_POWER)
        total = longer * both + amounts[:, HOST.stop :] @ rates[HOST.stop :]
        power = OVERLAP_POWER - 1
        return np.log(total), (device / both) ** power, (host / both) ** power


class MemoryForecast:
    """Log memory of configs: that of the worst of each one's stages."""

    def __init__(self, stages: Sequence[Sequence[MemoryParts]]) -> None:
        """Take over parts.

        Args:
            stages: For each config the stages that may be the worst, at least one.
        """
        import numpy as np  # noqa: PLC0415 - `space` must start without it

        most = max(map(len, stages))
        # A config with fewer stages repeats its last one.
        self._amounts: Floats = np.array(
            [[parts.amounts for parts in (*own, *[own[-1]] * (most - len(own)))] for own in stages]
        )

    def log_totals(self, log_rates: Floats) -> Floats:
        """Return the logarithm of each config's bytes."""
        import numpy as np  # noqa: PLC0415 - `space` must start without it

        return np.asarray(np.log((self._amounts @ np.exp(log_rates)).max(axis=1)))

    def __call__(
        self, log_rates: Floats, indices: NDArray[np.intp] | slice = slice(None)
    ) -> tuple[Floats, Floats]:
        """Return the same, and its derivatives by the log rates, shape (n, rates).

        Args:
            log_rates: Logarithms of the rates.
            indices: Of the configs that are asked for, n of them.
        """
        import numpy as np  # noqa: PLC0415 - `space` must start without it

        sizes = self._amounts[indices] * np.exp(log_rates)
        totals = sizes.sum(axis=2)
        each, worst = np.arange(len(totals)), totals.argmax(axis=1)
        total = totals[each, worst]
        return np.log(total), sizes[each, worst] / total[:, None]

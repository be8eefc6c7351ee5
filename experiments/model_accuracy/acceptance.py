"""Which configs the memory rule would launch: failures accepted, and fitting configs rejected."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindtune.experiments.model_accuracy.evaluation import Result
from mindtune.experiments.model_accuracy.mapping import Row
from mindtune.search.forecasts import memory_forecast
from mindtune.search.memory_model import stage_memory

__all__ = ["UTILIZATION", "Acceptance", "Judged", "acceptance", "judged"]

UTILIZATION = 0.85
"""Share of the device memory that the rule allows: the study file's `memory_utilization`."""


@dataclass(frozen=True)
class Acceptance:
    """One table, over all draws of calibrating rows; shares are of configs, 0..1."""

    table: tuple[str, str]
    num_failed: int
    """Failed for memory: the table says so, or its own measured rows do (see `acceptance`)."""
    accepted: float
    accepted_uncalibrated: float
    num_fitting: int
    """Ran, within the rule's limit."""
    rejected: float
    num_above_limit: int
    """Ran with more memory than the rule allows anyone."""
    num_unexplained: int
    """Failed, no cause stated, and nothing in the table says that memory was it."""
    unexplained_accepted: float


def acceptance(results: Iterable[Result], rows: Sequence[Row]) -> list[Acceptance]:
    """Return one entry for each table in which something failed.

    Where a table does not state why configs failed, those count as failed for memory that the
    formula, fitted to all the memory that was measured in that same table, puts above the whole
    device; what is judged never sees that fit.
    """
    found = [_of_table(result, rows) for result in results]
    return [table for table in found if table is not None]


@dataclass(frozen=True)
class Judged:
    """The configs of a table that are known to fit, or to have failed."""

    forecast: Any
    """From the logarithms of the rates, as `memory_forecast` returns it."""
    sizes: Any
    """Bytes of each config's device."""
    failed: Any
    """For memory: the table says so, or its own measured rows do (see `acceptance`)."""
    ran: Any
    used: Any
    """Measured shares of the devices' memory; NaN: not measured."""
    unexplained: Any
    """Failed, no cause stated, and nothing in the table says that memory was it."""


def judged(result: Result, rows: Sequence[Row]) -> Judged | None:
    """Return what became of a table's configs; None: all of them ran."""
    own = [row for row in rows if (row.file, row.table) == result.group.table]
    known = [
        (row, parts, row.facts.cluster.device_memory)
        for row in own
        if (parts := stage_memory(row.config, row.facts)) is not None
        and row.facts.cluster.device_memory
    ]
    if all(row.status == "ok" for row, *_ in known):
        return None
    forecast = memory_forecast([parts for _, parts, _ in known])
    sizes = np.array([size for *_, size in known], dtype=float)

    at_best = np.exp(forecast(result.all_log_rates)[0]) / sizes
    status = np.array([row.status for row, *_ in known])
    stated = np.array([row.states_oom for row, *_ in known])
    failed = (status == "fail") & (at_best > 1.0) | stated
    return Judged(
        forecast=forecast,
        sizes=sizes,
        failed=failed,
        ran=status == "ok",
        used=np.array([row.memory_bytes or np.nan for row, *_ in known]) / sizes,
        unexplained=(status == "fail") & ~failed,
    )


def _of_table(result: Result, rows: Sequence[Row]) -> Acceptance | None:
    known = judged(result, rows)
    if known is None:
        return None
    failed, unexplained = known.failed, known.unexplained
    above = known.ran & (known.used > UTILIZATION)
    fitting = known.ran & ~above

    def shares(log_rates: Any) -> Any:
        """Return the predicted shares of the devices' memory."""
        return np.exp(known.forecast(np.array(log_rates))[0]) / known.sizes

    accepted = np.mean([shares(draw.log_rates) <= UTILIZATION for draw in result.draws], axis=0)
    at_first = shares(result.draws[0].prior.means) <= UTILIZATION
    return Acceptance(
        table=result.group.table,
        num_failed=int(failed.sum()),
        accepted=_mean(accepted[failed]),
        accepted_uncalibrated=_mean(at_first[failed]),
        num_fitting=int(fitting.sum()),
        rejected=_mean(1.0 - accepted[fitting]),
        num_above_limit=int(above.sum()),
        num_unexplained=int(unexplained.sum()),
        unexplained_accepted=_mean(accepted[unexplained]),
    )


def _mean(values: Any) -> float:
    return float(values.mean()) if values.size else 0.0

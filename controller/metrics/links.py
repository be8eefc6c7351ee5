"""Measures the link between ranks of this machine: do they meet under msrun, and how fast.

The ranks run this module as a program (`python -m mindtune.controller.metrics.links FILE`), which
alone imports MindSpore; whoever asks calls `measure_links`. Method: AllReduce of float32 over all
ranks in graph mode, repeated per size; the median counts. Bandwidth is that of the bus, as in
NCCL's tests: bytes x 2 (n - 1) / n / time, what each rank sends in a ring.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindtune.controller.metrics.calibrate import CalibrationError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["LinkMeasurement", "main", "measure_links"]

_SMALL_ELEMENTS = 64
_ELEMENTS = (2**18, 2**20, 2**22)
_REPEATS = 9


@dataclass(frozen=True, kw_only=True)
class LinkMeasurement:
    """AllReduce between the ranks of one machine."""

    num_ranks: int
    bytes_per_s: float
    """Bus bandwidth at the best size."""
    latency_s: float
    """Time of a 256-byte AllReduce."""
    spread: float
    """Interquartile range over median of the repeats at the best size."""
    wall_s: float
    """Time of the whole measurement, starts included."""


def measure_links(num_ranks: int = 2, *, timeout_s: float = 120.0) -> LinkMeasurement:
    """Starts ranks on the CPU target under msrun and times AllReduce; 15 to 40 seconds.

    Args:
        num_ranks: At least 2.
        timeout_s: After this every rank is ended.

    Raises:
        CalibrationError: The ranks did not meet, failed or took too long.
    """
    from mindtune.controller.trials.launcher import launch  # noqa: PLC0415 - only when measuring
    from mindtune.controller.trials.outcome import judge  # noqa: PLC0415 - as above

    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mindtune_links_") as name:
        folder = Path(name)
        file = folder / "links.json"
        command = [sys.executable, "-m", "mindtune.controller.metrics.links", str(file)]
        report = launch(
            command,
            trial_dir=folder / "run",
            startup_deadline_s=timeout_s,
            deadline_s=timeout_s,
            num_ranks=num_ranks,
            launcher="msrun",
        )
        if not file.exists():
            why = judge(report, knobs={}).record.message
            raise CalibrationError(
                f"{num_ranks} ranks under msrun gave no result in "
                f"{report.supervised.wall_s:.0f} s; exit codes {report.supervised.exit_codes}"
                f"{f'; {why}' if why else ''}."
            )
        values = json.loads(file.read_text(encoding="utf-8"))
    return LinkMeasurement(**values, wall_s=time.monotonic() - started_s)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry of each rank; rank 0 writes the figures into the file that is named."""
    import mindspore as ms  # noqa: PLC0415 - the ranks alone import it
    from mindspore import communication, ops  # noqa: PLC0415 - as above

    (file,) = sys.argv[1:] if arguments is None else arguments
    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE)
    communication.init()
    num_ranks = communication.get_group_size()
    all_reduce = ops.AllReduce()

    def reduce(values: Any) -> Any:
        return all_reduce(values)

    graph = ms.jit(reduce)
    medians, spreads = {}, {}
    for elements in (_SMALL_ELEMENTS, *_ELEMENTS):
        values = ops.ones((elements,), ms.float32)
        if float(graph(values).asnumpy()[0]) != num_ranks:  # the first call compiles
            raise CalibrationError(f"AllReduce over {num_ranks} ranks gave a wrong sum.")
        times = []
        for _ in range(_REPEATS):
            begin_s = time.perf_counter()
            graph(values).asnumpy()
            times.append(time.perf_counter() - begin_s)
        medians[elements] = statistics.median(times)
        low_s, _, high_s = statistics.quantiles(times, n=4, method="inclusive")
        spreads[elements] = (high_s - low_s) / medians[elements]
    best = max(_ELEMENTS, key=lambda elements: elements / medians[elements])
    if communication.get_rank() == 0:
        result = {
            "num_ranks": num_ranks,
            "bytes_per_s": 4 * best * 2 * (num_ranks - 1) / num_ranks / medians[best],
            "latency_s": medians[_SMALL_ELEMENTS],
            "spread": spreads[best],
        }
        partial = Path(file).with_suffix(".part")
        partial.write_text(json.dumps(result), encoding="utf-8")
        partial.replace(file)
    # A rank that leaves takes its connections with it: none may be the first to.
    graph(ops.ones((_SMALL_ELEMENTS,), ms.float32)).asnumpy()
    return 0


if __name__ == "__main__":
    sys.exit(main())

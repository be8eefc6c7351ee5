"""Measures what this machine's processor really does: a matmul peak and a copy bandwidth.

The measurement runs in a process of its own (`python -m mindtune.controller.metrics.calibrate
--json`), which alone imports MindSpore; whoever asks calls `measure_host`. Method: products of
square matrices in graph mode on the CPU target, several sizes, one product per call, the sizes in
turn so that a busy moment does not hit one of them alone; per size the median of the repeats
counts, and the peak is the best size's. A round in which other processes took cores is repeated,
at most twice, and the cores it got stand in the source. All cores that MindSpore takes are used,
so ranks that share the machine share the peak (`peaks.shared_peak`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from mindtune.controller.metrics.peaks import Peak

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["CalibrationError", "HostMeasurement", "main", "measure_host"]

_SIZES = {"float32": (512, 1024, 1536, 2048), "float16": (256, 512, 1024)}
_MAX_ROUNDS = 3
# Share of the cores below which something else ran on them (0.97 was seen on an idle machine,
# 0.5 beside one busy process on two cores).
_UNDISTURBED = 0.85
_COPY_BYTES = 128 * 2**20


class _Round(NamedTuple):
    size: int
    flops: float
    spread: float
    cores_used: float


class CalibrationError(Exception):
    """The measurement did not finish; the message says why."""


@dataclass(frozen=True, kw_only=True)
class HostMeasurement:
    """What was measured, with how."""

    peaks: tuple[Peak, ...]
    """One per precision that could be measured."""
    copy_bytes_per_s: float
    """Bytes read and written per second by one copying thread (NumPy)."""
    graph_compile_s: float | None
    """Time of the first call of the first graph; None without MindSpore."""
    cores: int
    """Cores that the measuring process might use."""
    cores_used: float
    """Cores that it got while it multiplied, in the worst precision."""
    wall_s: float
    """Time that the whole measurement took, process start included."""

    @property
    def disturbed(self) -> bool:
        """Whether other processes took cores, so that the peaks are too low."""
        return self.cores_used < _UNDISTURBED * self.cores


def measure_host(
    precisions: Sequence[str] = ("float32", "float16"),
    *,
    repeats: int = 9,
    timeout_s: float = 180.0,
) -> HostMeasurement:
    """Measures this machine in a fresh process; about 6 seconds on two idle cores.

    Args:
        precisions: Of `float32`, `float16`.
        repeats: Timed products per size and round, at least 2.
        timeout_s: After this the process is killed.

    Raises:
        CalibrationError: The process failed or took too long.
    """
    started_s = time.monotonic()
    command = [sys.executable, "-m", "mindtune.controller.metrics.calibrate", "--json"]
    command += ["--repeats", str(repeats), "--precisions", *precisions]
    # MindSpore writes folders into its working directory.
    with tempfile.TemporaryDirectory(prefix="mindtune_calibrate_") as folder:
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise CalibrationError(f"the calibration took over {timeout_s:g} s.") from error
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        raise CalibrationError(
            f"the calibration ended with code {done.returncode}: {done.stderr.strip()[-500:]}"
        )
    try:
        values = json.loads(lines[-1])
    except ValueError:
        raise CalibrationError(f"the calibration ended with {lines[-1][-200:]!r}.") from None
    return HostMeasurement(
        peaks=tuple(Peak.from_dict(peak) for peak in values["peaks"]),
        copy_bytes_per_s=values["copy_bytes_per_s"],
        graph_compile_s=values["graph_compile_s"],
        cores=values["cores"],
        cores_used=values["cores_used"],
        wall_s=time.monotonic() - started_s,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry of the measuring process; prints one JSON document as its last line."""
    parser = argparse.ArgumentParser(description="Measure this machine's matmul peak.")
    parser.add_argument("--json", action="store_true", help="print JSON (the only form)")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--precisions", nargs="+", choices=sorted(_SIZES), default=["float32"])
    options = parser.parse_args(arguments)
    print(json.dumps(_measure(options.precisions, options.repeats), allow_nan=False))
    return 0


def _measure(precisions: Sequence[str], repeats: int) -> dict[str, Any]:
    import numpy as np  # noqa: PLC0415 - the measuring process alone needs it

    from mindtune.controller.device.host import cpu_name, usable_cores  # noqa: PLC0415 - as above

    product, compile_s, engine = _matmul_engine()
    cores = max(1, int(usable_cores()))
    rng = np.random.default_rng(0)
    peaks = []
    cores_used = float(cores)
    for precision in precisions:
        if precision != "float32" and compile_s is None:
            # NumPy multiplies float16 without a matrix kernel: no peak of anything.
            continue
        calls = {}
        for size in _SIZES[precision]:
            matrix = rng.standard_normal((size, size)).astype(precision)
            calls[size] = product(matrix)
            calls[size]()  # the first call compiles
        rounds = [_time_round(calls, repeats)]
        # Another process on these cores halves the figure: give it a chance to end.
        while rounds[-1].cores_used < _UNDISTURBED * cores and len(rounds) < _MAX_ROUNDS:
            rounds.append(_time_round(calls, repeats))
        best = max(rounds, key=lambda one: one.flops)
        cores_used = min(cores_used, best.cores_used)
        peak = Peak(
            flops=best.flops,
            precision=precision,
            device=cpu_name(),
            source=(
                f"measured: {engine} matmul {best.size}x{best.size}, median of {repeats}, "
                f"{best.cores_used:.2f} of {cores} core(s) got"
            ),
            certainty="measured",
            spread=best.spread,
        )
        peaks.append(peak.to_dict())
    block = np.ones(_COPY_BYTES // 8)
    target = np.zeros_like(block)
    copy_s = []
    for _ in range(repeats):
        begin_s = time.perf_counter()
        np.copyto(target, block)
        copy_s.append(time.perf_counter() - begin_s)
    return {
        "peaks": peaks,
        "copy_bytes_per_s": 2.0 * _COPY_BYTES / statistics.median(copy_s),
        "graph_compile_s": compile_s,
        "cores": cores,
        "cores_used": cores_used,
    }


def _time_round(calls: dict[int, Callable[[], Any]], repeats: int) -> _Round:
    """Times every size `repeats` times, in turn, and returns the best size's figures."""
    times: dict[int, list[float]] = {size: [] for size in calls}
    begin_cpu_s, begin_wall_s = time.process_time(), time.perf_counter()
    for _ in range(repeats):
        for size, call in calls.items():
            begin_s = time.perf_counter()
            call()
            times[size].append(time.perf_counter() - begin_s)
    cpu_s, wall_s = time.process_time() - begin_cpu_s, time.perf_counter() - begin_wall_s
    medians = {size: statistics.median(values) for size, values in times.items()}
    size = max(medians, key=lambda n: 2.0 * n**3 / medians[n])
    quartiles = statistics.quantiles(times[size], n=4, method="inclusive")
    return _Round(
        size=size,
        flops=2.0 * size**3 / medians[size],
        spread=(quartiles[2] - quartiles[0]) / medians[size],
        cores_used=cpu_s / wall_s,
    )


def _matmul_engine() -> tuple[Callable[[Any], Callable[[], Any]], float | None, str]:
    """How to make a timed product of a matrix with itself, the compile time, and by what."""
    try:
        import mindspore as ms  # noqa: PLC0415 - the measuring process alone imports it
        from mindspore import ops  # noqa: PLC0415 - as above
    except ImportError:
        return (lambda matrix: lambda: matrix @ matrix), None, "NumPy"

    def multiply(left: Any, right: Any) -> Any:
        return ops.matmul(left, right)

    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE)

    def product(matrix: Any) -> Callable[[], Any]:
        graph, tensor = ms.jit(multiply), ms.Tensor(matrix)
        # The call returns when the product is done on this target; asnumpy makes sure of it.
        return lambda: graph(tensor, tensor).asnumpy()

    import numpy as np  # noqa: PLC0415 - as above

    begin_s = time.perf_counter()
    product(np.eye(8, dtype="float32"))()
    return product, time.perf_counter() - begin_s, f"MindSpore {ms.__version__} CPU graph"


if __name__ == "__main__":
    sys.exit(main())

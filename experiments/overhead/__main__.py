"""Command line: `python -m mindtune.experiments.overhead --out DIR`."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
from pathlib import Path

from mindtune.controller.contract import write_atomic, write_json
from mindtune.controller.errors import ConfigError
from mindtune.experiments.gpt.config import GptConfig, parse_config
from mindtune.experiments.overhead.costs import (
    CopyTimes,
    closed_window_times,
    decision_times,
    device_read_times,
    record_times,
    recorded_trace,
)
from mindtune.experiments.overhead.report import (
    CopyCosts,
    OverheadReport,
    markdown,
    quartiles,
    ratio,
)
from mindtune.experiments.overhead.signal_report import signal_costs
from mindtune.experiments.provenance import load_1m, provenance

__all__ = ["main"]

_WRONG_USE = 2
_MICRO = 1e-6
_MILLI = 1e-3


def main(arguments: list[str] | None = None) -> int:
    """Measure, write overhead.json and overhead.md, print the table; 2 means wrong use."""
    parser = argparse.ArgumentParser(
        prog="python -m mindtune.experiments.overhead",
        description="Step time with all signals and policies over MindSpore's own step, "
        "alternating in one process.",
    )
    parser.add_argument("--out", type=Path, default=Path("overhead"), help="default: overhead")
    parser.add_argument("--rounds", type=int, default=30, help="turns of each way (default: 30)")
    parser.add_argument("--block", type=int, default=6, help="steps of a turn (default: 6)")
    parser.add_argument("--layers", type=int, default=4, help="blocks of the model (default: 4)")
    parser.add_argument("--batch", type=int, default=4, help="samples a step (default: 4)")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    try:
        for name in ("rounds", "block", "layers", "batch"):
            _require_positive(name, getattr(options, name))
        config = _config(options.layers, options.batch)
        out = options.out.resolve()
        text = _measure(config, rounds=options.rounds, block=options.block, out=out)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return _WRONG_USE
    print(text)
    return 0


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"--{name} must be 1 or more, but got {value}.")


def _measure(config: GptConfig, *, rounds: int, block: int, out: Path) -> str:
    """Measure and write the report; return its tables."""
    from mindtune.experiments.overhead.measure import step_times  # noqa: PLC0415 - MindSpore

    before = load_1m()
    with tempfile.TemporaryDirectory(prefix="mindtune_overhead_") as folder:
        scratch = Path(folder)
        back = Path.cwd()
        # MindSpore leaves its own folders in the working directory.
        os.chdir(scratch)
        try:
            measured = step_times(
                config, rounds=rounds, block=block, records=scratch / "runs", tell=_tell
            )
            trace = recorded_trace(measured.signals)
            rows, lines = record_times(trace, scratch / "records")
            closed = closed_window_times(scratch / "records")
        finally:
            os.chdir(back)
    times = measured.times
    report = OverheadReport(
        rounds=rounds,
        block=block,
        tokens_per_step=config.training.micro_batch_size * config.model.seq_length,
        parameters=measured.num_parameters,
        load_1m=(before, load_1m()),
        actions=measured.num_actions,
        step_time_s={
            name: quartiles([time_s for turn in turns for time_s in turn])
            for name, turns in times.items()
        },
        over_bare={
            name: ratio(turns, times["bare"]) for name, turns in times.items() if name != "bare"
        },
        over_checked={
            name: ratio(turns, times["checked"])
            for name, turns in times.items()
            if name != "checked"
        },
        decision_us=quartiles(decision_times(trace), unit=_MICRO),
        signal_row_us=quartiles(rows, unit=_MICRO),
        decision_record_us=quartiles(lines, unit=_MICRO),
        device_read_us=quartiles(device_read_times(), unit=_MICRO),
        signals=signal_costs(measured.signal_times, measured.added_s),
        profiler_closed_us=quartiles(closed, unit=_MICRO),
        copies=_copy_costs(measured.copies),
        measured=provenance(),
    )
    write_json(out / OverheadReport.FILE, report)
    text = markdown(report)
    write_atomic(out / "overhead.md", text)
    return text


def _copy_costs(times: CopyTimes) -> CopyCosts:
    costs = {
        f"{place}_{what}_ms": quartiles(seconds, unit=_MILLI)
        for place, pair in (("memory", times.memory), ("disk", times.disk))
        for what, seconds in zip(("copy", "return"), pair, strict=True)
    }
    return CopyCosts(num_bytes=times.num_bytes, **costs)


def _config(layers: int, batch: int) -> GptConfig:
    return parse_config(
        {
            "model": {"num_layers": layers},
            "training": {
                "global_batch_size": batch,
                "micro_batch_size": batch,
                "recompute": "none",
                "lr_schedule": "float",
                "warmup": 0,
                "learning_rate": 1e-4,
            },
        }
    )


def _tell(line: str) -> None:
    sys.stderr.write(f"{line}\n")


if __name__ == "__main__":
    sys.exit(main())

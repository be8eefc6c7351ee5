"""Command line of the workload: `python -m mindtune.experiments.gpt --config CONFIG.yaml`."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from pathlib import Path

from mindtune.controller.errors import ConfigError
from mindtune.controller.trials.worker import TrialContext, reporting
from mindtune.experiments.gpt.config import load_config
from mindtune.experiments.gpt.launch import check_world_size, rank_from_env
from mindtune.policies.errors import PolicyError
from mindtune.search.errors import SearchError

__all__ = ["main"]

_WRONG_USE = 2


def main(arguments: list[str] | None = None) -> int:
    """Train as the config says; return the exit code (0 done, 2 wrong config)."""
    parser = argparse.ArgumentParser(
        prog="python -m mindtune.experiments.gpt",
        description="Train a byte-level GPT on the Python standard library's source. "
        "Launch several ranks with msrun.",
    )
    parser.add_argument("--config", type=Path, required=True, help="YAML file; see base.yaml")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        context = TrialContext.from_env()
        with (
            contextlib.nullcontext()
            if context is None
            else reporting(context, rank=rank_from_env())
        ):
            config = load_config(options.config)
            check_world_size(config.parallel)
            # MindSpore takes seconds to import: a wrong config is told before.
            from mindtune.experiments.gpt.train import train  # noqa: PLC0415

            train(config, context)
    except (ConfigError, PolicyError, SearchError) as error:
        sys.stderr.write(f"error: {error}\n")
        return _WRONG_USE
    return 0


if __name__ == "__main__":
    sys.exit(main())

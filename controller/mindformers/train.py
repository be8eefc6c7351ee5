"""Starts a training: `python -m mindtune.controller.mindformers.train --config train.yaml`.

The few lines of MindFormers' own `run_mindformer.py` that train, which its wheel does not have.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as the YAML says; what MindFormers raises goes on to the caller."""
    parser = argparse.ArgumentParser(prog="mindtune.controller.mindformers.train")
    parser.add_argument("--config", required=True, help="MindFormers YAML")
    config_path = parser.parse_args(arguments).config

    from mindformers import MindFormerConfig, Trainer, build_context  # noqa: PLC0415 - heavy

    config = MindFormerConfig(config_path)
    build_context(config)
    Trainer(config).train()
    return 0


if __name__ == "__main__":
    sys.exit(main())

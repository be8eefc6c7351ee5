"""The command line."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Entry point of the console script."""
    from mindtune.controller.cli.app import run

    run()

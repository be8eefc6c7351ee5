"""`python -m mindtune.controller.cli`: the command line where no script is installed."""

from __future__ import annotations

from mindtune.controller.cli import main

main()

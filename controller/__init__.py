"""The body: everything that touches MindSpore, files, processes and the clock.

`TrainStep`, `TuneCallback` and `tune_loop` are loaded on first use, so that the command line
starts without importing MindSpore.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mindtune.controller.live.callback import TuneCallback
    from mindtune.controller.live.loop import tune_loop
    from mindtune.controller.live.train_step import TrainStep

__all__ = ["TrainStep", "TuneCallback", "tune_loop"]

_HOMES = {
    "TrainStep": "mindtune.controller.live.train_step",
    "TuneCallback": "mindtune.controller.live.callback",
    "tune_loop": "mindtune.controller.live.loop",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its home on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib  # noqa: PLC0415

    return getattr(importlib.import_module(_HOMES[name]), name)

"""What `auto_register: mindtune_callback.TuneCallback` loads; MindFormers runs a copy of it."""

from mindtune.controller.mindformers.callback import TuneCallback

__all__ = ["TuneCallback"]

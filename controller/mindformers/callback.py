"""`TuneCallback` for MindFormers' `callbacks`: what its trainer knows of itself comes along."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindtune.controller.live.callback import TuneCallback as PlainCallback
from mindtune.controller.mindformers.effective import (
    TrainerFacts,
    effective_knobs,
    trainer_facts,
)

__all__ = ["TuneCallback"]


class TuneCallback(PlainCallback):
    """The controller as an entry of MindFormers' `callbacks`.

        - type: TuneCallback
          auto_register: mindtune_callback.TuneCallback
          config: train.yaml          # with a `mindtune:` block; not needed under `mindtune run`

    The global batch is the trainer's own, so that tokens count right where ranks read the whole
    batch, or where a sink hides the batches; and the knobs that acted are read back.

    Args:
        config: As of `mindtune.controller.TuneCallback`.

    Raises:
        ConfigError, PolicyError: As there.
    """

    def __init__(self, config: str | Path | Mapping[str, Any] | None = None) -> None:
        super().__init__(config, effective=self._effective_knobs)
        self._facts: TrainerFacts | None = None
        self._network: Any = None

    def on_train_begin(self, run_context: Any) -> None:
        """Ask the trainer what it settled, and start watching."""
        params = run_context.original_args()
        self._network = params.train_network
        self._facts = trainer_facts(params.get("list_callback"), self._network)
        if self._facts is not None:
            self._workload.global_batch_size = self._facts.global_batch_size
            self._workload.tokens_per_sample = self._facts.seq_length
        super().on_train_begin(run_context)

    def _effective_knobs(self) -> Mapping[str, Any]:
        return {} if self._facts is None else effective_knobs(self._facts, self._network)

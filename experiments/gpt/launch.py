"""What a launcher tells each process: how many ranks there are, and which one this is."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from mindtune.controller.errors import ConfigError

if TYPE_CHECKING:
    from mindtune.experiments.gpt.config import ParallelConfig

__all__ = ["check_world_size", "rank_from_env"]


def rank_from_env() -> int:
    """Return this process's rank (`RANK_ID`, which msrun sets); 0 for plain Python."""
    return int(os.environ.get("RANK_ID", "0"))


def check_world_size(parallel: ParallelConfig) -> int:
    """Return how many ranks were launched (`RANK_SIZE`, which msrun sets); 1 for plain Python.

    Raises:
        ConfigError: It is not the product of the degrees.
    """
    world_size = int(os.environ.get("RANK_SIZE", "1"))
    needed = parallel.data_parallel * parallel.model_parallel
    if world_size != needed:
        raise ConfigError(
            f"parallel.data_parallel * parallel.model_parallel = {parallel.data_parallel} * "
            f"{parallel.model_parallel} must be the number of ranks, but {world_size} "
            f"were launched; launch with msrun --worker_num {needed}, or change a degree."
        )
    return world_size

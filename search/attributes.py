"""Names of what is kept with an Optuna trial or study, for whoever writes or reads them."""

from __future__ import annotations

__all__ = [
    "CONFIG", "ENDED_ON_REQUEST", "FIXED", "GAIN", "KEY", "MEMORY", "OUTCOME", "REASON",
    "RETRY_OF", "STEP_TIME", "VALUE", "WALL", "WORKER",
]  # fmt: skip

CONFIG = "config"
"""Of a trial: its knobs, as proposed."""
ENDED_ON_REQUEST = "ended_on_request"
"""Of an interrupted trial: whether the search was asked to end; that says nothing of the trial."""
FIXED = "fixed_params"
"""Of a queued trial, among Optuna's own attributes: its parameters."""
GAIN = "expected_gain"
"""Of a trial of a study with a stop rule: what the most promising config was expected to gain when
it was proposed, in log(value), and how many trials had finished by then."""
KEY = "config_hash"
"""Of a trial: hash of its complete config."""
OUTCOME = "outcome"
"""Of a trial: its typed outcome."""
REASON = "reason"
"""Of a trial: why it was turned down, or what went wrong."""
RETRY_OF = "retry_of"
"""Of a trial: number of the interrupted trial that it repeats."""
MEMORY = "peak_memory_bytes"
"""Of a trial: measured peak of the worst rank; calibrates the cost model."""
STEP_TIME = "step_time_s"
"""Of a trial: median step time; calibrates the cost model."""
VALUE = "value"
"""Of a trial of a study with several objectives: the one value that configs are ranked by."""
WALL = "wall_s"
"""Of a trial: seconds that it took, start and compilation included: what a further one costs."""
WORKER = "worker"
"""Of a trial: who measures it."""

"""Two ranks that meet, exchange something and end as the first argument says."""

import sys

import mindspore as ms
import numpy as np
from mindspore import ops
from mindspore.communication import get_rank, init

from mindtune.controller.contract import TrialResult
from mindtune.controller.trials.worker import TrialContext, reporting, write_result

context = TrialContext.from_env()
ms.set_context(mode=ms.PYNATIVE_MODE)
init()
rank = get_rank()
reduce = ops.AllReduce()
with reporting(context, rank=rank):
    # Rank 1 needs eight times the memory.
    block = ops.zeros((1 << (20 + 3 * rank),), ms.float32) + 1
    total = reduce(ms.Tensor(np.array([block[0].asnumpy()], np.float32)))
    if sys.argv[1] == "raise" and rank == 1:
        raise ValueError(
            "rank 1 fails\n"
            "on purpose"
        )  # fmt: skip
    total = reduce(total)
    if rank == 0:
        write_result(context, TrialResult(outcome="ok", step_time_s=1.0, loss=float(total[0])))

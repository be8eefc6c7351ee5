"""What a person can do about a finding, one sentence per kind.

The findings themselves say what was seen; where a policy stops a run, its diagnosis is more
precise than these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from mindtune.policies.findings import FindingKind

__all__ = ["REMEDIES"]

REMEDIES: Final[Mapping[FindingKind, str]] = {
    FindingKind.NON_FINITE_LOSS: "if it stays, go back to a checkpoint from before it and pass "
    "over the data since then; look for a division, log or sqrt of zero in the loss.",
    FindingKind.NON_FINITE_GRAD: "if it stays, go back to a checkpoint from before it; with "
    "float16 train with loss scaling, or use bfloat16.",
    FindingKind.LOSS_SPIKE: "nothing if it is one; if they come back, look at the data of these "
    "steps and lower the learning rate.",
    FindingKind.GRAD_NORM_SPIKE: "nothing if it is one; if they come back, clip the gradient norm "
    "or lower the learning rate.",
    FindingKind.GRAD_NORM_VANISHING: "look for frozen or detached layers, a loss that is masked "
    "out, and gradients that fall below float16's range.",
    FindingKind.DIVERGENCE: "go back to a checkpoint from before it with a lower learning rate.",
    FindingKind.PLATEAU: "compare with an earlier run at equal samples; a lower learning rate or "
    "the end of its schedule may be due.",
    FindingKind.FROZEN_LOSS: "check that updates are applied and that the weights are finite; a "
    "loss of ln(vocabulary size) means uniform guesses.",
    FindingKind.OVERFLOW: "nothing if it is rare: the loss scale finds its place.",
    FindingKind.OVERFLOW_STORM: "if it goes on, lower the initial loss scale, and keep "
    "normalisation, softmax and loss in float32.",
    FindingKind.OVERFLOW_WITHOUT_EFFECT: "use a dynamic loss scale that skips overflowed updates, "
    "or mindtune's TrainStep.",
    FindingKind.LOSS_SCALE_FLOOR: "the loss scale cannot fall further: look for non-finite "
    "weights or data, or train in bfloat16.",
    FindingKind.LOSS_SCALE_RUNAWAY: "bound the loss scale; a scale that grows without overflow "
    "ends in infinity.",
    FindingKind.LEVEL_SHIFT: "check that it was meant: a new batch size, schedule or data set; "
    "otherwise go back to before it.",
    FindingKind.PERIODIC_SPIKES: "look for what has this period: an epoch, a data shard, a "
    "checkpoint, an evaluation.",
    FindingKind.DATA_STALL: "raise the number of data workers or the prefetch size, or cache what "
    "is read.",
    FindingKind.LOW_UTILIZATION: "raise the batch per device, or look at what the host does "
    "between steps.",
    FindingKind.MEMORY_PRESSURE: "turn on recompute or offload, or halve the micro-batch before "
    "the device runs out.",
    FindingKind.STEP_TIME_SPIKE: "nothing if it is one; if they come back, look at the network, "
    "the storage, and other jobs on these machines.",
    FindingKind.STRAGGLER: "look at the device, clock and network of that rank; replace its node "
    "if it stays slow.",
    FindingKind.HANG: "look at the stacks in the run's folder for where it waits; end the run and "
    "start it again from its last checkpoint.",
    FindingKind.MFU_INVALID: "correct peak_flops or the model's shape: no training is faster than "
    "its device.",
    FindingKind.CLIP_SATURATION: "raise clip_norm or lower the learning rate: clipping acts as a "
    "hidden learning rate.",
    FindingKind.KNOB_INEFFECTIVE: "train with mindtune's TrainStep, or switch the policy off: the "
    "program does not obey it.",
    FindingKind.HIDDEN_STEPS: "train with dataset_sink_mode=False or sink_size=1.",
    FindingKind.NO_TRAINABLE_PARAMETERS: "check requires_grad and what the optimizer was given.",
}

"""How the outputs of foreign training steps are meant; nothing is trained."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.mindspore

SCRIPT = """
import json, sys
import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore.nn.wrap.cell_wrapper import GradAccumulationCell
from mindtune.controller.live.foreign_outputs import conventions_of, decode, number
from mindtune.controller.live.foreign import ForeignStep
from mindtune.controller.live.learning_rate import has_learning_rate
from mindtune.controller.live.ranks import JobRank, has_loss

class Step(nn.Cell):
    def __init__(self, network, **attributes):
        super().__init__()
        self.network = network
        for name, value in attributes.items():
            setattr(self, name, value)

class Clip(nn.Cell):
    def __init__(self):
        super().__init__()
        self.clip_norm = Tensor([2.5], ms.float32)

def meant(network, **attributes):
    found = conventions_of(Step(network, **attributes))
    return [found.num_losses, repr(found.clip_norm), repr(found.skip_threshold), found.scales_loss]

class PipelineCellWithMultiOutputs(nn.Cell):
    def __init__(self, micro_size):
        super().__init__()
        self.micro_size = micro_size

dense = nn.Dense(2, 2)
fixed = lambda value: Parameter(Tensor(value, ms.float32), name="scale_sense")
skipping = {"use_skip_data_by_global_norm": True, "global_norm_spike_threshold": 3.0}
conventions = conventions_of(Step(nn.MicroBatchInterleaved(dense, 2), scale_sense=fixed(8.0), **skipping))
outputs = lambda norm, overflow=False: (
    Tensor([6.0], ms.float32), Tensor(overflow), Tensor(8.0), Tensor(0.5), Tensor([norm], ms.float32))
odd = [None, {}, "text", (), ({}, 1, 2), object(), [None] * 5, Tensor(np.zeros((0,), np.float32)),
       Tensor(3.0, ms.bfloat16), Tensor([1, 3], ms.int32), (Tensor(2.0), Tensor(9.0)), np.float32(4.0)]

class NotAnOptimizer:
    learning_rate = "0.1"

def stage_loss(stages, rank):
    # What the step of a rank of four is taken to lose, whatever it returns.
    ms.set_auto_parallel_context(pipeline_stages=stages)
    found = has_loss(JobRank(rank, 4))
    ms.reset_auto_parallel_context()
    step = ForeignStep(dense, None, acts=False, data_parallel=1, job_size=4, has_loss=found)
    return step.take(Tensor(3.0)).loss

print(json.dumps({
    "plain": meant(dense),
    "interleaved": meant(nn.MicroBatchInterleaved(dense, 2)),
    "nested": meant(GradAccumulationCell(nn.MicroBatchInterleaved(dense, 2), 3)),
    "pipeline": meant(PipelineCellWithMultiOutputs(4)),
    "per_token": meant(PipelineCellWithMultiOutputs(4), calculate_per_token_loss=True),
    "clips": meant(dense, use_clip_grad=True, clip_grad_norm=Clip()),
    "no_clip": meant(dense, use_clip_grad=False, use_skip_data_by_global_norm=False),
    "skips": meant(dense, **skipping),
    "fixed_1": meant(dense, scale_sense=fixed(1.0), loss_scaling_manager=None),
    "fixed_8": meant(dense, scale_sense=fixed(8.0), loss_scaling_manager=None),
    "managed_1": meant(dense, scale_sense=fixed(1.0),
                       loss_scaling_manager=nn.DynamicLossScaleUpdateCell(1.0, 2.0, 9)),
    "read": [[repr(getattr(decode(given, conventions=conventions), name)) for name in
              ("loss", "overflow", "update_skipped", "grad_norm", "skip_threshold")]
             for given in (outputs(2.0), outputs(3.0), outputs(float("nan")), outputs(1.0, True))],
    "odd": [decode(each).loss for each in odd],
    "false_scale": decode((Tensor(1.0), False, False, None, None)).loss_scale,
    "rates": [has_learning_rate(each) for each in (
        nn.SGD(dense.trainable_params(), 0.1), nn.SGD(dense.trainable_params(), nn.CosineDecayLR(0.01, 0.1, 9)),
        ms.experimental.optim.SGD(dense.trainable_params(), 0.1), NotAnOptimizer(), None)],
    "stages": [[stage_loss(stages, rank) for rank in range(4)] for stages in (1, 2, 4)],
}))
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=tmp_path_factory.mktemp("outputs"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("step", "losses"),
    [("plain", 1), ("interleaved", 2), ("nested", 6), ("pipeline", 4), ("per_token", 1)],
)
def test_summed_losses_are_counted(seen, step, losses):
    assert seen[step] == [losses, "None", "None", True]


@pytest.mark.parametrize(
    ("step", "clip_norm", "skip_threshold", "scales_loss"),
    [
        ("clips", "2.5", "None", True),
        ("no_clip", "inf", "inf", True),
        ("skips", "None", "3.0", True),
        ("fixed_1", "None", "None", False),
        ("fixed_8", "None", "None", True),
        ("managed_1", "None", "None", True),
    ],
)
def test_thresholds_and_scales_of_a_step_are_read(
    seen, step, clip_norm, skip_threshold, scales_loss
):
    assert seen[step] == [1, clip_norm, skip_threshold, scales_loss]


def test_a_step_that_skips_above_a_norm_says_so_without_an_overflow(seen):
    assert seen["read"] == [
        ["3.0", "0.0", "0.0", "2.0", "3.0"],
        # MindFormers updates below its threshold only.
        ["3.0", "0.0", "1.0", "3.0", "3.0"],
        ["3.0", "0.0", "1.0", "nan", "3.0"],
        ["3.0", "1.0", "1.0", "1.0", "3.0"],
    ]


def test_outputs_that_are_no_numbers_are_not_measured(seen):
    assert seen["odd"] == [None, None, None, None, None, None, None, None, 3.0, 2.0, 2.0, 4.0]
    assert seen["false_scale"] is None


def test_of_a_pipeline_the_last_stage_alone_has_a_loss(seen):
    assert seen["stages"] == [[3.0] * 4, [None, None, 3.0, 3.0], [None, None, None, 3.0]]


def test_only_rates_in_a_known_form_are_reachable(seen):
    assert seen["rates"] == [True, True, True, False, False]

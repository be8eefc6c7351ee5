"""From the epochs of a training to the number of its last optimizer step; no framework loaded."""

import pytest

from mindtune.controller.contract import RunPlan, read_document
from mindtune.controller.live.plan import EpochPlan, PlanWriter


def told(folder):
    return read_document(RunPlan, folder / RunPlan.FILE).steps


def test_each_batch_is_a_step(tmp_path):
    plan = EpochPlan(tmp_path, epochs=3, batches=100, calls=0, step=0)
    plan.take(calls=1, step=1)
    assert told(tmp_path) == 300
    written = (tmp_path / RunPlan.FILE).stat().st_ino
    for call in range(2, 301):
        plan.take(calls=call, step=call)
    assert (tmp_path / RunPlan.FILE).stat().st_ino == written, "written once"
    assert read_document(RunPlan, tmp_path / RunPlan.FILE).basis == "epochs x batches = 3 x 100"


def test_more_micro_batches_per_step_make_fewer_steps(tmp_path):
    plan = EpochPlan(tmp_path, epochs=1, batches=103, calls=0, step=0)
    step = 0
    for call in range(1, 41):
        step += call % 4 == 0
        plan.take(calls=call, step=step)
        if step:
            assert told(tmp_path) == 25, "three of 103 are left over"
    # From here on eight of them: 63 are left.
    for call in range(41, 104):
        step += call % 8 == 0
        plan.take(calls=call, step=step)
    assert (step, told(tmp_path)) == (17, 17)


def test_a_loop_on_the_device_hides_steps(tmp_path):
    plan = EpochPlan(tmp_path, epochs=5, batches=20, calls=0, step=0)
    plan.take(calls=20, step=20)
    assert told(tmp_path) == 100


def test_a_resumed_run_goes_on_counting(tmp_path):
    (tmp_path / RunPlan.FILE).write_text('{"steps": 7, "basis": "an earlier segment"}')
    plan = EpochPlan(tmp_path, epochs=2, batches=50, calls=0, step=60)
    assert not (tmp_path / RunPlan.FILE).exists()
    plan.take(calls=1, step=61)
    assert told(tmp_path) == 160


@pytest.mark.parametrize(("epochs", "batches"), [(0, 5), (3, -1), (0, 0)])
def test_what_the_trainer_does_not_know_is_not_told(tmp_path, epochs, batches):
    EpochPlan(tmp_path, epochs=epochs, batches=batches, calls=0, step=0).take(calls=1, step=1)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path, caplog):
    (tmp_path / "run").write_text("no folder")
    plan = PlanWriter(tmp_path / "run", basis="x")
    plan.tell(5)
    plan.tell(6)
    assert caplog.text.count("so no end is told") == 1

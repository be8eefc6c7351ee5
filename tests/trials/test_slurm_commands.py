"""What srun is asked for, and what each node of a job then starts."""

import math
from pathlib import Path

import pytest

from mindtune.controller.errors import ConfigError
from mindtune.controller.trials.preflight import check_ranks
from mindtune.controller.trials.slurm import cancellation, num_nodes, srun_command
from mindtune.controller.trials.slurm_node import node_command


@pytest.mark.parametrize(
    ("num_ranks", "per_node", "nodes"),
    [(1, 8, 1), (6, 8, 1), (8, 8, 1), (16, 8, 2), (64, 8, 8), (64, None, 1)],
)
def test_a_node_has_at_most_its_devices(num_ranks, per_node, nodes):
    assert num_nodes(num_ranks, per_node) == nodes


def srun(num_ranks, per_node, *, time_limit_s=600.0, **environ):
    return srun_command(
        ["/bin/train"], num_ranks=num_ranks, ranks_per_node=per_node, rank_dir=Path("/t%/ranks"),
        port=20001, cluster_timeout_s=300, job_name="mindtune_1", time_limit_s=time_limit_s,
        device="Ascend910B", environ=environ,
    )  # fmt: skip


def test_one_task_per_node_under_a_name_and_a_limit():
    command = srun(24, 8)
    assert {"--job-name=mindtune_1", "--nodes=3", "--ntasks=3", "--ntasks-per-node=1",
            "--time=11"} <= set(command)  # fmt: skip
    assert command[-8:] == [
        "mindtune.controller.trials.slurm_node", "/t%/ranks", "24", "8", "20001", "300",
        "Ascend910B", "/bin/train",
    ]  # fmt: skip
    assert not [word for word in srun(24, 8, time_limit_s=math.inf) if word.startswith("--time")]


def test_a_single_rank_needs_no_msrun():
    command = srun(1, 8)
    assert command[-7:] == ["/t%/ranks", "1", "8", "20001", "300", "Ascend910B", "/bin/train"]
    alone = node_command(
        ["/bin/train"], num_ranks=1, ranks_per_node=8, node=0, master="", rank_dir=Path("/t"),
        port=1, cluster_timeout_s=1,
    )  # fmt: skip
    assert alone[-3:] == ["mindtune.controller.trials.rank_process", "/t", "/bin/train"]
    # srun would take a single percent sign for a place to fill in.
    assert "--output=/t%%/ranks/worker_0.log" in command


def test_inside_an_allocation_a_trial_is_a_step_with_the_cores_that_were_asked_for():
    def options(**environ):
        words = srun(24, 8, **environ)
        return {word for word in words if word.startswith(("--overlap", "--cpus", "--time"))}

    assert options() == {"--time=11"}
    job = {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "24"}
    assert options(**job) == {"--cpus-per-task=24"}
    assert options(**job, SRUN_CPUS_PER_TASK="12") == set()  # srun reads it itself
    # A search that is itself a step holds what its own steps would wait for.
    assert options(**job, SLURM_STEP_ID="0") == {"--cpus-per-task=24", "--overlap"}


@pytest.mark.parametrize(("num_ranks", "local"), [(24, 8), (6, 6)])
def test_every_node_has_as_many_ranks_so_that_their_numbers_follow(num_ranks, local):
    flags = [
        {
            word
            for word in node_command(
                ["/bin/train"], num_ranks=num_ranks, ranks_per_node=8, node=node, master="first",
                rank_dir=Path("/t"), port=20001, cluster_timeout_s=300,
            )
            if word.startswith(("--worker", "--local", "--master", "--node"))
        }
        for node in range(num_ranks // local)
    ]  # fmt: skip
    common = {f"--worker_num={num_ranks}", "--master_addr=first", "--master_port=20001"}
    common.add(f"--local_worker_num={local}")
    # Alone, a node needs no number.
    numbers = [set()] if len(flags) == 1 else [{f"--node_rank={n}"} for n in range(len(flags))]
    assert flags == [common | number for number in numbers]


def test_an_uneven_last_node_is_refused_with_what_fits():
    check_ranks("slurm", 12, None)
    check_ranks("slurm", 6, 8)
    check_ranks("slurm", 16, 8)
    check_ranks("none", 12, 8)  # started by the user's own command
    with pytest.raises(
        ConfigError, match="multiple of devices_per_node = 8.*multiply to 12; use 8 or 16 ranks"
    ):
        check_ranks("slurm", 12, 8)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-30T10:00:00 ***", ...),
        ("slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-30T10:00:00 DUE TO PREEMPTION ***", ...),
        ("slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-30T10:00:00 DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***", ...),
        ("slurmstepd-n1: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-30T10:00:00 ***", ...),
        ("srun: error: Node failure on n1", ...),
        ("srun: Force Terminated job 7", ...),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.", ""),
        ("srun: error: n1: task 0: Exited with exit code 1", ""),
        ("print('*** JOB 7 CANCELLED AT noon ***')", ""),
    ],
)  # fmt: skip
def test_who_ended_a_job_is_told_by_slurm_s_own_line(text, said):
    assert cancellation(f"before\n{text}\nafter\n") == (text if said is ... else said)

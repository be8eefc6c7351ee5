"""Trials through Slurm, in a cluster of one node that the tests start themselves."""

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from mindtune.controller.device.hardware import describe_hardware
from mindtune.controller.errors import ConfigError
from mindtune.controller.trials import study_opening
from mindtune.controller.trials.launcher import launch
from mindtune.controller.trials.outcome import record_outcome
from mindtune.controller.trials.progress import StudyNote
from mindtune.controller.trials.slurm import cancel_job
from mindtune.controller.trials.study_runner import run_study

pytestmark = pytest.mark.slurm

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket
CredType=cred/munge
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1
ReturnToService=2
MpiDefault=none
KillWait=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
DAEMONS = ("munged", "slurmctld", "slurmd")


def squeue():
    done = subprocess.run(["squeue", "--noheader"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for probe in sockets:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in sockets]
    for probe in sockets:
        probe.close()
    return ports


@pytest.fixture(scope="module")
def cluster(wait_for):
    """Return the environment of a cluster of one node, started for these tests."""
    paths = {name: shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") for name in DAEMONS}
    if not all(paths.values()) or os.getuid() != 0:
        pytest.skip("needs slurmctld, slurmd and munged, and root to start them")
    root = Path(tempfile.mkdtemp(prefix="mindtune_slurm_"))
    for name in ("state", "spool"):
        (root / name).mkdir()
    (root / "key").write_bytes(os.urandom(128))
    (root / "key").chmod(0o600)
    text = CONF.format(
        host=socket.gethostname(), root=root, ports=free_ports(2), cores=os.cpu_count()
    )
    (root / "slurm.conf").write_text(text)
    commands = (
        [paths["munged"], "--foreground", "--force", f"--socket={root / 'munge.socket'}",
         f"--key-file={root / 'key'}", f"--log-file={root / 'munged.log'}",
         f"--pid-file={root / 'munged.pid'}", f"--seed-file={root / 'seed'}"],
        [paths["slurmctld"], "-D"],
        [paths["slurmd"], "-D", "-N", socket.gethostname()],
    )  # fmt: skip
    environment = {**os.environ, "SLURM_CONF": str(root / "slurm.conf")}
    daemons = []
    try:
        for command in commands:
            daemons.append(
                subprocess.Popen(
                    command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )
            )
            wait_for((root / "munge.socket").exists)
        wait_for(
            lambda: b"idle" in subprocess.run(["sinfo"], env=environment, capture_output=True,
                                              check=False).stdout
        )  # fmt: skip
        yield {"SLURM_CONF": str(root / "slurm.conf")}
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(10)
        shutil.rmtree(root)


@pytest.fixture
def run(cluster, wait_for, monkeypatch, tmp_path):
    """Return what runs a program as a trial through Slurm."""
    for name, value in cluster.items():
        monkeypatch.setenv(name, value)

    def run(source, *, startup=20.0, deadline=20.0, **options):
        script = tmp_path / "a program.py"
        script.write_text(textwrap.dedent(source))
        report = launch(
            [sys.executable, str(script)], trial_dir=tmp_path / "100% trial", launcher="slurm",
            startup_deadline_s=startup, deadline_s=deadline, **options,
        )  # fmt: skip
        return record_outcome(report, knobs={})

    yield run
    wait_for(lambda: not squeue())


def test_a_program_runs_in_a_job_and_its_result_and_output_come_back(run, tmp_path):
    outcome = run(
        """
        import json, os
        print("hello from", os.environ["SLURM_JOB_NAME"])
        with open("result.json", "w") as file:
            json.dump({"outcome": "ok", "step_time_s": [1.0], "message": os.getcwd()}, file)
        """
    )
    record = outcome.record
    assert (record.outcome, record.exit_codes["rank0"]) == ("ok", 0)
    assert record.message == str(tmp_path / "100% trial")
    log = (tmp_path / "100% trial" / "ranks" / "worker_0.log").read_text()
    assert log.startswith("hello from mindtune_")
    assert record.peak_memory_bytes > 5_000_000  # of the rank, not of srun


@pytest.mark.parametrize(
    ("source", "outcome", "message"),
    [
        ("raise RuntimeError('no flux')", "crash", "RuntimeError: no flux (exit code 1)"),
        ("raise MemoryError('out of memory')", "oom", "out of memory"),
        ("import os; os.kill(os.getpid(), 9)", "crash", "killed by SIGKILL"),
    ],
)
def test_how_a_job_failed_is_told(run, source, outcome, message):
    record = run(source).record
    assert record.outcome == outcome
    assert message in record.message


def test_a_job_that_slurm_refuses_is_a_crash_with_its_words(run, monkeypatch):
    monkeypatch.setenv("SLURM_PARTITION", "nowhere")
    record = run("pass").record
    assert record.outcome == "crash"
    assert "srun: error: invalid partition specified: nowhere" in record.message


def test_a_deadline_ends_the_job(run, wait_for, tmp_path):
    record = run(
        """
        import os, time
        open("pid", "w").write(str(os.getpid()))
        time.sleep(600)
        """,
        startup=4.0,
    ).record
    assert record.outcome == "timeout"
    assert 4.0 <= record.wall_s < 15.0
    pid = int((tmp_path / "100% trial" / "pid").read_text())
    wait_for(lambda: not Path(f"/proc/{pid}").exists())


def test_a_job_that_somebody_cancels_is_interrupted(run):
    record = run(
        """
        import os, subprocess, time
        subprocess.run(["scancel", os.environ["SLURM_JOB_ID"]])
        time.sleep(600)
        """
    ).record
    assert record.outcome == "interrupted"
    assert "CANCELLED AT" in record.message


def test_a_job_whose_srun_died_does_not_run_on(run, wait_for, tmp_path):
    killed = []

    def kill():
        wait_for((tmp_path / "100% trial" / "started").exists)
        for process in psutil.process_iter(["name", "cmdline"]):
            if process.info["name"] == "srun" and str(tmp_path / "a program.py") in (
                process.info["cmdline"] or ()
            ):
                process.kill()
                killed.append(process.pid)

    killer = threading.Thread(target=kill)
    killer.start()
    record = run("import time; open('started', 'w'); time.sleep(600)").record
    killer.join()
    assert killed
    assert record.outcome == "crash"
    wait_for(lambda: not squeue(), 15)


def test_waiting_in_the_queue_is_not_the_trial_s_time(run, tmp_path):
    subprocess.run(
        ["sbatch", "--exclusive", "--output=/dev/null", "--wrap", "sleep 8"],
        check=True, capture_output=True,
    )  # fmt: skip
    asked = time.time()
    record = run(
        """
        import json
        with open("result.json", "w") as file:
            json.dump({"outcome": "ok", "step_time_s": [1.0]}, file)
        """,
        startup=6.0,
    ).record
    ended = time.time()
    files = (tmp_path / "100% trial" / "ranks").glob("begun.*")
    begun = min(file.stat().st_mtime for file in files)
    assert record.outcome == "ok"
    assert begun - asked > 4.0, "the job before held the node"
    assert record.wall_s < ended - begun + 0.5


def test_the_job_ends_with_the_process_that_started_it(cluster, run, wait_for, tmp_path):
    source = f"""
from pathlib import Path
from mindtune.controller.trials.launcher import launch
launch(["sleep", "600"], trial_dir=Path({str(tmp_path / "trial")!r}), startup_deadline_s=600,
       deadline_s=600, launcher="slurm")
"""
    launcher = subprocess.Popen([sys.executable, "-c", source])
    wait_for((tmp_path / "trial" / "ranks" / "begun.rank0").exists)
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    wait_for(lambda: not squeue(), 10)


def test_a_job_is_cancelled_by_name_and_so_is_a_step_inside_a_job(run, wait_for, monkeypatch):
    job = subprocess.Popen(["srun", "--job-name=mine", "sleep", "600"], stderr=subprocess.DEVNULL)
    wait_for(lambda: " R " in squeue())
    cancel_job("yours")
    assert squeue()
    cancel_job("mine")
    wait_for(lambda: not squeue())
    job.wait(10)
    step = "srun --overlap --job-name=inner sleep 600 & srun --overlap --job-name=other sleep 600"
    outer = subprocess.run(
        ["sbatch", "--parsable", "--output=/dev/null", "--wrap", step],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    number = outer.stdout.strip()

    def steps():
        return subprocess.run(["squeue", "-hs", "-o", "%j"], capture_output=True, text=True,
                              check=True).stdout.split()  # fmt: skip

    wait_for(lambda: {"inner", "other"} <= set(steps()))
    monkeypatch.setenv("SLURM_JOB_ID", number)
    cancel_job("inner")
    wait_for(lambda: "inner" not in steps())
    assert "other" in steps()
    subprocess.run(["scancel", number], check=True)


def test_a_study_measures_its_configs_through_slurm(run, tiny, monkeypatch):
    tiny.write(trial={"repeats": 1, "launcher": "slurm"}, study={"trials": 2})
    node = describe_hardware("cpu")
    monkeypatch.setattr(study_opening, "describe_hardware", lambda _: "a login node")
    summary = run_study(tiny.study_file, tiny.out).summary
    assert summary.hardware == tiny.record(1)["hardware"] == node
    assert [trial.outcome for trial in summary.trials] == ["ok", "ok"]
    assert summary.trial(1).value == pytest.approx(3.25)
    assert tiny.record(1)["exit_codes"]["rank0"] == 0


def test_a_search_that_is_a_step_of_an_allocation_takes_steps_of_it(run, tiny, wait_for):
    tiny.write(trial={"repeats": 1, "launcher": "slurm"}, study={"trials": 1})
    search = shlex.join([sys.executable, "-m", "mindtune.controller.cli", "search",
                         str(tiny.study_file), "--out", str(tiny.out)])  # fmt: skip
    log = tiny.folder / "job.log"
    job = subprocess.run(
        ["sbatch", "--parsable", f"--output={log}", "--cpus-per-task=1", "--time=5", "--wrap",
         f"srun {search}"],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    try:
        wait_for(lambda: job not in squeue(), 120)
    finally:
        subprocess.run(["scancel", job], check=True)
    assert (tiny.out / "best_config.yaml").exists(), log.read_text()
    assert tiny.record(0)["outcome"] == "ok"


def test_a_queue_that_outlasts_the_time_budget_ends_the_search_and_is_told_of(run, tiny):
    tiny.write(trial={"repeats": 1, "launcher": "slurm"}, study={"time_budget": "7s"})
    job = subprocess.run(
        ["sbatch", "--parsable", "--exclusive", "--output=/dev/null", "--wrap", "sleep 600"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    notes = []
    try:
        result = run_study(tiny.study_file, tiny.out, on_event=notes.append)
    finally:
        subprocess.run(["scancel", job.stdout.strip()], check=True)
    said = [note.message for note in notes if isinstance(note, StudyNote)]
    assert said[0] == "trial 0 waits in Slurm's queue"
    assert said[-1] == "the search is over: the time budget of 7 s is used up"
    assert result.best_config is None
    assert not tiny.log()


@pytest.mark.mindspore
@pytest.mark.msrun
def test_ranks_meet_under_msrun_inside_a_job(run, tmp_path):
    outcome = run(
        """
        import json, os
        import numpy as np
        import mindspore as ms
        from mindspore import communication, ops

        communication.init()
        rank = communication.get_rank()
        total = ops.AllReduce()(ms.Tensor(np.array([rank + 1.0], np.float32))).asnumpy()
        message = f"{communication.get_group_size()} ranks, sum {total[0]:g}, job {os.environ['SLURM_JOB_NAME']}"
        name = "result.json" if rank == 0 else f"result.rank{rank}.json"
        with open(os.path.join(os.environ["MINDTUNE_TRIAL_DIR"], name), "w") as file:
            json.dump({"outcome": "ok", "step_time_s": [1.0], "message": message}, file)
        """,
        num_ranks=2, ranks_per_node=8, startup=180.0, deadline=60.0,
    )  # fmt: skip
    record = outcome.record
    assert (record.outcome, record.exit_codes["rank0"], record.exit_codes["rank1"]) == ("ok", 0, 0)
    assert record.message.startswith("2 ranks, sum 3, job mindtune_")
    assert (tmp_path / "100% trial" / "ranks" / "worker_1.log").exists()


def test_slurm_that_is_not_here_is_refused_before_anything_is_written(tiny, monkeypatch):
    tiny.write(trial={"launcher": "slurm"})
    monkeypatch.setenv("PATH", str(tiny.folder))
    with pytest.raises(ConfigError, match="launcher slurm needs srun and scancel on the PATH"):
        run_study(tiny.study_file, tiny.out)
    assert not tiny.out.exists()

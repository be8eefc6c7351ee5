"""Trials whose ranks run on several hosts: a network namespace with an SSH server of its own."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest

from mindtune.controller.contract import BestConfig
from mindtune.controller.errors import ConfigError
from mindtune.controller.trials import launcher, supervisors
from mindtune.controller.trials.hosts import Hosts, check_hosts
from mindtune.controller.trials.launch_lines import launch_lines
from mindtune.controller.trials.preflight import check_ranks
from mindtune.controller.trials.process_tree import marked
from mindtune.controller.trials.protocol import SupervisorReport
from mindtune.controller.trials.supervisors import merged

NODE = """
import json, os, sys
rank = os.environ["RANK_ID"]
seen = {"net": os.readlink("/proc/self/ns/net"), "knob": os.environ.get("KNOB"), "cwd": os.getcwd()}
with open(f"seen{rank}.json", "w") as file:
    json.dump(seen, file)
"""
DONE = (
    NODE
    + """
print(f"hello from rank {rank}")
if rank == "0":
    with open("result.json", "w") as file:
        json.dump({"outcome": "ok", "step_time_s": [1.0]}, file)
"""
)
WAITS = NODE + "import time; time.sleep(600)"


def tool(name):
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


class OtherHost:
    """A network namespace, with an address and an SSH server of its own."""

    def __init__(self, root):
        self.root = root
        self.space = f"mindtune{os.getpid()}"
        net = f"10.231.{os.getpid() % 250}"
        self.names = (f"{net}.1", f"{net}.2")
        here, there = f"mta{os.getpid()}", f"mtb{os.getpid()}"
        inside = f"-n {self.space}"
        self._ip(f"netns add {self.space}")
        self._ip(f"link add {here} type veth peer name {there}")
        self._ip(f"link set {there} netns {self.space}")
        for name, end, where in ((net + ".1", here, ""), (net + ".2", there, inside)):
            self._ip(f"{where} addr add {name}/24 dev {end}")
            self._ip(f"{where} link set {end} up")
        self._ip(f"{inside} link set lo up")
        for name in ("host", "user"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(root / name)]
            subprocess.run(command, check=True)
        shutil.copy(root / "user.pub", root / "authorized")
        (root / "config").write_text(
            f"Port 2222\nListenAddress {self.names[1]}\nHostKey {root}/host\nPidFile none\n"
            f"AuthorizedKeysFile {root}/authorized\nStrictModes no\nUsePAM no\n"
        )
        Path("/run/sshd").mkdir(exist_ok=True)
        self.shell = (
            "ssh", "-F", "none", "-i", str(root / "user"), "-p", "2222", "-o", "BatchMode=yes",
            "-o", "StrictHostKeyChecking=no", "-o", f"UserKnownHostsFile={root}/known",
            "-o", "LogLevel=ERROR", "-o", "ConnectTimeout=10",
        )  # fmt: skip
        self.start()

    @property
    def hosts(self):
        return Hosts(self.names, self.shell)

    def _ip(self, words):
        subprocess.run([tool("ip"), *words.split()], check=True, capture_output=True)

    def start(self):
        inside = [tool("ip"), "netns", "exec", self.space]
        command = [tool("sshd"), "-D", "-f", str(self.root / "config")]
        self.server = subprocess.Popen([*inside, *command], stderr=subprocess.DEVNULL)
        end = time.monotonic() + 20
        while subprocess.run([*self.shell, self.names[1], "true"], check=False).returncode:
            assert time.monotonic() < end, "the SSH server does not answer"
            time.sleep(0.1)

    def stop(self):
        self.server.terminate()
        self.server.wait(10)

    def end(self):
        self.stop()
        self._ip(f"netns del {self.space}")  # with both ends of the link


@pytest.fixture(scope="module")
def other_host():
    missing = [name for name in ("sshd", "ssh", "ssh-keygen", "ip") if tool(name) is None]
    if missing or os.getuid() != 0:
        pytest.skip(f"needs {', '.join(missing) or 'root'}")
    if subprocess.run(["unshare", "-n", "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs network namespaces")
    root = Path(tempfile.mkdtemp(prefix="mindtune_ssh_"))
    host = OtherHost(root)
    try:
        yield host
    finally:
        host.end()
        shutil.rmtree(root)


@pytest.fixture
def local_shell(tmp_path):
    """Return a remote shell that runs its command line on this machine."""
    script = tmp_path / "shell.sh"
    script.write_text('#!/bin/sh\nshift\ncd / && exec env -i PATH="$PATH" sh -c "$*"\n')
    script.chmod(0o755)
    return (str(script),)


@pytest.fixture
def plain_ranks(monkeypatch):
    """Start one rank per node without msrun, which needs MindSpore's seconds to start."""

    def start(command, *, rank_dir, node, **_):
        wrapper = [sys.executable, "-m", "mindtune.controller.trials.rank_process", str(rank_dir)]
        return ["env", f"RANK_ID={node}", *wrapper, *command]

    monkeypatch.setattr(launcher, "msrun_command", start)


def on_two(program, source, hosts, **options):
    return program.run(
        source, num_ranks=2, launcher="msrun", ranks_per_node=1, hosts=hosts, **options
    )


def seen(program, rank):
    return json.loads((program.trial_dir / f"seen{rank}.json").read_text())


def test_each_host_runs_its_ranks_with_the_trial_s_environment(program, local_shell, plain_ranks):
    hosts = Hosts(("127.0.0.1", "elsewhere"), local_shell)
    record = on_two(program, DONE, hosts, env={"KNOB": "a b"}).record
    assert (record.outcome, record.message) == ("ok", "")
    assert {name: record.exit_codes[name] for name in ("rank0", "rank1")} == {
        "rank0": 0,
        "rank1": 0,
    }
    for rank in (0, 1):
        assert seen(program, rank) | {"net": ""} == {
            "net": "", "knob": "a b", "cwd": str(program.trial_dir),
        }  # fmt: skip
    ranks = program.trial_dir / "ranks"
    assert (ranks / "node_1.out.log").read_text() == "hello from rank 1\n"
    assert (program.trial_dir / "stdout.log").read_text() == "hello from rank 0\n"
    assert not list(ranks.glob(".shared*"))


def test_a_rank_that_fails_on_another_host_is_told_and_ends_all(program, local_shell, plain_ranks):
    hosts = Hosts(("127.0.0.1", "elsewhere"), local_shell)
    source = (
        NODE
        + """
if rank == "1":
    raise MemoryError("out of memory over there")
import time; time.sleep(600)
"""
    )
    record = on_two(program, source, hosts).record
    assert record.outcome == "oom"
    assert record.message.startswith("rank 1: ")
    assert not marked(f"MINDTUNE_TRIAL_DIR={program.trial_dir}")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("echo 'ssh: no route to host' >&2; exit 255", "ssh: no route to host (the remote shell"),
        ("exec sh -c 'cd /nowhere'", "nowhere"),
        ("sleep 1; kill -9 $$", "the remote shell ended with code -9"),
    ],
)
def test_a_host_that_is_lost_is_no_fault_of_the_config(program, tmp_path, plain_ranks, line, said):
    script = tmp_path / "shell.sh"
    script.write_text(f"#!/bin/sh\n{line}\n")
    script.chmod(0o755)
    record = on_two(program, WAITS, Hosts(("127.0.0.1", "n7"), (str(script),))).record
    assert record.outcome == "interrupted"
    assert record.message.startswith("host n7 was lost: ")
    assert said in record.message
    assert not marked(f"MINDTUNE_TRIAL_DIR={program.trial_dir}")


def test_a_host_that_hangs_is_not_waited_for(program, tmp_path, plain_ranks, monkeypatch):
    monkeypatch.setattr(supervisors, "_LINK_GRACE_S", 0.2)
    script = tmp_path / "shell.sh"
    script.write_text("#!/bin/sh\nexec sleep 600\n")
    script.chmod(0o755)
    hosts = Hosts(("127.0.0.1", "n7"), (str(script),))
    record = on_two(program, WAITS, hosts, startup_deadline_s=1.0, stop_grace_s=0.5).record
    assert record.outcome == "interrupted"
    assert record.message == "host n7 was lost: it gave no answer when it was told to end"


def test_a_deadline_ends_the_ranks_of_all_hosts(program, local_shell, plain_ranks):
    hosts = Hosts(("127.0.0.1", "elsewhere"), local_shell)
    record = on_two(program, WAITS, hosts, startup_deadline_s=1.0).record
    assert record.outcome == "timeout"
    assert not marked(f"MINDTUNE_TRIAL_DIR={program.trial_dir}")


@pytest.mark.parametrize(
    ("how", "outcome", "cleaning"), [("stop", "pruned", 2.5), ("interrupt", "interrupted", 0)]
)
def test_a_stop_reaches_the_ranks_of_all_hosts(
    program, local_shell, plain_ranks, how, outcome, cleaning
):
    hosts = Hosts(("127.0.0.1", "elsewhere"), local_shell)
    source = (
        NODE
        + """
import signal, time
def leave(*_):
    time.sleep(int(rank) * float(os.environ["CLEANING"]))
    open(f"cleaned{rank}", "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
open(f"ready{rank}", "w").close()
time.sleep(600)
"""
    )
    ended = threading.Event()

    def should_stop():
        if not all((program.trial_dir / f"ready{rank}").exists() for rank in (0, 1)):
            return None
        if how == "stop":
            return "hopeless"
        ended.set()
        return None

    record = on_two(
        program, source, hosts, should_stop=should_stop, interrupt=ended,
        env={"CLEANING": str(cleaning)},
    ).record  # fmt: skip
    assert record.outcome == outcome
    assert all((program.trial_dir / f"cleaned{rank}").exists() for rank in (0, 1))
    assert not marked(f"MINDTUNE_TRIAL_DIR={program.trial_dir}")


def test_ranks_need_room_on_the_hosts_that_are_named():
    check_ranks("msrun", 16, 8, num_hosts=2)
    check_ranks("msrun", 4, 8, num_hosts=2)  # one of them is enough
    check_ranks("msrun", 16, None)
    with pytest.raises(ConfigError, match="multiple of devices_per_node = 8, .*use 8 or 16 ranks"):
        check_ranks("msrun", 12, 8, num_hosts=2)
    with pytest.raises(ConfigError, match="multiply to 24 and hosts names 2: name 3 machines"):
        check_ranks("msrun", 24, 8, num_hosts=2)
    with pytest.raises(ConfigError, match="multiply to 16 and hosts names 1: name 2 machines"):
        check_ranks("msrun", 16, 8)


def test_a_best_config_tells_how_msrun_is_started_on_each_node():
    best = {
        "schema": 1, "command": ["python", "a train.py", "{config}"], "launcher": "msrun",
        "devices_per_node": 2, "hosts": ["me@n0", "n1"],
        "knobs": {"data_parallel": 4, "env.HCCL_BUFFSIZE": "200"},
    }  # fmt: skip
    first, second = launch_lines(BestConfig.model_validate(best), config="tuned.yaml")
    assert first == (
        "env HCCL_BUFFSIZE=200 msrun --worker_num=4 --local_worker_num=2 --master_addr=n0 "
        "--master_port=8118 --node_rank=0 --log_dir=msrun_log --join=True "
        "--cluster_time_out=600 python 'a train.py' tuned.yaml"
    )
    assert second == first.replace("--node_rank=0", "--node_rank=1")
    one = launch_lines(BestConfig.model_validate({**best, "hosts": None, "devices_per_node": 4}))
    assert len(one) == 1
    assert "--master_addr=127.0.0.1" in one[0]
    assert "--node_rank" not in one[0]
    for other in ({"launcher": "slurm"}, {"command": ["bash", "train.sh"]}, {"knobs": {}}):
        assert not launch_lines(BestConfig.model_validate({**best, **other}))


def report(ended_by="exit", own=(), **changes):
    codes = dict(own)
    return SupervisorReport(
        ended_by=ended_by, exit_codes={"command": None, "rank0": None, "rank1": None, **codes},
        own_exits=tuple(codes), **changes,
    )  # fmt: skip


def test_reports_of_hosts_become_one():
    done = report(own={"rank0": 0, "rank1": 0}, wall_s=4.0)
    lost = report("host_lost", error="host b was lost", wall_s=5.0)
    failed = report("rank_failed", own={"rank1": 1})
    ended = report("parent_died", own={"rank1": 1}, kernel_oom_kills=1)
    assert merged([done, done], num_ranks=2).ended_by == "exit"
    # What is lost once all is done has cost nothing; before, it is why the others failed.
    assert merged([lost, done], num_ranks=2) == merged([done, done], num_ranks=2).__class__(
        **{**done.__dict__, "wall_s": 5.0}
    )
    assert merged([failed, lost], num_ranks=2).ended_by == "host_lost"
    both = merged([failed, ended], num_ranks=2)
    assert (both.ended_by, both.own_exits, both.kernel_oom_kills) == ("rank_failed", ("rank1",), 1)
    # msrun of another host may fail before it has any rank.
    early = merged([report(own={"command": 2}), report("parent_died")], num_ranks=2)
    assert (early.ended_by, early.exit_codes["command"]) == ("exit", 2)


def speaking_of(folder):
    """Return the processes whose command line names a folder: a remote shell's client is one."""
    found = psutil.process_iter(["cmdline"])
    return [p.pid for p in found if any(str(folder) in word for word in p.info["cmdline"] or ())]


def test_nothing_is_left_on_another_host_when_the_search_is_killed(other_host, tmp_path):
    trial = tmp_path / "a trial"
    program = tmp_path / "program.py"
    program.write_text(WAITS)
    source = f"""
import sys
from pathlib import Path
from mindtune.controller.trials import launcher
from mindtune.controller.trials.hosts import Hosts
def start(command, *, rank_dir, node, **_):
    wrapper = [sys.executable, "-m", "mindtune.controller.trials.rank_process", str(rank_dir)]
    return ["env", f"RANK_ID={{node}}", *wrapper, *command]
launcher.msrun_command = start
launcher.launch([sys.executable, {str(program)!r}], trial_dir=Path({str(trial)!r}),
    startup_deadline_s=600, deadline_s=600, num_ranks=2, launcher="msrun", ranks_per_node=1,
    hosts=Hosts({other_host.names!r}, {other_host.shell!r}))
"""
    search = subprocess.Popen([sys.executable, "-c", source])
    end = time.monotonic() + 60
    while not all((trial / f"seen{rank}.json").exists() for rank in (0, 1)):
        assert time.monotonic() < end
        time.sleep(0.05)
    nets = {json.loads((trial / f"seen{rank}.json").read_text())["net"] for rank in (0, 1)}
    assert len(nets) == 2, "each rank runs in a network of its own"
    mark = f"MINDTUNE_TRIAL_DIR={trial}"
    assert len(marked(mark)) >= 4
    search.send_signal(signal.SIGKILL)
    search.wait()
    end = time.monotonic() + 20  # 5 s, where the machine has time for it
    while marked(mark) or speaking_of(trial):
        assert time.monotonic() < end, "ranks are left"
        time.sleep(0.1)


def test_hosts_are_looked_at_before_a_study(other_host, tmp_path):
    check_hosts(other_host.hosts, folder=tmp_path, device="cpu")
    there, shell = other_host.names[1], other_host.shell

    def refused(hosts, match):
        with pytest.raises(ConfigError, match=match):
            check_hosts(hosts, folder=tmp_path, device="cpu")
        assert not list(tmp_path.glob(".shared*"))

    refused(
        Hosts((there, other_host.names[0]), shell), "must be this machine, .*runs the scheduler"
    )
    refused(Hosts(("127.0.0.1", there), shell), "is each machine's own")
    refused(Hosts((other_host.names[0], "nobody@" + there), shell), f"nobody@{there}.*denied")
    refused(Hosts(other_host.names, ("no_such_shell",)), "which is not on the PATH")
    # The folder is another one there, though its path is the same.
    line = shlex.join(["mount", "-t", "tmpfs", "none", str(tmp_path)])
    script = tmp_path.with_name(f"{tmp_path.name}.sh")
    script.write_text(f'#!/bin/sh\nshift\nexec unshare -m sh -c "{line} && $*"\n')
    script.chmod(0o755)
    refused(Hosts(other_host.names, (str(script),)), r"share this folder.*\.shared\.")
    facts = {"hardware": "abacus", "versions": {}}
    script.write_text(f"#!/bin/sh\necho welcome\necho '{json.dumps(facts)}'\n")
    refused(
        Hosts(other_host.names, (str(script),)), f"alike|versions of this machine.*{there} has"
    )


@pytest.mark.mindspore
@pytest.mark.msrun
def test_ranks_of_two_hosts_meet_under_msrun(program, other_host):
    source = (
        NODE
        + """
import numpy as np
import mindspore as ms
from mindspore import communication, ops

communication.init()
own = communication.get_rank()
total = ops.AllReduce()(ms.Tensor(np.array([own + 1.0], np.float32))).asnumpy()
message = f"{communication.get_group_size()} ranks, sum {total[0]:g}"
assert str(own) == rank
name = "result.json" if own == 0 else f"result.rank{own}.json"
with open(name, "w") as file:
    json.dump({"outcome": "ok", "step_time_s": [1.0], "message": message}, file)
"""
    )
    outcome = on_two(program, source, other_host.hosts, startup_deadline_s=180.0, deadline_s=60.0)
    record = outcome.record
    assert (record.outcome, record.message) == ("ok", "2 ranks, sum 3")
    assert (record.exit_codes["rank0"], record.exit_codes["rank1"]) == (0, 0)
    assert seen(program, 0)["net"] != seen(program, 1)["net"]
    schedulers = (program.trial_dir / "ranks").glob("begun.scheduler")
    assert len(list(schedulers)) == 1

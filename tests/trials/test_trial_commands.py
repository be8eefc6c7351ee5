"""A study's command becomes one that runs from a folder of its own."""

import os
import socket
import sys
from pathlib import Path

import pytest

from mindtune.controller.errors import ConfigError
from mindtune.controller.trials import commands
from mindtune.controller.trials.commands import (
    free_port,
    module_path,
    msrun_command,
    resolve_command,
    trial_environment,
)
from mindtune.controller.trials.hosts import Hosts


def test_config_interpreter_and_files_are_filled_in(tmp_path):
    base = tmp_path / "my study"
    base.mkdir()
    (base / "train.py").touch()
    (base / "data.txt").touch()
    command = ["python", "train.py", "--config={config}", "-v", "data.txt", "other", "{config}"]
    config = tmp_path / "trials" / "base.yaml"
    assert resolve_command(command, config=config, base_dir=base) == [
        sys.executable, str(base / "train.py"), f"--config={config}", "-v",
        str(base / "data.txt"), "other", str(config),
    ]  # fmt: skip


def test_a_module_needs_no_file(tmp_path):
    command = ["python", "-m", "mindtune.experiments.gpt"]
    resolved = resolve_command(command, config=tmp_path / "c.yaml", base_dir=tmp_path)
    assert resolved == [sys.executable, "-m", "mindtune.experiments.gpt"]


def test_a_missing_script_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"'train\.py'"):
        resolve_command(["python", "train.py"], config=tmp_path / "c", base_dir=tmp_path)


def test_the_environment_finds_this_interpreter_first_and_carries_the_mark():
    environment = trial_environment(
        {"OMP_NUM_THREADS": "1", "MS_SUBMODULE_LOG_v": "{PIPELINE:0}"},
        trial_dir=Path("/t r"),
        mark="MARK=17",
        base={
            "PATH": "/usr/bin",
            "OMP_NUM_THREADS": "8",
            "PYTHONUNBUFFERED": "0",
            "MINDTUNE_CONFIG": "of another run",
            "MINDTUNE_MODE": "act",
            "MINDTUNE_STORAGE": "postgresql://user:password@host/name",
            "STUDY_DATABASE": "postgresql://user:password@host/name",
        },
        # A knob is the config's own, whatever else its name stands for.
        hidden=("STUDY_DATABASE", "OMP_NUM_THREADS", "NOT_SET"),
    )
    assert environment == {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}/usr/bin",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "0",
        "MS_SUBMODULE_LOG_v": "{PIPELINE:0,PRE_ACT:1}",
        "MINDTUNE_TRIAL_DIR": "/t r",
        "MARK": "17",
    }


def test_modules_are_found_from_every_folder_where_they_were_found_from_here(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    given = {"PYTHONPATH": f"lib{os.pathsep}/opt/x{os.pathsep}"}
    meant = f"{tmp_path}/lib{os.pathsep}/opt/x{os.pathsep}{tmp_path}"
    assert module_path(given) == {"PYTHONPATH": meant}
    assert module_path({}) == module_path({"PYTHONPATH": ""}) == {}
    found = trial_environment({}, trial_dir=None, mark="MARK=17", base=given)
    assert found["PYTHONPATH"] == meant
    own = trial_environment({"PYTHONPATH": "knob"}, trial_dir=None, mark="MARK=17", base=given)
    assert own["PYTHONPATH"] == "knob"
    monkeypatch.setenv("PYTHONPATH", "lib")
    hosts = Hosts(("here", "there"), ("ssh",))
    line = hosts.command(1, ["module"], folder=tmp_path, mark=tmp_path / "mark")[-1]
    assert f"PYTHONPATH={tmp_path}/lib " in line


def test_every_process_of_msrun_is_started_through_the_wrapper():
    command = msrun_command(
        ["/bin/train", "--x"], num_ranks=4, rank_dir=Path("/t/ranks"), port=20001,
        cluster_timeout_s=0.2,
    )  # fmt: skip
    assert command[:3] == [sys.executable, "-m", "mindspore.parallel.cluster.run"]
    assert {"--worker_num=4", "--local_worker_num=4", "--master_port=20001",
            "--log_dir=/t/ranks", "--join=True", "--cluster_time_out=1"} <= set(command)  # fmt: skip
    assert command[-5:] == [
        "-m", "mindtune.controller.trials.rank_process", "/t/ranks", "/bin/train", "--x",
    ]  # fmt: skip


def test_a_port_that_is_held_is_not_given(monkeypatch):
    with socket.socket() as held, socket.socket() as other:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        other.bind(("127.0.0.1", 0))
        free = other.getsockname()[1]
        other.close()
        monkeypatch.setattr(commands, "_PORTS", [port] * 63 + [free])
        assert free_port() == free
        monkeypatch.setattr(commands, "_PORTS", [port] * 64)
        with pytest.raises(ConfigError, match="free TCP port"):
            free_port()

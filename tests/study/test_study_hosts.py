"""A study whose trials run on two hosts, one of which goes away."""

import sys

import psutil
import pytest

from mindtune.controller.contract import BestConfig, read_document
from mindtune.controller.errors import ConfigError
from mindtune.controller.trials import launcher
from mindtune.controller.trials.export import export
from mindtune.controller.trials.production import run_best_config
from mindtune.controller.trials.progress import TrialStarted
from mindtune.controller.trials.study_runner import run_study


@pytest.fixture
def project(tiny, monkeypatch):
    """A study on this machine and one that a shell of ours reaches, as long as it is not away."""
    here = [
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family.name == "AF_INET" and not address.address.startswith("127.")
    ]
    if not here:
        pytest.skip("needs an address in a network")
    shell = tiny.folder / "shell.sh"
    shell.write_text(
        f"#!/bin/sh\n[ ! -e {tiny.folder}/away ] || {{ echo no route to $1 >&2; exit 255; }}\n"
        'shift\nexec env -i PATH="$PATH" sh -c "$*"\n'
    )
    shell.chmod(0o755)

    def start(command, *, rank_dir, node, **_):
        wrapper = [sys.executable, "-m", "mindtune.controller.trials.rank_process", str(rank_dir)]
        return ["env", f"RANK_ID={node}", *wrapper, *command]

    # Without MindSpore's seconds to start; the real one is in test_several_hosts.
    monkeypatch.setattr(launcher, "msrun_command", start)
    tiny.write(
        trial={"launcher": "msrun", "hosts": [here[0], "n7"], "remote_shell": [str(shell)],
               "repeats": 1},
        cluster={"num_devices": 2, "devices_per_node": 1},
        study={"trials": 2},
        space={"micro_batch_size": [1, 2], "recompute": ["full"], "data_parallel": [2]},
    )  # fmt: skip
    tiny.away = tiny.folder / "away"
    return tiny


def test_a_host_that_is_away_ends_the_search_and_spoils_no_config(project):
    project.away.touch()
    with pytest.raises(ConfigError, match="host n7 of trial.hosts must .* no route to n7; see"):
        run_study(project.study_file, project.out)
    assert not project.out.exists()
    project.away.unlink()
    with pytest.raises(ConfigError, match="--workers must be 1 where a trial has all of"):
        run_study(project.study_file, project.out, workers=2)

    def leave(event):
        if isinstance(event, TrialStarted) and event.number == 1:
            project.away.touch()

    with pytest.raises(ConfigError, match="no route to n7"):
        run_study(project.study_file, project.out, on_event=leave)
    assert project.record(1)["outcome"] == "interrupted"
    assert project.record(1)["message"].startswith("host n7 was lost: no route to n7 (")
    project.away.unlink()
    summary = run_study(project.study_file, project.out).summary
    assert [trial.outcome for trial in summary.trials] == ["ok", "ok"]
    # The winner goes into production on the same hosts.
    best = read_document(BestConfig, project.out / "best_config.yaml")
    assert best.hosts[1] == "n7"
    assert [line.split("--node_rank=")[1][0] for line in best.launch] == ["0", "1"]
    path = project.folder / "best.yaml"
    export(project.out, out=path)
    assert run_best_config(path, project.folder / "run") == 0
    assert (project.folder / "run" / "ranks" / "exit.rank1.json").exists()
    project.away.touch()
    with pytest.raises(ConfigError, match="no route to n7"):
        run_best_config(path, project.folder / "run2")
    assert not (project.folder / "run2").exists()

"""A folder with a study of the tiny trial program, whose best config is known; a database server."""

import contextlib
import copy
import getpass
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import yaml

from mindtune.controller.errors import ConfigError
from mindtune.controller.trials.study_folder import StudyFolder
from mindtune.controller.trials.summary import read_summary

PROGRAM = Path(__file__).with_name("tiny_trial.py")

STUDY = {
    "schema": 1,
    "study": {"name": "tiny", "trials": 20, "seed": 0},
    "trial": {
        "command": ["python", "tiny_trial.py", "--config", "{config}"],
        "base_config": "base.yaml",
        "warmup_steps": 2,
        "measure_steps": 8,
        "confirm_steps": 1,
        "repeats": 2,
        "startup_deadline": "20s",
        "deadline": "20s",
    },
    "cluster": {"num_devices": 1},
    "training": {"global_batch_size": 16},
    "space": {"micro_batch_size": [1, 2, 3, 4], "recompute": ["none", "full"]},
    "overrides": {
        "training.micro_batch_size": "micro_batch_size",
        "training.recompute": {"knob": "recompute", "values": {"none": False, "full": True}},
    },
}


class Tiny:
    """The folder, with what its trials have logged."""

    def __init__(self, folder):
        self.folder = folder
        self.out = folder / "out"
        self.log_file = folder / "log.txt"

    @property
    def study_file(self):
        return self.folder / "study.yaml"

    def write(self, *, base=None, behaviour=None, **sections):
        study = copy.deepcopy(STUDY)
        for name, section in sections.items():
            if isinstance(section, dict) and name not in ("space", "overrides"):
                study.setdefault(name, {}).update(section)
            else:
                study[name] = section
        config = {
            "log": str(self.log_file),
            "behaviour": behaviour or {},
            "training": {"micro_batch_size": 1, "recompute": True},
            **(base or {}),
        }
        self.study_file.write_text(yaml.safe_dump(study, sort_keys=False), encoding="utf-8")
        (self.folder / "base.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        return self.study_file

    def log(self, kind="start"):
        """Return the logged lines of a kind, each as its words."""
        if not self.log_file.exists():
            return []
        lines = [line.split() for line in self.log_file.read_text().splitlines()]
        return [line[1:] for line in lines if line[0] == kind]

    def let_base_end(self, study, members):
        """Let a base config that behaves as `wait` end once so many processes are on the study.

        Args:
            study: returns the Optuna study; fails as long as there is none.
            members: how many, the search included.
        """
        end = time.monotonic() + 120
        while True:
            with contextlib.suppress(KeyError, ConfigError):
                if sum(name.startswith("worker:") for name in study().user_attrs) >= members:
                    break
            assert time.monotonic() < end, "the workers do not join"
            time.sleep(0.2)
        Path(f"{self.log_file}.go").touch()

    def trial_below(self, *roots):
        """Return (process of `roots`, number) of a trial that runs below it; None: there is none.

        The base's trial does not count.
        """
        ended = {line[0] for line in self.log("end")}
        for number, *_, pid in self.log():
            if number not in {*ended, "0"}:
                with contextlib.suppress(psutil.NoSuchProcess):
                    above = {process.pid for process in psutil.Process(int(pid)).parents()}
                    for root in roots:
                        if root.pid in above:
                            return root, number
        return None

    def check_complete(self, interrupted, trials):
        """Every config ended once, and only that of an interrupted trial was started twice."""
        first = [line for line in self.log() if line[1] == "0"]
        starts = [tuple(line[2:4]) for line in first]
        again = [tuple(line[2:4]) for line in first if line[0] in interrupted]
        assert sorted(starts) == sorted([*set(starts), *again])
        # A program may end just before its search is killed, which then has nothing of it.
        ended = [line for line in self.log("end") if line[1] == "0" and line[0] not in interrupted]
        ends = [tuple(line[2:4]) for line in ended]
        assert sorted(ends) == sorted(set(starts))
        summary = read_summary(StudyFolder(self.out))
        assert summary.complete
        assert len(summary.trials) == len(ends) == trials
        for trial in summary.trials:
            micro, recompute = trial.knobs["micro_batch_size"], trial.knobs["recompute"]
            seconds = 0.002 + 0.008 / micro + (0.003 if recompute == "full" else 0.0)
            # Relative to the base everywhere, whoever measured it.
            assert trial.measurements[0].value == pytest.approx(0.013 / seconds)
            assert self.record(trial.number)["outcome"] == "ok"
        assert summary.trial(0).value == 1.0
        return summary

    def record(self, number, repeat=0):
        folder = self.out / "trials" / f"{number:04d}" / f"repeat_{repeat}"
        return json.loads((folder / "trial.json").read_text())


@pytest.fixture(scope="session")
def wait_for():
    """Return what waits until a condition holds, and returns what it gave."""

    def wait_for(condition, seconds=60):
        end = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < end, "waited in vain"
            time.sleep(0.02)
        return found

    return wait_for


@pytest.fixture(scope="session")
def make_tiny():
    """Return how to make a project folder with the program in it."""

    def make(parent):
        folder = parent / "project"
        folder.mkdir()
        shutil.copy(PROGRAM, folder / "tiny_trial.py")
        return Tiny(folder)

    return make


@pytest.fixture
def tiny(make_tiny, tmp_path):
    return make_tiny(tmp_path)


def find_postgres(name):
    """Return a program of PostgreSQL; Debian keeps the server's out of the path."""
    places = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return shutil.which(name) or (str(places[-1]) if places else None)


class Postgres:
    """A database server of our own, with a password in its URL."""

    def __init__(self, root, programs, options):
        self._root, self._programs, self._options = root, programs, options
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._address = f"postgresql://tuner:open%20sesame@127.0.0.1:{self._port}/postgres"
        self.url = self._address.replace("postgresql:", "postgresql+psycopg:")

    def start(self):
        """Start the server and wait until it answers."""
        self._server = subprocess.Popen(
            [self._programs["postgres"], "-D", self._root / "data", "-k", self._root,
             "-p", str(self._port), "-c", "fsync=off", "-c", "listen_addresses=127.0.0.1"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **self._options,
        )  # fmt: skip
        end = time.monotonic() + 30
        ask = [self._programs["psql"], self._address, "-qc", "SELECT 1"]
        while subprocess.run(ask, check=False, capture_output=True).returncode:
            assert self._server.poll() is None
            assert time.monotonic() < end, "the server does not answer"
            time.sleep(0.1)

    def disconnect_all(self):
        """Cut every connection, in the middle of whatever it does."""
        cut = (
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
        )
        subprocess.run(
            [self._programs["psql"], self._address, "-qc", cut], check=True, capture_output=True
        )

    def stop(self):
        """End the server with all its connections, as a restart does."""
        self._server.send_signal(signal.SIGINT)
        self._server.wait(10)

    def end(self):
        """End the server at once, whether it runs or not."""
        self._server.send_signal(signal.SIGQUIT)
        self._server.wait(10)


@pytest.fixture(scope="session")
def postgres():
    """Return a server with an empty database."""
    programs = {name: find_postgres(name) for name in ("initdb", "postgres", "psql")}
    missing = [name for name, path in programs.items() if path is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    # PostgreSQL refuses to run as root.
    user = "nobody" if os.getuid() == 0 else getpass.getuser()
    root = Path(tempfile.mkdtemp(prefix="mindtune_postgres_"))
    try:
        (root / "password").write_text("open sesame\n")
        if os.getuid() == 0:
            for path in (root, root / "password"):
                shutil.chown(path, user)
        options = {"user": user if os.getuid() == 0 else None, "cwd": root}
        subprocess.run(
            [programs["initdb"], "-D", root / "data", "--username=tuner", "--no-sync",
             "--auth=scram-sha-256", f"--pwfile={root / 'password'}"],
            check=True, stdout=subprocess.DEVNULL, **options,
        )  # fmt: skip
        server = Postgres(root, programs, options)
        try:
            server.start()
            yield server
        finally:
            server.end()
    finally:
        shutil.rmtree(root)


@pytest.fixture(scope="session")
def postgres_url(postgres):
    """Return the URL of an empty database of a server of our own, with a password in it."""
    return postgres.url

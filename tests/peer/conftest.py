"""Starts trainings in MindFormers' environment, which cannot be this one."""

import os
from pathlib import Path

import pytest

from mindtune.controller.records import RunFolder, read_decisions, read_signals
from mindtune.experiments.mindformers_peer import launch
from mindtune.experiments.mindformers_peer.case import PeerCase

HERE = Path(__file__).parent


class Training:
    """What a training left: MindFormers' side, as witnessed, and ours, as recorded."""

    def __init__(self, folder, seen):
        self.folder = folder
        self.seen = seen
        self.records = RunFolder(folder / "run")

    @property
    def rows(self):
        return [row.observation for row in read_signals(self.records.signals)]

    @property
    def decisions(self):
        return read_decisions(self.records.decisions)

    def actions(self, *names):
        return [entry for entry in self.decisions if entry.action in names]

    def witnessed(self, name):
        return [getattr(step, name) for step in self.seen.steps]

    def recorded(self, name):
        return [getattr(row, name) for row in self.rows]


@pytest.fixture(scope="session")
def train(tmp_path_factory):
    """Return a function that runs a case; `script` is a program of this folder."""
    python = os.environ.get(launch.PYTHON_VARIABLE)
    if not python:
        pytest.skip(f"{launch.PYTHON_VARIABLE} names no Python with MindFormers: CONTRIBUTING.md")
    root = launch.import_root(tmp_path_factory.mktemp("peer") / "root")

    def run(*, script=None, arguments=(), **case):
        folder = tmp_path_factory.mktemp("training")
        program = {} if script is None else {"program": [str(HERE / script)]}
        seen = launch.run_case(
            PeerCase(**case), folder, python=python, root=root, arguments=arguments, **program
        )
        return Training(folder, seen)

    return run

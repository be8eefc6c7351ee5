"""A study in PostgreSQL that several processes measure, one of them killed, one ended by signal."""

import os
import signal
import subprocess
import sys
import threading

import optuna
import pytest
import sqlalchemy
from optuna.trial import TrialState

from mindtune.controller.errors import ConfigError
from mindtune.controller.trials import outage
from mindtune.controller.trials.crew import Crew
from mindtune.controller.trials.storage import open_storage, storage_address, storage_errors
from mindtune.search.attributes import OUTCOME, RETRY_OF

CLI = [sys.executable, "-m", "mindtune.controller.cli"]


@pytest.mark.postgres
def test_two_workers_join_by_the_database_alone_and_nothing_is_lost_or_run_twice(
    tiny, postgres_url, wait_for, monkeypatch
):
    tiny.write(
        trial={"repeats": 1, "startup_deadline": "120s"},
        study={"trials": 6, "storage": "env:STUDY_DATABASE"},
        behaviour={"1-full": "wait"},
    )
    monkeypatch.setenv("STUDY_DATABASE", postgres_url)
    environment = {**os.environ, "TINY_SLEEP": "0.1"}

    def start(command, *options):
        return subprocess.Popen(
            [*CLI, command, str(tiny.study_file), *options],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def stored():
        address = storage_address("env:STUDY_DATABASE", tiny.out)
        return optuna.load_study(storage=open_storage(address), study_name="tiny")

    # Workers may be started before the search.
    workers = [start("worker"), start("worker", "--out", str(tiny.folder / "second"))]
    search = start("search", "--out", str(tiny.out))
    try:
        tiny.let_base_end(stored, members=3)
        killed, first = wait_for(lambda: tiny.trial_below(*workers))
        killed.send_signal(signal.SIGKILL)
        other = workers[1 - workers.index(killed)]
        _, second = wait_for(lambda: tiny.trial_below(other))
        other.send_signal(signal.SIGTERM)
        said = search.communicate(timeout=60)[0]
        told = {worker: worker.communicate(timeout=20)[0] for worker in workers}
    finally:
        for process in (search, *workers):
            process.kill()
    assert search.returncode == 0, said
    assert (killed.returncode, other.returncode) == (-signal.SIGKILL, 128 + signal.SIGTERM)
    tiny.check_complete({first, second}, trials=6)
    assert f"trial {first} was interrupted and is started again" in said + told[other]
    # Who is ended by a signal gives its trial back itself.
    assert f"trial {second} was interrupted and is started again" in told[other]
    study = stored()
    trials = study.trials
    assert {trials[int(n)].user_attrs[OUTCOME] for n in (first, second)} == {"interrupted"}
    # Two may notice the same end and queue it twice; the later copy is closed as a duplicate.
    retried = {t.user_attrs[RETRY_OF] for t in trials if RETRY_OF in t.user_attrs}
    assert retried == {int(first), int(second)}
    assert TrialState.RUNNING not in {trial.state for trial in trials}
    # The password is nowhere: not in what was said, nor in any file, nor in the study.
    assert "joined study tiny in env:STUDY_DATABASE" in told[other]
    kept = [p.read_bytes() for p in tiny.folder.rglob("*") if p.is_file()]
    texts = [said, *told.values(), str(study.user_attrs), *(str(t.user_attrs) for t in trials)]
    assert not [text for text in texts if "sesame" in text]
    assert not [content for content in kept if b"sesame" in content]


@pytest.mark.postgres
def test_a_database_that_restarts_is_waited_for_and_one_that_stays_away_is_told(
    postgres, tmp_path, monkeypatch, caplog
):
    address = storage_address(postgres.url, tmp_path)
    database = open_storage(address)
    study = optuna.create_study(storage=database, study_name="outage")
    with Crew(study, "search", beat_s=0.1) as crew:
        postgres.stop()
        later = threading.Timer(1.5, postgres.start)
        later.start()
        study.set_user_attr("said", "while it was away")
        later.join()
        assert crew.others() == []
    assert study.user_attrs["said"] == "while it was away"
    assert "is away and tried again in 0.5 s" in caplog.text
    monkeypatch.setattr(outage, "_OUTAGE_S", 0.8)
    postgres.stop()
    try:
        with (
            pytest.raises(ConfigError, match="must be readable and writable"),
            storage_errors(address),
        ):
            study.set_user_attr("said", "in vain")
    finally:
        postgres.start()
    assert "sesame" not in caplog.text


@pytest.mark.postgres
def test_a_transaction_that_is_cut_in_its_middle_is_run_again(postgres, tmp_path):
    database = open_storage(storage_address(postgres.url, tmp_path))
    study = optuna.create_study(storage=database, study_name="cut")
    cuts = []

    def cut(_connection, _cursor, statement, *_):
        is_new = statement.startswith("INSERT") and statement not in cuts
        if is_new and len(cuts) < 2:
            cuts.append(statement)
            postgres.disconnect_all()

    sqlalchemy.event.listen(database.engine, "before_cursor_execute", cut)
    study.set_user_attr("said", "all the same")
    study.tell(study.ask(), 1.0)
    assert len(cuts) == 2
    assert study.user_attrs["said"] == "all the same"
    ended = [trial for trial in study.trials if trial.state == TrialState.COMPLETE]
    assert [trial.value for trial in ended] == [1.0]

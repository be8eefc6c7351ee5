"""The recorder of the exhaustive table: nothing twice, nothing lost, nothing mixed."""

import math
import statistics
from dataclasses import replace

import pytest
import yaml

from mindtune.controller.contract import TrialPlan
from mindtune.controller.errors import ConfigError
from mindtune.controller.trials.launcher import launch
from mindtune.controller.trials.outcome import judge
from mindtune.controller.trials.study_setup import load_study
from mindtune.experiments.cluster_simulator.problems import problem
from mindtune.experiments.cluster_simulator.study import write_study
from mindtune.experiments.exhaustive_table.problem import TableProblem, configs_of, load_table
from mindtune.experiments.exhaustive_table.recorder import open_recorder
from mindtune.experiments.exhaustive_table.rows import (
    MOST_OTHER_WORK,
    Row,
    append_row,
    comparable,
    read_rows,
)
from mindtune.experiments.provenance import OtherWork, provenance
from mindtune.experiments.search_quality import problems
from mindtune.experiments.search_quality.answers import answers
from mindtune.experiments.search_quality.experiment import search

KIND, SEED = "dense_8_200", 2
SPACE = {"data_parallel": 8, "model_parallel": 1, "micro_batch_size": [1, 4, 8],
         "recompute": ["none", "full"]}  # fmt: skip


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Return a study, and the table of it, recorded in two sessions."""
    folder = tmp_path_factory.mktemp("table")
    study = write_study(KIND, SEED, folder)
    content = yaml.safe_load(study.read_text())
    study.write_text(yaml.safe_dump({**content, "space": SPACE}))
    told = []
    options = {"leaders": 2, "repeats": 1, "most_other_work": 1.0, "measure_steps": 8}
    with pytest.MonkeyPatch.context() as patch:
        # Whatever else the machine does meanwhile is no matter here.
        patch.setattr(OtherWork, "share", lambda _: 0.0)
        first = open_recorder(study, folder / "out", **options)
        assert first.record(limit=2, tell=told.append) == 6
        assert len(read_rows(first.table)) == 2
        second = open_recorder(study, folder / "out", **options)
        assert second.record(tell=told.append) == 0
    assert [one.done for one in told] == list(range(1, 9))
    return study, second


def copy_of(recorded, tmp_path, rows, **changes):
    """Return the recorder with a table of other rows."""
    _, recorder = recorded
    folder = replace(recorder.folder, root=tmp_path)
    for row in rows:
        append_row(tmp_path / "table.csv", row)
    return replace(recorder, folder=folder, **changes)


def test_every_config_is_measured_once_and_the_best_again(recorded):
    _, recorder = recorded
    rows = read_rows(recorder.table)
    assert len(rows) == 6 + 2
    assert sorted(row.number for row in rows[:6]) == list(range(6))
    assert [row.number for row in rows[:6]] != list(range(6))
    fine = [row for row in rows[:6] if row.outcome == "ok"]
    best = sorted(fine, key=lambda row: -row.value)[:2]
    assert [row.number for row in rows[6:]] == [row.number for row in best]
    assert {row.repeat for row in rows[6:]} == {1}
    assert recorder.missing() == []
    assert not list(recorder.folder.root.glob("trials/*/*.unfinished_*"))
    for row in rows:
        known = problem(KIND, SEED).draw(row.config, seed=row.repeat, measure_steps=8)
        is_large = known.memory_bytes > recorder.scorer.facts.memory_limit[0]
        expected = "infeasible" if known.outcome == "ok" and is_large else known.outcome
        assert row.outcome == expected
        if row.outcome == "ok":
            assert row.step_times_s == pytest.approx(known.step_time_s, rel=1e-5)
            assert row.mfu * row.stability == pytest.approx(row.value, rel=1e-4)
            assert row.peak_memory_bytes == round(known.memory_bytes)


def test_rows_survive_the_file(recorded, tmp_path):
    _, recorder = recorded
    rows = read_rows(recorder.table)
    odd = replace(rows[0], outcome="oom", value=None, step_times_s=(), peak_memory_bytes=None,
                  message='said "no",\nand died')  # fmt: skip
    for row in (*rows, odd):
        append_row(tmp_path / "table.csv", row)
    assert read_rows(tmp_path / "table.csv")[:-1] == rows
    assert read_rows(tmp_path / "table.csv")[-1] == replace(odd, message='said "no", and died')
    assert read_rows(tmp_path / "none.csv") == []


@pytest.mark.parametrize("kept", [1, 40, -1])
def test_a_torn_last_row_is_measured_again(recorded, tmp_path, kept):
    _, recorder = recorded
    rows = read_rows(recorder.table)
    again = copy_of(recorded, tmp_path, rows[:5])
    text = again.table.read_text()
    last = text.splitlines()[-1] + "\n"
    again.table.write_text(text[: -len(last)] + last[:kept])
    assert read_rows(again.table) == rows[:4]
    missing = [key for key in again.missing() if key[1] == 0]
    assert set(missing) == {(row.number, 0) for row in rows[4:6]}
    append_row(again.table, rows[4])
    assert read_rows(again.table) == rows[:5]


@pytest.mark.parametrize("change", [{"identity": "of another code"}, {"processor": "faster"},
                                    {"cores": 64.0}])  # fmt: skip
def test_rows_of_another_code_or_machine_are_not_mixed(recorded, tmp_path, change):
    study, recorder = recorded
    rows = read_rows(recorder.table)
    others = [replace(row, value=0.9, **change) for row in rows[:6]]
    again = copy_of(recorded, tmp_path, others)
    assert len(again.missing()) == 6 + 2
    for row in rows[:3]:
        append_row(again.table, row)
    assert {number for number, repeat in again.missing() if repeat == 0} == {
        row.number for row in rows[3:6]
    }
    assert comparable(read_rows(again.table)) == rows[:3]
    with pytest.raises(ConfigError, match="each of 6 configs, but 3 have none"):
        load_table(study, again.table)
    for row in rows[3:6]:
        append_row(again.table, row)
    assert len(load_table(study, again.table).rows) == 6


def test_a_busy_machine_is_noticed_and_the_quiet_measurement_counts(recorded, tmp_path):
    _, recorder = recorded
    rows = [replace(row, others_share=0.1) for row in read_rows(recorder.table)]
    busy = [replace(rows[0], others_share=0.5, value=0.001), *rows[1:]]
    again = copy_of(recorded, tmp_path, busy, most_other_work=0.4)
    assert [key for key in again.missing() if key[0] >= 0] == [(rows[0].number, 0)]
    append_row(again.table, rows[0])
    assert again.missing() == []
    assert rows[0] in comparable(read_rows(again.table))
    assert busy[0] not in comparable(read_rows(again.table))


def test_what_other_work_disturbed_does_not_count_in_a_replay_either(recorded, tmp_path):
    study, recorder = recorded
    rows = [replace(row, others_share=MOST_OTHER_WORK) for row in read_rows(recorder.table)]
    busy = replace(rows[2], others_share=0.5, value=9.0, identity="of another code")
    again = copy_of(recorded, tmp_path, [*rows[:2], *rows[3:], busy])
    assert comparable(read_rows(again.table)) == [*rows[:2], *rows[3:]]
    with pytest.raises(ConfigError, match="each of 6 configs, but 1 have none; record on"):
        load_table(study, again.table)
    append_row(again.table, rows[2])
    assert load_table(study, again.table).true_value(rows[2].config) < 1.0


def test_a_recorded_table_is_a_problem_that_is_searched(tmp_path, monkeypatch):
    setup = load_study(problems.GPT_STUDY)
    table = tmp_path / "table.csv"
    values = []
    for number, config in enumerate(configs_of(setup.space)):
        slow = 1.0 + 0.4 * (config["recompute"] != "none") + 0.8 / config["micro_batch_size"]
        values.append(slow)
        append_row(table, Row(
            number=number, repeat=0, config=config, outcome="ok", value=0.3 / slow, mfu=0.3 / slow,
            stability=1.0, step_times_s=(slow,) * 12, peak_memory_bytes=10**8, wall_s=20.0,
            others_share=0.02, peak_flops=1e11, identity="one", processor="none", cores=2.0,
            mindspore="2.10.0", revision="one", date="2026-01-01",
        ))  # fmt: skip
    monkeypatch.setattr(problems, "RECORDED", table)
    known = problems.chosen_problems("table_*")
    assert list(known) == ["table_gpt"]
    assert list(problems.chosen_problems("table_gpt", recorded=table)) == ["table_gpt"]
    problem_ = known["table_gpt"].of(100)
    found = answers(problem_)
    assert found.filling - found.refused == number + 1
    assert found.best == pytest.approx(0.3 / min(values), rel=1e-4)
    row = search(problem_, "table_gpt", "guided_early_stops", seed=100, trials=20, known=found,
                 measured=provenance())  # fmt: skip
    assert row.regrets[-1] < 0.05
    assert "pruned" in row.outcomes
    monkeypatch.setattr(problems, "RECORDED", tmp_path / "none.csv")
    assert "table_gpt" not in problems.chosen_problems(None)


def test_a_table_of_other_knobs_is_refused(recorded, tmp_path):
    study, recorder = recorded
    row = read_rows(recorder.table)[0]
    append_row(tmp_path / "table.csv", replace(row, config={"micro_batch_size": 1}))
    with pytest.raises(ConfigError, match="other columns"):
        append_row(tmp_path / "table.csv", row)
    with pytest.raises(ConfigError, match="does not list"):
        load_table(study, tmp_path / "table.csv")
    (tmp_path / "table.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="table of this experiment"):
        read_rows(tmp_path / "table.csv")
    with pytest.raises(ConfigError, match="has none"):
        load_table(study, tmp_path / "none.csv")


@pytest.mark.parametrize("cells", [3, 12, 24, 99])
def test_a_row_of_another_length_is_none_and_its_line_is_named(recorded, tmp_path, cells):
    _, recorder = recorded
    header, first, second = recorder.table.read_text().splitlines()[:3]
    short = ",".join(second.split(",")[:cells]) if cells < 99 else f"{second},more"
    (tmp_path / "table.csv").write_text(f"{header}\n{first}\n{short}\n")
    with pytest.raises(ConfigError, match="line 3 is no row: it has not as many cells"):
        read_rows(tmp_path / "table.csv")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"leaders": -1}, "leaders must be 0 or more, but got -1"),
     ({"repeats": -2}, "repeats must be 0 or more"),
     ({"measure_steps": 0}, "measure_steps must be 1 or more"),
     ({"most_other_work": 1.5}, "most_other_work must lie in"),
     ({"most_other_work": math.nan}, "most_other_work must lie in")],
)  # fmt: skip
def test_numbers_without_sense_are_refused(recorded, tmp_path, wrong, said):
    study, _ = recorded
    with pytest.raises(ConfigError, match=said):
        open_recorder(study, tmp_path / "out", **wrong)
    assert not (tmp_path / "out").exists()


def test_a_table_replays_its_rows_with_the_noise_of_its_repeats(recorded):
    study, recorder = recorded
    rows = read_rows(recorder.table)
    known = load_table(study, recorder.table)
    assert known.report.total == 6
    repeated = [row.number for row in rows[6:]]
    for row in rows:
        own = [math.log(one.value) for one in rows
               if one.number == row.number and one.outcome == "ok"]  # fmt: skip
        value = known.true_value(row.config)
        assert (
            value is None if not own else value == pytest.approx(math.exp(statistics.fmean(own)))
        )
    values = [[row.value for row in rows if row.number == number] for number in repeated]
    gaps = [math.log(one / other) for one, other in values]
    assert sorted(map(abs, known.noise)) == pytest.approx(
        sorted(abs(gap) / math.sqrt(2) for gap in gaps for _ in range(2))
    )
    config = next(row.config for row in rows if row.outcome == "ok")
    trials = [known.run(config, seed=seed) for seed in range(60)]
    assert trials == [known.run(config, seed=seed) for seed in range(60)]
    seen = {round(math.log(trial.value / known.true_value(config)), 9) for trial in trials}
    assert seen == {round(one, 9) for one in known.noise}
    assert known.run({**config, "micro_batch_size": 64}, seed=0).outcome == "bad_config"


def test_a_config_that_mostly_fails_has_no_value(recorded):
    study, recorder = recorded
    known = load_table(study, recorder.table)
    row = next(row for row in known.rows if row.outcome == "ok")
    failed = replace(row, outcome="oom", value=None)
    once = TableProblem("t", known.space, (row, replace(failed, repeat=1)))
    assert once.true_value(row.config) is None
    assert {once.run(row.config, seed=seed).outcome for seed in range(20)} <= {"ok", "oom"}
    twice = TableProblem("t", known.space, (row, replace(row, repeat=1), failed))
    assert twice.true_value(row.config) == pytest.approx(row.value)
    assert {twice.run(row.config, seed=seed).outcome for seed in range(20)} == {"ok", "oom"}


def test_a_search_runs_on_a_table(recorded, tmp_path):
    study, recorder = recorded
    row = next(row for row in read_rows(recorder.table) if row.outcome == "ok")
    base = {"study": str(study), "table": str(recorder.table)}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    (tmp_path / "study.yaml").write_text(study.read_text())
    setup = load_study(tmp_path / "study.yaml")
    folder = tmp_path / "trial"
    setup.config.write(
        folder, setup.knobs(row.config),
        TrialPlan(number=0, warmup_steps=1, measure_steps=10, deadline_s=60),
    )  # fmt: skip
    report = launch(setup.trial_command(folder / "config.yaml"), trial_dir=folder,
                    startup_deadline_s=60, deadline_s=60)  # fmt: skip
    outcome = judge(report, knobs=row.config)
    assert outcome.record.outcome == "ok", outcome.record.message
    drawn = load_table(study, recorder.table).draw(row.config, seed=0)
    assert outcome.result.step_time_s[:8] == pytest.approx(drawn.step_times_s)
    assert len(outcome.result.step_time_s) == 10

"""Reports of runs and studies: complete, self-contained, and safe with hostile texts."""

import json
import math
import os
from html.parser import HTMLParser

import pytest

from mindtune.controller.contract import (
    DecisionRecord,
    RunResult,
    TrialRecord,
    TrialResult,
    write_json,
)
from mindtune.controller.contract.fault_plan import PLANTED_FAULTS
from mindtune.controller.errors import ConfigError
from mindtune.controller.records import DecisionWriter, RunFolder, SignalWriter
from mindtune.controller.reports.page import number, time_text
from mindtune.controller.reports.write import write_report
from mindtune.controller.trials.summary import Measurement, StudySummary, TrialSummary
from mindtune.policies.signals import Observation


class Texts(HTMLParser):
    """Collects what a reader sees, and every address that a browser would load."""

    def __init__(self):
        super().__init__()
        self.texts = []
        self.loads = []
        self.tags = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loads += [v for k, v in attrs if k in ("src", "href") and not v.startswith("#")]

    def handle_data(self, data):
        self.texts.append(data)


def read(path):
    page = Texts()
    page.feed(path.read_text(encoding="utf-8"))
    return page, " ".join(" ".join(page.texts).split())


@pytest.fixture
def run_folder(tmp_path):
    """Write a run of 40 steps with one NaN, one skipped update and two decisions."""
    records = RunFolder(tmp_path / "run")
    records.create()
    signals = SignalWriter(records.signals)
    for step in range(1, 41):
        signals.write(
            Observation(
                step=step, wall_time_s=float(step), phase="compile" if step == 1 else "train",
                loss=math.nan if step == 20 else 5.0 - step / 20, grad_norm=1.0 + step % 3,
                overflow=float(step == 20), update_skipped=float(step == 20), step_time_s=0.25,
                data_time_s=0.05, learning_rate=1e-3, tokens_per_s=8192.0,
            )
        )  # fmt: skip
    signals.close()
    decisions = DecisionWriter(records.decisions)
    decisions.write(
        DecisionRecord(
            step=21, policy="gradient_norm", action="SetLearningRateScale", requested=0.5,
            before=1.0, acted=0.5, verdict="granted", reason="norm <script>alert(1)</script>",
        )
    )  # fmt: skip
    decisions.write(
        DecisionRecord(
            step=30, policy="batch_size", action="SetBatchSize", requested=32, before=16,
            verdict="refused", reason="cool-down",
        )
    )  # fmt: skip
    decisions.close()
    write_json(
        records.result,
        RunResult(outcome="ok", steps=40, wall_s=11.0, final_loss=3.0, actions=1, message="fine"),
    )
    return records.path


def test_run_report_tells_how_it_ended_and_every_decision(run_folder):
    path = write_report(run_folder)
    assert path == run_folder / "report.html"
    page, text = read(path)
    lead = text[: text.index("Where the numbers come from")]
    assert "The run finished" in lead
    assert "Last step 40, loss 3. fine" in lead
    assert "updates skipped: 1 (2.5%)" in lead
    assert "Non-finite losses: 1" in lead
    assert "250 ms a step" in lead
    assert "20.0% of a step waits for data" in lead
    assert "What the policies did actions: 1" in lead
    assert "21 gradient_norm learning-rate scale 1 \N{RIGHTWARDS ARROW} 0.5 0.5 applied" in text
    assert "30 batch_size global batch size 16 \N{RIGHTWARDS ARROW} 32 - refused cool-down" in text
    assert "non-finite loss 20" in text, "the incidents are those of the detectors"
    assert "optimizer step" in text
    assert page.loads == []
    assert "script" not in page.tags, "texts of a run are escaped"
    assert "<script>alert(1)</script>" in " ".join(page.texts)


def test_a_run_with_planted_faults_says_so_on_top(run_folder):
    decisions = DecisionWriter(RunFolder(run_folder).decisions)
    decisions.write(
        DecisionRecord(
            step=0, policy="sensors", action="Advise", requested=PLANTED_FAULTS, verdict="granted",
            reason="This is no real run: faults are planted on purpose (spike from step 3 on)",
        )
    )  # fmt: skip
    decisions.close()
    text = read(write_report(run_folder))[1]
    lead = text[: text.index("What happened when")]
    assert "no real run: faults were planted on purpose. Last step 40" in lead
    assert "faults are planted on purpose (spike from step 3 on)" in lead


def test_a_killed_run_has_a_report_too(run_folder):
    (run_folder / "result.json").unlink()
    (run_folder / "decisions.jsonl").unlink()
    with (run_folder / "signals.csv").open("a") as file:
        file.write("41,41.0,tr")
    _, text = read(write_report(run_folder))
    assert "The run has left no result: it is going on, or it was killed." in text
    assert "No policy asked for anything." in text


def test_a_log_of_another_program_has_a_report_too(tmp_path):
    log = tmp_path / "train.log"
    lines = [f'{{"step": {step}, "loss": {5 - step / 20:.3f}}}\n' for step in range(1, 50)]
    log.write_text("".join(lines) + '{"step": 50, "loss": NaN}\n{"step": 51, "loss": NaN}\n')
    path = write_report(log)
    assert path == tmp_path / "train.log.report.html"
    _, text = read(path)
    assert "Log train.log" in text
    assert "What the policies would have done" in text


@pytest.mark.parametrize("value", ["nan", "inf", "1.7e308", "-1.7e308", "5e-324", "0", "-1"])
def test_a_run_of_odd_values_has_a_report(tmp_path, value):
    header = "step,phase,loss,grad_norm,step_time_s,data_time_s,loss_scale,update_skipped"
    cells = ",".join([value] * 6)
    rows = "".join(f"{step},train,{cells}\n" for step in (1, 2, 3))
    (tmp_path / "signals.csv").write_text(f"{header}\n{rows}")
    _, text = read(write_report(tmp_path))
    assert "Last step 3" in text


def test_a_run_of_huge_and_small_values_has_a_report(tmp_path):
    rows = "".join(f"{n},{(-1) ** n * 1.7e308},5e-324\n" for n in range(1, 20))
    (tmp_path / "signals.csv").write_text(f"step,loss,grad_norm\n{rows}")
    assert "Last step 19" in read(write_report(tmp_path))[1]


def test_a_trial_has_a_report_of_how_it_ended(tmp_path):
    (tmp_path / "signals.csv").write_text("step,loss\n1,2.0\n")
    result = TrialResult(outcome="ok", step_time_s=[0.1])
    write_json(tmp_path / "result.json", result)
    assert "The run has left no result" in read(write_report(tmp_path))[1]
    record = TrialRecord(outcome="timeout", wall_s=3.0, message="too <late>\x1b[2J \x00")
    write_json(tmp_path / "trial.json", record)
    path = write_report(tmp_path)
    text = read(path)[1]
    assert "The run failed (timeout)." in text
    assert "too <late>" in text
    assert not {"\x1b", "\x00"} & set(path.read_text(encoding="utf-8"))


def test_a_study_of_odd_values_has_a_report(tmp_path):
    launch = Measurement(
        repeat=0, seed=0, outcome="ok", value=math.inf, step_time_s=1e308,
        peak_memory_bytes=10**18, wall_s=1.0,
    )  # fmt: skip
    trials = [
        TrialSummary(
            number=number, knobs={}, outcome="ok", value=value, interval=(math.nan, math.inf),
            measurements=[launch],
        )
        for number, value in enumerate([math.nan, 1.7e308, -1.7e308, math.inf, 0.5])
    ]  # fmt: skip
    summary = StudySummary(
        study="s", objective="mfu", planned=5, total=5, feasible=5, trials=trials, winner=4
    )
    write_json(tmp_path / "summary.json", summary)
    assert "No rule rejected a config." in read(write_report(tmp_path))[1]


def test_numbers_of_hundreds_of_digits_are_refused_by_their_place(tmp_path, run_folder):
    line = json.loads((run_folder / "decisions.jsonl").read_text().splitlines()[0])
    (run_folder / "decisions.jsonl").write_text(json.dumps({**line, "step": 10**400}) + "\n")
    with pytest.raises(ConfigError, match=r"line 1 .*\n  step: Input should be less than"):
        write_report(run_folder)
    (run_folder / "decisions.jsonl").unlink()
    (run_folder / "signals.csv").write_text("step,tokens\n1,5\n2,1e300\n")
    with pytest.raises(ConfigError, match="line 3: tokens must be at most 1e.18"):
        write_report(run_folder)
    launch = {"repeat": 0, "seed": 0, "outcome": "ok", "wall_s": 1.0}
    trial = {"number": 0, "knobs": {}, "outcome": "ok", "measurements": [launch]}
    summary = {"schema": 1, "study": "s", "objective": "mfu", "planned": 1, "total": 1,
               "feasible": 1, "trials": [trial]}  # fmt: skip
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    write_report(tmp_path)
    launch["peak_memory_bytes"] = 10**400
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(ConfigError, match="peak_memory_bytes: Input should be less than"):
        write_report(tmp_path)


@pytest.mark.parametrize("name", ["signals.csv", "decisions.jsonl", "result.json", "trial.json"])
def test_a_pipe_in_place_of_a_record_is_not_waited_for(run_folder, name):
    (run_folder / name).unlink(missing_ok=True)
    os.mkfifo(run_folder / name)
    with pytest.raises(ConfigError, match=f"{name} must be a file, but it is a pipe"):
        write_report(run_folder)


def test_study_report_shows_winner_trials_and_rules(study_folder):
    page, text = read(write_report(study_folder, study_folder / "r.html"))
    assert (
        "Best config: trial 1. 1.50 x the base config's value (95 % interval 1.40 to 1.60)" in text
    )
    assert "recompute full none" in text
    assert "2 out of memory - - - - - - 0 recompute=interval:2 Allocate memory failed" in text
    assert "memory 9 predicted memory = 9.0GB must be at most constraints.max_memory" in text
    assert "1.50 x Step time 334 ms instead of 501 ms A training of 24 h on the base" in text
    assert "takes 16.0 h" in text
    assert "9 of 12 configs Rejected by rules before anything ran (75%)" in text
    assert "3 of 3 trials are done" in text
    assert "recompute: full \N{RIGHTWARDS ARROW} none 0 1 0.3 1.50 x yes" in text
    assert "step to step 3.1%" in text
    assert (
        "launch to launch 5.2% values of the confirming launches; configs: 2, degrees of freedom: 2"
        in text
    )
    assert "part to part" not in text, "what was not measured is not shown"
    assert "1 0.3 1 64.0 MB 2 yes" in text
    assert (
        "1 0.3 1.50 x no recompute: full \N{RIGHTWARDS ARROW} none abc mindtune export . --trial 1"
        in text
    )
    assert page.tags.count("svg") == 3
    assert page.loads == []


def test_equal_records_give_an_equal_page(tmp_path):
    pages = []
    for name in ("first", "again"):
        folder = tmp_path / name / "run"
        folder.mkdir(parents=True)
        (folder / "signals.csv").write_text("step,loss\n1,2.0\n2,nan\n3,1.0\n")
        pages.append(write_report(folder).read_text())
    assert pages[0] == pages[1]


def test_wrong_folders_and_files_are_refused(tmp_path, run_folder):
    with pytest.raises(ConfigError, match="must be a training log|must be the folder"):
        write_report(tmp_path)
    with pytest.raises(ConfigError, match=r"must be an \.html or a \.pdf file"):
        write_report(run_folder, tmp_path / "r.docx")
    (run_folder / "signals.csv").write_text("step,loss\n")
    with pytest.raises(ConfigError, match="at least one step"):
        write_report(run_folder)
    with pytest.raises(ConfigError, match="language must be one of en, zh"):
        write_report(run_folder, language="fr")


def test_step_times_are_told_finely_enough_to_be_compared():
    times = [time_text(seconds) for seconds in (0.257, 0.9996, 1.52, 0.92, 61.0)]
    assert times == ["257 ms", "1 s", "1.52 s", "920 ms", "1 min 01 s"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (math.nan, "NaN"), (-math.inf, "-\N{INFINITY}"), (1234567, "1,234,567"), (0.5, "0.5"),
     (0.0, "0"), (1e-7, "1e-07"), (65536.0, "65,536"), (2.0**31, "2,147,483,648"),
     (123456.7, "123,457"), (12345678.9, "1.235e+07"), (999.96, "1000")],
)  # fmt: skip
def test_numbers_read_well(value, text):
    assert number(value) == text


def test_a_signal_that_never_changes_is_a_sentence_and_a_compile_is_not_drawn(run_folder):
    _, text = read(write_report(run_folder))
    assert "The same in all steps: learning rate that acted 0.001." in text
    assert "throughput 8,192 tokens/s" in text


def test_a_run_whose_losses_are_all_broken_says_so_and_grammar_holds_for_one_step(tmp_path):
    (tmp_path / "signals.csv").write_text("step,loss\n1,nan\n")
    _, text = read(write_report(tmp_path))
    assert "No loss was finite" in text
    assert "Recorded steps: 1; signals.csv" in text
    assert "Last step 1, loss NaN." in text
    assert "at the start" not in text
    (tmp_path / "signals.csv").write_text("step,step_time_s\n1,0.5\n")
    assert "Last step 1; its loss is not recorded." in read(write_report(tmp_path))[1]


def test_a_run_without_a_step_is_refused_with_how_it_ended(run_folder):
    (run_folder / "signals.csv").write_text("step,loss\n")
    result = RunResult(outcome="oom", steps=0, wall_s=9.0, message="Allocate memory failed.")
    write_json(run_folder / "result.json", result)
    with pytest.raises(
        ConfigError, match=r"header only\. It ended 'oom'\. Allocate memory failed"
    ):
        write_report(run_folder)


def test_a_trial_that_was_ended_early_did_not_fail(run_folder):
    (run_folder / "result.json").unlink()
    write_json(
        run_folder / "trial.json", TrialRecord(outcome="pruned", wall_s=3.0, message="slow")
    )
    _, text = read(write_report(run_folder))
    assert "ended early The run was ended before its time (stopped early)." in text


def test_advice_alone_is_counted_in_what_the_policies_would_have_done(tmp_path):
    log = tmp_path / "train.jsonl"
    lines = [
        f'{{"step": {step}, "loss": {3 - step / 900}, "step_time_s": 1.0, "data_time_s": 0.6}}'
        for step in range(1, 200)
    ]
    log.write_text("\n".join(lines))
    _, text = read(write_report(log))
    assert "would have done requests: 0 pieces of advice: 1" in text


def test_secrets_inside_of_lists_and_addresses_are_not_shown(run_folder):
    (run_folder / "config.yaml").write_text(
        "callbacks: [{wandb: {api_key: hunter2, project: p}}]\n"
        "storage: postgresql://me:hunter3@db/studies\nresume: null\nshuffle: true\n"
    )
    path = write_report(run_folder)
    _, text = read(path)
    assert "hunter" not in path.read_text(encoding="utf-8")
    assert "config.yaml: callbacks.0.wandb.api_key ***" in text
    assert "config.yaml: storage postgresql://***@db/studies" in text
    assert "config.yaml: resume null config.yaml: shuffle true" in text


def test_a_study_whose_base_is_not_measured_yet_has_a_report(study_folder, study_summary):
    later = [trial for trial in study_summary.trials if trial.number > 0]
    summary = study_summary.model_copy(update={"trials": later, "complete": False})
    write_json(study_folder / "summary.json", summary)
    _, text = read(write_report(study_folder))
    assert "The base config is not measured yet." in text
    assert "recompute - none" in text


def test_base_and_best_are_named_in_the_chart_besides_their_colours(study_folder):
    page = write_report(study_folder).read_text(encoding="utf-8")
    chart = page[page.index(">Values<") : page.index("Value of each trial that was measured")]
    assert ">best<" in chart
    assert ">base<" in chart

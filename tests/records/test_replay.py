"""`replay`: what it finds, decides and says, and how it exits."""

import gzip
import json
import math
import os
import subprocess
import sys

import pytest

from mindtune.controller.cli.app import main
from mindtune.controller.contract import ReplayOutput, parse
from mindtune.controller.contract.conditions import RunConditions
from mindtune.controller.contract.study_file import ModelSection
from mindtune.controller.records.log_readers import open_log
from mindtune.controller.replay import load_engine, replay
from mindtune.experiments.replay.misleading import SHAPES, replay_shape

HEADER = "step,loss,grad_norm\n"


def rows(values, start=1):
    return "".join(f"{step},{loss},1.0\n" for step, loss in enumerate(values, start=start))


@pytest.fixture
def healthy(tmp_path):
    """Write a log of a calm run."""
    path = tmp_path / "healthy.csv"
    path.write_text(HEADER + rows(4 - 0.01 * i + 0.02 * (i % 3) for i in range(80)))
    return path


@pytest.fixture
def faulty(tmp_path):
    """Write a log of a run that turns NaN at step 81 and stays so."""
    path = tmp_path / "faulty.csv"
    calm = [4 - 0.01 * i + 0.02 * (i % 3) for i in range(80)]
    path.write_text(HEADER + rows([*calm, *["nan"] * 20]))
    return path


def replayed(capsys, *arguments, code=0):
    assert main(["replay", *map(str, arguments), "--json"]) == code
    printed = capsys.readouterr().out
    return parse(ReplayOutput, json.loads(printed), source="replay")


def test_a_healthy_log_is_left_alone(healthy, capsys):
    document = replayed(capsys, healthy, "--strict")
    assert (document.format, document.records, document.steps) == ("mindtune", 80, 80)
    assert document.signals == ["loss", "grad_norm"]
    assert (document.verdict, document.findings, document.decisions) == ("healthy", [], [])
    assert [(r.first_step, r.last_step, r.steps) for r in document.runs] == [(1, 80, 80)]


def test_a_faulty_log_is_one_incident_with_its_steps(faulty, capsys):
    document = replayed(capsys, faulty)
    assert document.verdict == "faulty"
    kinds = [(f.kind, f.severity, f.step, f.last_step) for f in document.findings]
    assert kinds == [("non_finite_loss", "critical", 81, 100)]
    stop = next(d for d in document.decisions if d.action == "RequestStop")
    assert (stop.policy, stop.step) == ("gradient_norm", 90)
    assert len(stop.reason) > 80, "the diagnosis, not its short name"
    assert replayed(capsys, faulty, "--strict", code=1).verdict == "faulty"


def test_policies_of_a_file_are_used(faulty, tmp_path, capsys):
    path = tmp_path / "policies.yaml"
    path.write_text("gradient_norm: {mode: act, thresholds: {stop_after: 4}}\n")
    stops = [d.step for d in replayed(capsys, faulty, "--policies", path).decisions]
    assert 84 in stops
    path.write_text("policies: {gradient_norm: {enabled: false}}\n")
    decided = replayed(capsys, faulty, "--policies", path).decisions
    assert not [d for d in decided if d.policy == "gradient_norm"]


@pytest.mark.parametrize(
    ("text", "message"),
    [("nothing: 1\n", "must hold settings by policy name"),
     ("gradient_norm: {thresholds: {stop: 1}}\n", "has no 'stop'; allowed are"),
     ("policies: {gradient: {}}\n", "there is no policy 'gradient'"),
     ("gradient_norm: {modes: act}\n", "unknown key 'modes'"),
     ("- 1\n", "must hold a mapping"), ("", "must hold a mapping")],
)  # fmt: skip
def test_policies_that_do_not_exist_are_refused(healthy, tmp_path, capsys, text, message):
    path = tmp_path / "policies.yaml"
    path.write_text(text)
    assert main(["replay", str(healthy), "--policies", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_is_no_log_is_refused(tmp_path, capsys):
    path = tmp_path / "notes.txt"
    path.write_text("buy milk\n")
    assert main(["replay", str(path), "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "no reader understands a line of it; known are" in captured.err
    assert main(["replay", str(tmp_path / "none")]) == 2
    assert main(["replay", str(path), "--format", "megatron"]) == 2
    assert "the reader megatron finds none" in capsys.readouterr().err
    assert main(["replay", str(path), "--format", "xml"]) == 2


@pytest.mark.parametrize("cell", ["", "abc", "?"])
def test_a_log_of_steps_without_a_number_is_not_called_healthy(tmp_path, capsys, cell):
    path = tmp_path / "signals.csv"
    path.write_text(HEADER + "".join(f"{step},{cell},\n" for step in range(1, 50)))
    assert main(["replay", str(path)]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "must tell of a signal such as the loss" in told.err


def test_a_compressed_log_that_breaks_off_says_so(healthy, tmp_path, capsys):
    path = tmp_path / "log.gz"
    whole = gzip.compress(healthy.read_bytes())
    path.write_bytes(whole)
    assert not any("breaks off" in note for note in replayed(capsys, str(path)).notes)
    path.write_bytes(whole[:-20])
    assert any("breaks off" in note for note in replayed(capsys, str(path)).notes)


def test_a_pipe_is_refused_with_a_remedy(tmp_path, capsys):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(path, os.O_WRONLY)
    assert main(["replay", str(path)]) == 2
    os.close(writer)
    os.close(reader)
    assert "write what comes out of it into a file first" in capsys.readouterr().err


def test_segments_are_told_and_judged_apart(tmp_path, capsys):
    path = tmp_path / "log.csv"
    calm = [4 - 0.01 * i + 0.02 * (i % 3) for i in range(80)]
    path.write_text(HEADER + rows([*calm, "nan", "nan"]) + rows(calm) + rows(["nan"] * 3, 60))
    document = replayed(capsys, path)
    assert [(r.run, r.first_step, r.last_step) for r in document.runs] == [
        (0, 1, 82), (1, 1, 80), (2, 60, 62),
    ]  # fmt: skip
    assert [(f.run, f.step, f.last_step) for f in document.findings] == [(0, 81, 82), (2, 60, 62)]
    assert document.notes[0] == "step 1 comes after step 82: a restart, kept as segment 1."


def test_an_incident_spans_the_interval_of_the_log(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text(HEADER + "".join(f"{step},{'nan' if step > 500 else 2.0 - step / 1e4},1.0\n"
                                     for step in range(10, 610, 10)))  # fmt: skip
    output = replay(open_log(path), load_engine(None))
    faults = [(f.step, f.last_step) for f in output.findings if f.kind == "non_finite_loss"]
    assert faults == [(510, 600)]


def told(capsys, *arguments):
    assert main(["replay", *map(str, arguments)]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_the_story_tells_what_happened_why_and_what_cannot_be_judged(faulty, healthy, capsys):
    story = told(capsys, faulty)
    for part in (
        "mindtune: 100 data lines, 100 steps, from step 1 to 100; it tells of loss, grad_norm",
        "verdict: faulty one critical fault, in step 81",
        "81-100 non_finite_loss: the loss was nan",
        "why, most likely 81-100 NaN or infinity: ",
        "gradient_norm: RequestStop in step 90: non-finite loss",
        "an idle device (no device_utilization)",
    ):
        assert part in story, story
    story = told(capsys, healthy)
    assert "verdict: healthy nothing was found" in story
    assert "nothing: the policies would have left this run alone" in story
    assert "why, most likely" not in story


def test_a_pipe_gets_no_colour_and_every_width_all_words(faulty, monkeypatch, capsys):
    texts = []
    for columns in ("40", "80", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        assert main(["replay", str(faulty)]) == 0
        printed = capsys.readouterr().out
        assert "\x1b" not in printed
        assert max(map(len, printed.splitlines()[1:])) <= int(columns)
        texts.append(printed.split())
    assert sorted(texts[1]) == sorted(texts[2])


def test_likely_causes_stand_in_the_document_with_their_evidence(faulty, capsys):
    document = replayed(capsys, faulty)
    entries = [d for d in document.diagnoses if d.symptom == "non_finite"]
    assert {(d.step, d.last_step, d.run) for d in entries} == {(81, 100, 0)}
    first, *others = entries
    assert (first.cause, first.confidence) == ("forward_pass", "likely")
    assert first.evidence_for
    assert first.next_steps
    start = next(d for d in others if d.cause == "bad_from_the_start")
    assert start.confidence == "unlikely"
    assert start.evidence_against == ["80 records before it were finite"]
    assert {"data_time_s"} in [set(entry.signals) for entry in document.unjudged]
    figures = document.runs[0].signals["loss"]
    assert (figures.count, figures.non_finite, figures.first) == (80, 20, 4.0)
    assert document.runs[0].skipped is None


def test_several_logs_are_one_run(tmp_path, capsys):
    calm = [4 - 0.01 * i + 0.02 * (i % 3) for i in range(240)]
    parts = [tmp_path / name for name in ("first.csv", "second.csv", "third.csv")]
    parts[0].write_text(HEADER + rows(calm[:80]))
    parts[1].write_text(HEADER + rows(calm[80:160], 81))
    parts[2].write_text(HEADER + rows(calm[120:], 121))
    document = replayed(capsys, *parts)
    assert [(r.run, r.first_step, r.last_step, r.resumed) for r in document.runs] == [
        (0, 1, 160, False), (1, 121, 240, True),
    ]  # fmt: skip
    assert document.records == 280
    assert document.notes[0] == (
        "3 logs were read one after another, as one run: first.csv, second.csv, third.csv."
    )


def test_logs_of_ranks_are_read_side_by_side_and_compared(tmp_path, capsys):
    calm = [4 - 0.01 * i + 0.02 * (i % 3) for i in range(80)]
    for rank in range(4):
        first_bad = 70 if rank == 2 else 74
        losses = [value if step < first_bad else "nan" for step, value in enumerate(calm, start=1)]
        busy = 0.9 if rank < 2 else 0.02
        text = "".join(
            f"{step},{loss},1.0,{busy + step % 7 / 1000}\n"
            for step, loss in enumerate(losses, start=1)
        )
        (tmp_path / f"worker_{rank}.log").write_text(
            "step,loss,grad_norm,device_utilization\n" + text
        )
    for arguments in ([tmp_path], sorted(tmp_path.glob("*.log"))):
        document = replayed(capsys, *arguments)
        assert (document.steps, document.records) == (80, 320)
        bad = next(f for f in document.findings if f.kind == "non_finite_loss")
        assert (bad.step, bad.last_step) == (70, 80)
        one = next(d for d in document.diagnoses if d.cause == "one_rank")
        assert one.evidence_for == [
            "of 4 ranks, rank 2 alone: its loss is nan in step 70; others from step 74 on"
        ]
        idle = next(f for f in document.findings if f.kind == "low_utilization"
                    and f.severity == "critical")  # fmt: skip
        assert "2 of 4 ranks (rank 2, 3) are busy less than 10%" in idle.message


def test_a_folder_without_a_log_is_refused_with_what_was_looked_for(tmp_path, healthy, capsys):
    folder = tmp_path / "folder"
    folder.mkdir()
    assert main(["replay", str(folder)]) == 2
    assert "with one of signals.csv, trainer_state.json" in capsys.readouterr().err
    assert main(["replay", str(folder), str(healthy)]) == 2
    assert "several logs must be files" in capsys.readouterr().err
    (folder / "trainer_state.json").write_text(
        json.dumps({"log_history": [{"step": s, "loss": 3.0 - s / 90} for s in range(1, 60)]})
    )
    assert replayed(capsys, folder).format == "hf_trainer_state"


def test_the_folder_of_a_run_tells_how_it_ended(tmp_path, capsys):
    (tmp_path / "signals.csv").write_text(HEADER + rows(3 - 0.01 * s for s in range(40)))
    (tmp_path / "decisions.jsonl").write_text("")
    (tmp_path / "result.json").write_text(
        json.dumps({"schema": 1, "outcome": "oom", "steps": 40, "wall_s": 3.0, "message": "full",
                    "findings": {"hang": 1}})
    )  # fmt: skip
    document = replayed(capsys, tmp_path, "--strict", code=1)
    ends = [(f.kind, f.step) for f in document.findings if f.severity == "critical"]
    assert ends == [("hang", 40), ("memory_pressure", 40)]
    assert document.notes[0] == "the run's own record says that it ended 'oom'. full"
    hang = [d for d in document.diagnoses if d.symptom == "hang"]
    assert {d.cause for d in hang} >= {"rank_gone", "slow_link", "data_loader"}
    assert next(d.cause for d in document.diagnoses if d.symptom == "memory") == "steady_need"


def test_a_few_records_that_all_wait_are_a_starved_run(tmp_path, capsys):
    path = tmp_path / "log.csv"
    header = "step,loss,step_time_s,data_time_s\n"
    path.write_text(header + "1,8,230,2\n2,7,4.3,3.8\n3,7,4.0,3.5\n")
    document = replayed(capsys, path)
    kinds = [(f.kind, f.severity, f.step, f.last_step) for f in document.findings]
    assert ("data_stall", "critical", 2, 3) in kinds
    path.write_text(header + "1,8,230,2\n2,7,4.3,3.8\n3,7,4.0,0.1\n")
    assert replayed(capsys, path).verdict == "healthy"


def test_replay_starts_no_framework(healthy):
    script = (
        "import sys\n"
        f"sys.argv = ['mindtune', 'replay', {str(healthy)!r}, '--json']\n"
        "from mindtune.controller.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = [n for n in ('mindspore', 'pandas', 'scipy', 'torch') if n in sys.modules]\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("name", SHAPES)
def test_a_run_made_up_to_mislead_is_judged_right(name):
    output = replay_shape(SHAPES[name], seed=0)
    assert output.verdict == SHAPES[name].verdict, [f.message for f in output.findings]
    asked = [d for d in output.decisions if d.action in ("Rewind", "RequestStop")]
    if output.verdict == "healthy":
        assert not asked


def test_the_vocabulary_of_a_run_of_ours_tells_what_its_loss_stands_at(tmp_path, capsys):
    calm = [4 - 0.02 * i + 0.02 * (i % 3) for i in range(80)]
    (tmp_path / "signals.csv").write_text(HEADER + rows([*calm, *[f"{math.log(777):.9f}"] * 60]))
    model = ModelSection(
        num_layers=2, hidden_size=8, num_heads=2, intermediate_size=16, vocab_size=777,
        seq_length=16,
    )  # fmt: skip
    (tmp_path / RunConditions.FILE).write_text(RunConditions(model=model).to_json())
    causes = {d.cause: d for d in replayed(capsys, tmp_path).diagnoses}
    told = causes["weights_out_of_range"].evidence_for
    assert any("ln(777)" in text and "of this model" in text for text in told), told

"""The gate: every statistic, missing signals, and what it prints and exits with."""

import json
import math
from xml.etree import ElementTree as ET

import pytest
import yaml

from mindtune.controller.cli.app import main
from mindtune.controller.contract import GateOutput, GateRule, RunResult, parse, write_json
from mindtune.controller.errors import ConfigError
from mindtune.controller.records import SignalWriter
from mindtune.controller.reports.gate import judge_run
from mindtune.policies.signals import Observation


def write(folder, losses, norms=()):
    folder.mkdir(exist_ok=True)
    writer = SignalWriter(folder / "signals.csv")
    for step, loss in enumerate(losses, start=1):
        norm = norms[step - 1] if norms else None
        writer.write(Observation(step=step, loss=loss, grad_norm=norm, phase="train"))
    writer.close()
    return folder


def test_a_healthy_run_passes_and_says_what_was_not_measured(tmp_path, capsys):
    run = write(tmp_path / "run", [3.0, 2.0], [1.0, 99999.0])
    assert main(["gate", str(run), "--json"]) == 0
    output = parse(GateOutput, json.loads(capsys.readouterr().out), source="gate")
    assert output.passed
    assert [check.ok for check in output.checks] == [True, True, None, None]
    assert output.checks[0].value == 99999.0
    assert output.checks[2].message == "update_skipped was not measured"
    assert output.checks[3].message.startswith("how it ended is not recorded")


@pytest.mark.parametrize("norm", [100001.0, math.inf, math.nan])
def test_a_huge_or_broken_norm_in_the_last_100_steps_fails(tmp_path, norm, capsys):
    run = write(tmp_path / "run", [1.0] * 100, [1.0] * 99 + [norm])
    assert main(["gate", str(run)]) == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(("loss_scale", "passes"), [(65536.0, True), (None, False)])
def test_an_overflow_of_the_loss_scale_is_no_huge_norm(tmp_path, loss_scale, passes):
    writer = SignalWriter(tmp_path / "signals.csv")
    for step in range(1, 101):
        overflow = float(step == 50)
        writer.write(
            Observation(
                step=step, loss=1.0, phase="train", grad_norm=math.inf if overflow else 2.0,
                overflow=overflow, update_skipped=overflow, loss_scale=loss_scale,
            )
        )  # fmt: skip
    writer.close()
    assert judge_run(tmp_path).passed is passes


def test_a_norm_before_the_last_100_steps_is_forgiven(tmp_path):
    run = write(tmp_path / "run", [1.0] * 101, [1e9] + [1.0] * 100)
    assert judge_run(run).passed


def test_a_step_that_held_a_save_counts_but_not_its_time(tmp_path):
    writer = SignalWriter(tmp_path / "signals.csv")
    writer.write(Observation(step=1, loss=2.0, step_time_s=90.0, phase="compile"))
    writer.write(Observation(step=2, loss=2.0, step_time_s=1.0, phase="train"))
    writer.write(Observation(step=3, loss=math.nan, step_time_s=60.0, phase="save"))
    writer.close()
    rules = tmp_path / "gate.yaml"
    rules.write_text(
        "schema: 1\nrules:\n"
        "- {name: finite, signal: loss, statistic: non_finite_share, max: 0}\n"
        "- {name: slow, signal: step_time_s, statistic: max, max: 2}\n"
    )
    assert [check.ok for check in judge_run(tmp_path, rules).checks] == [False, True]


def test_steps_that_a_restart_has_made_once_more_count_as_they_were_made_last(tmp_path):
    for first, last, broken in ((1, 100, 95), (91, 120, 999)):
        writer = SignalWriter(tmp_path / "signals.csv")
        for step in range(first, last + 1):
            loss = math.nan if step >= broken else 2.0
            writer.write(Observation(step=step, loss=loss, step_time_s=1.0, phase="train"))
        writer.close()
    rules = tmp_path / "gate.yaml"
    rules.write_text("rules:\n- {name: end, metric: loss, max: 3}\n")
    assert judge_run(tmp_path).passed
    assert judge_run(tmp_path, rules).passed


def test_the_first_record_of_a_log_counts_for_no_time_as_in_the_metrics(tmp_path):
    log = tmp_path / "log.csv"
    rows = [f"{step},{60.0 if step == 1 else 1.0}" for step in range(1, 31)]
    log.write_text("step,step_time_s\n" + "\n".join(rows) + "\n")
    rules = tmp_path / "gate.yaml"
    rules.write_text("rules:\n- {name: slow, signal: step_time_s, statistic: max, max: 2}\n")
    (check,) = judge_run(log, rules).checks
    assert (check.ok, check.message) == (
        True,
        "max of step_time_s over 29 steps is 1, must be at most 2",
    )


@pytest.mark.parametrize(("outcome", "default", "told"), [
    ("ok", True, True), ("stopped", False, True), ("crash", False, False), (None, None, False),
])  # fmt: skip
def test_how_a_run_ended_counts(tmp_path, outcome, default, told):
    run = write(tmp_path / "run", [2.0] * 5)
    if outcome is not None:
        write_json(run / RunResult.FILE, RunResult(outcome=outcome, steps=5, wall_s=1.0))
    assert judge_run(run).checks[-1].ok is default
    assert judge_run(run).passed is (default is not False)
    rules = tmp_path / "gate.yaml"
    rules.write_text("rules:\n- {name: a, outcome: [ok, stopped]}\n")
    (check,) = judge_run(run, rules).checks
    assert check.ok is told
    if outcome is not None:
        assert check.message == f"it ended with {outcome}, must be ok or stopped"


def test_more_than_the_devices_can_do_passes_no_rule(tmp_path):
    writer = SignalWriter(tmp_path / "signals.csv")
    for step in range(1, 21):
        writer.write(Observation(step=step, loss=1.0, mfu=1.4, step_time_s=1.0, phase="train"))
    writer.close()
    rules = tmp_path / "gate.yaml"
    rules.write_text("rules:\n- {name: a, metric: mfu, min: 0.3}\n")
    (check,) = judge_run(tmp_path, rules).checks
    assert (check.ok, check.value) == (False, 1.4)
    assert check.message == "mfu is 1.4, must be at least 0.3, but above 1 it is wrong"


def test_own_rules_and_junit(tmp_path):
    run = write(tmp_path / "run", [4.0, math.nan, 2.0])
    rules = tmp_path / "gate.yaml"
    rules.write_text(
        "schema: 1\nrules:\n"
        "- {name: end, signal: loss, statistic: last, max: 2.5}\n"
        "- {name: broken, signal: loss, statistic: non_finite_share, max: 0.2}\n"
        "- {name: mean, signal: loss, statistic: mean, max: 9}\n"
        "- {name: speed, signal: tokens_per_s, statistic: median, min: 1}\n"
        "- {name: norm, signal: grad_norm, statistic: max, max: 1, required: false}\n"
    )
    output = judge_run(run, rules)
    assert [check.ok for check in output.checks] == [True, False, False, False, None]
    assert output.checks[1].value == pytest.approx(1 / 3)
    assert main(["gate", str(run), "--rules", str(rules), "--junit", str(tmp_path / "j.xml")]) == 1
    suite = ET.parse(tmp_path / "j.xml").getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("5", "3")
    assert [len(case.findall("failure")) for case in suite] == [0, 1, 1, 1, 0]
    assert [len(case.findall("skipped")) for case in suite] == [0, 0, 0, 0, 1]
    (failure,) = suite[3]
    assert failure.text == failure.get("message") == "tokens_per_s was not measured"


def test_wrong_rules_are_refused(tmp_path):
    run = write(tmp_path / "run", [1.0])
    rules = tmp_path / "gate.yaml"
    rules.write_text("schema: 1\nrules:\n- {name: a, signal: lss, statistic: max, max: 1}\n")
    with pytest.raises(ConfigError, match="must be one of step, wall_time_s"):
        judge_run(run, rules)
    with pytest.raises(ValueError, match="must have a min or a max"):
        GateRule(name="a", signal="loss", statistic="max")
    with pytest.raises(ConfigError, match="but it has none of these"):
        judge_run(tmp_path)


@pytest.mark.parametrize(
    ("losses", "statistic", "value"),
    [
        ([1.7e308] * 5, "mean", 1.7e308),
        ([math.inf, -math.inf], "mean", math.nan),
        ([math.inf, 1.0], "mean", math.inf),
        ([1.7e308] * 4, "median", math.inf),
    ],
)
def test_statistics_of_huge_values_fail_the_rule_and_never_the_gate(
    tmp_path, losses, statistic, value
):
    run = write(tmp_path / "run", losses)
    rules = tmp_path / "gate.yaml"
    rules.write_text(f"rules:\n- {{name: a, signal: loss, statistic: {statistic}, max: 1}}\n")
    (check,) = judge_run(run, rules).checks
    assert check.ok is False
    assert check.value == pytest.approx(value, nan_ok=True)


def test_a_rule_over_a_text_is_refused(tmp_path):
    run = write(tmp_path / "run", [1.0])
    rules = tmp_path / "gate.yaml"
    rules.write_text("rules:\n- {name: a, signal: phase, statistic: max, max: 1}\n")
    with pytest.raises(ConfigError, match="must be one of step, .* but got 'phase'"):
        judge_run(run, rules)


def test_names_steer_no_terminal_and_are_no_markup(tmp_path, capsys):
    run = write(tmp_path / "run", [1.0])
    rules = tmp_path / "gate.yaml"
    name = r'"\e[31m[/red]:smile:"'
    rules.write_text(f"rules:\n- {{name: {name}, signal: loss, statistic: max, max: 5}}\n")
    assert main(["gate", str(run), "--rules", str(rules)]) == 0
    assert r"\x1b[31m[/red]:smile:" in capsys.readouterr().out


METRIC_RULES = """\
schema: 1
rules:
- {name: speed, metric: step_time_s, max: 0.4}
- {name: stable, metric: stability, min: 0.9}
- {name: mfu, metric: mfu, min: 0.3}
- {name: end, signal: loss, statistic: last, max: 2.5}
"""


def test_rules_over_metrics_of_a_folder_and_of_a_log(tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    lines = [f"{step},{3 - step / 100},0.5,train" for step in range(1, 61)]
    (run / "signals.csv").write_text("step,loss,step_time_s,phase\n" + "\n".join(lines) + "\n")
    log = tmp_path / "log.csv"
    log.write_text((run / "signals.csv").read_text())
    rules = tmp_path / "gate.yaml"
    rules.write_text(METRIC_RULES)
    for path in (run, log):
        checks = judge_run(path, rules).checks
        assert [check.ok for check in checks] == [False, True, False, True]
        assert checks[0].message == "step_time_s is 0.5, must be at most 0.4"
        assert checks[2].message.startswith("mfu was not measured: needs the model's shape")
        assert checks[3].value == 2.4
    assert main(["gate", str(log), "--rules", str(rules)]) == 1
    capsys.readouterr()
    named = tmp_path / "named.csv"
    named.write_text(log.read_text().replace("loss", "cost"))
    command = ["gate", str(named), "--rules", str(rules), "--map", "loss=cost", "--json"]
    assert main(command) == 1
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert [check["ok"] for check in checks] == [False, True, False, True]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("{name: a, metric: mfu, signal: loss, statistic: max, max: 1}", "got several of them"),
        ("{name: a, metric: mfu, last_steps: 5, max: 1}", "got several of them"),
        ("{name: a, metric: mfu, outcome: [ok], max: 1}", "got several of them"),
        ("{name: a, signal: loss, max: 1}", "got no whole one"),
        ("{name: a, max: 1}", "got no whole one"),
        ("{name: a, outcome: [ok], max: 1}", "is over an outcome, which has no min or max"),
        ("{name: a, outcome: [fine]}", "rules.0.outcome.0"),
        ("{name: a, metric: mfu, max: .nan}", "must be a number, but got nan"),
        ("{name: a, metric: mfu, min: 2, max: 1}", "a min of at most its max, but got 2 and 1"),
        (
            "{name: a, metric: mfu, max: 1}\n- {name: a, metric: mfu, min: 0.1}",
            r"must differ from rule to rule, but got \['a'\] twice",
        ),
        (
            "{name: a, metric: speed, max: 1}",
            "must be a metric, but got 'speed'; known are first_loss,",
        ),
    ],
)
def test_a_rule_is_over_one_thing(tmp_path, rule, message):
    rules = tmp_path / "gate.yaml"
    rules.write_text(f"rules:\n- {rule}\n")
    with pytest.raises(ConfigError, match=message):
        judge_run(write(tmp_path / "run", [1.0]), rules)


def test_a_name_with_control_characters_leaves_the_junit_file_readable(tmp_path):
    run = write(tmp_path / "run", [9.0])
    rules = tmp_path / "gate.yaml"
    rules.write_text('rules:\n- {name: "\\e[31m\\0", signal: loss, statistic: max, max: 5}\n')
    assert main(["gate", str(run), "--rules", str(rules), "--junit", str(tmp_path / "j.xml")]) == 1
    suite = ET.parse(tmp_path / "j.xml").getroot()
    assert suite[0].get("name") == r"\x1b[31m\x00"


def test_the_ci_jobs_are_yaml_and_their_commands_run(tmp_path, monkeypatch, capsys):
    run = write(tmp_path / "run", [2.0] * 30)
    (tmp_path / "gate.yaml").write_text("rules:\n- {name: end, metric: loss, max: 3}\n")
    monkeypatch.chdir(tmp_path)
    assert main(["compare", "run", "--save-baseline", "baseline.json"]) == 0
    for system in ("github", "gitlab"):
        file = tmp_path / f"{system}.yaml"
        assert main(["init", "--ci", system, str(file)]) == 0
        content = yaml.safe_load(file.read_text())
        if system == "github":
            # YAML 1.1 reads the key `on` as true.
            assert True in content
            commands = [step["run"] for step in content["jobs"]["train"]["steps"] if "run" in step]
        else:
            assert content["stages"] == ["train", "gate"]
            assert content["gate"]["artifacts"]["reports"] == {"junit": "gate.xml"}
            jobs = [content["train"], content["gate"]]
            commands = [
                line for job in jobs for line in (*job["script"], *job.get("after_script", ()))
            ]
        assert [command.split()[1] for command in commands] == ["run", "gate", "compare"]
        for command in commands[1:]:
            assert main(command.split()[1:]) == 0, command
        assert ET.parse(tmp_path / "gate.xml").getroot().get("tests") == "1"
        (tmp_path / "gate.xml").unlink()
        assert main(["init", "--ci", system, str(file)]) == 2
    assert run.exists()
    capsys.readouterr()

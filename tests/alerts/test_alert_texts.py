"""What an alert says."""

import pytest

from mindtune.controller.alerts.alert import (
    Alert,
    decision_alert,
    end_alert,
    finding_alert,
    stop_alert,
)
from mindtune.controller.alerts.remedies import REMEDIES
from mindtune.controller.contract import DecisionRecord, RunResult
from mindtune.policies.findings import Finding, FindingKind, Severity

RUN = "run first on node-1 (/data/first)"


def finding(step, kind=FindingKind.OVERFLOW_STORM, severity=Severity.CRITICAL, **evidence):
    return Finding(
        step=step, last_step=step, kind=kind, severity=severity, message=f"Seen at {step}.",
        evidence=evidence,
    )  # fmt: skip


def test_a_finding_says_run_step_numbers_and_what_to_do():
    alert = finding_alert(finding(7, share=0.5, window=32, tensor=None), run=RUN, exits=False)
    assert alert.title == "[mindtune] finding: overflow_storm"
    assert alert.level == "failure"
    assert not alert.urgent
    assert alert.text.splitlines() == [
        RUN,
        "step 7: overflow_storm (critical)",
        "Seen at 7.",
        "Numbers: share 0.5, window 32",
        f"What to do: {REMEDIES[FindingKind.OVERFLOW_STORM]}",
    ]


@pytest.mark.parametrize("kind", FindingKind)
def test_every_kind_of_finding_has_a_remedy_and_a_title_without_numbers(kind):
    assert REMEDIES[kind].endswith(".")
    first, second = (
        finding_alert(finding(step, kind, value=float(step)), run=run, exits=False)
        for step, run in ((1, RUN), (99, "run second"))
    )
    assert first.title == second.title


@pytest.mark.parametrize(
    ("severity", "level"),
    [(Severity.INFO, "info"), (Severity.WARNING, "warning"), (Severity.CRITICAL, "failure")],
)
def test_severities_become_notify_types(severity, level):
    assert finding_alert(finding(1, severity=severity), run=RUN, exits=False).level == level


def test_a_hang_is_urgent_and_says_whether_the_process_ends():
    stays = finding_alert(finding(5, FindingKind.HANG), run=RUN, exits=False)
    ends = finding_alert(finding(5, FindingKind.HANG), run=RUN, exits=True)
    assert (stays.kind, stays.title, stays.urgent) == ("hang", "[mindtune] hang", True)
    assert "exit code 3" not in stays.text
    assert "The process ends now, with exit code 3." in ends.text


def test_an_action_says_what_changed_why_and_what_is_left():
    record = DecisionRecord(
        step=12, policy="gradient_norm", action="SetLearningRateScale", requested=0.5, before=1.0,
        verdict="granted", reason="the norm spiked", evidence={"score": 9.25}, budget_left=3,
    )  # fmt: skip
    alert = decision_alert(record, run=RUN)
    assert alert.title == "[mindtune] action: SetLearningRateScale"
    assert alert.text.splitlines()[1:4] == [
        "step 12: gradient_norm: SetLearningRateScale 1.0 -> 0.5, 3 more in its budget",
        "Reason: the norm spiked",
        "Numbers: score 9.25",
    ]
    undone = decision_alert(record.model_copy(update={"verdict": "undone"}), run=RUN)
    assert undone.title == "[mindtune] undone: SetLearningRateScale"
    assert "taken back" in undone.text


def test_a_stop_says_the_diagnosis():
    alert = stop_alert("the loss is nan: go back to step 3", step=13, run=RUN)
    assert (alert.title, alert.level, alert.urgent) == ("[mindtune] stop", "failure", True)
    assert alert.text == f"{RUN}\nstep 13: the run is stopped.\nthe loss is nan: go back to step 3"


@pytest.mark.parametrize(
    ("outcome", "level"),
    [("ok", "success"), ("stopped", "warning"), ("interrupted", "warning"), ("crash", "failure"),
     ("oom", "failure"), ("non_finite", "failure")],
)  # fmt: skip
def test_an_end_says_how_and_with_which_numbers(outcome, level):
    result = RunResult(
        outcome=outcome, steps=40, wall_s=7200.0, final_loss=2.5, actions=2,
        findings={"plateau": 1, "overflow": 3}, message="RuntimeError: down\n  File x",
    )  # fmt: skip
    alert = end_alert(result, run=RUN)
    assert (alert.level, alert.urgent) == (level, True)
    lines = alert.text.splitlines()
    assert lines[1:5] == [
        f"step 40: the run is over: {outcome}, 2 actions",
        "RuntimeError: down",
        "Numbers: loss 2.5, hours 2",
        "Findings: 3 x overflow, 1 x plateau",
    ]
    assert ("What to do" in lines[-1]) == (outcome != "ok")


def test_a_text_fits_the_smallest_service_also_in_chinese():
    alert = Alert(kind="stop", title="t", text="梯度" * 1000, level="failure", step=1)
    short = alert.short_text()
    assert len(short.encode()) <= 1900
    assert short.endswith(("度...", "梯..."))

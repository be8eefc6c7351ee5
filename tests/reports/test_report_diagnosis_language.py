"""Whatever detectors, diagnosis and stops can write has its sentence in Chinese."""

import ast
import re
from pathlib import Path

import pytest
import yaml

from mindtune.controller.live.unobserved import hidden_steps_finding
from mindtune.controller.replay.ending import judge_ending
from mindtune.controller.replay.ranks import Ranks
from mindtune.controller.reports import recorded
from mindtune.controller.reports.language import Words
from mindtune.controller.reports.page import Quoted
from mindtune.controller.reports.recorded import retold
from mindtune.policies import explanations
from mindtune.policies.diagnosis import CAUSES, History, RunContext
from mindtune.policies.findings import Finding, FindingKind, Severity
from mindtune.policies.signals import Observation

ROOT = Path(__file__).parents[2]
ZH = Words("zh")
BOOKS = [
    yaml.safe_load((Path(recorded.__file__).parent / name).read_text("utf-8"))
    for name in ("recorded_zh.yaml", "diagnosis_zh.yaml")
]
ENGLISH = "\n".join(english for book in BOOKS for english, _ in book["sentences"])
LETTERS = re.compile("[A-Za-z]")


def is_told(text):
    return not isinstance(retold(text, ZH), Quoted)


def test_every_cause_and_what_to_do_about_it_is_told():
    causes = [cause for causes in CAUSES.values() for cause in causes]
    texts = [text for cause in causes for text in (cause.statement, *cause.next_steps)]
    assert [text for text in texts if not is_told(text)] == []


class Sentences(ast.NodeVisitor):
    """Collects the texts of a module that a reader may see, each with gaps filled."""

    def __init__(self):
        self.texts = []

    def visit_Raise(self, node):
        """Errors are no records."""

    def visit_FunctionDef(self, node):
        if node.name != "contradiction":  # of a stored state
            self.generic_visit(node)

    def visit_Expr(self, node):
        if not isinstance(node.value, ast.Constant):  # a docstring
            self.generic_visit(node)

    def visit_Constant(self, node):
        if isinstance(node.value, str):
            self.texts.append(node.value)

    def visit_JoinedStr(self, node):
        text = ""
        for part in node.values:
            if isinstance(part, ast.Constant):
                text += part.value
            elif isinstance(part.value, ast.Name) and part.value.id == "name":
                text += "loss"
            elif not text or not (text[-1].isalnum() or text[-1] == "%"):
                text += "7"  # a gap right behind a word is the rest of the sentence, or nothing
        self.texts.append(text)


def sentences(*folders):
    for folder in folders:
        for path in sorted((ROOT / folder).glob("*.py")):
            if path.name == "model.py":  # degrees of sureness, which the page names
                continue
            visitor = Sentences()
            visitor.visit(ast.parse(path.read_text(encoding="utf-8")))
            yield from ((path.name, text) for text in visitor.texts if text.count(" ") > 1)


def is_covered(text):
    if LETTERS.match(text) or text[0] == "7":
        return is_told(text) or text in ENGLISH or not LETTERS.search(text)
    # The rest of a sentence.
    return all(piece.strip(" .;") in ENGLISH for piece in text.split("7"))


def test_every_sentence_of_detectors_and_diagnosis_is_told():
    texts = list(sentences("policies/diagnosis", "policies/detectors"))
    assert len(texts) > 200
    assert [(file, text) for file, text in texts if not is_covered(text)] == []


def found(kind, message, **evidence):
    return Finding(step=9, last_step=9, kind=kind, severity=Severity.CRITICAL, message=message,
                   evidence=evidence)  # fmt: skip


NAN = float("nan")
STALL = found(FindingKind.DATA_STALL,
              "62% of the time of the last 8 steps was spent waiting for data (limit 20%).")  # fmt: skip
SHORT = found(FindingKind.MEMORY_PRESSURE, "93% of the device memory is in use (limit 85%).")
FROZEN = found(FindingKind.FROZEN_LOSS, "the loss has been 10.4 for 20 steps while every update "
               "was skipped: the weights no longer change.", skipped=20, count=20)  # fmt: skip
STORM = found(FindingKind.OVERFLOW_STORM, "9 overflows in a row and 9 in the window; the loss scale is 1 after "
              "65536 at its highest, the loss is finite.")  # fmt: skip
UNMOVED = found(FindingKind.OVERFLOW_WITHOUT_EFFECT, "3 overflows in a row neither lowered the loss scale (1024) "
                "nor were seen to skip the update: non-finite gradients may reach the weights.")  # fmt: skip
CLIPPED = found(FindingKind.CLIP_SATURATION, "95% of the last 64 steps were clipped, and the median norm 20 is far "
                "above the threshold 1: the clip sets the step size, not the learning rate.", median=20.0,
                clip_norm=1.0)  # fmt: skip
DIVERGED = found(FindingKind.DIVERGENCE,
                 "the loss stands at 9 against 3 before, is flagged for 8 steps and goes on rising.")  # fmt: skip
FINITE = Observation(step=9, loss=2.5, grad_norm=0.5, loss_scale=1.0, update_skipped=0.0)
BAD = Observation(step=9, loss=NAN, grad_norm=NAN, update_skipped=1.0)
ODD = Observation(step=9, loss=2.5, grad_norm=float("inf"), update_skipped=0.0)


def stops():
    for observation, kind, frozen in ((BAD, FindingKind.NON_FINITE_LOSS, False),
                                      (ODD, FindingKind.NON_FINITE_GRAD, False),
                                      (Observation(step=9, loss=NAN), FindingKind.NON_FINITE_LOSS, False),
                                      (ODD, FindingKind.NON_FINITE_GRAD, True)):  # fmt: skip
        incident = found(kind, "", consecutive=20)
        seen = {kind: incident} | ({FindingKind.FROZEN_LOSS: FROZEN} if frozen else {})
        decision = explanations.stop_dead_run(observation, seen, 10)
        assert is_told(decision.reason), decision.reason
        yield decision.actions[0].diagnosis
    yield (
        explanations.stop_dead_run(FINITE, {FindingKind.FROZEN_LOSS: FROZEN}, 10)
        .actions[0]
        .diagnosis
    )
    yield explanations.diagnose_floor_of_learning_rate(FINITE, DIVERGED, 0.01)
    for hits in (
        "10 overflows in a row at",
        "18 overflows in a row down to",
        "16 overflows in 64 steps at",
    ):
        yield explanations.diagnose_floor_of_loss_scale(FINITE, hits)
        yield explanations.diagnose_floor_of_loss_scale(BAD, hits)
    yield explanations.diagnose_storm(FINITE, STORM)
    yield explanations.diagnose_storm(Observation(step=9), STORM)
    yield explanations.diagnose_without_effect(BAD, UNMOVED)
    yield explanations.diagnose_data_stall(STALL)
    yield explanations.diagnose_memory(SHORT, 1)
    yield explanations.diagnose_memory(SHORT, 0)
    yield explanations.diagnose_leak(SHORT, 2)
    yield explanations.diagnose_leak(SHORT, 0)
    yield explanations.diagnose_clip_saturation(CLIPPED)
    yield explanations.diagnose_lost_run(FINITE, "the loss diverged 64 steps ago, from 2.1, and stands at 9.3: "
                                         "lower learning rates did not bring it back", 0)  # fmt: skip
    yield explanations.diagnose_lost_run(BAD, DIVERGED.message.rstrip("."), 3)
    yield explanations.diagnose_skipping(FINITE, "20 updates in a row", 0.1, 0.5)
    yield explanations.diagnose_skipping(BAD, "70 of the last 100 updates", 0.1, None)
    yield explanations.diagnose_frequent_skips(FINITE, 60, 12.0, 24.0)
    yield explanations.diagnose_frequent_skips(FINITE, 60, 12.0, None)
    yield explanations.diagnose_never_finite(BAD, 3)
    yield explanations.diagnose_never_finite(Observation(step=3, loss=NAN), 3)


@pytest.mark.parametrize("text", list(stops()), ids=range(len(list(stops()))))
def test_every_diagnosis_of_a_stop_is_told_with_what_was_done_before_it(text):
    assert is_told(text), text
    done = ("step 5: gradient_norm set learning_rate_scale from unknown to 0.25; "
            "step 7: rewind returned to an earlier state")  # fmt: skip
    assert is_told(f"{text} Last actions: {done}."), text
    assert not re.search(r"[。，；]{2}|\. ", retold(text, ZH)), retold(text, ZH)


def test_what_ranks_and_other_records_tell_is_told():
    ranks = Ranks([0, 1, 2])
    streams = [[Observation(step=1, loss=loss, device_utilization=busy)] * 8
               for loss, busy in ((2.0, 0.9), (NAN, 0.0), (2.0, 0.9))]  # fmt: skip
    assert list(ranks.merged(streams))
    assert is_told(ranks.first_non_finite())
    assert is_told(ranks.idle())
    history = History.of([(Observation(step=4, loss=2.0), ())])
    for context in (RunContext(idle_ranks=ranks.idle()), RunContext(hung=True),
                    RunContext(outcome="oom")):  # fmt: skip
        assert all(is_told(finding.message) for finding in judge_ending(history, context))
    assert is_told(hidden_steps_finding(20, 10).message)


@pytest.mark.parametrize(
    ("english", "chinese"),
    [
        ("the loss stands at ln(50257) = 10.8249, uniform guesses over a vocabulary that is in use",
         "损失停在 ln(50257) = 10.8249，即对常用词表的均匀猜测"),
        ("step 12: the step took 4 s against 1 s.", "第 12 步：该步用时 4 s，平常为 1 s。"),
        ("the gradient norm rose from 0.5 to 20, from step 40 on; the loss in step 43",
         "自第 40 步起梯度范数从 0.5 升到 20；损失在第 43 步"),
        ("it is a drift over many batches", "它是跨越许多批的漂移"),
        ("30% of the time of the profiled steps 5 to 9 went into exchange, 10% of it beside other work",
         "剖析的第 5 到 9 步中 30% 的时间用于通信，其中 10% 与其他工作重叠"),
        (("from step 60 on the step took 4 s against 1 s, and has stayed there for 32 steps. The change is sudden "
         "and lasts, at 4 times the usual time"),
         "自第 60 步起，该步用时 4 s，平常为 1 s，且已持续 32 步。变化突然且持续，为平常用时的 4 倍"),
        ("Every update was skipped", "每次更新都被跳过"),
    ],
)  # fmt: skip
def test_evidence_is_put_together_from_what_is_known(english, chinese):
    assert retold(english, ZH).rstrip("。") == chinese.rstrip("。")


def test_a_text_without_end_is_quoted_at_once():
    assert isinstance(retold("the loss is " * 5000, ZH), Quoted)

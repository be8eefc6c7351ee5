"""The reports speak two languages completely, and quote records in the records' own."""

import ast
import re
import string
from html.parser import HTMLParser
from pathlib import Path
from typing import get_args

import pytest
from fontTools.ttLib import TTFont

from mindtune.controller.contract import RunResult
from mindtune.controller.contract.run_metrics import METRICS
from mindtune.controller.contract.trial_files import Outcome
from mindtune.controller.reports import language
from mindtune.controller.reports.language import LANGUAGES, Words, catalogue
from mindtune.controller.reports.time_figures import FATES
from mindtune.controller.reports.write import write_report
from mindtune.policies.decisions import EVENTS, SET_POINTS
from mindtune.policies.findings import FindingKind, Severity

FOLDER = Path(language.__file__).parent
CHINESE = re.compile("[\u4e00-\u9fff]")
SENTENCE = re.compile(r"(?:\b[A-Za-z]+ ){3,}[a-z]+")
SAME = {
    ", ",
    " ",
    "MFU",
    "{rate} tokens/s",
    "MFU {mfu}",
    "{fate}: {count}",
    "{outcome}: {count}",
    "HFU",
    "tokens/s",
}


def gaps(text):
    return {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}


def test_every_text_is_there_in_every_language_with_the_same_gaps():
    for key, texts in catalogue().items():
        assert gaps(texts["en"]) == gaps(texts["zh"]), key
        assert not CHINESE.search(texts["en"]), key
        words = re.sub("{.*?}", "", texts["zh"])
        assert CHINESE.search(words) or texts["en"] in SAME or not re.search("[a-z]{3}", words), (
            key
        )
        assert not SENTENCE.search(re.sub("`.*?`", "", texts["zh"])), key


def keys_in_code():
    """Return the keys that the code asks for; one with a gap as a pattern."""
    exact, patterns = set(), []
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "words"):
                continue
            inside = set()
            for part in ast.walk(node.args[0]):
                if isinstance(part, ast.JoinedStr):
                    inside |= {id(value) for value in part.values}
                    patterns.append("".join(
                        re.escape(v.value) if isinstance(v, ast.Constant) else r"\w+"
                        for v in part.values
                    ))  # fmt: skip
                elif isinstance(getattr(part, "value", None), str) and id(part) not in inside:
                    exact.add(part.value)
    template = (FOLDER / "page.html").read_text(encoding="utf-8")
    return exact | set(re.findall(r"words\('([\w.]+)'\)", template)), patterns


def test_the_code_asks_for_no_text_that_is_missing_and_no_text_is_left_over():
    exact, patterns = keys_in_code()
    known = set(catalogue())
    assert {key for key in exact if "." in key} <= known
    told = (
        "finding.",
        "meaning.",
        "action.",
        "outcome.",
        "phase.",
        "symptom.",
        "confidence.",
        "measure.",
    )  # by `known`, from records
    unused = [
        key
        for key in known - exact
        if not key.startswith(told) and not any(re.fullmatch(p, key) for p in patterns)
    ]
    assert unused == []


def test_all_that_a_record_can_hold_has_a_name():
    known = set(catalogue())
    assert {f"finding.{kind.value}" for kind in FindingKind} <= known
    assert {f"meaning.{kind.value}" for kind in FindingKind} <= known
    assert {f"action.{action.__name__}" for action in (*SET_POINTS, *EVENTS)} <= known
    assert {f"fate.{fate}" for fate in FATES} <= known
    assert {f"severity.{severity.value}" for severity in Severity} <= known
    assert {f"measure.{metric.unit}" for metric in METRICS.values()} - {"measure."} <= known | {
        "measure.s", "measure.bytes", "measure.bytes/s",  # scaled to the value
    }  # fmt: skip
    assert {f"phase.{phase}" for phase in ("train", "profile", "compile", "eval", "save")} <= known
    outcomes = {*get_args(Outcome), *get_args(RunResult.model_fields["outcome"].annotation)}
    assert {f"outcome.{outcome}" for outcome in outcomes} <= known
    assert Words("zh").known("finding", "of_a_later_version") == "of_a_later_version"


class Spoken(HTMLParser):
    """Collects the texts of a page, those of other languages besides; no style sheet."""

    def __init__(self):
        super().__init__()
        self.texts = []
        self.quoted = []
        self.open = []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.texts += [text for key in ("aria-label", "alt") if (text := attributes.get(key))]
        if tag not in ("meta", "br", "path", "use", "image", "rect", "line", "stop"):
            self.open.append((tag, attributes.get("lang")))

    def handle_endtag(self, tag):
        while self.open and self.open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        if not data.strip() or any(tag == "style" for tag, _ in self.open):
            return
        is_quoted = any(lang == "en" for _, lang in self.open)
        (self.quoted if is_quoted else self.texts).append(data.strip())


def log_of(steps):
    return "".join(
        f'{{"step": {step}, "loss": {loss}, "grad_norm": {norm}, "lr": 1e-3}}\n'
        for step, loss, norm in steps
    )


LOGS = {
    "nan_from_the_start": [(step, "NaN", "NaN") for step in range(1, 60)],
    "diverges": [(n, 3 + (n % 5) / 50 + max(0, n - 150) / 8, 1 + max(0, n - 150) / 4)
                 for n in range(1, 260)],
    "one_step": [(1, 2.0, 1.0)],
}  # fmt: skip


@pytest.fixture
def log(tmp_path, request):
    path = tmp_path / "log.jsonl"
    path.write_text(log_of(LOGS[request.param]), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("kind", "log", "foreign"),
    [("rich_run", "one_step", []), ("study_folder", "one_step", ["Allocate memory failed"]),
     *(("log", name, []) for name in LOGS)],
    indirect=["log"],
)  # fmt: skip
def test_the_chinese_page_holds_no_english_sentence(kind, log, foreign, request, rich_pages):
    path = rich_pages["zh"]
    if kind != "rich_run":
        path = write_report(request.getfixturevalue(kind), language="zh")
    page = Spoken()
    page.feed(path.read_text(encoding="utf-8"))
    assert len(page.texts) > 60
    assert page.quoted == foreign, "only what other programs wrote is quoted"
    assert [text for text in page.texts if SENTENCE.search(re.sub("`.*?`", "", text))] == []
    expected = {"rich_run": "损失非有限", "study_folder": "最优配置", "log": "策略本会做什么"}
    assert expected[kind] in " ".join(page.texts)
    assert LANGUAGES == ("en", "zh")


def test_the_font_of_a_pdf_has_every_character_that_the_books_use():
    font = TTFont(FOLDER / "fonts" / "NotoSansSC-common.otf")
    known = set(font.getBestCmap())
    missing = {
        path.name: sorted({c for c in text if CHINESE.match(c) and ord(c) not in known})
        for path in FOLDER.glob("*.yaml")
        for text in (path.read_text(encoding="utf-8"),)
    }
    assert missing == {key: [] for key in missing}

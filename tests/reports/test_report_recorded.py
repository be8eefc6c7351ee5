"""Sentences of records are told in Chinese, and the book of them is up to date."""

import ast
import re
from pathlib import Path

import pytest
import yaml

from mindtune.controller.reports import recorded
from mindtune.controller.reports.language import Words
from mindtune.controller.reports.page import Quoted
from mindtune.controller.reports.recorded import retold

ROOT = Path(__file__).parents[2]
BOOKS = [
    yaml.safe_load((Path(recorded.__file__).parent / name).read_text("utf-8"))
    for name in ("recorded_zh.yaml", "diagnosis_zh.yaml")
]
ZH = Words("zh")


@pytest.mark.parametrize(
    ("english", "chinese"),
    [
        ("the loss was nan, 2 steps in a row; its update was skipped.",
         "损失为 nan，连续 2 步；其更新已被跳过。"),
        ("the gradient norm 42.1 is 17.3 robust deviations above its median 0.93 (limit 8), 3 in a row and 3 in 64.",
         "梯度范数 42.1 高出其中位数 0.93 达 17.3 个稳健标准差（上限 8），连续 3 次，64 步中 3 次。"),
        # A sentence within another one, without its full stop.
        ("in the first steps the loss rose from 3.7 to 3.8 (return): the learning rate is too high.: back to the last healthy state, past the data since then",
         "最初几步损失从 3.7 升到 3.8（回升）：学习率过高：回退到最近的健康状态，并跳过其后的数据"),
        ("undone: 9 of 16 steps overflowed since", "已撤销：此后 16 步中溢出 9 步"),
        ("the learning rate is 0", "学习率为 0"),
    ],
)  # fmt: skip
def test_what_detectors_and_policies_wrote_is_told_in_chinese(english, chinese):
    assert retold(english, ZH) == chinese
    assert not isinstance(retold(english, ZH), Quoted)
    assert retold(english, Words("en")) == english


@pytest.mark.parametrize(
    "text", ["RuntimeError: out of memory", "undone: the dog ate it all", "x was set to y"]
)
def test_what_others_wrote_is_quoted(text):
    assert retold(text, ZH) == text
    assert isinstance(retold(text, ZH), Quoted)
    assert retold("", ZH) == ""


WRITERS = ("metrics", "live", "trials", "device", "replay")


def written():
    """Return all texts of the sources that write sentences, their gaps as {}."""
    texts = []
    for folder in ("policies", "search", *(f"controller/{room}" for room in WRITERS)):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    texts.append("".join(
                        part.value if isinstance(part, ast.Constant) else "{}"
                        for part in node.values
                    ))  # fmt: skip
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(node.value)
    return "\n".join(texts)


def can_be_written(part, sources):
    """Tell whether a part of a sentence is one of the sources', or put together of at most three."""
    words = part.split()
    for _ in range(3):
        ends = [end for end in range(len(words), 0, -1) if " ".join(words[:end]) in sources]
        if not ends:
            return False
        words = words[ends[0] :]
        if not words:
            return True
    return False


def test_every_sentence_of_the_book_is_one_that_can_be_written():
    """A message that was reworded is to be reworded in the book, too."""
    sources = written()
    stale = []
    for english, chinese in (
        *BOOKS[0]["prefixes"],
        *(pair for book in BOOKS for pair in book["sentences"]),
    ):
        gaps = set(re.findall("{(.)}", english))
        assert gaps == set(re.findall("{(.)}", chinese)), english
        parts = [part.strip(" ()") for part in re.split("{.}|[;:,.]", english)]
        if not can_be_written(max(parts, key=len), sources):
            stale.append(english)
    assert stale == []

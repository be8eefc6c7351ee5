"""What searches, trials and the live session can write into records is told in Chinese."""

import ast
from pathlib import Path

import pytest

from mindtune.controller.reports.language import Words
from mindtune.controller.reports.page import Quoted
from mindtune.controller.reports.recorded import retold

ROOT = Path(__file__).parents[2]
ZH = Words("zh")
RULES = ("rules", "pipeline_rules", "advice")
GAPS = {"relation": "be", "how": "", "stands": "within", "place": "stage 1", "given": "7"}
"""Words that a sentence is completed with; every other gap is a number."""


def sentences(path, *, of_returns):
    """Return the sentences that the functions of a module put together, gaps filled."""
    found = []
    for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            if not isinstance(node, ast.Return if of_returns else (ast.Return, ast.Assign)):
                continue
            value = node.value
            if isinstance(value, ast.JoinedStr):
                found.append("".join(map(filled, value.values)))
            elif isinstance(value, ast.Constant) and isinstance(value.value, str):
                found.append(value.value)
    return [text for text in found if text.count(" ") >= 3]


def filled(part):
    if isinstance(part, ast.Constant):
        return part.value
    return GAPS.get(getattr(part.value, "id", ""), "7")


@pytest.mark.parametrize("module", [*RULES, "ending", "stopping", "convergence"])
def test_what_a_search_writes_is_in_the_book(module):
    texts = sentences(ROOT / "search" / f"{module}.py", of_returns=module in RULES)
    assert len(texts) > 1
    assert [text for text in texts if isinstance(retold(text, ZH), Quoted)] == []


@pytest.mark.parametrize(
    ("english", "chinese"),
    [
        (("1.50 x the base config's value (95 % interval 1.40 to 1.60); trial 3 is out: it does not "
         "converge as the base does: its loss is not finite at the end, at 512 samples; trial 4 is "
         "out: it was not measured again"),
         ("得分为基线配置的 1.50 倍（95% 区间 1.40 至 1.60）；试验 3 出局：收敛不如基线：训练结束时（512 个样本）损失"
         "非有限；试验 4 出局：没有重新测量")),
        (("1.21 x the base config's value (one repeat each, so noise is not known); whether it "
         "learns as well as the base is not known (not judged: its repeats recorded no losses)"),
         ("得分为基线配置的 1.21 倍（各只重复一次，噪声未知）；学习效果是否不逊于基线尚不可知（未评判：各次重复都"
         "没有记录损失）")),
        (("a further trial is expected to gain 0.4%, less than stop.min_gain = 2.0%; none paid after "
         "any of the last 3 results"),
         "再做一个试验预计提升 0.4%，低于 stop.min_gain = 2.0%；最近 3 个结果之后都是如此"),
        ("data_parallel x model_parallel must be num_devices = 8, but 2 x 2 = 4",
         "data_parallel x model_parallel 须等于 num_devices = 8，但 2 x 2 = 4"),
        ("rank 3: killed by SIGKILL after an ok result", "进程 3：被 SIGKILL 终止，此前结果正常"),
        ("a knob did not take effect: recompute: 'none', but 'full' acted",
         "旋钮没有生效：recompute：要求 'none'，实际为 'full'"),
        (("at step 7 the gradient is first non-finite in block0 as the backward pass comes to it "
         "(1 of 3 layers are non-finite); look there for an overflow, a division by 0 or a log of 0"),
         "第 7 步：反向计算到 block0 时梯度首次非有限（3 层中 1 层非有限）；请在那里查找溢出、除以 0 或对 0 取 log"),
    ],
)  # fmt: skip
def test_sentences_within_sentences_are_told_as_well(english, chinese):
    assert retold(english, ZH) == chinese


def test_a_message_of_another_program_is_quoted_at_once():
    text = "Traceback (most recent call last):\n" + "  File: x, line 1, in y; z: (a) = b\n" * 60
    assert isinstance(retold(text, ZH), Quoted)

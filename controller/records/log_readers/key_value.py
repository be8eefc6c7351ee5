"""Lines that name their values: `Epoch 12/200, step:100/1487, loss:0.08, step cost:182ms`.

That is how the training scripts of MindSpore's model zoo and courses, mindyolo, torchtitan, OLMo
and many others print, each with names, brackets and units of its own: `loss[3.1]`, `loss: (Tensor(
shape=[], dtype=Float32, value= 50.2), ...)`, `lr=[1e-05, 1e-05]`. A data line names a step or an
epoch and a signal of training. A time without a unit is in seconds, as Python's clocks give it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from mindtune.controller.records.log_readers import fields
from mindtune.controller.records.log_readers.fields import EPOCH_NAMES
from mindtune.controller.records.log_readers.numerals import COMMA_NUMBER, Commas
from mindtune.controller.records.log_readers.reader import (
    CUT,
    INTEGER,
    NUMBER,
    VALUE,
    LogFormat,
    LogReader,
    Record,
    StepCounter,
    number,
)

__all__ = ["KEY_VALUE", "NamedLine", "parse_line"]

_TENSOR = re.compile(
    r"Tensor\(shape=\[[^\]]{0,40}\], dtype=\w+, value=\s*\[?([^)\]]*)\]?\)"
    rf"|(?:\btensor|\bnp\.\w{{1,20}})\(({NUMBER})(?:, *\w+=[^()]{{0,60}})*\)"
)
"""A value inside what Python makes of a tensor, or of a number of NumPy."""
_PAIR = re.compile(
    r"(?<![\w/.-])([A-Za-z][\w/.-]*(?: [A-Za-z][\w/-]*){0,4}(?: ?\([\w /%]{1,12}\))?)"
    r"( {0,9}[:=\uff1a]| {0,9}\[| ) {0,9}([\[(])? {0,9}"
    rf"((?:{COMMA_NUMBER}|{NUMBER}(?(3)|(?!,\d))|(?i:True|False)\b)"
    r"(?: ?(?:ms|sec|s|%)(?![\w/]))?)"
    rf"(?: */ *({COMMA_NUMBER}|{NUMBER}|\?+))?"
    r"(?=\.?(?:[\s,;|)\]}>(\"'\uff0c\uff1b\uff09]|:\s|$))(?= {0,9}([^ ]?))"
)
"""Name, sign, bracket, value with unit, total, and what follows. Spaces are counted, since a
pattern that may take any number of them twice needs the square of their number."""
_TELLING = frozenset({"loss", "grad_norm", "step_time_s", "eval_loss"})
"""Without one of these a line is no data line: many a line of a set-up names a step and a rate."""
_TIME = re.compile(rf"(?<![\w.])time: *({NUMBER})(?![\w.:])")
_MOST_WORDS = 4
_MOST_DIGITS = 15
_MOST_PHRASES = 4096
_MOST_BROKEN = 8
"""Lines that repeat a name per line that does not, above which that is how the program prints."""
_VERBS = (" is", " are")
_ENDS = "|,;:)]\t\r\n"
"""What follows a value that stands after its name without a sign between, as in `step 3 | ...`.
In a sentence another word follows."""
_TUPLE = re.compile(
    rf"\b(?:loss|outputs?)(?:[:=]| is| are)?\s*\(\s*({NUMBER}), *(True|False), *({VALUE})",
    re.IGNORECASE,
)
_OF_EPOCH = re.compile(
    r"(?:\((?:train|val|test)\)|\bEpoch:?(?= ?\[\d+\] {0,2}\[)|\bTrain:(?= \[\d+/\d+\]\[)) *"
    rf"(?:\[({INTEGER})(?:/\d+)?\] {{0,2}})?\[ *({INTEGER})/({INTEGER})\]"
    rf"|\b(?:Epoch|Train): ({INTEGER}) \[ *({INTEGER})/({INTEGER}) +\( *\d+%\)\]",
    re.IGNORECASE,
)
"""mmengine and mmcv: `Epoch(train) [1][240/735] lr: ... time: 2.9 data_time: 0.004 loss: 2.5`,
where `time` is that of a step; examples of PyTorch: `Epoch: [0][ 10/5005]`, `Train Epoch: 1
[640/60000 (1%)]`; torchvision, DETR and MAE: `Epoch: [0]  [  20/1251]  eta: 0:10:00`; Swin:
`Train: [3/300][10/1251]`; timm: `Train: 0 [  50/1251 (  4%)]`."""
_EPOCH_STEP = re.compile(rf"\bepoch ({INTEGER}) (?:step|iter|batch)", re.IGNORECASE)
"""Bare words, where another word does not make it a sentence."""
_RUN_IN = re.compile(
    r"[a-z0-9.](?:step|iter|iteration|epoch)\b(?= {0,3}[:=\[] {0,3}\d)", re.IGNORECASE
)
"""A step named right behind a letter or digit (`lostep: 6`), where another line may begin."""
_COUNTED = ("tep", "ter", "poch")
_ENGINES = ("][", "]  [", "train)", "val)", "test)", "%)]")
_PLAIN = frozenset({"", "info", "train", "training", "step", "debug", "the"})
_EVALUATES = re.compile(
    r"(?<![\w/.-])(?:val|valid(?:at\w+)?|eval(?:uat\w+)?|test(?:ing)?)(?![\w/.-])", re.IGNORECASE
)
"""As a word of its own: a path may name a test."""
_OF_ALL = "[step="
"""OLMo counts steps on over its epochs."""
_OVERFLOWED = re.compile(
    rf"\boverflow, (still update|drop (?:the )?step|skip)\b(?:.*loss scale adjust to ({VALUE}))?"
)
"""mindyolo and MindONE, before the line of the step: whether the update was applied all the same,
and the scale of the next step."""


@dataclass
class NamedLine:
    """What one line names."""

    epoch: int | None = None
    step: int | None = None
    of_steps: int | None = None
    signals: dict[str, float] = field(default_factory=dict)
    repeats: bool = False
    """Whether it gives two values under one name, as two lines do that were written into one."""


def parse_line(
    line: str, names: fields.Names = fields.KNOWN, commas: Commas | None = None
) -> NamedLine:
    """Return what a line names; nothing, where it names nothing that is known.

    Args:
        line: the line.
        names: which names stand for which signals.
        commas: how the log writes numbers; None: as this line does.
    """
    named = NamedLine()
    commas = commas or Commas()
    commas.note(line)
    if "ensor(" in line or "np." in line:
        line = _TENSOR.sub(lambda found: found[1] or found[2], line)
    pairs: list[tuple[str, object]] = []
    steps: dict[str, tuple[int, int | None]] = {}
    values: dict[str, str] = {}
    twice = any(line.count(word) > 1 for word in _COUNTED)
    named.repeats = twice and _RUN_IN.search(line) is not None
    phrases = names.phrases
    signs = "|" in line
    engine = _OF_EPOCH.search(line) if any(mark in line for mark in _ENGINES) else None
    ends = _ENDS if engine is None else f"{_ENDS}("  # the mean stands there: `Loss 2.5 (2.6)`
    for words, sign, bracket, told, total, following in _PAIR.findall(line):
        name, before = phrases.get(words) or _known(words, names)
        if not name:
            continue
        bare = not sign.strip() and not words.endswith(_VERBS)
        if bare and not total and following not in ends:
            continue
        value: str | None = told
        if "," in told:
            value = told.partition(",")[0] if bracket else commas.plain(told)
        if value is None:
            continue
        is_count = name in names.steps or name in EPOCH_NAMES
        signs = signs or not (bare or is_count)
        if is_count:
            if value.isdigit() and len(value) <= _MOST_DIGITS:
                count = int(value), int(total) if total.isdigit() else None
                same = steps.setdefault(name, count)[0] == count[0] or before not in _PLAIN
                named.repeats = named.repeats or not same
        elif not (name.endswith("loss") and before not in _PLAIN):
            pairs.append((name, value))
            same = values.setdefault(name, value) == value or before not in _PLAIN
            named.repeats = named.repeats or not same
    signs = signs or engine is not None or (bool(steps) and len(pairs) > 1)
    named.signals = names.collect(pairs) if signs else {}
    whole = _TUPLE.search(line) if "True," in line or "False," in line else None
    if whole is not None:  # what MindSpore's cells with loss scale return
        parts = [("loss", whole[1]), ("overflow", whole[2]), ("scale", whole[3])]
        named.signals = {**named.signals, **fields.collect(parts)}
    for name in names.steps:
        if name in steps:
            named.step, named.of_steps = steps[name]
            break
    if engine is not None:
        epoch, step, total = engine.groups()[:3] if engine[2] else engine.groups()[3:]
        steps = {"epoch": (int(epoch), None)} if epoch else {}
        named.step, named.of_steps = int(step), int(total)
        time = _TIME.search(line)
        if time is not None and "data_time_s" in named.signals:
            named.signals["step_time_s"] = number(time[1])
    if _OF_ALL not in line:
        named.epoch = next((steps[name][0] for name in EPOCH_NAMES if name in steps), None)
        if named.epoch is None and named.step is not None and "poch " in line:
            before_step = _EPOCH_STEP.search(line)
            named.epoch = int(before_step[1]) if before_step is not None else None
    if "loss" in named.signals and _evaluates(line):
        loss = named.signals.pop("loss")
        named.signals = {"eval_loss": named.signals.get("eval_loss", loss)}
    return named


def _evaluates(line: str) -> bool:
    """Tell whether a line says that it is of an evaluation, before it names a loss."""
    lower = line.lower()
    if "val" not in lower and "test" not in lower:
        return False
    found = _EVALUATES.search(line)
    return found is not None and found.start() < lower.find("loss")


def _known(words: str, names: fields.Names) -> tuple[str, str]:
    """Return the known name that words end with, the longest one, and the word before it.

    A loss with another word before it is that of a part: `box loss`.
    """
    found = names.phrases.get(words)
    if found is None:
        if len(names.phrases) >= _MOST_PHRASES:
            names.phrases.clear()
        found = names.phrases[words] = _find(words, names)
    return found


def _find(words: str, names: fields.Names) -> tuple[str, str]:
    parts = words.lower().split(" ")
    if parts[-1] in ("is", "are"):
        parts.pop()
    for count in range(min(_MOST_WORDS, len(parts)), 0, -1):
        name = fields.normal("_".join(parts[-count:]))
        if name in names.steps or name in EPOCH_NAMES or names.is_signal(name):
            return name, parts[-count - 1] if len(parts) > count else ""
    return "", ""


class _Reader:
    def __init__(self, names: fields.Names) -> None:
        self._names = names
        self._telling = _TELLING | names.mapped
        self._commas = Commas()
        self._counter = StepCounter()
        self._header: NamedLine | None = None
        self._overflow: dict[str, float] = {}
        self._last_step: int | None = None
        self._scale: float | None = None
        self._clean = False
        self._tells_next_scale = False
        self._single = 0
        self._repeating = 0
        self._has_steps = False

    def feed(self, line: str) -> Sequence[Record] | None:
        overflowed = _OVERFLOWED.search(line) if "overflow, " in line else None
        if overflowed is not None:
            skipped = float(overflowed[1] != "still update")
            self._overflow = {"overflow": 1.0, "update_skipped": skipped}
            if overflowed[2]:
                self._overflow.update(fields.collect([("loss_scale", overflowed[2])]))
            return []
        named = parse_line(line, self._names, self._commas)
        if named.repeats and self._is_two_lines():
            return None
        is_below = named.step is None and named.epoch is None
        if is_below:
            if self._header is None or line[:1] not in (" ", "\t") or not named.signals:
                return None
            # OLMo: the step on a line of its own, its values below, set in.
            named.step, named.epoch = self._header.step, self._header.epoch
        elif not named.signals:
            self._header = named if named.step is not None else None
            return None
        else:
            self._header = None
        if not is_below and not self._telling & named.signals.keys():
            return None
        if named.step is None and CUT in line:
            return None  # it lost its step
        if named.step is None and self._has_steps:
            return []  # a summary of an epoch
        self._has_steps = self._has_steps or named.step is not None
        self._single += not named.repeats
        step = self._step(named)
        signals = {**self._overflow, **named.signals}
        self._overflow = {}
        if "loss_scale" in signals and named.step is not None:
            signals["loss_scale"] = self._used_scale(step, signals)
        starts = self._last_step is None or step <= self._last_step
        self._last_step = step
        # A step that is the first of its run holds the compilation, and so its time.
        phase = "compile" if starts and step <= 1 and "step_time_s" in signals else None
        return [Record(fields.make(step, signals, phase=phase))]

    def _is_two_lines(self) -> bool:
        """Tell whether a line that repeats a name is two; not where most lines of a log do."""
        self._repeating += 1
        return self._repeating <= _MOST_BROKEN * self._single

    def _used_scale(self, step: int, signals: dict[str, float]) -> float:
        """Return the scale that acted, from a printed one that may be that of the next step.

        Which one a program prints shows at an overflow after a clean step: the next step's scale
        is lower than the one before.
        """
        scale, overflow = signals["loss_scale"], signals.get("overflow")
        follows = self._last_step is not None and step == self._last_step + 1
        before = self._scale if follows else None
        if before is not None and overflow == 1.0 and self._clean:
            self._tells_next_scale = scale < before
        self._scale, self._clean = scale, overflow == 0.0
        return before if before is not None and self._tells_next_scale else scale

    def _step(self, named: NamedLine) -> int:
        if named.step is None:
            return named.epoch or 0
        return self._counter.count(named.epoch, named.step, named.of_steps)

    def finish(self) -> Sequence[Record]:
        return []


def _start(names: fields.Names = fields.KNOWN) -> LogReader:
    return _Reader(names)


KEY_VALUE = LogFormat(
    "key_value",
    "lines that name step, loss and other values (MindSpore model zoo, mindyolo, torchtitan, ...)",
    _start,
    mapped=_start,
    is_general=True,
)

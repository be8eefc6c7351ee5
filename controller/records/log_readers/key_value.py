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
from mindtune.controller.records.log_readers.reader import (
    INTEGER,
    NUMBER,
    LogFormat,
    LogReader,
    Record,
    StepCounter,
    number,
)

__all__ = ["KEY_VALUE", "NamedLine", "parse_line"]

_TENSOR = re.compile(r"Tensor\(shape=\[[^\]]{0,40}\], dtype=\w+, value=\s*\[?([^)\]]*)\]?\)")
_PAIR = re.compile(
    r"(?<![\w/.-])([A-Za-z][\w/.-]*(?: [A-Za-z][\w/-]*){0,4})"
    r"( {0,9}[:=]| {0,9}\[| ) {0,9}[\[(]? {0,9}"
    rf"((?:{NUMBER}|(?i:True|False)\b)(?: ?(?:ms|sec|s|%)(?![\w/]))?)(?: */ *({INTEGER}))?"
    r"(?= {0,9}([^ ]?))"
)
"""Name, sign, value with unit, total, and what follows. Spaces are counted, since a pattern that
may take any number of them twice needs the square of their number."""
_TELLING = frozenset({"loss", "grad_norm", "step_time_s", "eval_loss"})
"""Without one of these a line is no data line: many a line of a set-up names a step and a rate."""
_TIME = re.compile(rf"(?<![\w.])time: *({NUMBER})(?![\w.:])")
_COUNTS = frozenset((*fields.STEP_NAMES, *fields.EPOCH_NAMES))
_MOST_WORDS = 4
_VERBS = (" is", " are")
_ENDS = "|,;:)]"
"""What follows a value that stands after its name without a sign between, as in `step 3 | ...`.
In a sentence another word follows."""
_TUPLE = re.compile(
    rf"\b(?:loss|outputs?)(?:[:=]| is| are)?\s*\(\s*({NUMBER}), *(True|False), *({NUMBER})",
    re.IGNORECASE,
)
_OF_EPOCH = re.compile(
    rf"(?:\((?:train|val|test)\)|\bEpoch(?= ?\[\d+\]\[)) *(?:\[({INTEGER})\])?"
    rf"\[ *({INTEGER})/({INTEGER})\]",
    re.IGNORECASE,
)
"""mmengine and mmcv: `Epoch(train) [1][240/735] lr: ... time: 2.9 data_time: 0.004 loss: 2.5`; its
`time` is that of a step."""
_PLAIN = frozenset({"", "info", "train", "training", "step", "debug", "the"})
_EVALUATES = re.compile(r"\b(?:val|valid|validation|eval|evaluation|test)\b", re.IGNORECASE)
_OVERFLOWED = re.compile(
    rf"\boverflow, (still update|drop (?:the )?step|skip)\b(?:.*loss scale adjust to ({NUMBER}))?"
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


def parse_line(line: str) -> NamedLine:
    """Return what a line names; nothing, where it names nothing that is known."""
    named = NamedLine()
    if "Tensor(" in line:
        line = _TENSOR.sub(r"\1", line)
    pairs: list[tuple[str, object]] = []
    steps: dict[str, tuple[int, int | None]] = {}
    signs = "|" in line
    for words, sign, value, total, following in _PAIR.findall(line):
        bare = not sign.strip() and not words.endswith(_VERBS)
        if bare and not total and following.strip() not in _ENDS:
            continue
        name, before = _known(words)
        signs = signs or not (bare or name in _COUNTS)
        if name in _COUNTS:
            if value.isdigit():
                steps.setdefault(name, (int(value), int(total) if total else None))
        elif name and not (name.endswith("loss") and before not in _PLAIN):
            pairs.append((name, value))
    named.signals = fields.collect(pairs) if signs else {}
    whole = _TUPLE.search(line)
    if whole is not None:  # what MindSpore's cells with loss scale return
        told = fields.collect([("loss", whole[1]), ("overflow", whole[2]), ("scale", whole[3])])
        named.signals = {**named.signals, **told}
    for name in fields.STEP_NAMES:
        if name in steps:
            named.step, named.of_steps = steps[name]
            break
    engine = _OF_EPOCH.search(line) if "][" in line or "(" in line else None
    if engine is not None:
        steps = {"step": (int(engine[2]), int(engine[3]))}
        named.step, named.of_steps = steps["step"]
        if engine[1]:
            steps["epoch"] = (int(engine[1]), None)
        time = _TIME.search(line)
        if time is not None and "data_time_s" in named.signals:
            named.signals["step_time_s"] = number(time[1])
    named.epoch = next((steps[name][0] for name in fields.EPOCH_NAMES if name in steps), None)
    if "loss" in named.signals and _EVALUATES.search(line):
        loss = named.signals.pop("loss")
        named.signals = {"eval_loss": named.signals.get("eval_loss", loss)}
    return named


def _known(words: str) -> tuple[str, str]:
    """Return the known name that words end with, the longest one, and the word before it.

    A loss with another word before it is that of a part: `box loss`.
    """
    parts = words.lower().split(" ")
    if parts[-1] in ("is", "are"):
        parts.pop()
    for count in range(min(_MOST_WORDS, len(parts)), 0, -1):
        name = fields.normal("_".join(parts[-count:]))
        if name in _COUNTS or fields.is_signal(name):
            return name, parts[-count - 1] if len(parts) > count else ""
    return "", ""


class _Reader:
    def __init__(self) -> None:
        self._counter = StepCounter()
        self._header: NamedLine | None = None
        self._overflow: dict[str, float] = {}
        self._last_step: int | None = None
        self._scale: float | None = None
        self._clean = False
        self._tells_next_scale = False

    def feed(self, line: str) -> Sequence[Record] | None:
        overflowed = _OVERFLOWED.search(line) if "overflow, " in line else None
        if overflowed is not None:
            skipped = float(overflowed[1] != "still update")
            self._overflow = {"overflow": 1.0, "update_skipped": skipped}
            if overflowed[2]:
                self._overflow.update(fields.collect([("loss_scale", overflowed[2])]))
            return []
        named = parse_line(line)
        if named.step is None and named.epoch is None:
            if self._header is None or line[:1] not in (" ", "\t") or not named.signals:
                return None
            # OLMo: the step on a line of its own, its values below, set in.
            named.step, named.epoch = self._header.step, self._header.epoch
        elif not named.signals:
            self._header = named
            return None
        else:
            self._header = None
        if not _TELLING & set(named.signals):
            return None
        step = self._step(named)
        signals = {**self._overflow, **named.signals}
        self._overflow = {}
        if "loss_scale" in signals and named.step is not None:
            signals["loss_scale"] = self._used_scale(step, signals)
        self._last_step = step
        # A step that is the first of its run holds the compilation, and so its time.
        phase = "compile" if step <= 1 and "step_time_s" in signals else None
        return [Record(fields.make(step, signals, phase=phase))]

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


def _start() -> LogReader:
    return _Reader()


KEY_VALUE = LogFormat(
    "key_value",
    "lines that name step, loss and other values (MindSpore model zoo, mindyolo, torchtitan, ...)",
    _start,
)

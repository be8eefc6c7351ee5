"""Iteration lines of Megatron-LM and its kin (Megatron-DeepSpeed, GPT-NeoX).

` iteration 10/ 1000 | consumed samples: 80 | elapsed time per iteration (ms): 1210.0 | ... |`:
means over a log interval, but the newest gradient norm. What is not what it looks like:

- the loss is left out where its mean is not a positive number: NaN, unless every iteration of the
  interval was skipped;
- the loss scale is the one after the iteration; the one that acted stands in the line before;
- Megatron-DeepSpeed prints `grad norm: 0.000` and `loss scale: -1.0` for "not known", counts no
  skipped iterations (the overflows stand in lines of DeepSpeed's between), repeats an old norm on
  them, and in its fp16 builds of before 2023 prints norms multiplied by the loss scale;
- a terminal may have wrapped a line, also inside of a name, but a number that may be broken is not
  taken.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from mindtune.controller.records.log_readers import fields
from mindtune.controller.records.log_readers.reader import (
    CUT,
    INTEGER,
    NUMBER,
    PART,
    LogFormat,
    LogReader,
    Record,
    number,
    observed,
    whole,
)
from mindtune.controller.records.log_readers.scaler_events import ScalerEvents
from mindtune.policies.signals import Observation

__all__ = ["MEGATRON"]

_HEAD = re.compile(rf"iteration +({INTEGER})/ *{INTEGER} *\|")
_MARKS = ("elapsed time per iteration", "consumed samples")
"""Stand in every iteration line; NeMo names an iteration, too."""
_LAST = "number of nan"
_COMPLETE = re.compile(r"number of nan ?iterations: *\d+ *\|")
_VALID = re.compile(
    rf"\bvalid(?:ation)? loss at iteration ({INTEGER})\b(?!.* on test set)[^|]*\|"
    rf" *\S* ?loss value: *({NUMBER}) *\|"
)
_WRAPPED = 6
"""Physical lines that one record may be wrapped over."""
_IS_PIECE = re.compile(r"(?!.*%\|).*[A-Za-z|]")
"""A number alone may be none, and a progress bar is none."""
_IN_NUMBER = re.compile(r"[\d.]\n(?=[\d.eE])")
_PARTS = ("load_balancing", "mtp", "z_loss", "sop", "aux")
"""Losses that are parts or additions, not the loss."""
_TELLING_SCALE = 256.0
"""A scale below it does not show whether a norm was multiplied by it."""


class _Reader:
    def __init__(self) -> None:
        self._events = ScalerEvents()
        self._pieces: list[str] = []
        self._iteration: int | None = None
        self._interval: int | None = None
        self._consumed: tuple[float | None, float | None] = (None, None)
        self._scale: float | None = None
        self._norm_text = ""
        self._reports_norm = False
        self._deepspeed = False
        self._scaled: bool | None = None

    def feed(self, line: str) -> Sequence[Record] | None:
        if self._events.feed(line):
            return []
        heads = [head.start() for head in _HEAD.finditer(line)] if "iteration" in line else []
        if not heads and not self._pieces:
            return self._validation(line)
        if not heads and not _IS_PIECE.match(line):
            # Of another writer, as far as can be told: what it stands in is broken.
            self._pieces += [CUT] * (self._pieces[-1] != CUT)
            return None
        records: list[Record] = []
        if not heads:
            self._pieces.append(line.rstrip("\n"))
        for start, end in zip(heads, [*heads[1:], len(line)], strict=False):
            # Several heads: one rank wrote into the line of another. Each is read up to the next.
            records += self._finish_pieces()
            self._pieces = [line[start:end].rstrip("\n")]
        if _is_complete("".join(self._pieces)):
            return [*records, *self._finish_pieces()]
        if len(self._pieces) >= _WRAPPED:
            return [*records, *self._finish_pieces()]
        return records or PART

    def finish(self) -> Sequence[Record]:
        return self._finish_pieces()

    def _validation(self, line: str) -> Sequence[Record] | None:
        found = _VALID.search(line) if "loss at iteration" in line else None
        if found is None:
            return None
        return [Record(Observation(step=int(found[1]), eval_loss=number(found[2])))]

    def _finish_pieces(self) -> list[Record]:
        if not self._pieces:
            return []
        text, is_wrapped, self._pieces = _joined(self._pieces), len(self._pieces) > 1, []
        head = _HEAD.search(text)
        if head is None:
            return []
        if _MARKS[0] not in text and _MARKS[1] not in text:
            return []
        values: dict[str, str] = {}
        # The last part is empty, or the cut end of a truncated line.
        parts = text[head.end() :].split("|")[:-1]
        for part in parts:
            name, colon, value = part.partition(":")
            if colon:
                values.setdefault(fields.normal(name), value.strip())
        if not values:
            return []
        # Only a record without damage can tell a loss by not naming it.
        intact = CUT not in text and text.count(":", head.end()) >= len(parts)
        intact = intact and not is_wrapped
        complete = intact and _is_complete(text)
        return [Record(self._observation(int(head[1]), values, complete=complete))]

    def _observation(
        self, iteration: int, values: dict[str, str], *, complete: bool
    ) -> Observation:
        self._deepspeed = self._deepspeed or values.get("num_zeros") == "0.0"
        gap = None if self._iteration is None else iteration - self._iteration
        if gap is not None and gap <= 0:  # resumed: what was counted holds no more
            gap = self._scale = None
            self._events.restart()
        batch = _value(values, "global_batch_size")
        interval = self._steps(iteration, gap, batch, _value(values, "consumed_samples"))
        skipped = _value(values, "number_of_skipped_iterations")
        loss = _loss(values)
        if loss is None and complete and _lost_its_loss(values, skipped, interval):
            loss = math.nan
        scale = _value(values, "loss_scale")
        scale = scale if scale is not None and scale > 0 else None
        events = self._events.take(interval or 1)
        rate = self._overflows(skipped, scale, interval, gap, events)
        used = events.get("loss_scale", scale)
        if "loss_scale" not in events and gap == 1 == interval and self._scale is not None:
            used = self._scale
        norm = self._grad_norm(values, used, overflow=rate)
        time_ms = _value(values, "elapsed_time_per_iteration_ms", "elapsed_time_per_iteration")
        time_s = _value(values, "elapsed_time_per_iteration_s")
        if time_ms is not None:
            time_s = time_ms / 1000
        tokens = self._tokens_per_step(values, batch, gap)
        self._iteration, self._scale = iteration, scale
        return observed(
            step=iteration,
            loss=loss,
            grad_norm=norm,
            overflow=rate,
            update_skipped=rate,
            loss_scale=used if scale is not None else None,
            learning_rate=_value(values, "learning_rate"),
            global_batch_size=whole(batch),
            tokens=tokens,
            step_time_s=time_s,
            tokens_per_s=tokens / time_s if tokens and time_s else None,
        )

    def _steps(
        self, iteration: int, gap: int | None, batch: float | None, samples: float | None
    ) -> int | None:
        """Return how many iterations a line is about; an excerpt's gaps are no intervals."""
        if gap is not None:
            self._interval = min(gap, self._interval or gap)
        elif batch and samples == batch * iteration:
            return iteration  # the first line of a run
        return self._interval

    def _overflows(
        self,
        skipped: float | None,
        scale: float | None,
        interval: int | None,
        gap: int | None,
        events: dict[str, float],
    ) -> float | None:
        """Return the share of iterations that overflowed; None: the log does not tell.

        DeepSpeed counts none of them: its lines tell, or at least a scale that fell.
        """
        self._deepspeed = self._deepspeed or self._events.seen
        if scale is None or skipped is None:
            return None
        if self._deepspeed and not skipped and not self._events.seen:
            before = self._scale if gap == interval else None
            if before is None or interval is None or scale >= before:
                return None
            return min(1.0, math.log2(before / scale) / interval)
        share = 0.0 if skipped == 0 else None if not interval else min(1.0, skipped / interval)
        return None if share is None else max(events.get("overflow", 0.0), share)

    def _tokens_per_step(
        self, values: dict[str, str], batch: float | None, gap: int | None
    ) -> int | None:
        """Return the tokens of a step, where the batch was the same since the line before."""
        consumed = _value(values, "consumed_samples"), _value(values, "consumed_tokens")
        before, self._consumed = self._consumed, consumed
        samples, tokens = consumed
        if not gap or batch is None or samples is None or tokens is None:
            return None
        if before[0] is None or before[1] is None or samples - before[0] != gap * batch:
            return None
        return whole(float(round((tokens - before[1]) / gap)))

    def _grad_norm(
        self, values: dict[str, str], scale: float | None, *, overflow: float | None
    ) -> float | None:
        text = values.get("grad_norm", "")
        norm = _value(values, "grad_norm")
        stale = bool(overflow) and text == self._norm_text and self._deepspeed
        self._norm_text = text
        if norm is None or stale:
            return None
        if norm == 0 and not self._reports_norm:
            return None
        self._reports_norm = True
        if not self._deepspeed or scale is None or not math.isfinite(norm):
            return norm
        if self._scaled is None and scale >= _TELLING_SCALE:
            # A norm is within a few decades of 1: it was multiplied if it is nearer to the scale.
            self._scaled = norm > math.sqrt(scale)
        return norm / scale if self._scaled else norm


def _joined(pieces: list[str]) -> str:
    """Return a record as one line; a number that a break may run through stays broken."""
    return _IN_NUMBER.sub(lambda found: found[0][0] + CUT, "\n".join(pieces)).replace("\n", "")


def _is_complete(text: str) -> bool:
    start = text.rfind(_LAST)
    return start >= 0 and _COMPLETE.match(text, start) is not None


def _value(values: dict[str, str], *names: str) -> float | None:
    for name in names:
        read = fields.read_value(values[name]) if name in values else None
        if read is not None:
            return read[0]
    return None


def _loss(values: dict[str, str]) -> float | None:
    for name in fields.SIGNALS["loss"]:
        if name in values:
            return _value(values, name)
    others = (name for name in values if name.endswith("loss") and not name.startswith(_PARTS))
    return _value(values, next(others, ""))


def _lost_its_loss(values: dict[str, str], skipped: float | None, interval: int | None) -> bool:
    """Tell whether a loss is missing because it is not finite, not because all was skipped."""
    if _value(values, "number_of_nan_iterations"):
        return True
    if skipped is None:
        return False
    return skipped == 0 or (interval is not None and skipped != interval)


def _start() -> LogReader:
    return _Reader()


MEGATRON = LogFormat(
    "megatron", "iteration lines of Megatron-LM, Megatron-DeepSpeed, GPT-NeoX", _start, lag=0
)

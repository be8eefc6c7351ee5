"""What loss scalers of PyTorch programs print when a gradient overflows.

DeepSpeed's scaler says so on rank 0 (`OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536,
reducing to 32768`), its fused optimizer on every rank besides; apex on every rank, without saying
which. Each overflow counts once.
"""

from __future__ import annotations

import re

from mindtune.controller.records.log_readers.reader import NUMBER, VALUE, number

__all__ = ["ScalerEvents"]

_SKIPPED = re.compile(
    rf"overflow\S{{0,9}} *(?:detected\.)? *(?:Rank (\d+) )?Skipping step\. "
    rf"Attempted loss scale: ({NUMBER})(?:, (?:but|reducing))",
    re.IGNORECASE,
)
_RANK = re.compile(r"\[Rank (\d+)\]")
_APEX = re.compile(rf"Gradient overflow\. +Skipping step, loss scaler 0 reducing loss scale to "
                   rf"({VALUE})")  # fmt: skip
_ECHO = "ing dynamic loss scale from"
_ECHOES = ("rad overflow on iteration", "rad overflow for ", _ECHO)
_APEX_FACTOR = 2.0
"""apex halves its scale; the scale that overflowed is twice the one that it names."""


class ScalerEvents:
    """Counts overflows between two records of a log."""

    def __init__(self) -> None:
        self._rank: str | None = None
        self._last_apex: float | None = None
        self.count = 0
        """Overflows since `take`."""
        self.seen = False
        """Whether there was any in this run: then a step without one is known to have had none."""
        self._scale: float | None = None

    def feed(self, line: str) -> bool:
        """Take in a line, and tell whether it is one of a loss scaler."""
        if "verflow" not in line and "OVERFLOW" not in line:
            return _ECHO in line
        told = _SKIPPED.findall(line)
        for named, scale in told:
            prefix = _RANK.search(line)
            rank = named or (prefix[1] if prefix else "0")
            self._rank = self._rank or rank
            if rank == self._rank:
                self._add(number(scale))
        if told:
            return True
        found = _APEX.search(line)
        if found is not None:
            reduced = number(found[1])
            if reduced != self._last_apex:
                self._add(reduced * _APEX_FACTOR)
            self._last_apex = reduced
            return True
        return any(echo in line for echo in _ECHOES)

    def restart(self) -> None:
        """Another run begins: whether its gradients can overflow is not known."""
        self.seen = self.count > 0

    def _add(self, scale: float) -> None:
        self.count += 1
        self.seen = True
        self._scale = scale

    def take(self, interval: int) -> dict[str, float]:
        """Return the signals of the steps since the last call, and start anew.

        Args:
            interval: their number, at least 1.

        Returns:
            Nothing where the run has had no overflow yet.
        """
        count, scale = self.count, self._scale
        self.count, self._scale = 0, None
        if not self.seen:
            return {}
        rate = min(1.0, count / interval)
        signals = {"overflow": rate, "update_skipped": rate}
        if scale is not None:
            signals["loss_scale"] = scale
        return signals

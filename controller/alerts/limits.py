"""Decides which alert goes out now and which is only told later, in a digest.

Theory of operation. Each title may speak once in `min_interval_s`, and all together `max_per_hour`
times in any hour. An alert that may not go out is held back: counted by title, with its first and
last step. The next alert that does go out carries the digest of all that was held back; if none
comes, the digest goes out by itself as soon as a title that is held back may speak again. Urgent
alerts (stop, hang, end) ignore the hourly limit. Pure: the time is an argument.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from mindtune.controller.alerts.alert import Alert

__all__ = ["DIGEST_TITLE", "AlertLimits"]

DIGEST_TITLE: Final = "[mindtune] held back"

_HOUR_S: Final = 3600.0


@dataclass
class _Held:
    """What was held back of one title."""

    count: int
    first_step: int
    last_step: int


class AlertLimits:
    """Limits per title and in all.

    Args:
        min_interval_s: Least time between two alerts of one title.
        max_per_hour: Most alerts in any hour.
    """

    def __init__(self, *, min_interval_s: float, max_per_hour: int) -> None:
        self._min_interval_s = min_interval_s
        self._max_per_hour = max_per_hour
        self._spoke_s: dict[str, float] = {}
        self._sent_s: deque[float] = deque()
        self._held: dict[str, _Held] = {}

    def admit(self, alert: Alert, now_s: float) -> Alert | None:
        """Return the alert to send now, or None if it is held back.

        Args:
            alert: What happened.
            now_s: Monotonic time.

        Returns:
            The alert, with the digest of what was held back before it.
        """
        if now_s < self._free_s(alert.title) or (not alert.urgent and self._is_full(now_s)):
            self.hold(alert)
            return None
        self._sent_s.append(now_s)
        self._spoke_s[alert.title] = now_s
        digest = self._take_digest(now_s)
        return alert.with_text(digest) if digest else alert

    def hold(self, alert: Alert) -> None:
        """Keep an alert for the digest."""
        held = self._held.setdefault(alert.title, _Held(0, alert.step, alert.step))
        held.count += 1
        held.last_step = alert.step

    def digest(self, now_s: float, *, run: str, last: bool = False) -> Alert | None:
        """Return what was held back as an alert of its own, if it may go out now.

        Args:
            now_s: Monotonic time.
            run: Name and place of the run.
            last: Whether the run is over, so that this is the last chance.
        """
        due_s = self.due_s(now_s)
        if due_s is None or (due_s > now_s and not last):
            return None
        step = max(held.last_step for held in self._held.values())
        self._sent_s.append(now_s)
        text = f"{run}\n{self._take_digest(now_s)}"
        return Alert(
            kind="findings", title=DIGEST_TITLE, text=text, level="warning", step=step
        )  # fmt: skip

    def due_s(self, now_s: float) -> float | None:
        """Return when the digest may go out by itself; None while nothing is held back."""
        if not self._held:
            return None
        title_s = min(self._free_s(title) for title in self._held)
        return max(title_s, self._sent_s[0] + _HOUR_S) if self._is_full(now_s) else title_s

    def _free_s(self, title: str) -> float:
        """Time from which a title may speak again."""
        spoke_s = self._spoke_s.get(title)
        return float("-inf") if spoke_s is None else spoke_s + self._min_interval_s

    def _is_full(self, now_s: float) -> bool:
        while self._sent_s and self._sent_s[0] <= now_s - _HOUR_S:
            self._sent_s.popleft()
        return len(self._sent_s) >= self._max_per_hour

    def _take_digest(self, now_s: float) -> str:
        """Return the text of what was held back, and forget it."""
        if not self._held:
            return ""
        parts = [
            f"{held.count} x {title.removeprefix('[mindtune] ')} ({_steps(held)})"
            for title, held in self._held.items()
        ]
        for title in self._held:
            # It has spoken now, through the digest.
            self._spoke_s[title] = now_s
        self._held.clear()
        return f"Held back before this: {'; '.join(parts)}."


def _steps(held: _Held) -> str:
    if held.first_step == held.last_step:
        return f"step {held.first_step}"
    return f"steps {held.first_step} to {held.last_step}"

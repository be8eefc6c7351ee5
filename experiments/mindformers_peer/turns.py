"""Ways of watching a step that take turns within one training, so that all share its weather.

One compiled step runs from the first step to the last; what differs from turn to turn is which
callbacks' step hooks are called. MindFormers' own `MFLossMonitor`, which it always puts in front,
is switched off outside of its turns. Our acting callback has wrapped the schedule for all turns:
one multiplication, far below what can be seen. The threads of our callbacks (one reading of the
host in half a second) live through all turns as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mindformers.core.callback.callback import MFLossMonitor, TrainingStateMonitor
from mindspore.train import Callback, RunContext

from mindtune.controller import TuneCallback
from mindtune.controller.contract import RunResult, read_document
from mindtune.experiments.mindformers_peer.case import WAYS
from mindtune.experiments.mindformers_peer.case import Turns as TurnPlan

__all__ = ["Turns", "make_turns"]


class Turns(Callback):
    """Calls the hooks of whoever has the turn, and times steps and hooks.

    A step's time is from its beginning to the beginning of the next one: data, step, hooks. The
    first step of a turn is not measured.

    Args:
        plan: Rounds and steps of a turn.
        watchers: Way -> whose hooks are called; a way without any is bare training.
    """

    def __init__(self, plan: TurnPlan, watchers: dict[str, Watcher]) -> None:
        super().__init__()
        self._plan = plan
        self._watchers = watchers
        self._begun_s: float | None = None
        self._hook_s = 0.0
        self._steps = 0
        self._times: dict[str, list[list[float]]] = {way: [] for way in WAYS}
        self.hooks_s: dict[str, list[float]] = {way: [] for way in watchers}
        """By way, seconds of its hooks, per measured step."""

    def times_s(self) -> dict[str, list[list[float]]]:
        """Return by way, per round, the seconds of each measured step."""
        return self._times

    def num_actions(self) -> int:
        """Return how many actions were granted; with any the ways did not do the same."""
        return sum(watcher.num_actions() for watcher in self._watchers.values())

    def on_train_begin(self, run_context: Any) -> None:
        """Bind the watchers, and take MindFormers' own monitor out of its list."""
        for watcher in self._watchers.values():
            watcher.begin(run_context)

    def on_train_epoch_begin(self, run_context: Any) -> None:
        """Pass it on."""
        for watcher in self._watchers.values():
            watcher.call("on_train_epoch_begin", run_context)

    def on_train_step_begin(self, run_context: Any) -> None:
        """Close the measured step before, and begin this one."""
        now_s = time.perf_counter()
        self._close(now_s)
        self._begun_s, self._hook_s = now_s, 0.0
        way, place = self._plan.turn(self._steps)
        watcher = self._watchers.get(way)
        if watcher is None:
            return
        if place == 0:
            watcher.enter()
        begin_s = time.perf_counter()
        watcher.call("on_train_step_begin", run_context)
        self._hook_s += time.perf_counter() - begin_s

    def on_train_step_end(self, run_context: Any) -> None:
        """Let the watcher look at the step."""
        way, place = self._plan.turn(self._steps)
        watcher = self._watchers.get(way)
        if watcher is not None:
            begin_s = time.perf_counter()
            watcher.call("on_train_step_end", run_context)
            self._hook_s += time.perf_counter() - begin_s
            if place == self._plan.block:
                watcher.leave()
        self._steps += 1

    def on_train_end(self, run_context: Any) -> None:
        """Close the last step."""
        self._close(time.perf_counter())
        for watcher in self._watchers.values():
            watcher.enter()
            watcher.call("on_train_end", run_context)

    def _close(self, now_s: float) -> None:
        if self._begun_s is None:
            return
        way, place = self._plan.turn(self._steps - 1)
        if place == 1:
            self._times[way].append([])
        if place >= 1:
            self._times[way][-1].append(now_s - self._begun_s)
            if way in self.hooks_s:
                self.hooks_s[way].append(self._hook_s)


class Watcher:
    """One way of watching: a callback, and what its turns begin and end with."""

    def __init__(self, callback: Callback) -> None:
        self._callback = callback

    def begin(self, run_context: Any) -> None:
        """Training begins."""
        self.call("on_train_begin", run_context)

    def call(self, hook: str, run_context: Any) -> None:
        """Call a hook."""
        getattr(self._callback, hook)(run_context)

    def enter(self) -> None:
        """A turn begins."""

    def leave(self) -> None:
        """A turn has ended."""

    def num_actions(self) -> int:
        """Actions that it was granted."""
        return 0


class _LossMonitor(Watcher):
    """MindFormers' own instance, taken over from its list."""

    def __init__(self) -> None:
        super().__init__(Callback())
        self._hooks: dict[str, Callable[[Any], None]] = {}

    def begin(self, run_context: Any) -> None:
        """Keep its step hooks, and leave empty ones in their place."""
        callbacks: Sequence[Any] = run_context.original_args().list_callback
        (found,) = (each for each in callbacks if isinstance(each, MFLossMonitor))
        for hook in ("on_train_step_begin", "on_train_step_end"):
            self._hooks[hook] = getattr(found, hook)
            setattr(found, hook, lambda _context: None)

    def call(self, hook: str, run_context: Any) -> None:
        """Call a step hook; MindFormers calls the others itself."""
        if hook in self._hooks:
            self._hooks[hook](run_context)


class _Ours(Watcher):
    """`TuneCallback`: it sees its own steps alone, numbered without a gap."""

    def __init__(self, callback: TuneCallback) -> None:
        super().__init__(callback)
        self._ours = callback
        self._steps = 0
        self._between = ExitStack()

    def begin(self, run_context: Any) -> None:
        """Bind it; the time until its first turn counts for no step."""
        super().begin(run_context)
        self.leave()

    def call(self, hook: str, run_context: Any) -> None:
        """Call a hook with the step number that this callback would see alone."""
        if hook == "on_train_step_begin":
            self._steps += 1
        params = run_context.original_args()
        own = type(params)()
        own.update(params)
        own.cur_step_num = self._steps
        super().call(hook, RunContext(own))

    def enter(self) -> None:
        """Go on."""
        self._between.close()

    def leave(self) -> None:
        """What happens until the next turn is no training of this callback's."""
        self._between.enter_context(self._ours.paused("eval"))

    def num_actions(self) -> int:
        """Actions that were granted."""
        folder = self._ours.out_dir
        return 0 if folder is None else read_document(RunResult, folder / RunResult.FILE).actions


def make_turns(plan: TurnPlan, folder: Path) -> Turns:
    """Return the turns of all ways; ours write their records into `folder`."""
    return Turns(
        plan,
        {
            "loss_monitor": _LossMonitor(),
            **{
                mode: _Ours(TuneCallback({"mode": mode, "out_dir": str(folder / mode)}))
                for mode in ("observe", "act")
            },
            **{
                f"{part}_state": Watcher(
                    TrainingStateMonitor(origin_epochs=1, config={f"{part}_state_format": "log"})
                )
                for part in ("weight", "optimizer")
            },
        },
    )

"""MindSpore's own profiler, for a window of a few steps.

Seen with MindSpore 2.10.0 on CPU: to open takes 1 ms and to close 3 ms, in graph and in PyNative
mode, as long as its own analysis is left out, which starts a process and takes over a second. The
kernels' times are in a file that can be read without it. On Ascend they are not: there the
analysis runs in a process of its own, and its table is read when it has come.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mindspore as ms
from mindspore.profiler import ProfilerActivity, profile, tensorboard_trace_handler
from mindspore.profiler.profiler_interface import ProfilerInterface

from mindtune.controller.metrics.profile_summary import (
    Shares,
    Span,
    kernel_shares,
    read_ascend_shares,
    read_cpu_kernels,
)

__all__ = ["MindSporeProfiler"]

_CPU = "CPU"
_ACTIVITIES = {"CPU": "CPU", "GPU": "GPU", "Ascend": "NPU"}


class MindSporeProfiler:
    """Profiles this process; see `profiler_window.Profiler`."""

    def __init__(self) -> None:
        self._device = str(ms.get_context("device_target"))
        self._profile: Any = None

    def start(self, folder: Path) -> None:
        """Begin to profile into a folder.

        Raises:
            RuntimeError: The program has a profiler of its own open.
        """
        if ProfilerInterface.is_initialized:
            # There is one per process: closing ours would close the user's.
            raise RuntimeError("another profiler is open in this process")
        activities = {ProfilerActivity.CPU, ProfilerActivity[_ACTIVITIES[self._device]]}
        handler = tensorboard_trace_handler(
            str(folder), analyse_flag=self._device != _CPU, async_mode=True
        )
        self._profile = profile(
            activities=sorted(activities, key=lambda activity: activity.value),
            on_trace_ready=handler,
            start_profile=False,
        )
        self._profile.start()

    def stop(self) -> None:
        """Stop; what was taken is on its way into the folder."""
        self._profile.stop()
        self._profile = None

    def shares(self, folder: Path, steps: list[Span]) -> Shares | None:
        """Return the summary of the steps; None: not ready yet."""
        if self._device == _CPU:
            return kernel_shares(read_cpu_kernels(folder), steps)
        return read_ascend_shares(folder, sum(end - begin for begin, end in steps))

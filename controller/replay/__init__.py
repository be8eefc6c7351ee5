"""Replays a log: what the detectors see in it, its causes, and what the policies would do.

A log does not follow what a policy decides, so all policies observe: each decision is what the
policy would have asked for at that step of the run as it was, not a run that never happened.
"""

from __future__ import annotations

from mindtune.controller.replay.judge import Witness, replay
from mindtune.controller.replay.log_set import LogSet, open_logs
from mindtune.controller.replay.settings import load_engine
from mindtune.controller.replay.story import Chapter, Line, tell

__all__ = ["Chapter", "Line", "LogSet", "Witness", "load_engine", "open_logs", "replay", "tell"]

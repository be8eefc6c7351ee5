"""A session around a simulated step that hangs in its fourth call; ends with exit code 3."""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "live"))
from test_callback_session import SimulatedStep

from mindtune.controller.alerts.run_alerts import open_alerts
from mindtune.controller.contract import AlertsSection, WatchdogSection
from mindtune.controller.live.session import LiveSession
from mindtune.controller.live.settings import LiveSettings
from mindtune.controller.live.step_adapter import OwnStep
from mindtune.controller.live.workload import Workload
from mindtune.controller.records import Recorder, RunFolder
from mindtune.policies.engine import build_engine

folder = RunFolder(Path("hung"))
watchdog = WatchdogSection(train_min_s=0.3, train_factor=1e-9, exit_on_hang=True)
step = SimulatedStep()
session = LiveSession(
    LiveSettings(watchdog=watchdog),
    Workload(),
    OwnStep(step, acts=True, job_size=1),
    build_engine({}, mode="act"),
    recorder=Recorder(folder),
    alerts=open_alerts(
        AlertsSection(urls=["env:HOOK"], on=sys.argv[1].split(",")),
        folder=folder.path,
        exits_on_hang=True,
    ),
)
session.begin()


def never_ends():
    time.sleep(600)


for call in range(4):
    session.begin_call(shapes="same", samples=8)
    if call == 3:
        never_ends()
    step.train(2.0)
    session.end_call(None)

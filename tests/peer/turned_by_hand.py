"""Runs in MindFormers' environment: a training whose knobs are turned by hand at given steps.

Arguments: the folder of the case, and JSON of {step: {knob: value}}: set after that step.
"""

import json
import os
import sys
from pathlib import Path

from mindspore.train import Callback

from mindtune.controller import TuneCallback
from mindtune.controller.contract import read_document, write_json
from mindtune.experiments.mindformers_peer.case import PeerCase, PeerRun
from mindtune.experiments.mindformers_peer.train import run
from mindtune.policies.decisions import KNOBS


class Hand(Callback):
    """Stands behind TuneCallback, and uses its actuators."""

    def __init__(self, tune, plan):
        super().__init__()
        self.tune = tune
        self.plan = plan

    def on_train_step_end(self, run_context):
        step = run_context.original_args().cur_step_num
        for knob, value in self.plan.get(str(step), {}).items():
            self.tune._session.controller._actuators.apply(KNOBS[knob](value))


folder = Path(sys.argv[1])
case = read_document(PeerCase, folder / PeerCase.FILE)
os.chdir(folder)
tune = TuneCallback(case.mindtune)
write_json(folder / PeerRun.FILE, run(case, folder, [tune, Hand(tune, json.loads(sys.argv[2]))]))

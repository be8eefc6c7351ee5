"""Runs in MindFormers' environment: its trainer on a CPU, with what a CPU lacks put right.

On Ascend or GPU the command of a study is `mindtune.controller.mindformers.train` itself, or
MindFormers' own `run_mindformer.py`; nothing of mindtune is named here but what starts a training.
"""

import sys

from mindtune.controller.mindformers.train import main
from mindtune.experiments.mindformers_peer.workload import patch_overflow_status

patch_overflow_status()
sys.exit(main())

"""Runs in MindFormers' environment: writes a base.yaml and its data into the folder that is named.

No key of it knows of mindtune. Paths are relative to the folder, as users write them.
"""

import sys
from pathlib import Path

from mindtune.controller.contract import dump_yaml
from mindtune.experiments.mindformers_peer.case import PeerCase
from mindtune.experiments.mindformers_peer.workload import training_yaml, write_data

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
case = PeerCase(steps=steps)
(folder / "data").mkdir()
write_data(folder / "data" / "text.mindrecord", steps * case.batch, seed=0)
tree = training_yaml(case, Path("data"), own_path=folder / "base.yaml")
del tree["mindtune"]
tree["callbacks"] = [
    {"type": "MFLossMonitor"},
    {"type": "CheckpointMonitor", "save_checkpoint_steps": steps, "async_save": False},
]
(folder / "base.yaml").write_text("# A tiny Llama.\n" + dump_yaml(tree))

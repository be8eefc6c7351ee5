"""A program in MindFormers' place: takes its YAML as it does, and reports what a trial asks for.

Loads what `auto_register` names from REGISTER_PATH by its text alone: MindSpore stays out of these
tests. What acts is read from the YAML, so that a key which did not arrive makes a bad config.
"""

import json
import os
import sys
from pathlib import Path

import yaml

config = yaml.safe_load(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())
ours = [entry for entry in config["callbacks"] if entry["type"] == "TuneCallback"]
assert len(ours) == 1
module = ours[0]["auto_register"].partition(".")[0]
registered = Path(os.environ["REGISTER_PATH"])
assert "class TuneCallback" in (registered / f"{module}.py").read_text() or (
    "import TuneCallback" in (registered / f"{module}.py").read_text()
)
print(json.dumps(sorted(path.name for path in registered.glob("*.py"))))

repeated = config["recompute_config"]["recompute"]
spelled = {False: "none", True: "full"}.get(repeated) if isinstance(repeated, bool) else repeated
seconds = {"none": 0.02, "full": 0.01}.get(spelled if isinstance(spelled, str) else "", 0.03)
effective = {
    "recompute": spelled,
    "micro_batch_size": config["runner_config"]["batch_size"],
    "data_workers": config["train_dataset_task"]["dataset_config"]["num_parallel_workers"],
}
if folder := os.environ.get("MINDTUNE_TRIAL_DIR"):
    result = {
        "outcome": "ok", "step_time_s": [seconds] * 4, "tokens_per_step": 256,
        "effective": effective, "loss": [1.0] * 4,
    }  # fmt: skip
    Path(folder, "result.json").write_text(json.dumps(result))

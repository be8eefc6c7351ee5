"""A training in plain Python whose speed is known: what a study is tested with.

Step time = 2 ms + 8 ms / micro_batch_size (+ 3 ms with recomputation); memory = 100 MB + 50 MB x micro_batch_size, halved by recomputation. `behaviour`
of the config makes some micro-batch sizes fail in a given way. `speed` gives a step time instead, `sleep` the time that a step really takes. Every start
and end is a line in the log that the config names. Ranks above 0 have nothing to do.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import yaml


def log(config, line):
    with Path(config["log"]).open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def step_time(training):
    micro = training["micro_batch_size"]
    seconds = 0.002 + 0.008 / micro
    if training["recompute"]:
        seconds += 0.003
    return seconds


def memory(training):
    micro = training["micro_batch_size"]
    factor = 0.5 if training["recompute"] else 1.0
    return int(100e6 + factor * 50e6 * micro)


def main():
    config = yaml.safe_load(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())
    if os.environ.get("RANK_ID", "0") != "0":
        return 0
    if "MINDTUNE_TRIAL_DIR" not in os.environ:
        return produce(config)
    folder = Path(os.environ["MINDTUNE_TRIAL_DIR"])
    knobs = yaml.safe_load((folder / "knobs.yaml").read_text())
    plan, training = knobs["trial"], config["training"]
    micro, recompute = training["micro_batch_size"], "full" if training["recompute"] else "none"
    name = f"{plan['number']} {plan['repeat']} {micro} {recompute}"
    log(config, f"start {name} {plan['seed']} {os.getpid()}")
    log(config, f"devices {plan['number']} {os.environ.get('ASCEND_RT_VISIBLE_DEVICES')}")
    log(config, f"storage {os.environ.get('STUDY_DATABASE')}")
    behaviour = config.get("behaviour", {}).get(f"{micro}-{recompute}", "good")
    while behaviour == "wait" and not Path(config["log"] + ".go").exists():
        time.sleep(0.05)
    if behaviour == "crash":
        raise RuntimeError("the flux capacitor is empty")
    if behaviour == "crash_once" and not Path(config["log"] + ".once").exists():
        Path(config["log"] + ".once").touch()
        raise RuntimeError("not again")
    if behaviour == "end_supervisor":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
    if behaviour == "garbage":
        (folder / "result.json").write_text("}{ not json")
        return 0
    if behaviour == "oom":
        raise MemoryError("out of memory in the test")
    if behaviour == "hang":
        time.sleep(600)
    print("error: this word proves nothing")
    name_of_config = f"{micro}-{recompute}"
    seconds = config.get("speed", {}).get(name_of_config, step_time(training))
    pause = float(os.environ.get("TINY_SLEEP", config.get("sleep", {}).get(name_of_config, 0.0)))
    steps = plan["warmup_steps"] + plan["measure_steps"]
    times, losses, norms = [], [], []
    with (folder / "signals.csv").open("w", encoding="utf-8") as table:
        table.write("step,phase,loss,grad_norm,step_time_s,data_time_s,loss_scale\n")
        for step in range(1, steps + 1):
            time.sleep(pause)
            loss = 4.0 / step**0.5 + 0.001 * plan["seed"]
            if behaviour == "diverge" and step > 8:
                loss += 0.1 * (step - 8)
            norm = 1.0 + 0.1 * (step % 3)
            table.write(f"{step},train,{loss},{norm},{seconds},{seconds / 10},1024.0\n")
            table.flush()
            if step > plan["warmup_steps"]:
                times.append(seconds)
                losses.append(loss)
                norms.append(norm)
    effective = {"micro_batch_size": micro, "recompute": recompute}
    if behaviour == "ignore":
        effective["recompute"] = "interval:2"
    result = {
        "outcome": "ok",
        "step_time_s": times,
        "tokens_per_step": 16 * 8,
        "samples_per_step": 16,
        "peak_memory_bytes": memory(training),
        "loss": losses,
        "grad_norm": norms,
        "effective": effective,
    }
    (folder / "result.json").write_text(json.dumps(result))
    log(config, f"end {name}")
    return 0


def produce(config):
    """A production run: what it was given goes into a file; `ending` says how it ends."""
    folder = Path(os.environ["MINDTUNE_RUN_DIR"])
    seen = {
        "mode": os.environ["MINDTUNE_MODE"],
        "best_config": os.environ["MINDTUNE_CONFIG"],
        "faults": os.environ.get("MINDTUNE_FAULTS"),
        "training": config["training"],
        "knobs": yaml.safe_load((folder / "knobs.yaml").read_text()),
    }
    (folder / "seen.json").write_text(json.dumps(seen))
    with (folder / "signals.csv").open("w", encoding="utf-8") as table:
        table.write("step,loss\n1,3.0\n2,2.5\n")
    ending = config.get("ending", "ok")
    if ending == "silent":
        return 0
    if ending == "crash":
        raise RuntimeError("production is down")
    if ending == "wait":
        (folder / "waiting").touch()
        time.sleep(600)
    if ending == "foreign":
        (folder / "result.json").write_text('{"score": 7}')
        (folder / "signals.csv").write_text("reward\n1\n")
        return 0
    if ending == "ok_then_crash":
        result = {"outcome": "ok", "steps": 2, "wall_s": 0.1, "eval_loss": 1.5}
        (folder / "result.json").write_text(json.dumps(result))
        raise RuntimeError("too late")
    result = {"outcome": ending, "steps": 2, "wall_s": 0.1, "message": "as the test asked"}
    (folder / "result.json").write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Every way in which a trial can end gets its own outcome."""

import dataclasses
import json
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from mindtune.controller.contract import (
    KnobsFile,
    TrialPlan,
    TrialRecord,
    TrialResult,
    read_document,
    write_yaml,
)
from mindtune.controller.trials import log_result
from mindtune.controller.trials.launcher import launch, launch_logs
from mindtune.controller.trials.learned import learn
from mindtune.controller.trials.log_result import LogWatch, telling_logs
from mindtune.controller.trials.outcome import differing_knobs, judge, record_outcome

OK = """
import json
def leave(**fields):
    with open("result.json", "w") as file:
        json.dump({"outcome": "ok", "step_time_s": [0.5, 0.25], **fields}, file)
"""


def test_a_program_that_leaves_an_ok_result_is_ok(program):
    outcome = program.run(OK + "leave(effective={'micro_batch_size': 2})")
    assert outcome.record.outcome == "ok"
    assert outcome.result.step_times() == (0.5, 0.25)
    assert outcome.record.exit_codes == {"command": 0}
    assert outcome.record.memory_source == "rss"
    assert 1 << 20 < outcome.record.peak_memory_bytes < 1 << 30
    assert read_document(TrialRecord, program.trial_dir / "trial.json") == outcome.record


def test_a_program_without_our_callback_is_measured_by_its_log(program):
    outcome = program.run(
        """
        for step in range(1, 4):
            print(f"{{ Epoch:[  1/  1], step:[    {step}/    3], loss:[2.5/2.5], "
                  f"per_step_time: {step * 10}ms, lr: 0.1, overflow cond: False")
        """
    )
    assert outcome.record.outcome == "ok"
    assert outcome.result.step_time_s == [0.01, 0.02, 0.03]
    assert "read from stdout.log (mindformers, 3 lines)" in outcome.record.message
    # It is kept as a result, for who comes later.
    assert read_document(TrialResult, program.trial_dir / "result.json") == outcome.result


ENDLESS = """
import sys, time
for step in range(1, 1000):
    print("2025-03-04 12:10:{:02d},123 - mindformers./output/log[mindformers/core/callback/"
          "callback.py:564] - INFO - {{ Epoch:[  1/  1], step:[{:5d}/ 1000], loss:[{:.3f}/{:.3f}], "
          "per_step_time: {}ms, lr: 0.1, overflow cond: False, loss_scale: 65536.0".format(
          step % 60, step, 9 - step / 100, 9 - step / 100, 100 + step), flush=True)
    time.sleep(PAUSE)
"""
MINDFORMERS_LOG = Path(__file__).with_name("mindformers_train.txt")
"""The first twelve steps of a training of forty in MindFormers 1.8.0's trainer, on a CPU."""
PLAN = TrialPlan(number=1, warmup_steps=2, measure_steps=5, deadline_s=9.0)


def test_a_program_that_trains_on_is_ended_when_its_log_holds_the_steps(program):
    write_yaml(program.trial_dir / "knobs.yaml", KnobsFile(knobs={}, trial=PLAN))
    watch = LogWatch(telling_logs(launch_logs(program.trial_dir, 0), {}), PLAN)
    outcome = program.run(
        f"""
        import time
        for line in open({str(MINDFORMERS_LOG)!r}, encoding="utf-8"):
            print(line, end="", flush=True)
            time.sleep(0.1)
        time.sleep(60)
        """,
        should_stop=lambda: "enough" if watch.is_complete() else None,
    )
    assert outcome.record.outcome == "ok"
    assert outcome.record.wall_s < 15
    assert outcome.result.step_time_s == [0.048, 0.088, 0.45, 0.568, 0.063]
    assert outcome.result.loss == [5.399096, 5.221676, 5.168891, 4.918264, 4.638412]
    assert "ended with its planned steps done" in outcome.record.message
    assert read_document(TrialResult, program.trial_dir / "result.json") == outcome.result


@pytest.mark.parametrize(
    ("pause", "before", "outcome"),
    [
        ("0.01", "", "ok"),
        ("0.6", "", "timeout"),  # too few steps
        ("0.01", "print('Traceback (most recent call last):\\n  x\\nOSError: gone')", "timeout"),
        ("0.01", "open('signals.csv', 'w').write('step\\n1\\n')", "timeout"),
    ],
)
def test_a_deadline_takes_the_steps_that_were_logged_before_it(program, pause, before, outcome):
    write_yaml(program.trial_dir / "knobs.yaml", KnobsFile(knobs={}, trial=PLAN))
    source = f"{before}\n{ENDLESS.replace('PAUSE', pause)}"
    found = program.run(source, startup_deadline_s=2.0, deadline_s=2.0)
    assert found.record.outcome == outcome, found.record.message
    if outcome == "ok":
        assert len(found.result.step_time_s) == 5
        assert "ended at its deadline with its planned steps done" in found.record.message
    else:
        assert found.result is None


def test_a_log_is_not_read_more_often_than_it_grows_or_than_it_costs(tmp_path):
    now, log = [0.0], tmp_path / "log"
    watch = LogWatch([log], PLAN, clock=lambda: now[0])
    assert not watch.is_complete()
    log.write_text("".join(f"step: {step}, loss: 2.0, step time: 0.5 s\n" for step in range(1, 7)))
    assert not watch.is_complete()
    with log.open("a") as file:
        file.write("step: 7, loss: 2.0, step time: 0.5 s\n")
    assert not watch.is_complete(), "it was read just now"
    now[0] += 3.0
    assert watch.is_complete()


def test_of_a_pipeline_the_last_stage_is_read(tmp_path):
    report = launch(
        [sys.executable, "-c", "pass"], trial_dir=tmp_path, startup_deadline_s=20, deadline_s=20
    )
    logs = {}
    for rank, loss in enumerate((0.0, 2.5)):
        path = tmp_path / f"worker_{rank}.log"
        path.write_text(
            f"{{ Epoch:[  1/  1], step:[    1/    1], loss:[{loss}/{loss}], per_step_time: 9ms, "
            "lr: 0.1, overflow cond: False"
        )
        logs[f"rank{rank}"] = (path,)
    report = dataclasses.replace(report, logs=logs)
    assert judge(report, knobs={"data_parallel": 2}).result.loss == [0.0]
    assert judge(report, knobs={"pipeline_stage": 2}).result.loss == [2.5]


def test_the_word_error_in_a_log_proves_nothing(program):
    outcome = program.run(
        OK
        + """
import sys
print("[ERROR] DEVICE(1,2,python): out of memory", file=sys.stderr)
print("RuntimeError: error: Memory not enough")
leave()
"""
    )
    assert outcome.record.outcome == "ok"


def test_a_crash_carries_the_whole_last_exception(program):
    outcome = program.run(
        """
        try:
            1 / 0
        except ZeroDivisionError:
            raise ValueError(
                "hidden_size must be a multiple of 7,\\n"
                "  but got 10"
            )
        """
    )
    assert outcome.record.outcome == "crash"
    assert outcome.record.message == (
        "ValueError: hidden_size must be a multiple of 7,\n  but got 10 (exit code 1)"
    )
    assert outcome.result is None


def test_a_crash_after_ok_keeps_the_measurements(program):
    outcome = program.run(OK + "leave()\nraise RuntimeError('in the end')")
    assert outcome.record.outcome == "crash"
    assert outcome.record.message == ("RuntimeError: in the end (exit code 1 after an ok result)")
    assert outcome.result.step_times() == (0.5, 0.25)


def test_no_result_with_exit_code_zero_is_a_crash(program):
    record = program.run("print('done')").record
    assert record.outcome == "crash"
    assert "ended with exit code 0 but left no result.json" in record.message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("\\x00\\x01 no json", "must be JSON"),
        ('{"outcome": "ok", "step_time_s": [0.5', "must be JSON"),
        ('{"outcome": "ok"}', "must carry step_time_s"),
        ('{"outcome": "fine", "step_time_s": 1}', "outcome"),
        ("[]", "must hold a mapping"),
        ("", "must be JSON"),
        ('{"outcome": "ok", "step_time_s": 1e308}', "must be positive finite seconds"),
        ('{"outcome": "ok", "step_time_s": 5e-324}', "must be positive finite seconds"),
        ('{"outcome": "ok", "step_time_s": 1, "tokens_per_step": 1e400}', "tokens_per_step"),
        (
            '{"outcome": "ok", "step_time_s": 1, "peak_memory_bytes": 1' + "0" * 400 + "}",
            "peak_me",
        ),
    ],
)
def test_an_unreadable_result_is_a_crash_that_says_so(program, content, words):
    record = program.run(f"open('result.json', 'w').write('{content}')").record
    assert record.outcome == "crash"
    assert "result.json is not readable" in record.message
    assert words in record.message


@pytest.mark.parametrize("name", ["result.json", "result.rank1.json"])
def test_brackets_without_end_in_a_result_do_not_end_the_supervisor(program, name):
    record = program.run(
        f"""
        import time
        open({name!r}, "w").write("[" * 100_000)
        time.sleep(0.5)
        """
    ).record
    assert record.outcome == "crash"
    assert record.exit_codes == {"command": 0}


@pytest.mark.parametrize("name", ["result.json", "signals.csv", "stdout.log"])
def test_a_pipe_in_place_of_a_file_hangs_nothing(program, name):
    started = time.monotonic()
    record = program.run(
        f"import os, pathlib, time; pathlib.Path({name!r}).unlink(True); os.mkfifo({name!r}); time.sleep(60)",
        startup_deadline_s=1.0,
        deadline_s=1.0,
        stop_grace_s=0.5,
    ).record
    assert record.outcome == "timeout"
    assert time.monotonic() - started < 30.0


def test_a_program_that_spoils_its_knobs_costs_its_own_trial_alone(program):
    record = program.run(
        "open('knobs.yaml', 'wb').write(b'\\xff{'); print('step: 1 loss: 2')"
    ).record
    assert record.outcome == "crash"
    assert "left no result.json" in record.message
    (program.trial_dir / "signals.csv").write_text("step,grad_norm\n1,2.0\n")
    (program.trial_dir / "result.json").write_text('{"outcome": "ok", "step_time_s": 0.5}')
    learned = learn([program.trial_dir], peak_memory_bytes=None)
    assert (learned.step_time_s, learned.grad_norm) == (0.5, None)


def test_a_log_without_end_is_not_read(program, monkeypatch):
    text = "print('step: 1, loss: 2.0, step time: 0.5 s')"
    assert program.run(text).record.outcome == "ok"
    monkeypatch.setattr(log_result, "LARGEST_LOG", 10)
    record = program.run(text).record
    assert record.outcome == "crash"
    assert "larger than" in record.message


def test_a_message_with_half_a_character_is_kept(program):
    record = program.run(
        r"""
        open("result.json", "w").write('{"outcome": "crash", "message": "\\ud800 \u4e2d"}')
        """
    ).record
    assert (record.outcome, record.message) == ("crash", "\\ud800 \u4e2d")
    assert json.loads((program.trial_dir / "trial.json").read_text())["message"] == record.message


def test_a_traceback_and_a_hang_before_the_first_step_is_a_timeout(program):
    record = program.run(
        """
        import sys, time, traceback
        try:
            raise ConnectionError("rank 3 is gone")
        except ConnectionError:
            traceback.print_exc()
        time.sleep(60)
        """,
        startup_deadline_s=1.0,
    ).record
    assert record.outcome == "timeout"
    assert "startup deadline" in record.message
    assert "ConnectionError: rank 3 is gone" in record.message
    assert 1.0 <= record.wall_s < 4.0
    assert record.exit_codes == {"command": -signal.SIGTERM}


def test_the_deadline_counts_from_the_first_step(program):
    outcome = program.run(
        """
        import time
        time.sleep(0.6)
        with open("signals.csv", "w") as table:
            table.write("step,loss\\n1,0.5\\n")
        time.sleep(60)
        """,
        startup_deadline_s=20.0,
        deadline_s=1.0,
    )
    assert outcome.record.outcome == "timeout"
    assert "at its deadline" in outcome.record.message
    assert 1.5 <= outcome.record.wall_s < 5.0


def test_a_step_in_time_lifts_the_startup_deadline(program):
    outcome = program.run(
        OK
        + """
import time
with open("signals.csv", "w") as table:
    table.write("step,loss\\n1,0.5\\n")
time.sleep(2)
leave()
""",
        startup_deadline_s=1.5,
        deadline_s=20.0,
    )
    assert outcome.record.outcome == "ok"


def test_a_header_alone_is_no_progress(program):
    record = program.run(
        "import time; open('signals.csv', 'w').write('step,loss\\n'); time.sleep(60)",
        startup_deadline_s=1.0,
    ).record
    assert record.outcome == "timeout"


@pytest.mark.parametrize(
    ("statement", "outcome", "message"),
    [
        ("raise MemoryError()", "oom", "MemoryError"),
        ("raise RuntimeError('Allocate memory failed')", "oom", "RuntimeError: Allocate memory failed"),
        ("raise FloatingPointError('loss is nan')", "non_finite", "FloatingPointError: loss is nan"),
        ("raise ConfigError('no such knob')", "bad_config",
         "mindtune.controller.errors.ConfigError: no such knob"),
        ("raise KeyError('x')", "crash", "KeyError: 'x'"),
    ],
)  # fmt: skip
def test_an_exception_inside_reporting_is_typed_by_the_program(
    program, statement, outcome, message
):
    (program.trial_dir / "knobs.yaml").write_text(
        "schema: 1\nknobs: {}\n"
        "trial: {number: 0, warmup_steps: 1, measure_steps: 1, deadline_s: 5}\n"
    )
    record = program.run(
        f"""
        from mindtune.controller.errors import ConfigError
        from mindtune.controller.trials.worker import TrialContext, reporting
        with reporting(TrialContext.from_env()):
            {statement}
        """
    ).record
    assert (record.outcome, record.message) == (outcome, message)
    assert record.exit_codes == {"command": 1}


def test_a_real_allocation_failure_is_oom_without_any_result(program):
    record = program.run("bytearray(1 << 62)").record
    assert (record.outcome, record.message) == ("oom", "MemoryError (exit code 1)")


def test_a_kill_without_evidence_is_a_crash_and_with_evidence_an_oom(program):
    report = program.launch("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert report.supervised.exit_codes == {"command": -9}
    assert report.supervised.kernel_oom_kills == 0

    def outcome(**evidence):
        supervised = dataclasses.replace(report.supervised, **evidence)
        return judge(dataclasses.replace(report, supervised=supervised), knobs={}).record

    assert outcome().outcome == "crash"
    assert outcome().message == "killed by SIGKILL"
    assert outcome(exit_codes={"command": -40}).message == "killed by signal 40"
    told = "killed by SIGKILL; 2 of its processes could not be ended, and may disturb what follows"
    assert outcome(processes_left=2).message == told
    assert outcome(kernel_oom_kills=1).outcome == "oom"
    limit = report.supervised.memory_limit_bytes
    assert outcome(peak_tree_rss_bytes=int(0.85 * limit)).outcome == "oom"
    assert outcome(peak_tree_rss_bytes=int(0.75 * limit)).outcome == "crash"
    # Another signal, or a kill of our own, is never taken for the kernel's.
    assert outcome(kernel_oom_kills=1, exit_codes={"command": -11}).outcome == "crash"
    assert outcome(kernel_oom_kills=1, ended_by="deadline").outcome == "timeout"


def test_a_knob_that_did_not_take_effect_makes_the_config_bad(program):
    source = OK + "leave(effective={'micro_batch_size': 1, 'recompute': 'none'})"
    knobs = {"micro_batch_size": 4, "recompute": "none", "data_workers": 2}
    outcome = program.run(source, knobs=knobs)
    assert outcome.record.outcome == "bad_config"
    assert outcome.record.message == (
        "a knob did not take effect: micro_batch_size: 4, but 1 acted"
    )
    assert outcome.result.outcome == "ok"


def test_knobs_are_compared_in_canonical_spelling():
    effective = {"recompute": "interval:1", "micro_batch_size": "4", "precision": "fp16",
                 "gradient_compression": "topk:0.10", "comm_overlap": "True", "other": 1}  # fmt: skip
    knobs = {"recompute": "full", "micro_batch_size": 4, "precision": "float16",
             "gradient_compression": "topk:0.1", "comm_overlap": True, "prefetch": 2}  # fmt: skip
    assert differing_knobs(effective, knobs) == {}
    assert differing_knobs({"recompute": None}, {"recompute": "none"}) == {}
    assert differing_knobs({"recompute": "nonsense"}, {"recompute": "full"}) == {
        "recompute": ("full", "nonsense")
    }


def test_a_rank_that_ran_out_of_memory_is_the_cause_and_not_the_crash_that_followed(program):
    report = program.launch(
        """
        import json, time
        def leave(name, outcome, message):
            with open(name, "w") as file:
                json.dump({"outcome": outcome, "message": message}, file)
        leave("result.json", "crash", "Launch kernel failed, name:Default/AllReduce-op0")
        time.sleep(0.05)
        leave("result.rank2.json", "oom", "MemoryError")
        """,
        num_ranks=4,
    )
    record = record_outcome(report, knobs={}).record
    assert (record.outcome, record.message) == ("oom", "rank 2: MemoryError")


def test_of_two_crashed_ranks_the_first_is_the_cause(program):
    report = program.launch(
        """
        import json, os
        for rank, age in ((1, 10), (3, 20)):
            name = f"result.rank{rank}.json"
            with open(name, "w") as file:
                json.dump({"outcome": "crash", "message": f"from {rank}"}, file)
            os.utime(name, (1_000_000 - age, 1_000_000 - age))
        raise SystemExit(1)
        """,
        num_ranks=4,
    )
    assert record_outcome(report, knobs={}).record.message == "rank 3: from 3"


def test_a_failure_on_one_rank_does_not_wait_for_the_rest(program):
    record = program.run(
        """
        import json, time
        with open("result.rank1.json", "w") as file:
            json.dump({"outcome": "crash", "message": "lost"}, file)
        time.sleep(60)
        """,
        num_ranks=2,
    ).record
    assert (record.outcome, record.message) == ("crash", "rank 1: lost")
    assert record.wall_s < 10.0
    assert record.exit_codes == {"command": None}


def test_a_stop_prunes_and_names_the_reason(program):
    asked = []

    def should_stop():
        asked.append(True)
        return "3x slower than the median" if len(asked) == 2 else None

    record = program.run("import time; time.sleep(60)", should_stop=should_stop).record
    assert (record.outcome, record.message) == ("pruned", "3x slower than the median")
    assert record.wall_s < 4.0


def test_an_interrupt_from_another_thread_is_told_apart_from_a_stop(program):
    interrupt = threading.Event()
    timer = threading.Timer(1.0, interrupt.set)
    timer.start()
    record = program.run("import time; time.sleep(60)", interrupt=interrupt).record
    timer.join()
    assert record.outcome == "interrupted"
    assert record.wall_s < 6.0
    assert read_document(TrialRecord, program.trial_dir / "trial.json") == record


@pytest.mark.mindspore
def test_the_pool_of_a_single_rank_is_read_from_its_log(program):
    outcome = program.run(
        OK
        + """
import mindspore as ms
from mindspore import ops
ms.set_context(mode=ms.PYNATIVE_MODE)
block = ops.zeros((10 << 20,), ms.float32) + 1
leave(loss=float(block[0].asnumpy()))
""",
        startup_deadline_s=100.0,
    )
    assert outcome.record.outcome == "ok"
    assert outcome.record.memory_source == "pool"
    # Two blocks of 40 MiB at once.
    assert 80 << 20 <= outcome.record.peak_memory_bytes < 90 << 20


def test_a_program_that_cannot_be_started_is_a_crash(program):
    report = launch(
        ["/no/such/program"], trial_dir=program.trial_dir, startup_deadline_s=5, deadline_s=5
    )
    record = record_outcome(report, knobs={}).record
    assert record.outcome == "crash"
    assert "/no/such/program" in record.message


def test_what_an_interrupted_launch_left_is_not_taken_for_this_one(program):
    for name in ("result.json", "result.rank1.json", "signals.csv", "trial.json", "stderr.log"):
        (program.trial_dir / name).write_text(json.dumps({"outcome": "oom"}) + "\n\n")
    record = program.run("pass").record
    assert "ended with exit code 0 but left no result.json" in record.message


def test_the_program_finds_itself_in_its_folder_with_its_variables(program):
    outcome = program.run(
        OK
        + """
import os
leave(message="|".join([os.getcwd(), os.environ["MINDTUNE_TRIAL_DIR"], os.environ["KNOB"],
                        os.environ["MS_SUBMODULE_LOG_v"]]))
""",
        env={"KNOB": "7"},
    )
    folder = str(program.trial_dir)
    assert outcome.record.message == f"{folder}|{folder}|7|{{PRE_ACT:1}}"


def test_msrun_with_one_rank_starts_the_plain_command(program):
    outcome = program.run(OK + "import sys\nleave(message=sys.executable)", launcher="msrun")
    assert outcome.record.message == sys.executable
    assert outcome.record.exit_codes == {"command": 0}

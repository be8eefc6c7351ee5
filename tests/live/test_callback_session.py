"""The controller and the session around a simulated training step; no framework is loaded."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest

from mindtune.controller.contract import RunResult, WatchdogSection, read_document
from mindtune.controller.errors import ConfigError
from mindtune.controller.live.controller import LiveController
from mindtune.controller.live.layout import ParallelLayout
from mindtune.controller.live.loss_scale import LossScale
from mindtune.controller.live.observing import Machine
from mindtune.controller.live.packed import NUM_HOST_SIGNALS, StepReport
from mindtune.controller.live.sensors import HostSignals
from mindtune.controller.live.session import LiveSession
from mindtune.controller.live.settings import LiveSettings
from mindtune.controller.live.snapshots import Snapshots
from mindtune.controller.live.state import ControllerState
from mindtune.controller.live.step_adapter import OwnStep, optimizer_family
from mindtune.controller.live.watchdog import Hang
from mindtune.controller.live.workload import Workload
from mindtune.controller.records import Recorder, RunFolder, read_decisions, read_signals
from mindtune.policies.decisions import (
    Advise,
    Decision,
    RequestStop,
    Rewind,
    SetBatchSize,
    SetClipNorm,
    SetLearningRateScale,
    SetLossScale,
    SetMicroBatch,
    SetSkipThreshold,
)
from mindtune.policies.detectors import DetectorThresholds
from mindtune.policies.engine import Engine, _Seat, build_engine
from mindtune.policies.findings import Finding, FindingKind, Severity
from mindtune.policies.limits import KnobLimits
from mindtune.policies.settings import PolicySettings


class Adam:
    """Stands for an optimizer by its name."""

    global_step = None


class SimulatedStep:
    """A training step whose losses are given; its knobs act, or do not."""

    def __init__(self, *, obeys=True, loss_scale=None, world_size=1):
        self.obeys = obeys
        self.optimizer = Adam()
        self.layout = ParallelLayout(data_parallel=world_size, world_size=world_size)
        self.compression = SimpleNamespace(kind="none")
        self.loss_scale_rule = loss_scale
        self.loss_scale_managed_by_policy = False
        self.skip_non_finite = True
        self.skips = None
        self.knobs = {"learning_rate_scale": 1.0, "clip_norm": math.inf,
                      "skip_threshold": math.inf, "loss_scale": 1024.0}  # fmt: skip
        self.num_microbatches = 1
        self.micro_batch_split = 1
        self.micro_batch_rows = 8
        self.hooks_gradients = False
        self.last_report = None
        self.sent = None
        self.rows = ((math.nan,) * NUM_HOST_SIGNALS,) * world_size
        self.gradient_hooks = []
        self.fuses_gradients = True
        self.hooks_gradients = False

    @property
    def next_loss_scale(self):
        return self.knobs["loss_scale"]

    def _set(self, name, value):
        if self.obeys:
            self.knobs[name] = value

    def set_learning_rate_scale(self, scale):
        self._set("learning_rate_scale", scale)

    def set_loss_scale(self, scale):
        self._set("loss_scale", scale)

    def set_clip_norm(self, norm):
        self._set("clip_norm", norm)

    def set_skip_threshold(self, norm):
        self._set("skip_threshold", norm)

    def set_skip_non_finite(self, skip):
        self.skips = skip

    def set_num_microbatches(self, count):
        self.num_microbatches = count

    def set_micro_batch_split(self, parts):
        self.micro_batch_split = parts

    def set_host_signals(self, row):
        self.sent = row

    def train(self, loss=2.0, grad_norm=1.0):
        overflow = not (math.isfinite(loss) and math.isfinite(grad_norm))
        self.last_report = StepReport(
            loss=loss, grad_norm=grad_norm, overflow=overflow, update_skipped=overflow,
            loss_scale=None if self.loss_scale_rule is None else self.knobs["loss_scale"],
            learning_rate=0.1 * self.knobs["learning_rate_scale"],
            learning_rate_scale=self.knobs["learning_rate_scale"],
            clip_norm=self.knobs["clip_norm"], clip_factor=1.0,
            skip_threshold=self.knobs["skip_threshold"], skip_non_finite=self.skips,
            compression_ratio=1.0, clean_steps=1, micro_batch_split=self.micro_batch_split,
            num_microbatches=self.num_microbatches * self.micro_batch_split,
            rank_losses=(loss,), rank_grad_norms=None, rank_rows=self.rows,
        )  # fmt: skip


@dataclass(frozen=True)
class Scripted:
    """A policy that asks for what the script says, step by step."""

    script: dict
    name: str = "scripted"
    knobs: dict = field(default_factory=dict)

    def init(self):
        return ()

    def decide(self, observation, findings, feedback, state):
        actions = self.script.get(observation.step, ())
        if not actions:
            return Decision(), state
        return Decision(actions, f"the script at {observation.step}", {"loss": 2.0}), state


LIMITS = KnobLimits(
    low=0.0, high=1e9, max_factor=1e9, cooldown=1, budget=100, check="loss", check_after=4
)


def scripted(script, *, mode="act"):
    knobs = dict.fromkeys(
        (
            "learning_rate_scale",
            "clip_norm",
            "loss_scale",
            "global_batch_size",
            "micro_batch_size",
        ),
        LIMITS,
    )
    return Engine((_Seat(Scripted(script, knobs=knobs), mode),), DetectorThresholds())


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 0.001
        return self.now


class Run:
    """A session with its step and folder."""

    def __init__(self, tmp_path, engine, *, step=None, records=True, resumed=None, workload=None,
                 machine=None, watchdog=False, snapshots=None):  # fmt: skip
        self.step = step or SimulatedStep()
        self.clock = Clock()
        self.folder = RunFolder(tmp_path / "run")
        self.session = LiveSession(
            LiveSettings(watchdog=WatchdogSection(enabled=watchdog)),
            workload or Workload(tokens_per_sample=4),
            OwnStep(
                self.step,
                acts=True,
                job_size=1 if machine is None else machine.num_ranks,
                snapshots=snapshots,
            ),
            engine,
            recorder=Recorder(self.folder) if records else None,
            machine=machine,
            clock=self.clock,
        )
        self.session.begin(resumed=resumed)

    def train(self, *losses, num_steps=1):
        for loss in losses:
            self.session.begin_call(shapes="same", samples=8)
            self.step.train(loss)
            self.clock.now += 0.1
            self.session.end_call(None, num_steps=num_steps)
        return self

    def end(self, error=None):
        self.session.end(error)
        return read_document(RunResult, self.folder.result)

    @property
    def decisions(self):
        return read_decisions(self.folder.decisions)


@pytest.fixture
def run(tmp_path):
    runs = []

    def make(engine, **options):
        runs.append(Run(tmp_path, engine, **options))
        return runs[-1]

    yield make
    for made in runs:
        made.session.end(RuntimeError("the test is over"))


def decision(entry):
    return (entry.step, entry.action, entry.requested, entry.verdict)


# Acting ----------------------------------------------------------------------------------------


def test_a_granted_set_point_acts_in_the_next_step_and_its_record_says_so(run):
    made = run(scripted({3: (SetLearningRateScale(0.5),)})).train(*[2.0] * 5)
    (entry,) = made.decisions
    assert decision(entry) == (3, "SetLearningRateScale", 0.5, "granted")
    assert (entry.before, entry.acted) == (1.0, 0.5)
    assert (entry.reason, entry.evidence) == ("the script at 3", {"loss": 2.0})
    assert made.end().actions == 1
    rows = [row.observation for row in read_signals(made.folder.signals)]
    assert [row.learning_rate_scale for row in rows] == [1.0, 1.0, 1.0, 0.5, 0.5]


def test_every_line_is_in_the_log_before_the_run_ends(run):
    made = run(scripted({3: (SetLearningRateScale(0.5),)})).train(2.0, 2.0, 2.0)
    lines = made.folder.decisions.read_text().splitlines()
    assert [json.loads(line)["acted"] for line in lines] == [None]
    assert [row.observation.step for row in read_signals(made.folder.signals)] == [1, 2, 3]


def test_observe_mode_records_and_touches_nothing(run):
    made = run(scripted({3: (SetLearningRateScale(0.5),)}, mode="observe")).train(*[2.0] * 5)
    assert [decision(entry) for entry in made.decisions] == [
        (3, "SetLearningRateScale", 0.5, "observed")
    ]
    assert made.step.knobs["learning_rate_scale"] == 1.0
    assert made.end().actions == 0


def test_a_knob_that_does_not_obey_is_a_finding(run):
    made = run(scripted({3: (SetLearningRateScale(0.5),)}), step=SimulatedStep(obeys=False))
    made.train(*(2.0 + 0.01 * (step % 3) for step in range(10)))
    assert made.end().findings == {"knob_ineffective": 1}


def test_the_batch_is_resized_in_micro_batches(run):
    made = run(scripted({3: (SetBatchSize(32),)})).train(*[2.0] * 5)
    assert made.step.num_microbatches == 4
    assert [row.observation.global_batch_size for row in read_signals(made.folder.signals)][:3] == [
        8, 8, 8,
    ]  # fmt: skip


def test_what_the_actuator_refuses_is_recorded_as_refused_with_its_reason(run):
    made = run(scripted({3: (SetBatchSize(12),)})).train(*[2.0] * 3)
    entry, following = made.decisions
    assert decision(entry) == (3, "SetBatchSize", 12.0, "refused")
    assert "multiple of data_parallel * micro_batch_size = 8, but got 12" in entry.reason
    assert made.step.num_microbatches == 1
    # The learning rate that would have followed the batch stays as well.
    assert (following.action, following.verdict) == ("SetLearningRateScale", "refused")
    assert made.step.knobs["learning_rate_scale"] == 1.0
    assert made.end().actions == 0


class Weights:
    """The weights of a simulated step, a number, and their copies."""

    survives = True

    def __init__(self):
        self.value = 0.0
        self.copies = {}

    def write(self, step):
        self.copies[step] = self.value

    def load(self, step):
        return self.copies[step]

    def assign(self, copy):
        self.value = copy

    def holds(self, step):
        return step in self.copies

    def retain(self, steps):
        self.copies = {step: copy for step, copy in self.copies.items() if step in steps}


def test_a_return_without_earlier_states_is_refused_with_a_reason(run):
    made = run(scripted({3: (Rewind("r1", "bad"),)})).train(*[2.0] * 3)
    (entry,) = made.decisions
    assert decision(entry) == (3, "Rewind", "r1", "refused")
    assert "restart from a checkpoint" in entry.reason
    assert not made.session.controller.engine_state.facts.can_rewind
    assert made.end().actions == 0


def test_a_return_brings_the_weights_back_and_the_run_goes_on(run, caplog):
    weights = Weights()
    script = {3: (Rewind("r1", "bad"), SetLearningRateScale(0.5)), 4: (Rewind("r1", "bad"),)}
    made = run(scripted(script), snapshots=Snapshots(weights, every=8, keep=2))
    weights.value = 3.0
    made.train(2.0, 2.0, 2.0)
    assert weights.value == 0.0
    assert made.session.controller.engine_state.facts.can_rewind
    weights.value = 4.0
    made.train(2.0, 2.0)
    # The same id is the same event: nothing happens twice.
    assert weights.value == 4.0
    entries = {entry.action: entry for entry in made.decisions}
    assert decision(entries["Rewind"]) == (3, "Rewind", "r1", "granted")
    assert entries["Rewind"].acted == 0
    assert "step 3: returned to the state of step 0" in caplog.text
    assert made.end().actions == 2
    rows = [row.observation for row in read_signals(made.folder.signals)]
    assert [row.step for row in rows] == [1, 2, 3, 4, 5]
    # The time of the return lies in step 4; what was set with it acts.
    assert [row.phase for row in rows] == ["compile", "train", "train", "save", "train"]
    assert [row.learning_rate_scale for row in rows] == [1.0, 1.0, 1.0, 0.5, 0.5]


def test_in_observe_mode_nothing_is_brought_back(run):
    weights = Weights()
    engine = scripted({3: (Rewind("r1", "bad"),)}, mode="observe")
    made = run(engine, snapshots=Snapshots(weights, every=8, keep=2))
    weights.value = 3.0
    made.train(2.0, 2.0, 2.0)
    assert weights.value == 3.0
    (entry,) = made.decisions
    assert (entry.verdict, entry.acted) == ("observed", None)


def test_the_copies_are_part_of_the_state(run):
    weights = Weights()
    made = run(scripted({}), snapshots=Snapshots(weights, every=8, keep=2)).train(2.0, 2.0)
    state = json.loads(json.dumps(made.session.state().to_dict(), allow_nan=False))
    assert state["snapshots"]["healthy"] == [0]
    snapshots = Snapshots(weights, every=8, keep=2)
    weights.value = 2.0
    again = run(
        scripted({5: (Rewind("r1", "bad"),)}),
        resumed=ControllerState.from_dict(state),
        snapshots=snapshots,
    )
    again.train(2.0, 2.0, 2.0)
    assert (snapshots.healthy, weights.value) == ((0,), 0.0)


@pytest.mark.parametrize("records", [True, False])
def test_a_rank_without_records_keeps_the_copies_of_a_checkpoint_too(run, records):
    weights = Weights()
    made = run(scripted({}), snapshots=Snapshots(weights, every=8, keep=2), records=records)
    losses = [2.0 + 0.01 * (step % 5) for step in range(80)]
    made.train(*losses[:30])
    made.session.saved()
    named = set(weights.copies)
    assert len(named) == 2
    made.train(*losses[30:])
    # Later ones have taken their place, but a run resumed from the checkpoint finds them.
    assert named < set(weights.copies)


def test_the_micro_batch_is_split_at_a_fixed_global_batch(run):
    made = run(scripted({3: (SetMicroBatch(2),), 5: (SetBatchSize(16),)})).train(*[2.0] * 7)
    state = made.session.state()
    effective = made.end().effective
    rows = [row.observation for row in read_signals(made.folder.signals)]
    assert [row.micro_batch_size for row in rows] == [8, 8, 8, 2, 2, 2, 2]
    assert [row.num_microbatches for row in rows] == [1, 1, 1, 4, 4, 8, 8]
    assert [row.global_batch_size for row in rows] == [8, 8, 8, 8, 8, 16, 16]
    assert state.knobs["micro_batch_split"] == 4
    assert (effective["micro_batch_size"], effective["micro_batch_num"]) == (2, 8)
    entry = next(entry for entry in made.decisions if entry.action == "SetMicroBatch")
    assert (entry.before, entry.requested, entry.acted) == (8, 2, 2)
    again = run(scripted({}), resumed=state).train(2.0)
    assert (again.step.micro_batch_split, again.step.num_microbatches) == (4, 2)


def test_a_micro_batch_that_cannot_be_cut_equally_is_refused_with_the_sizes_that_can(run):
    made = run(scripted({3: (SetMicroBatch(3),)})).train(*[2.0] * 4)
    (entry,) = made.decisions
    assert decision(entry) == (3, "SetMicroBatch", 3.0, "refused")
    assert "must divide the 8 samples of the dataset's micro-batch, but got 3" in entry.reason
    assert "use one of 1, 2, 4, 8." in entry.reason
    assert made.step.micro_batch_split == 1


def test_a_micro_batch_of_unequal_inputs_is_out_of_reach(run):
    step = SimulatedStep()
    step.micro_batch_rows = None
    made = run(scripted({3: (SetMicroBatch(4),)}), step=step).train(*[2.0] * 4)
    assert "micro_batch_size" not in made.session.controller.engine_state.facts.reachable
    (entry, *_) = made.decisions
    assert (entry.action, entry.verdict) == ("SetMicroBatch", "refused")
    with pytest.raises(ConfigError, match="one common first axis"):
        made.session.controller._actuators.apply(SetMicroBatch(4))


def test_a_resumed_run_says_what_was_restored_and_what_is_armed_anew(run, caplog):
    caplog.set_level(logging.INFO)
    first = run(build_engine({"rewind": PolicySettings(enabled=False)}, mode="act")).train(2.0)
    first.step.set_clip_norm(1.0)
    saved = first.session.state()
    first.end()
    state = replace(saved, step=120, knobs={"clip_norm": 1.0})
    run(build_engine({}, mode="act"), resumed=state).train(2.0)
    (line,) = [text for text in caplog.messages if "goes on from step" in text]
    assert line.startswith(
        "the controller goes on from step 120; restored: knobs clip_norm 1; detectors, cool-downs "
        "and budgets; policies batch_size, "
    )
    assert "loss_scale" in line
    assert line.endswith(
        "; armed anew: policies rewind; watchdog (the first step may compile); "
        "counts of findings and actions"
    )


def test_a_resumed_run_whose_state_is_of_another_version_says_so(run, caplog):
    caplog.set_level(logging.INFO)
    state = ControllerState(step=7, updates=7, engine={"schema": 0}, knobs={})
    run(build_engine({}, mode="act"), resumed=state).train(2.0)
    text = caplog.text
    assert "schema 0, this version reads" in text
    assert "restored: no knob, since none was set; armed anew: policies " in text
    assert "detectors, cool-downs and budgets;" not in text


def test_a_step_before_a_checkpoint_has_the_limit_of_saving(run):
    made = run(scripted({}), watchdog=True)
    limits = WatchdogSection().limits()
    made.train(2.0)
    assert made.session._watchdog.limit_s() == limits.train_min_s
    made.session.begin_call(shapes="same", samples=8, saves=True)
    assert made.session._watchdog.limit_s() == limits.save_s
    made.step.train(2.0)
    made.session.end_call(None)
    assert made.session._watchdog.limit_s() == limits.save_s, "the checkpoint is written now"
    made.session.begin_call(shapes="same", samples=8)
    assert made.session._watchdog.limit_s() == limits.train_min_s


def test_a_saved_split_that_fits_no_more_is_left_out_with_a_warning(run, caplog):
    state = ControllerState(step=3, updates=3, engine={}, knobs={"micro_batch_split": 3})
    made = run(scripted({}), resumed=state).train(2.0)
    assert made.step.micro_batch_split == 1
    assert "3 parts do not divide a micro-batch of 8" in caplog.text
    assert made.session.state().knobs == {}


def test_a_stop_carries_its_diagnosis_to_the_result(run):
    made = run(scripted({3: (RequestStop("s", "the data are bad: look at batch 3"),)}))
    made.train(2.0, 2.0)
    assert made.session.stop_reason is None
    made.train(2.0)
    assert made.session.stop_reason == "the data are bad: look at batch 3"
    result = made.end()
    assert (result.outcome, result.message) == ("stopped", "the data are bad: look at batch 3")


def test_an_advice_is_logged_once_by_its_id(run, caplog):
    caplog.set_level(logging.INFO)
    advice = Advise("a1", "use more workers")
    run(scripted({3: (advice,), 4: (advice,), 5: (advice,)})).train(*[2.0] * 5)
    assert caplog.text.count("use more workers") == 1


def test_one_log_line_per_granted_action(run, caplog):
    caplog.set_level(logging.INFO)
    run(scripted({3: (SetLearningRateScale(0.5),)})).train(*[2.0] * 4)
    lines = [record.getMessage() for record in caplog.records if "scripted" in record.getMessage()]
    assert lines == [
        "step 3: scripted: SetLearningRateScale 1.0 -> 0.5 granted: the script at 3",
    ]


def test_a_policy_that_manages_the_loss_scale_puts_the_steps_own_rule_to_rest(run):
    script = {3: (SetLossScale(512.0),)}
    acting = run(scripted(script), step=SimulatedStep(loss_scale=LossScale())).train(*[2.0] * 4)
    assert acting.step.loss_scale_managed_by_policy
    assert acting.step.knobs["loss_scale"] == 512.0
    fixed = LossScale(dynamic=False, initial=1024.0)
    resting = run(scripted(script), step=SimulatedStep(loss_scale=fixed)).train(2.0)
    assert not resting.step.loss_scale_managed_by_policy


def test_the_steps_own_rule_rests_from_the_first_step_on(run):
    script = {3: (SetLossScale(512.0),)}
    acting = run(scripted(script), step=SimulatedStep(loss_scale=LossScale()))
    assert acting.step.loss_scale_managed_by_policy
    observing = run(scripted(script, mode="observe"), step=SimulatedStep(loss_scale=LossScale()))
    assert not observing.step.loss_scale_managed_by_policy


def test_without_a_recorder_a_rank_decides_alike_and_writes_nothing(run, tmp_path):
    script = {3: (SetLearningRateScale(0.5), SetClipNorm(4.0))}
    made = run(scripted(script), records=False).train(*[2.0] * 4)
    made.session.end()
    assert made.step.knobs["learning_rate_scale"] == 0.5
    assert made.step.knobs["clip_norm"] == 4.0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("wanted", "acts", "loss_scale", "skips"),
    [
        (True, True, None, True),
        # MindSpore's own step without a loss scale skips nothing either.
        (True, False, None, False),
        (True, False, LossScale(), True),
        (False, True, None, False),
        (False, False, LossScale(), False),
    ],
)
def test_observing_skips_nothing_that_mindspore_would_not_skip(wanted, acts, loss_scale, skips):
    step = SimulatedStep(loss_scale=loss_scale)
    step.skip_non_finite = wanted
    OwnStep(step, acts=not acts, job_size=1)
    OwnStep(step, acts=acts, job_size=1)
    assert step.skips is skips


# Findings --------------------------------------------------------------------------------------


def test_a_fault_that_goes_on_is_one_incident_and_a_worse_one_is_said_again(run, caplog):
    made = run(scripted({})).train(2.0, *[math.nan] * 4, 2.0)
    result = made.end()
    assert result.findings["non_finite_loss"] == 1
    said = [r.levelname for r in caplog.records if "non_finite_loss" in r.getMessage()]
    assert said == ["WARNING", "ERROR"]


def test_a_fault_that_comes_back_is_a_second_incident(run):
    made = run(scripted({})).train(2.0, math.nan, *[2.0] * 40, math.nan, 2.0)
    assert made.end().findings["non_finite_loss"] == 2


def test_hidden_steps_are_told_once(run):
    made = run(scripted({})).train(2.0).train(2.0, 2.0, 2.0, num_steps=4)
    result = made.end()
    assert (result.steps, result.findings) == (13, {"hidden_steps": 1})
    (entry,) = [entry for entry in made.decisions if entry.policy == "sensors"]
    assert "3 of 4 steps stay unseen" in entry.reason
    rows = [row.observation for row in read_signals(made.folder.signals)]
    assert [row.step for row in rows] == [1, 5, 9, 13]
    assert rows[0].step_time_s == pytest.approx(0.1, rel=0.1)
    assert rows[2].step_time_s == pytest.approx(0.1 / 4, rel=0.1)


def test_a_hang_reaches_the_records_from_its_own_thread(run):
    made = run(scripted({})).train(2.0)
    made.session._hang(Hang(stalled_s=700.0, limit_s=600.0, step=1, phase="train", stacks=None))
    (entry,) = made.decisions
    assert (entry.policy, entry.action, entry.requested) == ("sensors", "Advise", "hang-1")
    assert "no heartbeat for 700 s in phase train" in entry.reason
    assert made.end().findings == {"hang": 1}


def test_the_watchdog_runs_from_begin_to_end(run):
    import threading

    names = lambda: {thread.name for thread in threading.enumerate()}  # noqa: E731
    made = run(scripted({}), watchdog=True).train(2.0)
    assert {"mindtune-watchdog", "mindtune-sampler"} <= names()
    made.end()
    assert not {"mindtune-watchdog", "mindtune-sampler"} & names()


def test_findings_from_outside_count_once_where_told_once():
    engine = build_engine({}, mode="observe")
    controller = LiveController(engine, OwnStep(SimulatedStep(), acts=True, job_size=1).actuators)
    for step in (1, 50):
        controller.report_once(
            Finding(step=step, last_step=step, kind=FindingKind.HIDDEN_STEPS,
                    severity=Severity.WARNING, message="hidden")
        )  # fmt: skip
    assert controller.finding_counts == {"hidden_steps": 1}


# Ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(MemoryError("m"), "oom"), (RuntimeError("r"), "crash"), (KeyboardInterrupt(), "interrupted"),
     (SystemExit(1), "interrupted")],
)  # fmt: skip
def test_what_ended_the_run_is_typed(run, error, outcome):
    result = run(scripted({})).train(2.0, 3.0).end(error)
    assert (result.outcome, result.steps, result.final_loss) == (outcome, 2, 3.0)
    assert result.message.startswith(type(error).__name__)


def test_a_run_whose_last_loss_is_no_number_is_non_finite(run):
    result = run(scripted({})).train(2.0, math.inf).end()
    assert (result.outcome, result.message) == (
        "non_finite", "the loss of the last step, 2, is inf",
    )  # fmt: skip


@pytest.mark.parametrize("name", ["eval_fn", "effective"])
def test_a_function_of_the_users_that_fails_is_the_runs_failure(run, name):
    def fail():
        raise ValueError("no validation set")

    made = run(scripted({}), workload=Workload(**{name: fail})).train(2.0)
    with pytest.raises(ValueError, match="no validation set"):
        made.session.end()
    result = read_document(RunResult, made.folder.result)
    assert (result.outcome, result.message) == ("crash", "ValueError: no validation set")
    assert len(read_signals(made.folder.signals)) == 1


def test_the_second_end_changes_nothing(run):
    made = run(scripted({})).train(2.0)
    assert made.end().outcome == "ok"
    assert made.end(RuntimeError("later")).outcome == "ok"


def test_the_result_of_an_earlier_segment_is_gone_while_the_next_runs(run):
    made = run(scripted({})).train(2.0)
    made.end()
    again = run(scripted({})).train(2.0)
    assert not again.folder.result.exists()


# State -----------------------------------------------------------------------------------------


def test_state_survives_and_restores_what_policies_had_set(run):
    made = run(scripted({3: (SetLearningRateScale(0.5),)})).train(*[2.0] * 4)
    made.session.controller._actuators.apply(SetBatchSize(16))
    state = json.loads(json.dumps(made.session.state().to_dict(), allow_nan=False))
    assert state["knobs"] == {"learning_rate_scale": 0.5, "num_microbatches": 2}
    step = SimulatedStep()
    step.knobs["clip_norm"] = 7.0
    again = run(scripted({}), step=step, resumed=ControllerState.from_dict(state)).train(2.0)
    assert (step.knobs["learning_rate_scale"], step.num_microbatches) == (0.5, 2)
    assert step.knobs["clip_norm"] == 7.0
    assert again.session.step == 5
    assert again.session.state().knobs == made.session.state().knobs


def test_a_knob_that_the_new_step_lacks_is_left_out_with_a_warning(run, caplog):
    state = ControllerState(step=3, updates=3, engine={}, knobs={"loss_scale": 4.0})
    made = run(scripted({}), resumed=state).train(2.0)
    assert made.step.knobs["loss_scale"] == 1024.0
    assert "loss_scale of the saved run is left out" in caplog.text


# Ranks -----------------------------------------------------------------------------------------


def test_on_several_ranks_times_are_those_of_the_step_before(run):
    machine = Machine(rank=0, num_ranks=2)
    made = run(scripted({}), step=SimulatedStep(world_size=2), machine=machine).train(2.0)
    row = HostSignals(step_time_s=0.5, data_time_s=0.25, phase="train")
    slow = HostSignals(step_time_s=2.0, data_time_s=0.125, phase="compile")
    made.step.rows = (row.to_row(), slow.to_row())
    made.train(2.0)
    made.end()
    first, second = (entry.observation for entry in read_signals(made.folder.signals))
    assert (first.phase, first.step_time_s, first.tokens_per_s) == ("compile", None, None)
    assert (second.phase, second.step_time_s, second.data_time_s) == ("compile", 2.0, 0.25)
    # 8 samples of 4 tokens on 2 ranks in the step before, which took 2 s.
    assert (second.tokens, second.tokens_per_s) == (64, 32.0)
    assert len(made.step.sent) == NUM_HOST_SIGNALS


# The rest --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "family"),
    [("Adam", "adam"), ("AdamWeightDecay", "adam"), ("AdamW", "adam"), ("Lamb", "adam"),
     ("SGD", "sgd"), ("Momentum", "sgd"), ("Ftrl", "unknown")],
)  # fmt: skip
def test_the_family_of_an_optimizer_shows_in_its_class(name, family):
    assert optimizer_family(type(name, (), {})()) == family
    assert optimizer_family(type("Own", (type(name, (), {}),), {})()) == family


def test_the_controller_loads_no_framework():
    code = (
        "import sys, mindtune.controller.live.session, mindtune.controller.live.trial_report\n"
        "print(sorted({'mindspore', 'pandas', 'scipy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Endings --------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", ["model signals", "probe", "step", "watchdog"])
def test_whatever_fails_to_close_the_rest_closes_and_the_result_says_so(tmp_path, broken):
    made = Run(tmp_path, scripted({}), watchdog=True).train(2.0, 2.0)
    session, closed = made.session, []

    def part(name, inner=lambda: None):
        def close(*_):
            closed.append(name)
            inner()
            if name == broken:
                raise RuntimeError(f"{name} did not close")

        return close

    session._model_signals = SimpleNamespace(end=part("model signals"))
    session._faults = SimpleNamespace(remove=part("faults"))
    session._probe.stop = part("probe", session._probe.stop)
    session._watchdog.stop = part("watchdog", session._watchdog.stop)
    session._adapter.watch_own_time = part("step")
    with pytest.raises(RuntimeError, match=f"{broken} did not close"):
        session.end()
    assert sorted(closed) == ["faults", "model signals", "probe", "step", "watchdog"]
    result = read_document(RunResult, made.folder.result)
    assert (result.outcome, result.steps) == ("crash", 2)
    assert f"{broken} did not close" in result.message


def test_a_state_that_cannot_be_kept_costs_no_result(tmp_path, monkeypatch):
    made = Run(tmp_path, scripted({})).train(2.0)
    monkeypatch.setattr(made.session, "state", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        made.session.end()
    assert read_document(RunResult, made.folder.result).steps == 1


@pytest.mark.parametrize(
    ("mode", "together", "leaves"),
    [
        ("observe", {}, True),
        ("act", {}, False),
        # What is measured on all ranks at once, by collectives or by the user's own.
        ("observe", {"eval_fn": lambda: 1.0}, False),
        ("observe", {"model_signals": SimpleNamespace()}, False),
        ("observe", {"faults": SimpleNamespace()}, False),
    ],
)
def test_one_rank_of_several_leaves_only_what_it_does_alone(tmp_path, mode, together, leaves):
    step = SimulatedStep(world_size=2)
    session = LiveSession(
        LiveSettings(watchdog=WatchdogSection(enabled=False)),
        Workload(eval_fn=together.get("eval_fn")),
        OwnStep(step, acts=mode == "act", job_size=2),
        scripted({}, mode=mode),
        machine=Machine(rank=1, num_ranks=2),
        **{name: part for name, part in together.items() if name != "eval_fn"},
    )
    step.sent = [1.0] * NUM_HOST_SIGNALS
    assert session.abandon(RuntimeError("a bug")) is leaves
    if leaves:
        # The others are not told its last times for ever.
        assert all(map(math.isnan, step.sent))


def test_a_threshold_that_nobody_moves_any_more_skips_no_update(tmp_path):
    made = Run(tmp_path, scripted({})).train(2.0)
    actuators = made.session._adapter.actuators
    made.step.set_skip_threshold(7.0)  # the user's own
    actuators.take_over(frozenset())
    assert made.step.knobs["skip_threshold"] == 7.0
    actuators.apply(SetSkipThreshold(5.0))
    actuators.take_over(frozenset({"skip_threshold"}))
    assert made.step.knobs["skip_threshold"] == 5.0
    assert made.session.abandon(RuntimeError("a bug"))
    assert made.step.knobs["skip_threshold"] is None
    assert "skip_threshold" not in actuators.values()

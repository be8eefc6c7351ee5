"""Known mistakes of public tuners, replayed: each case shows the right behaviour."""

import dataclasses
import random

import optuna
import pytest
from optuna.trial import TrialState

from mindtune.search.attributes import OUTCOME, STEP_TIME
from mindtune.search.constraints import check, explain
from mindtune.search.cost_model import CostModel, Measurement, calibrate
from mindtune.search.errors import SearchError
from mindtune.search.facts import Cluster, Limits, StudyFacts, Training
from mindtune.search.history import Attempt, infer
from mindtune.search.memory_model import memory_parts
from mindtune.search.model_shape import ModelShape
from mindtune.search.sampler import GuidedSampler, make_sampler
from mindtune.search.scoring import best_by
from mindtune.search.space import Space
from mindtune.search.study import Proposer
from mindtune.search.trial_history import measurements

optuna.logging.set_verbosity(optuna.logging.ERROR)

MOE = ModelShape(
    num_layers=32, hidden_size=4096, num_heads=64, intermediate_size=8192, gated_mlp=True,
    vocab_size=128000, seq_length=4096, flash_attention=True, num_experts=64,
    experts_per_token=4, moe_intermediate_size=2048,
)  # fmt: skip
MIB = 2**20


def expert_facts():
    return StudyFacts(
        cluster=Cluster(num_devices=4096, devices_per_node=8, device_memory=59392.0 * MIB),
        training=Training(global_batch_size=4096, precision="bfloat16"),
        model=MOE,
    )


@pytest.mark.parametrize(("measured_ep", "megabytes"), [(8, 90000), (16, 80000)])
def test_a_crashed_dry_run_is_unknown_and_no_estimate_is_negative(measured_ep, megabytes):
    """One of two dry runs crashed and counted as 0 MB: estimates of -45000 and -1120000 MB."""
    facts = expert_facts()
    spec = {"data_parallel": 64, "model_parallel": 8, "pipeline_stage": 8,
            "expert_parallel": [1, 8, 16, 32, 64]}  # fmt: skip
    space = Space.from_spec(spec, facts)
    configs = {c["expert_parallel"]: space.complete(c) for c in space.configs()}
    crashed = {8: 16, 16: 8}[measured_ep]
    seen = [
        Measurement(configs[measured_ep], memory_bytes=float(megabytes * MIB)),
        Measurement(configs[crashed], memory_bytes=None),
    ]
    fitted = calibrate(CostModel(facts), seen)
    # One measurement moves the formula to it, as far as the formula's own noise goes.
    assert fitted.memory_bytes(configs[measured_ep]) == pytest.approx(megabytes * MIB, rel=0.05)
    for config in configs.values():
        static = fitted.memory_parts(config).static
        assert fitted.memory_bytes(config) >= fitted.memory_rates.states * static > 0
    # The more ranks share the experts, the less; never less than the measured slope allows.
    estimates = [fitted.memory_bytes(configs[ep]) for ep in (1, 8, 16, 32, 64)]
    assert estimates == sorted(estimates, reverse=True)
    report = check(space, fitted)
    assert configs[1]["expert_parallel"] not in [
        entry.config["expert_parallel"] for entry in report.configs
    ]


def test_unknown_memory_rejects_nothing_and_is_never_zero():
    facts = dataclasses.replace(expert_facts(), model=None)
    report = check(Space.from_spec({"data_parallel": 64, "model_parallel": 64}, facts))
    assert report.feasible == 1
    assert report.configs[0].prediction.memory_bytes is None


def test_as_many_stages_as_layers_are_listed():
    """A range that ends one early lost pipeline_stage = num_layers."""
    model = dataclasses.replace(MOE, num_layers=8, num_experts=None)
    facts = StudyFacts(
        cluster=Cluster(num_devices=8), training=Training(global_batch_size=64), model=model
    )
    space = Space.from_spec(
        {"pipeline_stage": "auto", "data_parallel": "auto", "pp_interleave_num": [1, 2]}, facts
    )
    stages = {
        (e.config["pipeline_stage"], e.config["pp_interleave_num"]) for e in check(space).configs
    }
    assert stages == {(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (8, 1)}
    found = explain(space, {"pipeline_stage": 8, "data_parallel": 1, "pp_interleave_num": 2})
    assert "8 x 2 = 16" in found.rejected[0].reason


def test_more_stages_are_not_ruled_out_by_fewer_that_ran_out_of_memory():
    """A string taken for a list of names made `pp_degree` match `vpp_degree`."""
    failed = {"pipeline_stage": 4, "pp_interleave_num": 2, "micro_batch_size": 1}
    other = {"pipeline_stage": 8, "pp_interleave_num": 1, "micro_batch_size": 1}
    assert infer(other, [Attempt(1, failed, "oom")]) is None
    assert infer({**failed, "micro_batch_size": 2}, [Attempt(1, failed, "oom")]) is not None


def test_the_fastest_of_three_runs_wins_in_any_order_of_rows_and_columns():
    """A sort by column 15 compared nodes after two columns were added."""
    rows = [
        {"name": name, "nodes": 4, "step_time_s": time, "tokens_per_s": 100 / time}
        for name, time in (("a", 3.1), ("b", 2.2), ("c", 4.0))
    ]
    draw = random.Random(1)
    for _ in range(10):
        draw.shuffle(rows)
        shuffled = [dict(draw.sample(list(row.items()), len(row))) for row in rows]
        assert best_by("step_time_s", shuffled)["name"] == "b"
        assert best_by("tokens_per_s", shuffled)["name"] == "b"


def test_results_go_to_the_trial_that_they_are_of_whoever_ends_first():
    """Three listings of folders were taken side by side: one run died and the others moved up."""
    facts = StudyFacts(cluster=Cluster(num_devices=1), training=Training(global_batch_size=64))
    report = check(Space.from_spec({"micro_batch_size": [1, 2, 4]}, facts))
    study = optuna.create_study(direction="maximize")
    proposer = Proposer(study, report, trials=3)
    a, b, c = (proposer.ask() for _ in range(3))
    proposer.tell(c.number, "ok", 3.0, {STEP_TIME: 0.3})
    proposer.tell(a.number, "crash")
    proposer.tell(b.number, "ok", 2.0, {STEP_TIME: 0.2})
    found = {attempt.number: attempt for attempt in proposer.attempts()}
    assert [(found[p.number].config, found[p.number].value) for p in (a, b, c)] == [
        (a.config, None), (b.config, 2.0), (c.config, 3.0),
    ]  # fmt: skip
    seen = {tuple(one.config.items()): one.step_time_s
            for one in measurements(study.trials, report.space)}  # fmt: skip
    complete = [tuple(report.space.complete(p.config).items()) for p in (b, c)]
    assert seen == dict(zip(complete, (0.2, 0.3), strict=True))
    assert [leader.number for leader in proposer.leaders(3)] == [c.number, b.number]


def test_a_latency_is_minimised():
    assert best_by("latency_s", [{"latency_s": 0.1}, {"latency_s": 0.2}])["latency_s"] == 0.1


def test_sharded_states_are_never_below_the_whole_over_all_ranks():
    """Shards were divided by all ranks and then once more by model parallelism."""
    model = ModelShape(num_layers=16, hidden_size=2048, num_heads=16, intermediate_size=8192,
                       vocab_size=32000, seq_length=1024)  # fmt: skip
    facts = StudyFacts(
        cluster=Cluster(num_devices=8),
        training=Training(global_batch_size=8, precision="float16"),
        model=model,
    )
    space = Space.from_spec({"data_parallel": 4, "model_parallel": 2,
                             "optimizer_sharding": "parameter"}, facts)  # fmt: skip
    parts = memory_parts(next(map(space.complete, space.configs())), facts)
    assert parts.static == pytest.approx(18 * model.num_parameters / 8)


def test_a_list_that_excludes_every_survivor_exports_nothing_and_names_the_constraint():
    """The unfiltered best was returned with a warning."""
    facts = StudyFacts(
        cluster=Cluster(num_devices=8, devices_per_node=2),
        training=Training(global_batch_size=64),
        limits=Limits(tensor_parallel_inside_node=True),
    )
    wide = {"model_parallel": [1, 2], "data_parallel": "auto"}
    assert check(Space.from_spec(wide, facts)).feasible == 2
    report = check(Space.from_spec({**wide, "model_parallel": [4, 8]}, facts))
    assert report.feasible == 0
    assert report.configs == ()
    assert report.emptied_by == (
        "no config of 8 is feasible: tensor_parallel_inside_node alone rejects all of them; e.g. "
        "model_parallel = 8 does not divide devices_per_node = 2: groups span nodes, with slow "
        "links in every layer (constraints.tensor_parallel_inside_node). Values here: "
        "model_parallel 4, 8. Left would be 2 without tensor_parallel_inside_node."
    )
    with pytest.raises(SearchError, match="no config of 8 is feasible"):
        Proposer(
            optuna.create_study(), report, trials=3
        )  # fmt: skip


@pytest.mark.parametrize("sampler", ["guided", "staged", "tpe", "random"])
def test_a_failing_half_is_reported_as_constraint_and_never_repeated(sampler):
    """A sampler kept proposing the region that ran out of memory."""
    facts = StudyFacts(cluster=Cluster(num_devices=1), training=Training(global_batch_size=64))
    spec = {"micro_batch_size": [1, 2, 4, 8, 16, 32], "env.MODE": ["a", "b", "c", "d"]}
    report = check(Space.from_spec(spec, facts))
    study = optuna.create_study(
        direction="maximize", sampler=make_sampler(sampler, report, seed=0)
    )
    proposer = Proposer(study, report, trials=10 if sampler == "tpe" else 24)
    keys, failures = [], 0
    while (proposal := proposer.ask()) is not None:
        keys.append(proposal.key)
        size = proposal.config["micro_batch_size"]
        if size >= 8:
            failures += 1
            proposer.tell(proposal.number, "oom")
            assert study.trials[proposal.number].constraints == {"oom": 1.0}
        else:
            proposer.tell(proposal.number, "ok", float(size))
    assert len(set(keys)) == len(keys)
    succeeded = sum(a.outcome == "ok" for a in proposer.attempts())
    assert succeeded + failures == len(keys)
    assert (succeeded == 12 and failures <= 12) or len(keys) == 10


def test_our_sampler_leaves_the_failing_half_at_once():
    facts = StudyFacts(cluster=Cluster(num_devices=1), training=Training(global_batch_size=64))
    spec = {"micro_batch_size": [1, 2, 4, 8, 16, 32], "env.MODE": ["a", "b", "c", "d"]}
    sampler = GuidedSampler(check(Space.from_spec(spec, facts)), seed=0)
    tried = []
    for number in range(12):
        config = sampler.propose(tried, number=number)
        size = config["micro_batch_size"]
        outcome, value = ("oom", None) if size >= 8 else ("ok", float(size))
        tried.append(Attempt(number, config, outcome, value))
    assert sum(attempt.outcome == "oom" for attempt in tried) <= 6


def test_a_killed_worker_leaves_no_running_trial_and_a_late_report_is_harmless(tmp_path):
    """A stale trial stayed RUNNING for ever; a live one was failed by a short heartbeat."""
    facts = StudyFacts(cluster=Cluster(num_devices=1), training=Training(global_batch_size=64))
    report = check(Space.from_spec({"micro_batch_size": [1, 2, 4]}, facts))
    storage = f"sqlite:///{tmp_path / 'study.db'}"

    def worker():
        study = optuna.create_study(
            study_name="s", storage=storage, direction="maximize", load_if_exists=True,
            sampler=make_sampler("guided", report, seed=0),
        )  # fmt: skip
        return Proposer(study, report, trials=3)

    slow = worker()
    lost = slow.ask()
    resumed = worker()
    assert resumed.requeue_stale(lambda _: False) == (lost.number,)
    retry = resumed.ask()
    assert retry.config == lost.config
    assert slow.tell(lost.number, "ok", 1.0) is False  # it was alive after all
    assert resumed.tell(retry.number, "ok", 0.9) is True
    while (proposal := resumed.ask()) is not None:
        resumed.tell(proposal.number, "ok", 0.5)
    states = [(t.state, t.user_attrs[OUTCOME]) for t in resumed.study.trials]
    assert states[lost.number] == (TrialState.FAIL, "interrupted")
    assert [state for state, _ in states].count(TrialState.COMPLETE) == 3
    assert TrialState.RUNNING not in [state for state, _ in states]


def test_selective_recompute_is_no_rescue_where_attention_is_fused():
    """-70 % was promised, 2 % came: attention was fused already."""
    fused = dataclasses.replace(MOE, num_experts=None)
    for flash, saved_at_least in ((True, 0.0), (False, 0.3)):
        facts = StudyFacts(
            cluster=Cluster(num_devices=1),
            training=Training(global_batch_size=8, precision="bfloat16"),
            model=dataclasses.replace(fused, flash_attention=flash),
        )
        space = Space.from_spec({"recompute": ["none", "selective"]}, facts)
        none, selective = (
            memory_parts(space.complete(c), facts).activations for c in space.configs()
        )
        saved = 1 - selective / none
        assert saved == 0.0 if flash else saved > saved_at_least

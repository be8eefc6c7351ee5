"""The experiment on a table of known order and on the smallest simulated cluster."""

import csv
import json
import math
from dataclasses import replace
from importlib.util import find_spec
from itertools import product

import optuna
import pytest

from mindtune.controller.errors import ConfigError
from mindtune.experiments.cluster_simulator.problems import problem
from mindtune.experiments.model_accuracy.mapping import Device, map_row
from mindtune.experiments.provenance import provenance
from mindtune.experiments.search_quality.__main__ import main
from mindtune.experiments.search_quality.answers import answers
from mindtune.experiments.search_quality.conclusion import Tried, concluded, leaders
from mindtune.experiments.search_quality.early_stops import best_bar, stopped_early
from mindtune.experiments.search_quality.experiment import search, stream, with_base
from mindtune.experiments.search_quality.methods import METHODS, missing
from mindtune.experiments.search_quality.per_knob import PerKnob
from mindtune.experiments.search_quality.problem import SimulatedTrial
from mindtune.experiments.search_quality.problems import chosen_problems
from mindtune.experiments.search_quality.published import PublishedProblem, published_problems
from mindtune.experiments.search_quality.rows import (
    SearchRow,
    SpaceFacts,
    append_row,
    read_rows,
)
from mindtune.experiments.search_quality.summary import summary
from mindtune.search.constraints import check
from mindtune.search.cost_model import Usual

MEASURED = provenance()
DEVICES = {
    "A100": Device(peak=312e12, peak_fp8=None, memory=80 * 2.0**30, intra=3e11, inter=2.5e10)
}
CELLS = dict.fromkeys(
    ("params_b", "experts", "topk", "moe_ffn", "tokens_per_s_dev", "flags", "notes", "peak_mem_gib",
     "mem_kind"), ""
) | {
    "source": "made_up", "table": "one", "framework": "Megatron-LM", "date": "2025-01",
    "model": "GPT", "arch": "dense", "layers": "24", "hidden": "2048", "heads": "16",
    "kv_heads": "16", "ffn": "8192", "gated_mlp": "0", "vocab": "51200", "seq": "2048",
    "device": "A100", "n_devices": "8", "devices_per_node": "8", "mem_gb": "80",
    "precision": "bf16", "pp": "1", "vpp": "1", "cp": "1", "ep": "1", "gbs": "64", "sp": "0",
    "recompute": "none", "zero": "0",
}  # fmt: skip
TIMES = {(1, 1): 1.0, (1, 2): 0.9, (1, 4): 0.8, (2, 1): 1.3, (2, 2): 1.2, (2, 4): 1.1,
         (4, 1): 1.6, (4, 2): 1.5, (4, 4): 1.4}  # fmt: skip


def mapped(**cells):
    return map_row({**CELLS, **cells}, "file.csv", 1, DEVICES)


@pytest.fixture(scope="module")
def table():
    rows = [
        mapped(
            tp=str(tensor), dp=str(8 // tensor), mbs=str(size),
            grad_accum=str(64 * tensor // (8 * size)), step_time_s=str(time),
            status="oom" if (tensor, size) == (1, 4) else "ok",
        )
        for (tensor, size), time in TIMES.items()
    ]  # fmt: skip
    again = mapped(tp="1", dp="8", mbs="2", grad_accum="4", step_time_s="1.0", status="ok")
    return PublishedProblem("table", (*rows, again), Usual)


def config_of(problem, tensor, size):
    return next(
        config
        for config in problem.report.space.configs()
        if (config["model_parallel"], config["micro_batch_size"]) == (tensor, size)
    )


def test_a_trial_looks_its_config_up_in_the_table(table):
    assert table.report.total == table.report.feasible == 9
    failed = table.run(config_of(table, 1, 4), seed=0)
    assert (failed.outcome, failed.value) == ("oom", None)
    assert table.true_value(config_of(table, 1, 4)) is None
    measured = table.run(config_of(table, 2, 2), seed=0)
    assert (measured.outcome, measured.step_time_s) == ("ok", 1.2)
    assert measured.value == table.true_value(config_of(table, 2, 2))
    # Measured twice: either may be seen, and the truth lies between.
    twice = config_of(table, 1, 2)
    seen = {table.run(twice, seed=seed).step_time_s for seed in range(20)}
    assert seen == {0.9, 1.0}
    assert table.run(twice, seed=3) == table.run(twice, seed=3)
    fast, slow = (table.report.cost.mfu(time) for time in (0.9, 1.0))
    assert slow < table.true_value(twice) < fast


AVAILABLE = [name for name in METHODS if not missing(name)]


@pytest.mark.parametrize("method", AVAILABLE)
def test_every_method_tries_every_config_once_and_concludes_with_the_best(table, method):
    known = answers(table)
    row = search(table, "t", method, seed=1, trials=20, known=known, measured=MEASURED)
    assert len(row.outcomes) in ((8, 9) if method == "guided_with_stop" else (9,))
    assert row.outcomes.count("oom") <= 1
    assert row.leader_regrets[-1] == 0.0
    # The best config's two measurements differ by 10 %: within that, another one may win.
    assert row.regrets[-1] <= 0.1
    again = search(table, "t", method, seed=1, trials=20, known=known, measured=MEASURED)
    assert (again.regrets, again.outcomes) == (row.regrets, row.outcomes)


def test_a_failure_is_one_for_memory_if_the_table_or_its_own_rows_say_so(table):
    known = answers(table)
    assert (known.failing_for_memory, known.accepted_for_memory) == (1, 1)
    rows = [replace(row, status="fail", step_time_s=None) if index < 3 else row
            for index, row in enumerate(table.rows)]  # fmt: skip
    unknown = replace(table, rows=tuple(rows))
    assert (answers(unknown).failing, answers(unknown).failing_for_memory) == (2, 0)
    large = replace(unknown, is_too_large=lambda row: row.config["micro_batch_size"] > 1)
    assert answers(large).failing_for_memory == 1
    assert large.run(config_of(large, 1, 1), seed=0).outcome == "crash"


def test_the_largest_micro_batch_is_tried_first_stage_by_stage(table):
    searcher = METHODS["largest_micro_batch"].open(table.report, 9, 0)
    sizes = []
    while (asked := searcher.ask()) is not None:
        sizes.append((asked[1]["model_parallel"], asked[1]["micro_batch_size"]))
    base, *others = sizes
    assert others[:2] == [(base[0], size) for size in (4, 2, 1) if (base[0], size) != base]


def test_a_method_whose_package_is_missing_is_left_out_by_name(tmp_path, capsys):
    assert missing("guided") == ""
    if find_spec("torch") is None:
        assert missing("gp") == "torch"
        assert main(["--out", str(tmp_path), "--methods", "gp"]) == 2
        assert "--methods gp needs torch, which is not installed" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["dense_8_200", "dense_64_2000"])
def test_ours_comes_within_3_percent_in_15_trials(kind):
    regrets = []
    for seed in range(3):
        found = problem(kind, seed)
        row = search(found, kind, "guided", seed=seed, trials=15, known=answers(found),
                     measured=MEASURED)  # fmt: skip
        regrets.append(row.leader_regrets[-1])
    assert sorted(regrets)[1] <= 0.03
    assert max(regrets) < 0.15


def test_the_answers_count_what_each_rule_rejects_and_what_could_run():
    found = problem("dense_64_2000", 0)
    known = answers(found)
    counts = {entry.rule: entry.count for entry in found.report.rejected if entry.count}
    assert known.rejected == counts
    assert known.configs == known.feasible + sum(counts.values())
    degrees = ("data_parallel", "model_parallel", "pipeline_stage")
    filling = [
        config
        for config in found.space.configs()
        if math.prod(config[name] for name in degrees) == 64
    ]
    assert known.filling == len(filling) == 288
    runs = [config for config in filling if found.true_value(config) is not None]
    kept = {tuple(entry.config.values()) for entry in found.report.configs}
    accepted = [config for config in filling if tuple(config.values()) in kept]
    assert known.feasible == len(accepted)
    assert known.runnable == len(runs)
    assert known.failing == sum(
        found.can_start(config) and found.true_value(config) is None for config in filling
    )
    assert (
        known.accepted_for_memory
        == known.accepted_failures
        == sum(found.true_value(config) is None for config in accepted)
    )
    assert sum(known.rejected_runnable.values()) == len(runs) - sum(
        found.true_value(config) is not None for config in accepted
    )
    assert known.rejected_filling == 1 - len(accepted) / 288
    assert known.best == max(map(found.true_value, runs))


def facts(**fields):
    return SpaceFacts(
        **{
            "configs": 1000, "rejected": {"degrees_fill_cluster": 900, "memory": 70, "heads": 10},
            "rejected_runnable": {"memory": 5}, "feasible": 20, "accepted_refused": 1,
            "accepted_failures": 2, "refused": 11, "failing": 67,
            "failing_for_memory": 50, "accepted_for_memory": 1, "best": 0.5, "best_feasible": 0.4,
        }
        | fields
    )  # fmt: skip


def test_shares_are_of_layouts_that_fill_the_cluster_with_both_denominators():
    one = facts()
    assert one.filling == 100
    assert one.runnable == 100 - 11 - 67 == 22
    assert one.rejected_filling == 0.8
    assert one.rejected_for_memory == 0.7
    assert one.accepted_that_cannot_run == 3 / 20
    assert one.failures_accepted == 1 / 50
    assert one.rejected_that_can_run == 5 / 80
    assert one.runnable_rejected == 5 / 22
    assert one.lost == pytest.approx(0.2)
    assert facts(failing_for_memory=0, accepted_for_memory=0).failures_accepted == 0.0


def test_base_method_and_noise_have_streams_of_their_own():
    streams = [stream(seed, what) for seed in range(100) for what in ("base", "method", "trial")]
    assert len(set(streams)) == 300
    assert streams[0] == stream(0, "base")
    found = problem("dense_8_200", 100)
    bases = {tuple(with_base(found, seed).space.base.items()) for seed in range(20)}
    assert len(bases) > 5


def tried(*trials):
    return [Tried(number, {"micro_batch_size": number}, trial)
            for number, trial in enumerate(trials)]  # fmt: skip


def ok(value, memory=1e9):
    return SimulatedTrial("ok", value, 1.0 / value, memory)


def test_a_study_concludes_with_its_own_confirmation():
    known = tried(ok(1.0), ok(2.0), ok(1.9), ok(1.2), SimulatedTrial("oom"))
    assert [one.number for one in leaders(known)] == [1]
    many = known + [Tried(5 + n, {"micro_batch_size": 5 + n}, ok(1.0)) for n in range(5)]
    assert [one.number for one in leaders(many)] == [1, 2]

    def conclude(values, trials=many):
        asked = []

        def launch(config, repeat):
            asked.append((config["micro_batch_size"], repeat))
            value = values.get(config["micro_batch_size"], 1.0)
            return SimulatedTrial("crash") if value is None else ok(value)

        won = concluded(trials, {"micro_batch_size": 0}, launch, device_memory=None)
        return (None if won is None else won["micro_batch_size"]), asked

    won, asked = conclude({1: 2.0, 2: 1.9})
    assert won == 1
    assert asked == [(number, repeat) for repeat in (1, 2, 3) for number in (0, 1, 2)]
    # What luck measured too well does not win, and the base does if nothing is better.
    assert conclude({1: 0.9, 2: 1.9})[0] == 2
    assert conclude({1: 0.9, 2: 1.01})[0] == 0
    # If all leaders fail, the next ones take their place.
    won, asked = conclude({1: None, 2: None, 3: 1.2})
    assert won == 3
    assert {number for number, _ in asked} == {0, 1, 2, 3, 5}
    assert concluded(tried(SimulatedTrial("oom")), {}, None, device_memory=None) is None
    # Other workers may be faster than that of the base config.
    assert conclude({1: 2.0, 2: 1.9}, many[1:])[0] == 1


def test_several_workers_have_trials_in_flight_and_end_earlier():
    found = problem("dense_8_200", 1)
    known = answers(found)
    alone, four = (
        search(found, "p", name, seed=1, trials=12, known=known, measured=MEASURED)
        for name in ("guided", "guided_4_workers")
    )
    assert len(alone.outcomes) == len(four.outcomes) == 12
    assert alone.wall_s / 5 < four.wall_s < alone.wall_s / 2
    assert alone.slowest_own_s >= alone.own_s > 0


def test_a_trial_that_cannot_catch_up_is_stopped_early():
    found = problem("dense_8_200", 1)
    report = found.report
    fast = max((entry.config for entry in report.configs), key=lambda c: found.true_value(c) or 0)
    best = next(trial for seed in range(9) if (trial := found.run(fast, seed=seed)).value)
    bar = best_bar([best, SimulatedTrial("oom")], report.space.facts)
    assert best_bar([SimulatedTrial("ok", 0.5)], report.space.facts) is None
    slow = replace(best, step_times_s=tuple(3 * time for time in best.step_times_s),
                   wall_s=100 + 3 * sum(best.step_times_s), value=best.value / 3)  # fmt: skip
    stopped = stopped_early(slow, bar, report.space.facts)
    assert (stopped.outcome, stopped_early(best, bar, report.space.facts)) == ("pruned", best)
    assert stopped.wall_s == pytest.approx(100 + sum(slow.step_times_s[:5]))
    assert slow.value <= stopped.value < 0.9 * best.value
    assert stopped_early(slow, None, report.space.facts) is slow


def test_above_the_memory_that_the_user_allows_a_trial_is_no_good(table):
    limits = replace(table.report.space.facts.limits, max_memory=50 * 2.0**30)
    facts_ = replace(table.report.space.facts, limits=limits)
    report = check(replace(table.report.space, facts=facts_))

    class Large(PublishedProblem):
        @property
        def report(self):
            return report

        def run(self, config, *, seed):
            found = super().run(config, seed=seed)
            large = config["micro_batch_size"] == 2
            return replace(found, memory_bytes=(60 if large else 40) * 2.0**30)

    problem_ = Large("large", table.rows, Usual)
    row_ = search(problem_, "t", "grid", seed=1, trials=20, known=answers(problem_),
                  measured=MEASURED)  # fmt: skip
    assert row_.outcomes.count("infeasible") == 3


def row(regrets, outcomes=None, **fields):
    outcomes = outcomes or ["ok"] * len(regrets)
    return SearchRow(
        **{
            "problem": "p", "method": "guided", "seed": 0, "trials": 40, "space": facts(),
            "regrets": tuple(regrets), "leader_regrets": tuple(regrets),
            "outcomes": tuple(outcomes), "own_s": 0.01, "slowest_own_s": 0.25, "wall_s": 1.0,
            "measured": MEASURED,
        }
        | fields
    )  # fmt: skip


def test_a_row_says_when_the_best_was_found_and_what_is_left_of_it():
    outcomes = ["oom", "ok", "pruned", "crash", "ok", "infeasible"]
    one = row([1.0, 0.02, 0.05, 0.03, 0.0, 0.0], outcomes)
    assert one.trials_to(0.03) == 2
    assert row([0.5, 0.04]).trials_to(0.03) is None
    assert row([0.01]).trials_to(0.03) == 1
    assert (one.regret_after(2), one.regret_after(50)) == (0.02, 0.0)
    assert (one.failures(1), one.failures(5), one.failures(6)) == (1, 2, 3)


def test_rows_are_kept_and_a_cut_line_is_passed_over(tmp_path):
    path = tmp_path / "rows.jsonl"
    append_row(path, row([0.5]))
    with path.open("a") as file:
        file.write('{"cut')
    assert list(read_rows(path)) == [("p", "guided", 0, 40, MEASURED.revision)]
    assert read_rows(path).popitem()[1] == row([0.5])
    twice = tmp_path / "twice.jsonl"
    append_row(twice, row([0.5]))
    append_row(twice, row([0.5]))
    with pytest.raises(ConfigError, match="must stand once"):
        read_rows(twice)


def test_the_summary_says_what_was_found_and_what_was_not():
    text = summary([row([0.5, 0.02]), row([0.5, 0.4], seed=1, leader_regrets=(0.5, 0.1))])
    assert "| p | >2 (21.0%) |" in text
    assert "| p | 1,000 | 100 | 80.0% | 70.0% | 20.0% |" in text
    assert "| p | 20 | 15.0% | 50 | 2.0% | 6.2% | 22 | 22.7% | 0.0% |" in text
    assert "| p | memory | 70 | 70.0% | 5 |" in text
    assert "| p | heads | 10 | 10.0% | 0 |" in text
    four = [row([0.5, 0.02], seed=seed) for seed in range(3)]
    assert "| p | 2 [2, >2] (" in summary([*four, row([0.5, 0.4], seed=3)])
    assert "| guided | 2 | 2 | >2 | 1 of 2 | 1 of 2 |" in text
    assert "| 6.0% [4.0%, 8.0%] | 0 | 1 s | 10 ms | 250 ms |" in text


def test_rows_of_other_code_are_told_apart_and_replaced_by_newer_ones(tmp_path):
    def of(revision, *, trials=40, seed=0, method="guided", regret=0.5):
        measured = MEASURED.model_copy(update={"revision": revision, "date": "2026-01-02"})
        return row([regret], measured=measured, trials=trials, seed=seed, method=method)

    rows = [of("a"), of("a", seed=1), of("a", method="grid"), of("b", regret=0.01)]
    path = tmp_path / "rows.jsonl"
    for one in rows:
        append_row(path, one)
    text = summary(read_rows(path).values())
    assert "| guided | 1 | 1 | 1 | 1 of 1 |" in text, "the rows of `a` are not mixed in"
    assert "- 1 search, 40 trials at most (grid): " in text
    assert "2026-01-02, revision `a`." in text
    assert "2026-01-02, revision `b`." in text
    assert "**Not all of one revision and number of trials**" in text
    assert "2 rows of other code or trials are left out" in text
    alike = summary([of("b"), of("b", seed=1), of("b", method="grid")])
    assert "- 3 searches, 40 trials at most (guided, grid): " in alike
    assert "Not all of one" not in alike
    assert "left out" not in alike
    assert "Not all of one" in summary([of("b"), of("b", trials=60, method="grid")])


def test_optunas_samplers_have_fair_parameters():
    report = with_base(problem("dense_64_2000", 0), 0)
    searcher = PerKnob(optuna.samplers.RandomSampler(seed=0), report, 0)
    kinds = {name: type(one).__name__ for name, one in searcher.parameters.items()}
    assert kinds == {
        "model_parallel": "IntDistribution", "pipeline_stage": "IntDistribution",
        "micro_batch_size": "IntDistribution", "recompute": "IntDistribution",
        "optimizer_sharding": "CategoricalDistribution",
    }  # fmt: skip
    assert searcher.parameters["model_parallel"].high == 3
    configs = []
    while (asked := searcher.ask()) is not None:
        number, config = asked
        configs.append(config)
        searcher.tell(number, SimulatedTrial("ok", 1.0))
    feasible = [entry.config for entry in report.configs]
    assert configs[0] == {name: report.space.base[name] for name in configs[0]}
    assert sorted(map(repr, configs)) == sorted(map(repr, feasible))


def test_what_is_rejected_or_fails_is_told_by_optunas_constraints():
    report = with_base(problem("dense_64_2000", 0), 0)
    searcher = PerKnob(optuna.samplers.RandomSampler(seed=0), report, 0)
    number, _ = searcher.ask()
    searcher.tell(number, SimulatedTrial("oom"))
    for _ in range(20):
        number, _ = searcher.ask()
        searcher.tell(number, SimulatedTrial("ok", 0.5))
    trials = searcher._study.trials
    assert trials[0].constraints == {"oom": 1.0}
    pruned = [t for t in trials[1:] if t.state == optuna.trial.TrialState.PRUNED]
    assert pruned
    counts = {entry.rule for entry in report.rejected if entry.count}
    assert {rule for trial in pruned for rule in trial.constraints} <= counts
    assert all(trial.constraints for trial in pruned)


def test_without_a_model_the_surrogate_is_left_and_the_order_says_nothing():
    report = with_base(problem("dense_64_2000", 0), 0)
    orders = []
    for seed in (1, 2):
        searcher = METHODS["guided_without_model"].open(report, 3, seed)
        configs = []
        while (asked := searcher.ask()) is not None:
            configs.append(asked[1])
            searcher.tell(asked[0], SimulatedTrial("ok", 0.3, 1.0, 1e9))
        orders.append(configs)
    assert orders[0][0] == orders[1][0]
    assert orders[0][1] != orders[1][1]
    predicted = METHODS["cost_order"].open(report, 3, 1)
    first = [predicted.ask()[1], predicted.ask()[1]]
    best = report.configs[0].config
    assert best in first


class Stubborn(optuna.samplers.RandomSampler):
    """Proposes the first value of everything, for ever."""

    def sample_independent(self, study, trial, param_name, param_distribution):
        return 0


def test_what_is_drawn_instead_of_known_proposals_follows_the_seed(table):
    def order(seed):
        searcher = PerKnob(Stubborn(), table.report, seed)
        configs = []
        while (asked := searcher.ask()) is not None:
            number, config = asked
            configs.append((config["model_parallel"], config["micro_batch_size"]))
            searcher.tell(number, SimulatedTrial("ok", 1.0))
        return configs

    assert order(0) == order(0)
    assert order(0) != order(1)
    assert sorted(order(0)) == sorted(order(1)) == sorted(TIMES)


def test_the_experiment_goes_on_where_it_was(tmp_path, capsys):
    command = ["--out", str(tmp_path), "--problems", "dense_8_200", "--trials", "3"]
    command += ["--first-seed", "7"]
    assert main([*command, "--methods", "grid", "--seeds", "1"]) == 0
    first = (tmp_path / "rows.jsonl").read_text()
    assert main([*command, "--methods", "grid,guided", "--seeds", "1"]) == 0
    lines = (tmp_path / "rows.jsonl").read_text().splitlines(keepends=True)
    assert lines[0] == first
    assert [json.loads(line)["method"] for line in lines] == ["grid", "guided"]
    assert {json.loads(line)["seed"] for line in lines} == {7}
    more = ["--out", str(tmp_path), "--problems", "dense_8_200", "--trials", "4", "--jobs", "2"]
    assert main([*more, "--methods", "grid", "--seeds", "2"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [one["trials"] for one in rows] == [3, 3, 4, 4]
    assert {one["seed"] for one in rows[2:]} == {100, 101}, "held out unless a user says so"
    assert "| dense_8_200 |" in (tmp_path / "results.md").read_text()
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "results.md")


def test_groups_that_share_file_device_and_size_are_problems_of_their_own(tmp_path):
    """The second of a name was told by its model, the third took the place of the second."""
    columns = {"table", "status", "tp", "dp", "mbs", "grad_accum", "step_time_s", *CELLS}
    layouts = list(product((1, 2, 4, 8), (1, 2, 4), (1, 2, 4), ("0", "1"), ("none", "full")))
    with (tmp_path / "made.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, sorted(columns))
        writer.writeheader()
        for batch, model in ((256, "GPT"), (512, "GPT"), (1024, "GPT"), (256, "other")):
            for tensor, stages, size, zero, recompute in layouts:
                writer.writerow({
                    **CELLS, "n_devices": 64, "tp": tensor, "pp": stages, "mbs": size,
                    "dp": 64 // (tensor * stages), "gbs": batch, "zero": zero, "status": "ok",
                    "recompute": recompute, "step_time_s": 1.0, "model": model, "grad_accum": "",
                })  # fmt: skip
    (tmp_path / "device_peaks.csv").write_text(
        "device,peak_bf16_fp16_dense_tflops,peak_fp8_dense_tflops,memory_gb,"
        "intra_node_gb_s_per_dev_one_way,inter_node_gb_s_per_dev_one_way\nA100,312,,80,300,25\n"
    )
    found = published_problems(tmp_path)
    assert list(found) == [
        "made-A100-x64", "made-A100-x64-GPT", "made-A100-x64-GPT-seq2048", "made-A100-x64-other",
    ]  # fmt: skip
    batches = [one.rows[0].facts.training.global_batch_size for one in found.values()]
    assert batches == [256, 512, 1024, 256]
    assert all(len(one.rows) >= 100 for one in found.values())


def test_a_table_of_which_nothing_runs_is_refused(table):
    failed = tuple(replace(row, status="fail", step_time_s=None) for row in table.rows)
    with pytest.raises(ConfigError, match="of its 9 configs none runs that the rules let pass"):
        answers(replace(table, rows=failed))


@pytest.mark.parametrize(
    "wrong", [("--seeds", "0"), ("--first-seed", "-1"), ("--trials", "0"), ("--jobs", "0")]
)
def test_numbers_without_sense_are_refused(tmp_path, capsys, wrong):
    assert main(["--out", str(tmp_path), "--problems", "dense_8_200", *wrong]) == 2
    assert f"{wrong[0]} must be" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_wrong_use_is_named(tmp_path, capsys):
    out = ["--out", str(tmp_path)]
    assert main([*out, "--methods", "psychic"]) == 2
    assert "--methods must be some of guided, guided_with_stop" in capsys.readouterr().err
    assert main([*out, "--problems", "nanotron_*"]) == 2
    assert "published tables need --tables" in capsys.readouterr().err
    assert main([*out, "--tables", str(tmp_path)]) == 2
    assert "device_peaks.csv" in capsys.readouterr().err
    assert main([*out, "--recorded", str(tmp_path / "none.csv")]) == 2
    assert "none.csv" in capsys.readouterr().err
    assert main([*out, "--recorded", str(tmp_path)]) == 2
    assert "must be a readable text file" in capsys.readouterr().err
    assert "dense_16384_100000" in chosen_problems(None)

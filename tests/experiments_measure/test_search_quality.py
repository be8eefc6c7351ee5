"""The experiment on a table of known order and on the smallest simulated cluster."""

import json

import optuna
import pytest

from mindtune.controller.errors import ConfigError
from mindtune.experiments.model_accuracy.mapping import Device, map_row
from mindtune.experiments.provenance import provenance
from mindtune.experiments.search_quality.__main__ import main
from mindtune.experiments.search_quality.experiment import answers, search
from mindtune.experiments.search_quality.methods import METHODS, _PerKnob
from mindtune.experiments.search_quality.problem import SimulatedTrial
from mindtune.experiments.search_quality.problems import chosen_problems
from mindtune.experiments.search_quality.published import PublishedProblem
from mindtune.experiments.search_quality.rows import SearchRow, append_row, read_rows
from mindtune.experiments.search_quality.summary import summary
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


@pytest.mark.parametrize("method", METHODS)
def test_every_method_tries_every_config_once_and_finds_the_best(table, method):
    known = answers(table)
    assert (known.accepted_failures, known.rejected_runnable) == (1, 0)
    row = search(table, "t", method, seed=1, trials=20, known=known, measured=MEASURED)
    assert len(row.outcomes) in ((8, 9) if method == "guided_with_stop" else (9,))
    assert row.outcomes.count("oom") <= 1
    assert row.regrets[-1] == 0.0
    again = search(table, "t", method, seed=1, trials=20, known=known, measured=MEASURED)
    assert (again.regrets, again.outcomes) == (row.regrets, row.outcomes)


def test_the_largest_micro_batch_is_tried_first_stage_by_stage(table):
    searcher = METHODS["largest_micro_batch"](table.report, 9, 0)
    sizes = []
    while (config := searcher.ask()) is not None:
        sizes.append((config["model_parallel"], config["micro_batch_size"]))
    base, *others = sizes
    assert others[:2] == [(base[0], size) for size in (4, 2, 1) if (base[0], size) != base]


def row(regrets, outcomes=None, **fields):
    outcomes = outcomes or ["ok"] * len(regrets)
    return SearchRow(
        problem="p", method="guided", seed=0, configs=100, feasible=20, accepted_failures=1,
        rejected_runnable=2, regrets=tuple(regrets), outcomes=tuple(outcomes), ask_s=0.01,
        wall_s=1.0, measured=MEASURED, **fields,
    )  # fmt: skip


def test_a_row_says_when_the_best_was_found_and_what_is_left_of_it():
    one = row([1.0, 0.02, 0.05, 0.03, 0.0], ["oom", "ok", "ok", "crash", "ok"])
    assert one.trials_to(0.03) == 2
    assert row([0.5, 0.04]).trials_to(0.03) is None
    assert row([0.01]).trials_to(0.03) == 1
    assert (one.regret_after(2), one.regret_after(50)) == (0.02, 0.0)
    assert (one.failures(1), one.failures(5)) == (1, 2)


def test_rows_are_kept_and_a_cut_line_is_passed_over(tmp_path):
    path = tmp_path / "rows.jsonl"
    append_row(path, row([0.5]))
    with path.open("a") as file:
        file.write('{"cut')
    assert list(read_rows(path)) == [("p", "guided", 0, None, MEASURED.revision)]
    twice = tmp_path / "twice.jsonl"
    append_row(twice, row([0.5]))
    append_row(twice, row([0.5]))
    with pytest.raises(ConfigError, match="must stand once"):
        read_rows(twice)


def test_the_summary_says_what_was_found_and_what_was_not():
    text = summary([row([0.5, 0.02]), row([0.5, 0.4]).model_copy(update={"seed": 1})])
    assert "| p | >2 (21.0%) |" in text
    assert "| p | 100 | 80.0% | 5.0% | 2.0% | 0.0% |" in text
    four = [row([0.5, 0.02]).model_copy(update={"seed": seed}) for seed in range(3)]
    assert "| p | 2 [2, >2] (" in summary([*four, row([0.5, 0.4]).model_copy(update={"seed": 3})])
    assert "| guided | 2 | 2 | >2 | 1 of 2 |" in text


def test_rows_of_other_code_are_told_apart_and_replaced_by_newer_ones(tmp_path):
    def of(revision, *, trials=40, seed=0, method="guided", regret=0.5):
        measured = MEASURED.model_copy(update={"revision": revision, "date": "2026-01-02"})
        return row([regret]).model_copy(
            update={"measured": measured, "trials": trials, "seed": seed, "method": method}
        )

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


class Stubborn(optuna.samplers.RandomSampler):
    """Proposes the first value of everything, for ever."""

    def sample_independent(self, study, trial, param_name, param_distribution):
        return param_distribution.choices[0]


def test_what_is_drawn_instead_of_known_proposals_follows_the_seed(table):
    def order(seed):
        searcher = _PerKnob(Stubborn(), table.report, seed)
        configs = []
        while (config := searcher.ask()) is not None:
            configs.append((config["model_parallel"], config["micro_batch_size"]))
            searcher.tell(SimulatedTrial("ok", 1.0))
        return configs

    assert order(0) == order(0)
    assert order(0) != order(1)
    assert sorted(order(0)) == sorted(order(1)) == sorted(TIMES)


def test_the_experiment_goes_on_where_it_was(tmp_path, capsys):
    command = ["--out", str(tmp_path), "--problems", "dense_8_200", "--trials", "3"]
    assert main([*command, "--methods", "grid", "--seeds", "1"]) == 0
    first = (tmp_path / "rows.jsonl").read_text()
    assert main([*command, "--methods", "grid,guided", "--seeds", "1"]) == 0
    lines = (tmp_path / "rows.jsonl").read_text().splitlines(keepends=True)
    assert lines[0] == first
    assert [json.loads(line)["method"] for line in lines] == ["grid", "guided"]
    more = ["--out", str(tmp_path), "--problems", "dense_8_200", "--trials", "4"]
    assert main([*more, "--methods", "grid", "--seeds", "1"]) == 0
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert [json.loads(line)["trials"] for line in lines] == [3, 3, 4]
    assert "| dense_8_200 |" in (tmp_path / "results.md").read_text()
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "results.md")


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
    assert "dense_16384_100000" in chosen_problems(None)

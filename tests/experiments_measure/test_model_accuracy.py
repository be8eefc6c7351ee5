"""The experiment on a small table whose numbers follow a known law."""

import csv
import dataclasses
import itertools

import numpy as np
import pytest

from mindtune.experiments.model_accuracy.__main__ import main
from mindtune.experiments.model_accuracy.acceptance import acceptance
from mindtune.experiments.model_accuracy.evaluation import evaluate, memory_groups, time_groups
from mindtune.experiments.model_accuracy.learning import NEUTRAL_TIME, Lesson, learn
from mindtune.experiments.model_accuracy.mapping import Device, UnmappedError, map_row
from mindtune.experiments.model_accuracy.metrics import ceiling, regret, tie_aware_spearman
from mindtune.experiments.model_accuracy.naive import naive_memory, naive_time
from mindtune.experiments.model_accuracy.report import figures, markdown
from mindtune.experiments.model_accuracy.tables import read_tables
from mindtune.search.cost_model import CostModel
from mindtune.search.forecasts import time_forecast
from mindtune.search.memory_model import MemoryRates
from mindtune.search.time_model import TimeRates, time_parts

DEVICES = {
    "A100": Device(peak=312e12, peak_fp8=None, memory=80 * 2.0**30, intra=3e11, inter=2.5e10)
}
ROW = {
    "source": "made_up", "table": "one", "mark": "V", "framework": "Megatron-LM", "date": "2025-01",
    "model": "GPT", "arch": "dense", "params_b": "", "active_params_b": "", "layers": "24",
    "hidden": "2048", "heads": "16", "kv_heads": "16", "ffn": "8192", "gated_mlp": "0",
    "vocab": "50257", "seq": "2048", "experts": "", "topk": "", "moe_ffn": "", "device": "A100",
    "n_devices": "8", "devices_per_node": "8", "peak_tflops": "312", "mem_gb": "80",
    "interconnect": "", "precision": "bf16", "tp": "1", "pp": "1", "dp": "8", "vpp": "1", "cp": "1",
    "ep": "1", "mbs": "1", "gbs": "64", "grad_accum": "8", "sp": "0", "recompute": "none",
    "zero": "0", "step_time_s": "1.0", "tokens_per_s_dev": "", "tflops_dev": "",
    "flops_convention": "", "mfu_pct": "", "hfu_pct": "", "peak_mem_gib": "20",
    "mem_kind": "torch peak", "status": "ok", "calc_tflops_full": "", "calc_tflops_causal": "",
    "flags": "", "notes": "",
}  # fmt: skip
PEAKS = (
    "device,peak_bf16_fp16_dense_tflops,peak_fp8_dense_tflops,memory_gb,hbm_tb_s,intra_node_link,"
    "intra_node_gb_s_per_dev_one_way,inter_node_gb_s_per_dev_one_way,mark,notes\n"
    "A100,312,,80,2,NVLink,300,12.5/4,V,\n"
    "910B,313,,64,1.6,HCCS,~28 per peer (196 aggregate),25 (200Gb/s RoCE),M,\n"
)


def mapped(**cells):
    return map_row({**ROW, **cells}, "file.csv", 1, DEVICES)


def test_a_row_becomes_the_config_and_the_facts_that_it_states():
    row = mapped(tp="2", dp="4", sp="1", zero="dist_opt", recompute="full:uniform:1")
    assert row.config["model_parallel"] == 2
    assert row.config["use_seq_parallel"] is True
    assert row.config["optimizer_sharding"] == "optimizer"
    assert row.config["recompute"] == "full"
    # Padded to a multiple of 128 x tensor parallel, as Megatron-LM does.
    assert row.model.vocab_size == 50432
    assert row.facts.training.global_batch_size == 4 * 1 * 8
    assert row.memory_bytes == 20 * 2.0**30
    assert row.facts.cluster.device_memory == 80 * 2.0**30


def test_tokens_per_second_are_taken_before_a_derived_step_time():
    row = mapped(tokens_per_s_dev="8192")
    assert row.step_time_s == pytest.approx(64 * 2048 / (8192 * 8))


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"layers": ""}, "layers is not stated"),
        ({"recompute": "recipe (not stated)"}, "recompute is not stated"),
        ({"dp": "4"}, "the degrees' product is not the number of devices"),
        ({"mbs": "", "grad_accum": ""}, "mbs is not stated"),
        ({"gbs": "", "grad_accum": ""}, "neither gbs nor grad_accum"),
        ({"status": "forward_only"}, "only the forward pass"),
        ({"flags": "gbs_label_inconsistent"}, "gbs is not dp x mbs x grad_accum"),
        ({"framework": "Megatron-LM fork, schedule zb2p"}, "a pipeline schedule"),
        ({"precision": ""}, "precision is not stated"),
        ({"heads": "17"}, "hidden_size must be a multiple of num_heads"),
    ],
)
def test_what_a_row_does_not_say_is_no_guess(cells, reason):
    with pytest.raises(UnmappedError, match=reason):
        mapped(**cells)


def test_stored_attention_scores_follow_what_is_stated_or_the_date():
    assert mapped().model.flash_attention
    assert not mapped(notes="a; attention-backend=unfused").model.flash_attention
    assert not mapped(date="2023-11").model.flash_attention
    assert mapped(date="2023-11", framework="torchtitan").model.flash_attention
    assert not mapped(notes="FA=False", framework="MindFormers").model.flash_attention


def test_failed_runs_have_neither_time_nor_memory():
    row = mapped(status="oom")
    assert (row.step_time_s, row.memory_bytes, row.status) == (None, None, "oom")


def test_nanotron_splits_by_flops_and_tells_the_first_stage():
    row = mapped(framework="nanotron", pp="2", dp="4", vocab="131072", layers="16")
    # The output layer is worth 5 layers, so 10.5 to each stage, and the 11th is the first's.
    assert row.config["offset"] == "3/-3"
    assert row.stage == 0
    assert row.facts.program.gradient_bytes == 6


def test_ties_are_not_judged_and_true_order_is():
    assert tie_aware_spearman([1, 2, 3, 4], [1, 2, 3, 4]) == 1
    assert tie_aware_spearman([2, 1, 4, 3], [1.0, 1.05, 2.0, 2.1]) == 1
    assert tie_aware_spearman([2, 1, 4, 3], [1.0, 1.2, 2.0, 2.5]) == pytest.approx(0.6)
    assert tie_aware_spearman([4, 3, 2, 1], [1, 2, 3, 4]) == -1
    assert tie_aware_spearman([1, 2], [1, 2]) is None


def test_regret_is_of_the_best_of_three():
    assert regret([1, 2, 3, 4], [4.0, 3.0, 2.2, 2.0]) == pytest.approx(0.1)
    assert regret([1, 2, 3, 4], [4.0, 3.0, 2.0, 2.2]) == 0


def test_the_ceiling_falls_with_noise():
    times = [1.0, 1.3, 1.7, 2.2, 3.0]
    assert ceiling(times, 1e-6) == pytest.approx((1.0, 0.0))
    order, loss = ceiling(times, 0.5)
    assert 0.2 < order < 0.9
    assert loss > 0


def synthetic(table, scale, activations):
    """Rows whose time and memory follow the formulas with other constants."""
    rows = []
    layouts = [(1, 1, 8), (2, 1, 4), (1, 2, 4), (2, 2, 2), (4, 1, 2)]
    for (tp, pp, dp), mbs, zero in itertools.product(layouts, (1, 2, 4), ("0", "dist_opt")):
        if 64 % (dp * mbs) or (zero != "0" and dp == 1):
            continue
        cells = {**ROW, "table": table, "tp": str(tp), "pp": str(pp), "dp": str(dp), "mbs": str(mbs),
                 "grad_accum": str(64 // (dp * mbs)), "zero": zero}  # fmt: skip
        row = map_row(cells, "file.csv", 1, DEVICES)
        cost = CostModel(
            row.facts,
            time_rates=dataclasses.replace(TimeRates(), compute=scale),
            memory_rates=dataclasses.replace(MemoryRates(), activations=activations),
        )
        cells["step_time_s"] = f"{cost.step_time_s(row.config):.6f}"
        gib = cost.memory_bytes(row.config) / 2**30
        cells["peak_mem_gib"] = f"{gib:.4f}"
        if gib > 30:
            cells |= {"status": "oom", "mem_gb": "30", "peak_mem_gib": "", "step_time_s": ""}
        rows.append({**cells, "mem_gb": "30"})
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tables")
    (path / "device_peaks.csv").write_text(PEAKS, encoding="utf-8")
    for name, scale, activations in (("one", 1.5, 1.0), ("two", 2.0, 1.2), ("three", 1.8, 0.9)):
        with (path / f"{name}.csv").open("w", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(stream, list(ROW))
            writer.writeheader()
            writer.writerows(synthetic(name, scale, activations))
            writer.writerow({**ROW, "layers": ""})
    (path / "notes.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    return path


def test_what_follows_the_formulas_is_predicted_from_three_rows(folder):
    tables = read_tables(folder)
    assert sum(tables.unmapped.values()) == 3
    assert tables.skipped == ("notes.csv",)
    for of_time, groups in ((True, time_groups(tables.rows)), (False, memory_groups(tables.rows))):
        assert len(groups) == 3
        for result in evaluate(groups, of_time=of_time):
            measured = result.group.measured
            errors = [
                np.abs(draw.predicted / measured - 1)[draw.held_out] for draw in result.draws
            ]
            assert np.median(np.concatenate(errors)) < 0.05
            assert np.max(np.abs(result.by_all / measured - 1)) < 0.05


def test_out_of_memory_is_seen_before_it_happens(folder):
    tables = read_tables(folder)
    found = acceptance(evaluate(memory_groups(tables.rows), of_time=False), tables.rows)
    assert sum(table.num_failed for table in found) >= 3
    for table in found:
        assert table.accepted < 0.1
        assert table.rejected < 0.1


def test_the_figures_are_the_same_twice_and_name_what_was_left_out(folder):
    text = markdown(figures(read_tables(folder)))
    assert text == markdown(figures(read_tables(folder)))
    assert "one.csv: 1, layers is not stated" in text
    assert "notes.csv: no table of runs" in text
    assert "0 step times and 0 memories are not used" in text
    assert "| worst |" in text


def test_the_command_writes_the_figures_and_refuses_a_folder_without_tables(
    folder, tmp_path, capsys
):
    out = tmp_path / "figures.md"
    assert main([str(folder), "--out", str(out)]) == 0
    assert capsys.readouterr().out == out.read_text(encoding="utf-8")
    assert main([str(tmp_path)]) == 2
    assert "must hold device_peaks.csv" in capsys.readouterr().err


def test_other_tables_may_lack_columns_and_cells(folder, tmp_path):
    """What is missing is not stated: of a row that needs it, that is the reason."""
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    kept = [name for name in ROW if name not in ("notes", "flags", "vpp", "date", "mem_kind")]
    with (tmp_path / "more.csv").open("w", encoding="utf-8-sig", newline="") as stream:
        writer = csv.DictWriter(stream, kept, extrasaction="ignore")
        writer.writeheader()
        writer.writerow(ROW)
        stream.write(",".join(ROW[name] for name in kept[:20]) + "\n")
    tables = read_tables(tmp_path)
    assert [row.file for row in tables.rows].count("more.csv") == 1
    assert sum(count for (file, _), count in tables.unmapped.items() if file == "more.csv") == 1


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "device_peaks.csv",
            PEAKS.replace("312", "fast").encode(),
            "must state peak and memory of 'A100'",
        ),
        ("device_peaks.csv", b"device\nA100\n", "must state peak and memory of 'A100'"),
        ("one.csv", b"table,framework\n\xff\xfe,\n", "one.csv must be a CSV file in UTF-8"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(folder, tmp_path, capsys, name, content, said):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / name).write_bytes(content)
    assert main([str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["peak_mem_gib", "step_time_s"])
def test_tables_of_one_kind_have_its_figures_alone(folder, tmp_path, missing):
    (tmp_path / "device_peaks.csv").write_text(PEAKS, encoding="utf-8")
    with (folder / "one.csv").open(encoding="utf-8", newline="") as stream:
        rows = [{**row, missing: ""} for row in csv.DictReader(stream)]
    with (tmp_path / "one.csv").open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, list(ROW))
        writer.writeheader()
        writer.writerows(rows)
    text = markdown(figures(read_tables(tmp_path)))
    assert text.count("No four rows of a group were measured.") == 1
    assert text.count("| and 3 rows |") == 1


def test_units_of_device_peaks(folder):
    tables = read_tables(folder)
    assert tables.rows[0].facts.cluster.inter_node_bandwidth == 12.5e9 / 4
    from mindtune.experiments.model_accuracy.tables import _devices

    assert _devices(folder / "device_peaks.csv")["910B"].intra == 196e9


def test_a_rate_of_which_no_table_tells_stays_neutral():
    row = mapped()
    parts = [time_parts({**row.config, "micro_batch_size": n}, row.facts) for n in (1, 2, 4)]
    rates = dataclasses.replace(TimeRates(), compute=3.0)
    lesson = Lesson(time_forecast(parts), np.log([part.total(rates) for part in parts]))
    prior = learn([lesson] * 8, NEUTRAL_TIME, 0.1)
    names = [field.name for field in dataclasses.fields(TimeRates)]
    moved = dict(zip(names, np.subtract(prior.means, NEUTRAL_TIME.means), strict=True))
    assert moved["compute"] > 0.1
    assert abs(moved["expert"]) < 0.05
    assert abs(moved["far_exchange"]) < 0.05


def test_the_naive_model_by_hand():
    row = mapped(zero="dist_opt")
    params = row.model.num_parameters
    assert naive_memory(row) == pytest.approx(params * (4 + 12 / 8) + 34 * 2048 * 2048 * 24)
    flops = row.model.step_flops(64 * 2048) / (0.5 * 312e12 * 8)
    assert naive_time(row) == pytest.approx(flops + 8 * params / 3e11)

"""Statistics and report of the overhead experiment; no training."""

import pytest

from mindtune.controller.errors import ConfigError
from mindtune.controller.records import SignalWriter, read_signals
from mindtune.experiments.overhead.__main__ import _copy_costs, main
from mindtune.experiments.overhead.costs import (
    CopyTimes,
    closed_window_times,
    decision_times,
    record_times,
    recorded_trace,
)
from mindtune.experiments.overhead.report import (
    MEANINGS,
    OverheadReport,
    _copies,
    markdown,
    quartiles,
    ratio,
)
from mindtune.experiments.overhead.signal_report import SIGNALS, signal_costs, signal_table
from mindtune.experiments.overhead.split_memory import pool_peak_mb
from mindtune.experiments.provenance import Provenance
from mindtune.policies.signals import Observation

ONE = quartiles([1.0])
PLACE = Provenance(
    processor="Test CPU",
    cores=2,
    python="3.11.0",
    mindspore="2.10.0",
    revision="abc",
    date="2026-01-02",
)


def test_quartiles_in_another_unit():
    found = quartiles([1e-6, 2e-6, 3e-6, 4e-6, 5e-6], unit=1e-6)
    assert (found.low, found.median, found.high, found.count) == pytest.approx((2, 3, 4, 5))


def test_the_ratio_is_taken_within_rounds():
    # The machine slows down threefold from round to round; within a round one way takes 10 % more.
    base = [[1.0, 1.0, 9.0], [3.0, 3.0, 3.0], [9.0, 9.0, 9.0]]
    times = [[1.1, 1.1, 1.1], [3.3, 0.1, 3.3], [9.9, 9.9, 9.9]]
    found = ratio(times, base)
    assert found.median == pytest.approx(1.1)
    assert (found.low, found.high, *found.interval) == pytest.approx((1.1,) * 4)


def test_the_interval_holds_the_median_and_widens_with_the_rounds_scatter():
    times = [[value] for value in (1.0, 1.1, 1.2, 1.3, 1.4)]
    found = ratio(times, [[1.0]] * 5)
    begin, end = found.interval
    assert found.median == pytest.approx(1.2)
    assert begin < found.median < end
    assert ratio(times, [[1.0]] * 5) == found


@pytest.mark.parametrize(("act", "verdict"), [(1.02, "1.020, met"), (1.021, "1.021, missed")])
def test_the_report_round_trips_and_says_whether_the_aim_is_met(act, verdict):
    over = {name: ratio([[act]], [[1.0]]) for name in MEANINGS}
    report = OverheadReport(
        rounds=1, block=1, tokens_per_step=512, parameters=10, load_1m=(0.5, None), actions=0,
        step_time_s=dict.fromkeys(MEANINGS, quartiles([0.1])),
        over_bare={name: over[name] for name in MEANINGS if name != "bare"},
        over_checked={name: over[name] for name in MEANINGS if name != "checked"},
        decision_us=ONE, signal_row_us=ONE, decision_record_us=ONE, device_read_us=ONE, measured=PLACE,
    )  # fmt: skip
    assert OverheadReport.model_validate_json(report.to_json()) == report
    text = markdown(report)
    assert verdict in text
    assert "| `bare`: `nn.TrainOneStepCell` | 100.0 [100.0, 100.0] | 1 |" in text
    assert "load of the machine before and after: 0.5 and -" in text
    assert "copied to" not in text


def test_the_peak_of_the_memory_pool_is_read_from_its_last_line():
    line = "total allocated mem:1024M, peak used mem:{}M, actual peak used mem:{}M, in used mem:0M"
    assert pool_peak_mb("\n".join([line.format(3, 4), "others", line.format(47, 48)])) == 48
    with pytest.raises(ConfigError, match="told no peak"):
        pool_peak_mb("in used mem:0M")


def test_the_costs_of_earlier_states_are_told_with_their_size():
    times = CopyTimes(num_bytes=3 * 2**20, memory=([1e-3], [2e-3]), disk=([3e-3], [4e-3]))
    costs = _copy_costs(times)
    lines = _copies(costs)
    assert lines[1] == "| a state of 3.0 MB | ms: median [quartiles] |"
    assert lines[3] == "| copied to the host's memory | 1.0 [1.0, 1.0] |"
    assert lines[6] == "| returned to from disk | 4.0 [4.0, 4.0] |"


def test_the_cost_of_a_signal_is_its_difference_within_rounds():
    # The machine slows down threefold from round to round; the norm adds 2 ms in each.
    bare = [[0.1, 0.1], [0.3, 0.3], [0.3, 0.3]]
    times = dict.fromkeys(SIGNALS, bare) | {"bare": bare}
    times["norm"] = [[time_s + 0.002 for time_s in turn] for turn in bare]
    added = {name: [1e-4] * 6 for name in SIGNALS}
    costs = signal_costs(times, added)
    assert costs["norm"].difference_ms.median == pytest.approx(2.0)
    assert costs["norm"].interval_ms == pytest.approx((2.0, 2.0))
    assert costs["norm"].share == pytest.approx(0.002 / 0.3)
    assert costs["loss"].difference_ms.median == 0.0
    assert costs["loss"].host_ms.median == pytest.approx(0.1)
    lines = signal_table(costs)
    assert (
        "| norm: global gradient norm as well | 2.00 [2.00, 2.00] | 0.67% | 0.100 [0.100, 0.100] | 1.8 |"
        in lines
    )
    assert lines[-1].startswith("A look inside is sampled: with `every: 50` it costs 0.000 ms")


def test_a_closed_profiler_window_is_timed_and_opens_nothing(tmp_path):
    seconds = closed_window_times(tmp_path)
    assert len(seconds) == 2000
    assert list(tmp_path.iterdir()) == []


def table(path, steps):
    writer = SignalWriter(path)
    for step in range(1, steps + 1):
        writer.write(Observation(step=step, phase="compile" if step == 1 else "train", loss=3.0 - step / 100,
                                 grad_norm=1.0, micro_batch_size=4, global_batch_size=4))  # fmt: skip
    writer.close()


def test_a_recorded_table_becomes_one_long_run_of_training_steps(tmp_path):
    table(tmp_path / "signals.csv", 4)
    trace = recorded_trace(tmp_path / "signals.csv", length=7)
    assert [observation.step for observation in trace] == [1, 2, 3, 4, 5, 6, 7]
    assert [round(observation.loss, 2) for observation in trace[:4]] == [2.98, 2.97, 2.96, 2.98]
    assert {observation.phase for observation in trace} == {"train"}


def test_decisions_and_records_are_timed_for_real(tmp_path):
    table(tmp_path / "signals.csv", 200)
    trace = recorded_trace(tmp_path / "signals.csv", length=300)
    seconds = decision_times(trace)
    assert len(seconds) == 300
    assert all(value > 0 for value in seconds)
    rows, lines = record_times(trace, tmp_path / "records")
    assert len(rows) == len(read_signals(tmp_path / "records" / "signals.csv")) == 300
    assert len(lines) == len((tmp_path / "records" / "decisions.jsonl").read_text().splitlines())


def test_wrong_use_is_told_and_writes_nothing(tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["--out", str(out), "--rounds", "0"]) == 2
    assert "--rounds must be 1 or more, but got 0" in capsys.readouterr().err
    assert not out.exists()

"""The measured peak, with MindSpore in a process of its own."""

import sys

import pytest

from mindtune.controller.metrics import calibrate
from mindtune.controller.metrics.calibrate import CalibrationError, measure_host
from mindtune.controller.metrics.links import measure_links


@pytest.mark.mindspore
def test_the_host_is_measured_by_mindspore(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    measured = measure_host(repeats=3)
    assert [peak.precision for peak in measured.peaks] == ["float32", "float16"]
    for peak in measured.peaks:
        # Slower than one scalar operation a clock or faster than any CPU: not a matmul's peak.
        assert 1e9 < peak.flops < 1e14
        assert peak.source.startswith("measured: MindSpore ")
        assert "median of 3" in peak.source
        assert peak.certainty == "measured"
        assert 0.0 <= peak.spread < 10.0
    assert measured.cores >= 1
    assert 0.0 < measured.cores_used < measured.cores + 1
    assert measured.graph_compile_s > 0.0
    assert 1e8 < measured.copy_bytes_per_s < 1e13
    assert list(tmp_path.iterdir()) == []  # what MindSpore writes stays out of the caller's folder


def test_without_mindspore_numpy_measures_float32_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "mindspore", None)
    monkeypatch.setitem(calibrate._SIZES, "float32", (64, 128))
    monkeypatch.setattr(calibrate, "_COPY_BYTES", 2**20)
    values = calibrate._measure(["float32", "float16"], 3)
    assert [peak["precision"] for peak in values["peaks"]] == ["float32"]
    assert values["peaks"][0]["source"].startswith("measured: NumPy matmul ")
    assert values["graph_compile_s"] is None


def test_a_disturbed_round_is_repeated_and_the_best_counts(monkeypatch):
    rounds = iter([(1e9, 0.4), (3e9, 0.5), (2e9, 0.3)])

    def one_round(calls, repeats):
        flops, share = next(rounds)
        return calibrate._Round(size=64, flops=flops, spread=0.1, cores_used=share)

    monkeypatch.setitem(sys.modules, "mindspore", None)
    monkeypatch.setitem(calibrate._SIZES, "float32", (64,))
    monkeypatch.setattr(calibrate, "_COPY_BYTES", 2**20)
    monkeypatch.setattr(calibrate, "_time_round", one_round)
    values = calibrate._measure(["float32"], 3)
    assert values["peaks"][0]["flops"] == 3e9
    assert values["cores_used"] == 0.5


def test_a_process_that_fails_or_hangs_is_told(monkeypatch):
    with pytest.raises(CalibrationError, match="ended with code 2"):
        measure_host(["float64"])
    with pytest.raises(CalibrationError, match="took over 0.01 s"):
        measure_host(timeout_s=0.01)


def test_words_in_place_of_figures_are_told(monkeypatch, tmp_path):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho a library says goodbye\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(CalibrationError, match="ended with 'a library says goodbye'"):
        measure_host()


@pytest.mark.mindspore
@pytest.mark.msrun
def test_two_ranks_meet_and_reduce():
    links = measure_links(2)
    assert links.num_ranks == 2
    # Slower than a modem or faster than memory: not an AllReduce of this machine.
    assert 1e5 < links.bytes_per_s < 1e12
    assert 0.0 < links.latency_s < 5.0
    assert links.spread >= 0.0


def test_ranks_that_do_not_meet_are_told():
    with pytest.raises(CalibrationError, match="2 ranks under msrun gave no result"):
        measure_links(2, timeout_s=0.2)

"""What overflow and loss scale say together, and non-finite values as a class of their own."""

from __future__ import annotations

import math

import pytest

from mindtune.policies.detectors import DetectorState, update
from mindtune.policies.findings import Finding, Severity
from mindtune.policies.signals import Observation


def run(rows: list[dict]) -> list[Finding]:
    state, found = DetectorState(), []
    for step, row in enumerate(rows, start=1):
        findings, state = update(Observation(step=step, **row), state)
        found.extend(findings)
    return found


def kinds(found: list[Finding]) -> list[tuple[int, str]]:
    return [(finding.step, finding.kind.value) for finding in found]


def hit(scale: float | None, loss: float = 2.0, skipped: float | None = 1.0) -> dict:
    return {
        "loss": loss, "grad_norm": math.inf, "overflow": 1.0, "loss_scale": scale,
        "update_skipped": skipped,
    }  # fmt: skip


def clean(scale: float | None, loss: float = 2.0) -> dict:
    return {
        "loss": loss, "grad_norm": 1.0, "overflow": 0.0, "loss_scale": scale, "update_skipped": 0.0,
    }  # fmt: skip


def searching(start: float, end: float) -> list[dict]:
    rows, scale = [], start
    while scale > end:
        rows.append(hit(scale, loss=5.5 + 0.001 * len(rows)))
        scale /= 2
    return [*rows, *[clean(scale, 5.5 - 0.01 * i) for i in range(40)]]


@pytest.mark.parametrize(
    ("start", "end"), [(2.0**24, 2.0**18), (2.0**32, 2.0**16), (2.0**32, 2.0**9)]
)
def test_a_search_at_the_start_is_no_storm(start, end) -> None:
    found = run(searching(start, end))
    assert {finding.kind.value for finding in found} == {"overflow"}
    assert len(found) == round(math.log2(start / end))


def test_a_search_with_a_bad_loss_is_a_storm() -> None:
    found = run([hit(2.0**16, loss=math.nan)])
    assert [f.kind.value for f in found] == ["non_finite_loss", "overflow", "overflow_storm"]


def test_five_in_a_row_in_mid_run_are_a_storm() -> None:
    calm = [clean(65536.0, 2 + 0.001 * i) for i in range(40)]
    storm = [hit(65536.0 / 2**i, 2.1) for i in range(6)]
    found = run([*calm, *storm])
    assert [s for s, kind in kinds(found) if kind == "overflow_storm"] == [45, 46]


def test_a_rate_is_a_storm_too() -> None:
    calm = [clean(65536.0, 2 + 0.001 * i) for i in range(40)]
    rows = [row for i in range(16) for row in (hit(1024.0, 2.1), clean(1024.0, 2 + 0.01 * i))]
    found = run([*calm, *rows])
    assert min(s for s, kind in kinds(found) if kind == "overflow_storm") == 40 + 2 * 12 - 1


def test_a_collapsing_scale_of_rates_is_a_storm() -> None:
    rates = [(1.0, 8388608.0), (0.11, 100024.0), (0.05, 1066.24), (0.05, 51.36)]
    rows = [{"loss": 4 - i, "overflow": r, "loss_scale": s} for i, (r, s) in enumerate(rates)]
    assert [s for s, kind in kinds(run(rows)) if kind == "overflow_storm"] == [3, 4]


def test_the_record_with_which_a_search_ends_is_no_collapse() -> None:
    rates = [
        (1.0, 2.0**32),
        (1.0, 2.0**23),
        (1.0, 2.0**13),
        (0.2, 2.0**11),
        (0.1, 2.0**10),
        (0.0, 2.0**10),
    ]
    rows = [
        {"loss": 4 - 0.1 * i, "overflow": r, "loss_scale": s} for i, (r, s) in enumerate(rates)
    ]
    assert {kind for _, kind in kinds(run(rows))} == {"overflow"}


def test_overflow_without_effect() -> None:
    losses = [11.67, 8.85, 8712.59, 15806.38]
    found = run([{"loss": loss, "overflow": 1.0, "loss_scale": 1024.0} for loss in losses])
    hits = [f for f in found if f.kind.value == "overflow_without_effect"]
    assert [f.step for f in hits] == [3, 4]
    assert hits[0].severity is Severity.CRITICAL
    skipped = run([hit(1024.0, loss) for loss in losses])
    assert "overflow_without_effect" not in {f.kind.value for f in skipped}


def test_the_floor_and_the_runaway() -> None:
    floor = [f for f in run([hit(1.0, 2 + 0.1 * i) for i in range(4)]) if "floor" in f.kind.value]
    assert [f.severity.value for f in floor] == ["warning", "warning", "critical", "critical"]
    grown = run([clean(2.0 ** (20 + i), 2 + 0.1 * i) for i in range(9)])
    assert kinds(grown) == [(6, "loss_scale_runaway")]
    assert run([clean(2.0**32, 2 + 0.1 * i) for i in range(7)]) == []


def test_a_raw_nan_is_counted_before_any_filter() -> None:
    rows = [
        {"loss": v, "loss_scale": 1.0, "update_skipped": 0.0} for v in (2.0, 1.9, math.nan, 1.8)
    ]
    state = DetectorState()
    for step, row in enumerate(rows, start=1):
        _, state = update(Observation(step=step, **row), state)
    assert state.non_finite.total_losses == 1
    assert state.non_finite.losses == 0
    assert kinds(run(rows)) == [(3, "non_finite_loss")]


@pytest.mark.parametrize(
    ("skipped", "severities"),
    [(1.0, ["warning", "critical"]), (0.0, ["critical"] * 2), (None, ["warning", "critical"])],
)
def test_severity_of_a_non_finite_loss(skipped, severities) -> None:
    found = run([{"loss": math.nan, "update_skipped": skipped}] * 2)
    assert [finding.severity.value for finding in found] == severities


def test_a_non_finite_norm_belongs_to_the_overflow_of_a_scaled_loss() -> None:
    assert kinds(run([hit(1024.0)])) == [(1, "overflow")]
    assert kinds(run([hit(None)])) == [(1, "non_finite_grad"), (1, "overflow")]
    assert kinds(run([{"loss": 1.0, "grad_norm": math.nan}])) == [(1, "non_finite_grad")]

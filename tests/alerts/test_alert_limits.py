"""What goes out now and what only later, by a given clock."""

import pytest

from mindtune.controller.alerts.alert import Alert
from mindtune.controller.alerts.limits import DIGEST_TITLE, AlertLimits

MINUTE = 60.0
HOUR = 3600.0


def alert(title="[mindtune] finding: overflow", step=1, *, urgent=False):
    return Alert(
        kind="findings", title=title, text="text", level="warning", step=step, urgent=urgent
    )


@pytest.fixture
def limits():
    return AlertLimits(min_interval_s=10 * MINUTE, max_per_hour=3)


def test_a_title_speaks_once_in_its_interval_and_others_meanwhile(limits):
    assert limits.admit(alert(), 0.0) == alert()
    assert limits.admit(alert(step=2), 1.0) is None
    other = limits.admit(alert("[mindtune] finding: plateau", 3), 2.0)
    assert other.text == "text\n\nHeld back before this: 1 x finding: overflow (step 2)."
    assert limits.admit(alert(step=4), 10 * MINUTE + 1.9) is None, "the digest spoke for it at 2.0"
    again = limits.admit(alert(step=5), 10 * MINUTE + 2.0)
    assert again.text.endswith("1 x finding: overflow (step 4).")


def test_the_digest_goes_out_by_itself_when_its_title_may_speak(limits):
    assert limits.due_s(0.0) is None
    limits.admit(alert(), 0.0)
    for step in range(2, 50):
        assert limits.admit(alert(step=step), float(step)) is None
    assert limits.due_s(50.0) == 10 * MINUTE
    assert limits.digest(599.9, run="run a") is None
    digest = limits.digest(600.0, run="run a")
    assert (digest.title, digest.step) == (DIGEST_TITLE, 49)
    assert digest.text == "run a\nHeld back before this: 48 x finding: overflow (steps 2 to 49)."
    assert limits.due_s(600.0) is None
    assert limits.digest(9e9, run="run a") is None


def test_the_hourly_limit_holds_all_titles_but_the_urgent(limits):
    for index in range(3):
        assert limits.admit(alert(f"title {index}"), float(index)) is not None
    assert limits.admit(alert("title 3", 7), 3.0) is None
    assert limits.due_s(3.0) == HOUR, "when the oldest of the three is an hour old"
    stop = limits.admit(alert("[mindtune] stop", 8, urgent=True), 4.0)
    assert stop.text.endswith("1 x title 3 (step 7).")
    assert limits.admit(alert("title 4", 9), HOUR) is None, "the stop counts as well"
    assert limits.admit(alert("title 4", 9), HOUR + 1.0) is not None


def test_a_repeated_urgent_title_waits_for_its_interval(limits):
    hang = alert("[mindtune] hang", urgent=True)
    assert limits.admit(hang, 0.0) is not None
    assert limits.admit(hang, 599.0) is None
    assert limits.admit(hang, 600.0) is not None


def test_the_last_digest_waits_for_nothing(limits):
    for index in range(4):
        limits.admit(alert(f"title {index}", index), 0.0)
    assert limits.digest(1.0, run="run a") is None
    assert limits.digest(1.0, run="run a", last=True).text.endswith("1 x title 3 (step 3).")


def test_what_is_remembered_does_not_grow_with_the_run(limits):
    for step in range(1, 50_000):
        limits.admit(alert(step=step), 60.0 * step)
    assert len(limits._sent_s) <= 3
    assert len(limits._spoke_s) == 1
    assert len(limits._held) <= 1

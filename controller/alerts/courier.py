"""The training's side of the process that sends."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

from mindtune.controller.alerts.alert import Alert
from mindtune.controller.alerts.send import END_DEADLINE_S
from mindtune.controller.errors import ConfigError

__all__ = ["Courier", "send_once"]

_LOGGER = logging.getLogger(__name__)

_START_S: Final = 60.0
"""Longest wait for the process to have read the addresses: apprise may lie on a slow disk."""
_MARGIN_S: Final = 1.0
"""What that process gets beyond its own deadline to end by itself."""


class Courier:
    """Hands alerts to a process of its own, and logs what does not arrive.

    Args:
        addresses: Each env:NAME.
        will: What that process sends should this one end without `close`; None: nothing.

    Raises:
        ConfigError: A variable is not set, apprise can make nothing of what it holds, or no
            process can be started.
    """

    def __init__(self, addresses: Sequence[str], *, will: Alert | None = None) -> None:
        for address in addresses:
            name = address.removeprefix("env:")
            if not os.environ.get(name):
                raise ConfigError(
                    f"alerts.urls names the environment variable {name}, which must hold an "
                    f"apprise URL, but it is not set; export {name}=slack://..., or take it out."
                )
        self._failing: set[str] = set()
        self._checks: list[Mapping[str, Any]] = []
        self._checked = threading.Event()
        self._process = _start()
        self._write(
            {
                "addresses": list(addresses),
                "will": None if will is None else _plain(will),
                "parent": os.getpid(),
            }
        )
        reader = threading.Thread(
            target=self._read, args=(len(addresses),), name="mindtune-alerts-answers", daemon=True
        )
        reader.start()
        self._checked.wait(_START_S)
        problems = [f"{at['address']}: {at['problem']}" for at in self._checks if not at["ok"]]
        missing = addresses[len(self._checks) :]
        if missing and not problems:
            problems = [f"{missing[0]}: the process that sends said nothing"]
        if problems:
            self.close()
            raise ConfigError(
                f"alerts.urls must name URLs that alerts can be sent to, but of {problems[0]}."
            )

    def send(self, alert: Alert) -> None:
        """Hand an alert over; waits for no server."""
        self._write(_plain(alert))

    def close(self) -> None:
        """Wait until all is sent, little more than `END_DEADLINE_S` seconds at most."""
        self._write(None)
        try:
            self._process.wait(END_DEADLINE_S + _MARGIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _write(self, message: object) -> None:
        stream = self._process.stdin
        assert stream is not None  # noqa: S101 - a pipe was asked for
        # A process that is gone is told about by the thread that reads.
        with contextlib.suppress(BrokenPipeError):
            stream.write(json.dumps(message) + "\n")
            stream.flush()

    def _read(self, num_checks: int) -> None:
        """Take in the answers, in a thread of its own."""
        stream = self._process.stdout
        assert stream is not None  # noqa: S101 - a pipe was asked for
        for line in stream:
            answer = json.loads(line)
            if len(self._checks) < num_checks:
                self._checks.append(answer)
                if len(self._checks) == num_checks:
                    self._checked.set()
            else:
                self._tell(answer)
        self._checked.set()
        code = self._process.wait()
        if code:
            _LOGGER.warning("the process that sends alerts has ended with code %d", code)

    def _tell(self, answer: Mapping[str, Any]) -> None:
        """Log the first failure of an address, and that it works again."""
        address = answer["address"]
        if answer["ok"]:
            if address in self._failing:
                self._failing.discard(address)
                _LOGGER.info("alerts reach %s again", answer["target"])
        elif address not in self._failing:
            self._failing.add(address)
            _LOGGER.warning(
                "an alert did not reach %s: %s; training goes on, and further failures there are "
                "not logged",
                answer["target"],
                answer["problem"],
            )


def send_once(address: str, alert: Alert) -> tuple[str, str]:
    """Send one alert and wait for the answer.

    Args:
        address: env:NAME.
        alert: What to send.

    Returns:
        Who was asked, and what went wrong; empty if nothing did.
    """
    process = _start()
    opening = {"addresses": [address], "will": None, "parent": os.getpid()}
    messages = "".join(json.dumps(line) + "\n" for line in (opening, _plain(alert), None))
    limit_s = _START_S + END_DEADLINE_S + _MARGIN_S
    try:
        said, _ = process.communicate(messages, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return address, f"the process that sends did not end within {limit_s:g} s"
    finally:
        # It has ended by now, unless it hangs or the wait for it was broken off.
        process.kill()
        process.wait()
    # What the address holds comes first, what became of the alert second.
    answers = [json.loads(line) for line in said.splitlines()]
    for answer in answers:
        if not answer["ok"]:
            return answer["target"], answer["problem"]
    if len(answers) < _ANSWERS_TO_ONE:
        code = process.returncode
        return address, f"the process that sends ended with code {code} and no word on the alert"
    return answers[-1]["target"], ""


_ANSWERS_TO_ONE: Final = 2


def _start() -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "mindtune.controller.alerts.send"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            # A Ctrl-C ends the training, which then says so.
            start_new_session=True,
            # The folder of the training must not put its modules in front of apprise's.
            env={**os.environ, "PYTHONSAFEPATH": "1"},
        )
    except OSError as error:
        raise ConfigError(
            f"alerts need a process that sends them, but none can be started: {error.strerror}; "
            "take `alerts` out, or raise the limit of processes."
        ) from None


def _plain(alert: Alert) -> dict[str, str]:
    return {"title": alert.title, "text": alert.short_text(), "level": alert.level}

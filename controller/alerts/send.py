"""The process that sends the alerts of one run: `python -m` this module.

Theory of operation. Only here is apprise imported and a URL used. The training has its variable in
the environment, which this process inherits, but asks no more than whether it is set: no log line
of apprise or urllib3, no traceback and no dump of stacks of the training holds the secret. And
this process outlives a training that is killed. It reads one JSON object per
line: first the addresses and the last will, then alerts, at last a goodbye; it writes one line
when it is ready and one per alert and address. Each of them is sent by a thread of its own, since
no time-out of a library holds for all that can hang (a name look-up, a server that sends a byte a
minute); it starts when the one before to the same address is done, a second later at the latest.

Answers name the service and, where the URL has one, its public host. What apprise says about a
failure may hold parts of the URL and is reduced to a status code. If the training ends without a
goodbye (killed, out of memory, a crash inside the framework), the last will is sent.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import Any, Final
from urllib.parse import urlsplit

__all__ = ["CHANNELS", "END_DEADLINE_S", "SEND_DEADLINE_S", "check", "main", "send"]

CHANNELS: Final[Mapping[str, str]] = {
    "WeCom": "wecombot://KEY",
    "DingTalk": "dingtalk://SECRET@ACCESS_TOKEN",
    "Feishu": "feishu://TOKEN",
    "Lark": "lark://TOKEN",
    "Slack": "slack://TOKEN_A/TOKEN_B/TOKEN_C",
    "mail": "mailtos://USER:PASSWORD@DOMAIN?smtp=SERVER&to=ADDRESS",
    "JSON webhook": "jsons://HOST/PATH",
}
"""Services that users ask for, and the form of their apprise URL."""

SEND_DEADLINE_S: Final = 10.0
"""Longest time that a service is waited for. apprise waits 4 s for a connection and 4 s for an
answer."""
END_DEADLINE_S: Final = SEND_DEADLINE_S + 2.0
"""Longest wait for the newest alerts at the end of a run: each may first wait `_ORDER_S` for its
turn, and has to say what became of it."""

_ORDER_S: Final = 1.0
_PARENT_POLL_S: Final = 1.0
_MAX_UNANSWERED: Final = 50
"""Threads that may wait, at one address, for a server which never answers."""
_STATUS: Final = re.compile(r"\berror=(\d{3})\b")


_SAID: ContextVar[list[str] | None] = ContextVar("said", default=None)
"""What apprise says about the alert that this thread sends: it sends in the thread that asks."""


class _Listener(logging.Handler):
    """Keeps what apprise says, apart for each alert."""

    def emit(self, record: logging.LogRecord) -> None:
        said = _SAID.get()
        if said is not None:
            said.append(record.getMessage())


def check(address: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Read an address without sending anything.

    Args:
        address: env:NAME.
        environ: The environment.

    Returns:
        `ok`, `target` (for people, without secrets) and `problem`, empty if it is ok.
    """
    return _service(address, environ)[1]


def send(address: str, alert: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, Any]:
    """Send an alert and wait for the answer of the service.

    Args:
        address: env:NAME.
        alert: `title`, `text` and `level`.
        environ: The environment.

    Returns:
        As `check` does.
    """
    service, outcome = _service(address, environ)
    if service is None:
        return outcome
    import apprise  # noqa: PLC0415 - see the module

    sender = apprise.Apprise(asset=service.asset)
    sender.add(service)
    listener = _Listener(logging.WARNING)
    said: list[str] = []
    _SAID.set(said)
    logging.getLogger("apprise").addHandler(listener)
    try:
        taken = sender.notify(
            title=alert["title"],
            body=alert["text"],
            notify_type=alert["level"],
            body_format="text",
        )
    finally:
        logging.getLogger("apprise").removeHandler(listener)
    if taken:
        return outcome
    status = _STATUS.search("\n".join(said))
    why = "no connection, or no answer in time" if status is None else f"it answered {status[1]}"
    return _outcome(outcome["target"], why)


def _service(address: str, environ: Mapping[str, str]) -> tuple[Any | None, dict[str, Any]]:
    """Return apprise's object for an address, if there is one, and the outcome of that."""
    url = environ.get(address.removeprefix("env:"))
    if not url:
        return None, _outcome(address, "the variable is not set")
    try:
        import apprise  # noqa: PLC0415 - see the module
    except ImportError:
        return None, _outcome(address, "apprise is not installed; pip install apprise")
    # One thread and no deadline of apprise's own: this process has both.
    asset = apprise.AppriseAsset(async_mode=False, app_id="mindtune", app_desc="mindtune")
    service = apprise.Apprise.instantiate(url, asset=asset)
    if service is None:
        forms = ", ".join(CHANNELS.values())
        return None, _outcome(address, f"it holds no URL that apprise can use; forms: {forms}")
    return service, _outcome(f"{_target(service)} ({address})")


def _outcome(target: str, problem: str = "") -> dict[str, Any]:
    return {"ok": not problem, "target": target, "problem": problem}


def _target(service: Any) -> str:
    """Name a service and its host, where that is no secret.

    In `wecombot://KEY` the place of the host holds the key: only where apprise itself names the
    field `host` does it hold one; other services have a fixed host of their own.
    """
    name = str(service.service_name)
    if "host" in service.template_tokens and service.host:
        port = f":{service.port}" if service.port else ""
        return f"{name} at {service.host}{port}"
    for attribute in ("notify_url", "webhook_url"):
        fixed = getattr(type(service), attribute, None)
        if isinstance(fixed, str) and urlsplit(fixed).hostname:
            return f"{name} at {urlsplit(fixed).hostname}"
    return name


class _Sender:
    """Sends what it is given to all addresses, in threads."""

    def __init__(self, addresses: Iterable[str], will: Mapping[str, str] | None) -> None:
        self._addresses = tuple(addresses)
        self._will = will
        self._last: dict[str, threading.Event] = {}
        self._threads: dict[str, list[threading.Thread]] = {}
        self._counting = threading.Lock()
        self._writing = threading.Lock()
        self._over = threading.Lock()

    def ready(self) -> None:
        """Say of each address whether it can be used."""
        for address in self._addresses:
            self._say(address, check(address, os.environ))

    def start(self, alert: Mapping[str, str]) -> None:
        """Begin to send an alert."""
        for address in self._addresses:
            with self._counting:
                waiting = [t for t in self._threads.get(address, ()) if t.is_alive()]
                self._threads[address] = waiting
                unanswered = len(waiting)
            if unanswered >= _MAX_UNANSWERED:
                problem = f"{unanswered} earlier alerts are still without an answer"
                self._say(address, _outcome(address, problem))
                continue
            done = threading.Event()
            arguments = (address, alert, self._last.get(address), done)
            threading.Thread(target=self._send, args=arguments, daemon=True).start()
            self._last[address] = done

    def finish(self, *, with_will: bool) -> None:
        """End this process when all is sent, `END_DEADLINE_S` seconds later at the latest."""
        # Never released: another thread that comes here ends with the process.
        self._over.acquire()
        if with_will and self._will is not None:
            self.start(self._will)
        end_s = time.monotonic() + END_DEADLINE_S
        for done in list(self._last.values()):
            done.wait(max(0.0, end_s - time.monotonic()))
        with self._writing:
            # Threads that still wait for a server would keep the process.
            os._exit(0)

    def follow(self, parent: int) -> None:
        """Send the last will when the training has ended without a word.

        The end of standard input does not tell: workers that the training forked may hold it open.
        """
        while os.getppid() == parent:
            time.sleep(_PARENT_POLL_S)
        self.finish(with_will=True)

    def _send(
        self,
        address: str,
        alert: Mapping[str, str],
        before: threading.Event | None,
        done: threading.Event,
    ) -> None:
        if before is not None:
            before.wait(_ORDER_S)
        outcomes: list[dict[str, Any]] = []
        sending = threading.Thread(
            target=lambda: outcomes.append(send(address, alert, os.environ)), daemon=True
        )
        with self._counting:
            sending.start()
            self._threads[address].append(sending)
        sending.join(SEND_DEADLINE_S)
        problem = f"no answer in {SEND_DEADLINE_S:g} s" if sending.is_alive() else "apprise failed"
        self._say(address, outcomes[0] if outcomes else _outcome(address, problem))
        if before is not None:
            # Done means that all up to here are.
            before.wait()
        done.set()

    def _say(self, address: str, outcome: Mapping[str, Any]) -> None:
        # Nobody reads any more when the training has ended.
        with self._writing, contextlib.suppress(BrokenPipeError):
            print(json.dumps({"address": address, **outcome}), flush=True)


def main() -> None:
    """Serve the training that started this process."""
    # What apprise and its libraries log goes nowhere: it may hold the URL.
    logging.lastResort = None
    # Whoever ends the training ends this process by ending the training.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    opening = json.loads(sys.stdin.readline())
    sender = _Sender(opening["addresses"], opening["will"])
    sender.ready()
    threading.Thread(target=sender.follow, args=(opening["parent"],), daemon=True).start()
    for line in sys.stdin:
        message = json.loads(line)
        if message is None:
            sender.finish(with_will=False)
        sender.start(message)
    sender.finish(with_will=True)


if __name__ == "__main__":
    main()

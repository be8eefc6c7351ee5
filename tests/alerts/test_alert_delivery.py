"""Alerts on their way, to real servers on this machine: good, dead, hanging, refusing."""

import logging
import os
import signal
import socketserver
import subprocess
import sys
import threading
import time

import pytest

import mindtune.controller.alerts.courier as courier_module
import mindtune.controller.alerts.send as send_module
from mindtune.controller.alerts.alert import Alert
from mindtune.controller.alerts.courier import Courier, send_once
from mindtune.controller.alerts.limits import AlertLimits
from mindtune.controller.alerts.outbox import Outbox
from mindtune.controller.alerts.send import CHANNELS, check
from mindtune.controller.errors import ConfigError

LOOSE = {"min_interval_s": 600.0, "max_per_hour": 1000}


def alert(title, *, step=1, urgent=False, text="it happened"):
    return Alert(
        kind="findings", title=title, text=text, level="failure", step=step, urgent=urgent
    )


def outbox(*addresses, **limits):
    return Outbox(Courier(addresses), AlertLimits(**(LOOSE | limits)), run="run a")


def test_a_webhook_gets_title_text_and_type_in_order(server):
    box = outbox("env:HOOK")
    for index in range(8):
        box.put(alert(f"title {index}", text="梯度 is nan"))
    box.close()
    assert server.titles() == [f"title {index}" for index in range(8)]
    assert server.posts[0]["message"] == "梯度 is nan"
    assert server.posts[0]["type"] == "failure"


def test_putting_waits_for_no_server_that_hangs(server):
    server.hold()
    box = outbox("env:HOOK")
    box.put(alert("first"))
    assert server.reached.wait(30)
    for step in range(1000):  # the steps of a training
        box.put(alert(f"title {step % 10}", step=step))
    assert server.holds, "the first alert is still without an answer"
    server.release()
    box.close()
    assert not box._thread.is_alive()
    assert server.titles()[0] == "first"
    assert "[mindtune] held back" in server.titles()


def test_a_server_that_hangs_delays_no_other_and_no_later_alert(server, monkeypatch):
    hanging = type(server)()
    hanging.hold()
    monkeypatch.setenv("HANGING", hanging.url)
    box = outbox("env:HANGING", "env:HOOK")
    box.put(alert("first"))
    hanging.wait_for(1)
    box.put(alert("[mindtune] hang", urgent=True))
    server.wait_for(2)
    hanging.wait_for(2)
    assert hanging.holds
    hanging.close()
    box.close()


def test_what_no_server_answers_is_given_up_at_the_deadline(monkeypatch):
    monkeypatch.setattr(send_module, "SEND_DEADLINE_S", 0.05)
    monkeypatch.setattr(send_module, "send", lambda *_: time.sleep(30))
    answers = []
    sender = send_module._Sender(["env:HOOK"], None)
    sender._say = lambda *answer: answers.append(answer)
    sender.start({})
    assert sender._last["env:HOOK"].wait(10)
    ((address, outcome),) = answers
    assert address == "env:HOOK"
    assert (outcome["ok"], outcome["problem"]) == (False, "no answer in 0.05 s")


def test_threads_that_never_end_do_not_pile_up(monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(send_module, "SEND_DEADLINE_S", 0.001)
    monkeypatch.setattr(send_module, "_ORDER_S", 0.001)
    monkeypatch.setattr(send_module, "send", lambda *_: release.wait(60))
    answers = []
    sender = send_module._Sender(["env:HOOK"], None)
    sender._say = lambda _, outcome: answers.append(outcome["problem"])
    for _ in range(80):
        sender.start({})
        sender._last["env:HOOK"].wait(10)
    release.set()
    assert answers.count("50 earlier alerts are still without an answer") == 30


def test_an_address_that_never_answers_takes_no_turn_of_another(monkeypatch):
    release = threading.Event()

    def send(address, *_):
        if address == "env:DEAD":
            release.wait(60)
        return {"ok": True, "target": address, "problem": ""}

    monkeypatch.setattr(send_module, "SEND_DEADLINE_S", 0.001)
    monkeypatch.setattr(send_module, "_ORDER_S", 0.001)
    monkeypatch.setattr(send_module, "send", send)
    problems = {"env:DEAD": [], "env:HOOK": []}
    sender = send_module._Sender(problems, None)
    sender._say = lambda address, outcome: problems[address].append(outcome["problem"])
    for _ in range(80):
        sender.start({})
        for done in sender._last.values():
            done.wait(10)
    release.set()
    told = "50 earlier alerts are still without an answer"
    assert problems["env:DEAD"].count(told) == 30
    assert problems["env:HOOK"].count(told) == 0


def child(monkeypatch, program):
    """Let another program stand for the process that sends."""
    started = []

    def start():
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        return process

    monkeypatch.setattr(courier_module, "_start", start)
    return started


READY = (
    'print(\'{"address": "env:HOOK", "ok": true, "target": "JSON", "problem": ""}\', flush=True)'
)


def test_an_address_that_can_be_used_is_no_alert_that_arrived(monkeypatch):
    child(monkeypatch, f"{READY}\nraise SystemExit(7)")
    target, problem = send_once("env:HOOK", alert("first"))
    assert target == "env:HOOK"
    assert problem == "the process that sends ended with code 7 and no word on the alert"


def test_a_process_that_hangs_is_waited_for_so_long_and_ended(monkeypatch):
    started = child(monkeypatch, f"{READY}\nimport time; time.sleep(60)")
    for name in ("_START_S", "END_DEADLINE_S", "_MARGIN_S"):
        monkeypatch.setattr(courier_module, name, 0.25)
    assert send_once("env:HOOK", alert("first")) == (
        "env:HOOK",
        "the process that sends did not end within 0.75 s",
    )
    assert started[0].returncode == -signal.SIGKILL


def test_a_process_that_ends_after_the_first_of_two_addresses_is_refused(monkeypatch):
    child(monkeypatch, READY)
    monkeypatch.setenv("HOOK", "json://127.0.0.1")
    monkeypatch.setenv("OTHER", "json://127.0.0.1")
    with pytest.raises(ConfigError, match="env:OTHER: the process that sends said nothing"):
        Courier(["env:HOOK", "env:OTHER"])


def test_a_failure_is_logged_once_with_the_host_and_without_the_secret(
    dead_url, closed_port, secret, caplog
):
    caplog.set_level(logging.DEBUG)
    box = outbox(dead_url)
    for index in range(3):
        box.put(alert(f"title {index}"))
    box.close()
    (record,) = caplog.records
    assert record.getMessage() == (
        f"an alert did not reach JSON at 127.0.0.1:{closed_port} (env:DEAD): no connection, or no "
        "answer in time; training goes on, and further failures there are not logged"
    )
    assert secret not in caplog.text


def test_a_refusal_names_its_status(monkeypatch, server, caplog):
    refusing = type(server)(status=403)
    monkeypatch.setenv("REFUSING", refusing.url)
    box = outbox("env:REFUSING")
    box.put(alert("first"))
    box.close()
    refusing.close()
    assert f"JSON at 127.0.0.1:{refusing.port} (env:REFUSING): it answered 403" in caplog.text


def test_the_rest_goes_out_when_the_run_ends(server):
    box = outbox("env:HOOK")
    box.put(alert("first", step=1))
    for step in (2, 3):
        box.put(alert("first", step=step))
    box.close()
    box.close()
    box.put(alert("too late"))
    assert server.titles() == ["first", "[mindtune] held back"]
    assert server.posts[1]["message"] == "run a\nHeld back before this: 2 x first (steps 2 to 3)."


def test_the_digest_leaves_by_itself(server):
    box = outbox("env:HOOK", min_interval_s=0.2)
    box.put(alert("first", step=1))
    box.put(alert("first", step=2))
    server.wait_for(2)
    assert server.titles() == ["first", "[mindtune] held back"]
    box.close()


TRAINING = """
import os, signal, sys
sys.path.insert(0, os.getcwd())
import mindtune.controller.live.session, mindtune.controller.doctor
from mindtune.controller.alerts.run_alerts import open_alerts
from mindtune.controller.contract import AlertsSection, RunResult
section = AlertsSection(urls=["env:HOOK"], on=sys.argv[2].split(","))
alerts = open_alerts(section, folder=None, with_will=True)
worker = os.fork()  # as a worker of a dataset: it holds the pipe open
if worker == 0:
    signal.pause()
print(worker, flush=True)
print([name for name in ("apprise", "requests", "urllib3") if name in sys.modules], flush=True)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
alerts.end(RunResult(outcome="ok", steps=1, wall_s=1.0))
alerts.close()
"""


def train(tmp_path, *arguments):
    # A module of that name in the folder of the training is not what sends.
    (tmp_path / "apprise.py").write_text("raise SystemExit('the wrong module')\n")
    with subprocess.Popen(
        [sys.executable, "-c", TRAINING, *arguments],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as training:  # fmt: skip
        worker = int(training.stdout.readline())
        imported = training.stdout.readline()
        training.wait(60)
        return worker, imported


def test_apprise_is_imported_by_no_process_that_trains(server, tmp_path):
    worker, imported = train(tmp_path, "ends", "end")
    os.kill(worker, signal.SIGKILL)
    assert imported == "[]\n"
    server.wait_for(1)
    assert server.titles() == ["[mindtune] end"]
    assert server.posts[0]["type"] == "success"


def test_a_killed_training_leaves_its_last_will(server, tmp_path):
    worker, _ = train(tmp_path, "killed", "stop,end")
    server.wait_for(1)
    os.kill(worker, signal.SIGKILL)
    assert server.titles() == ["[mindtune] end"]
    assert "The process of rank 0 is gone" in server.posts[0]["message"]
    assert server.posts[0]["type"] == "failure"


TOKEN = "0123456789abcdef-0123456789abcdef"  # noqa: S105 - a made-up one
EXAMPLES = {
    "WeCom": (f"wecombot://{TOKEN}", "WeCom Bot at qyapi.weixin.qq.com"),
    "DingTalk": (f"dingtalk://SECabcdef01@{'a1b2c3d4' * 8}", "DingTalk at oapi.dingtalk.com"),
    "Feishu": (f"feishu://{TOKEN}", "Feishu at open.feishu.cn"),
    "Lark": (f"lark://{TOKEN}", "Lark (Feishu) at open.larksuite.com"),
    "Slack": (
        "slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ",
        "Slack at hooks.slack.com",
    ),
    "mail": (
        "mailtos://user:pass0123@example.com?smtp=smtp.example.com&to=on.call@example.com",
        "E-Mail at example.com",
    ),
    "JSON webhook": (f"jsons://example.com/hooks/{TOKEN}", "JSON at example.com"),
}


@pytest.mark.parametrize("channel", CHANNELS)
def test_the_installed_apprise_reads_the_form_of_each_channel(channel):
    url, target = EXAMPLES[channel]
    assert url.split("://")[0] == CHANNELS[channel].split("://")[0]
    port = ":587" if channel == "mail" else ""
    assert check("env:URL", {"URL": url}) == {
        "ok": True, "target": f"{target}{port} (env:URL)", "problem": "",
    }  # fmt: skip


class Proxy(socketserver.ThreadingTCPServer):
    """Refuses every tunnel, after noting where to; a real one would lead to the service."""

    allow_reuse_address = daemon_threads = True

    def __init__(self):
        self.asked = []
        outer = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self):
                outer.asked.append(self.rfile.readline().decode().split()[1])
                self.wfile.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


def test_each_chat_is_reached_at_its_own_host(monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    proxy = Proxy()
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.server_address[1]}")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    urls = {f"URL_{n}": url for n, (url, _) in enumerate(EXAMPLES.values()) if "mail" not in url}
    for name, url in urls.items():
        monkeypatch.setenv(name, url)
    box = outbox(*(f"env:{name}" for name in urls))
    box.put(alert("first"))
    box.close()
    proxy.shutdown()
    proxy.server_close()
    assert sorted(set(proxy.asked)) == [
        "example.com:443", "hooks.slack.com:443", "oapi.dingtalk.com:443", "open.feishu.cn:443",
        "open.larksuite.com:443", "qyapi.weixin.qq.com:443",
    ]  # fmt: skip
    assert len(caplog.records) == len(urls)
    for secret in (TOKEN, "SECabcdef01", "a1b2c3d4", "T1JJ3T3L2", "TIiaj"):
        assert secret not in caplog.text


class MailServer(socketserver.ThreadingTCPServer):
    """Takes mail by SMTP, any login."""

    allow_reuse_address = daemon_threads = True

    def __init__(self):
        self.mails = []
        outer = self

        class Handler(socketserver.StreamRequestHandler):
            def say(self, text):
                self.wfile.write(f"{text}\r\n".encode())

            def handle(self):
                self.say("220 test")
                while line := self.rfile.readline().decode().strip():
                    word = line.split()[0].upper()
                    if word == "EHLO":
                        self.say("250-test\r\n250 AUTH PLAIN LOGIN")
                    elif word == "AUTH":
                        self.say("235 welcome")
                    elif word == "DATA":
                        self.say("354 go on")
                        mail = b""
                        while not mail.endswith(b"\r\n.\r\n"):
                            mail += self.rfile.readline()
                        outer.mails.append(mail.decode())
                        self.say("250 taken")
                    else:
                        self.say("250 fine")

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


def test_mail_arrives(monkeypatch):
    server = MailServer()
    port = server.server_address[1]
    monkeypatch.setenv(
        "MAIL", f"mailto://me:pass0123@127.0.0.1:{port}?mode=insecure&from=a@b.cn&to=on.call@b.cn"
    )
    target, problem = send_once("env:MAIL", alert("[mindtune] stop", text="the loss is nan"))
    server.shutdown()
    server.server_close()
    assert (target, problem) == (f"E-Mail at 127.0.0.1:{port} (env:MAIL)", "")
    (mail,) = server.mails
    assert "Subject: [mindtune] stop" in mail
    assert "the loss is nan" in mail

"""The section `alerts`: what it accepts, and that a refusal repeats no secret."""

import json

import pytest

from mindtune.controller.alerts.run_alerts import check_alerts, open_alerts
from mindtune.controller.contract import (
    ALERT_KINDS,
    AlertsSection,
    BestConfig,
    WatchdogSection,
    parse,
    read_yaml,
)
from mindtune.controller.errors import ConfigError
from mindtune.controller.live.settings import LiveConfig, load_settings

BEST = {"command": ["python", "train.py"]}


def test_defaults_tell_about_everything_from_warnings_on():
    section = AlertsSection(urls=["env:HOOK", "env:OTHER", "env:HOOK"])
    assert section.urls == ["env:HOOK", "env:OTHER"]
    assert section.min_severity == "warning"
    assert section.min_interval == 600.0
    assert section.max_per_hour == 20
    assert tuple(section.on) == ALERT_KINDS == ("findings", "actions", "stop", "hang", "end")


def test_a_bare_on_in_yaml_is_the_key_and_no_boolean(tmp_path):
    path = tmp_path / "live.yaml"
    path.write_text("alerts:\n  urls: env:HOOK\n  min_interval: 90s\n  on: [stop, end]\n")
    assert True in read_yaml(path)["alerts"]
    section = load_settings(path, {}).alerts
    assert section == AlertsSection(urls=["env:HOOK"], min_interval=90.0, on=["stop", "end"])


@pytest.mark.parametrize(
    "alerts",
    [
        {"urls": ["slack://T0K3N/T0K3N/T0K3N"]},
        {"urls": "https://hooks.slack.com/services/T0K3N"},
        {"urls": ["env:HOOK", "json://user:T0K3N@host"]},
        {"urls": ["env:json://user:T0K3N@host"]},
        {"urls": {"slack": "slack://T0K3N"}},
        {"urls": [{"url": "slack://T0K3N"}]},
        {"urls": [["slack://T0K3N"]]},
        "slack://T0K3N/T0K3N",
        ["slack://T0K3N/T0K3N"],
    ],
)
@pytest.mark.parametrize("where", ["live", "best", "mindformers"])
def test_a_literal_url_is_refused_with_the_remedy_and_not_repeated(alerts, where):
    content = {"alerts": alerts}
    if where == "best":
        content = {**BEST, **content}
    if where == "mindformers":
        content = {"trainer": {}, "mindtune": {**BEST, **content}}
    with pytest.raises(ConfigError) as refused:
        load_settings(content, {})
    text = str(refused.value)
    assert "env:MINDTUNE_ALERT_URL" in text
    assert "T0K3N" not in text
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__


@pytest.mark.parametrize(
    ("section", "rule"),
    [
        ({"min_interval": "soon"}, "must be a duration such as 90s"),
        ({"max_per_hour": 0}, "greater than or equal to 1"),
        ({"on": ["findings", "weather"]}, "'findings', 'actions', 'stop', 'hang' or 'end'"),
        ({"min_severity": "bad"}, "'info', 'warning' or 'critical'"),
        ({"url": "x"}, "unknown key 'url' at alerts; allowed: urls"),
    ],
)
def test_other_values_are_refused_by_their_rule(section, rule):
    with pytest.raises(ConfigError, match=rule):
        load_settings({"alerts": section}, {})


@pytest.mark.parametrize(
    "section",
    [
        {"min_severity": "slack://T0K3N"},
        {"min_interval": "slack://T0K3N"},
        {"max_per_hour": "slack://T0K3N"},
        {"on": "slack://T0K3N"},
        {"on": ["stop", "slack://T0K3N"]},
        {"on": {"slack://T0K3N": 1}},
        {"slack://T0K3N": None},
        {"min_severity": ["slack://T0K3N"]},
        {"urls": ["env:HOOK"], "max_per_hour": {"a": "slack://T0K3N"}},
    ],
)
@pytest.mark.parametrize("whole", [True, False])
def test_a_secret_in_any_other_place_is_not_repeated_either(section, whole):
    model, content = (
        (BestConfig, {**BEST, "alerts": section}) if whole else (AlertsSection, section)
    )
    with pytest.raises(ConfigError) as refused:
        parse(model, content, source="x")
    assert "T0K3N" not in str(refused.value)
    assert "not shown, since it may be a secret" in str(refused.value)


def test_a_best_config_carries_alerts_and_watchdog_and_old_ones_stay_readable():
    assert parse(BestConfig, BEST, source="x").alerts is None
    content = {**BEST, "alerts": {"urls": ["env:HOOK"]}, "watchdog": {"exit_on_hang": True}}
    settings = load_settings(content, {})
    assert settings.alerts.urls == ["env:HOOK"]
    assert settings.watchdog == WatchdogSection(exit_on_hang=True)
    again = parse(BestConfig, parse(BestConfig, content, source="x").to_plain(), source="x")
    assert again.alerts == settings.alerts
    assert load_settings(BEST, {}).watchdog == WatchdogSection()
    assert load_settings({"mode": "act"}, {}).alerts is None


def test_trials_of_a_search_tell_nobody(tmp_path):
    config = {"alerts": {"urls": ["env:HOOK"]}}
    assert load_settings(config, {"MINDTUNE_TRIAL_DIR": str(tmp_path)}).alerts is None


def test_a_variable_that_is_not_set_is_refused(monkeypatch):
    monkeypatch.delenv("NOT_SET", raising=False)
    with pytest.raises(ConfigError, match=r"NOT_SET.*it is not set; export NOT_SET=slack://"):
        check_alerts(AlertsSection(urls=["env:NOT_SET"]))


def test_a_variable_that_holds_no_apprise_url_is_refused_without_its_value(monkeypatch, caplog):
    monkeypatch.setenv("TYPO", "weecom://T0K3N")
    with pytest.raises(ConfigError) as refused:
        open_alerts(AlertsSection(urls=["env:TYPO"]), folder=None)
    assert "of env:TYPO: it holds no URL that apprise can use; forms: wecombot://KEY" in str(
        refused.value
    )
    assert "T0K3N" not in str(refused.value) + caplog.text


def test_without_addresses_nothing_is_opened():
    assert open_alerts(None, folder=None) is None
    assert open_alerts(AlertsSection(), folder=None) is None


def test_the_section_stands_in_the_schema():
    schema = json.dumps(LiveConfig.model_json_schema())
    for key in ("urls", "min_severity", "min_interval", "max_per_hour", "exit_on_hang"):
        assert key in schema

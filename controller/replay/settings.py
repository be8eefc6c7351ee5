"""The policies of a replay: defaults, or what `--policies` names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mindtune.controller.contract import MINDFORMERS_KEY, ContractModel, Learned, parse, read_yaml
from mindtune.controller.contract.study_file import PolicySection
from mindtune.controller.errors import ConfigError
from mindtune.policies.engine import Engine, build_engine
from mindtune.policies.settings import PolicySettings
from mindtune.policies.table import POLICIES

__all__ = ["load_engine"]


class _PoliciesFile(ContractModel):
    """What `--policies` names."""

    policies: dict[str, PolicySection]
    learned: Learned = Learned()


def load_engine(policies: Path | None) -> Engine:
    """Return an engine whose policies all observe.

    Args:
        policies: YAML with a mapping by policy name, at its top or under `policies`, such as a
            best_config.yaml or a study file; None: defaults.

    Raises:
        ConfigError: the file is missing or not valid.
        PolicyError: a policy, limit or threshold is unknown or out of range.
    """
    told = _PoliciesFile(policies={}) if policies is None else _read_policies(policies)
    settings = {
        name: PolicySettings(
            enabled=section.enabled,
            mode="observe",
            limits=section.limits,
            thresholds=section.thresholds,
        )
        for name, section in told.policies.items()
    }
    return build_engine(settings, mode="observe", prior=told.learned.grad_norm)


def _read_policies(path: Path) -> _PoliciesFile:
    content: Any = read_yaml(path)
    if isinstance(content, dict) and isinstance(content.get(MINDFORMERS_KEY), dict):
        content = content[MINDFORMERS_KEY]
    if isinstance(content, dict) and "policies" not in content:
        known = {*POLICIES, "detectors"}
        if not known & set(content):
            raise ConfigError(
                f"{path} must hold settings by policy name ({', '.join(sorted(known))}), at its "
                f"top or under `policies`, but its keys are {', '.join(map(str, content))}."
            )
        content = {"policies": content}
    if isinstance(content, dict):
        content = {key: content[key] or {} for key in ("policies", "learned") if key in content}
    return parse(_PoliciesFile, content, source=str(path))

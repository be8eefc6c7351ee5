"""Drives the engine: over recorded observations, or over a plant that obeys its set-points."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from mindtune.policies.decisions import Action
from mindtune.policies.engine import Engine, EngineState, build_engine
from mindtune.policies.facts import RunFacts
from mindtune.policies.findings import Finding
from mindtune.policies.records import ActionRecord
from mindtune.policies.signals import Observation

EVERYTHING = frozenset({"learning_rate_scale", "loss_scale", "global_batch_size"})


@dataclass
class Run:
    """What an engine said over a run."""

    engine: Engine
    state: EngineState
    findings: list[Finding] = field(default_factory=list)
    grants: list[tuple[int, Action]] = field(default_factory=list)
    records: list[ActionRecord] = field(default_factory=list)

    def feed(self, observation: Observation) -> tuple[Action, ...]:
        result = self.engine.step(observation, self.state)
        self.state = result.state
        self.findings.extend(result.findings)
        self.grants.extend((observation.step, grant) for grant in result.grants)
        self.records.extend(result.records)
        return result.grants

    def set_points(self, kind: type) -> list[tuple[int, float]]:
        return [(step, a.value) for step, a in self.grants if isinstance(a, kind)]

    def events(self, kind: type) -> list[tuple[int, str]]:
        return [(step, a.id) for step, a in self.grants if isinstance(a, kind)]

    def kinds(self) -> set[str]:
        return {finding.kind.value for finding in self.findings}

    def steps_of(self, kind: str) -> list[int]:
        return [f.step for f in self.findings if f.kind.value == kind]


@pytest.fixture
def start() -> Callable[..., Run]:
    """Return a run that has not begun: `start(mode=..., settings=..., **facts)`."""

    def begin(
        *,
        mode: str = "act",
        settings: dict[str, Any] | None = None,
        prior: Any = None,
        **facts: Any,
    ) -> Run:
        engine = build_engine(settings or {}, mode=mode, prior=prior)
        facts.setdefault("reachable", EVERYTHING)
        facts.setdefault("micro_batch_size", 2)
        return Run(engine, engine.init(RunFacts(**facts)))

    return begin


@pytest.fixture
def replay(start: Callable[..., Run]) -> Callable[..., Run]:
    """Return the run over observations that no action changes: dicts without `step`, from 1."""

    def over(rows: Iterable[dict[str, Any]], **options: Any) -> Run:
        run = start(**options)
        for step, row in enumerate(rows, start=1):
            run.feed(Observation(step=step, **row))
        return run

    return over

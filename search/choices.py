"""The choices of every knob, which Optuna forbids to change within a study."""

from __future__ import annotations

import json
from collections.abc import Mapping

import optuna
from optuna.distributions import CategoricalDistribution

from mindtune.search.errors import SearchError

__all__ = ["keep_choices"]

_CHOICES = "space"
"""User attribute of the study."""


def keep_choices(
    study: optuna.Study, distributions: Mapping[str, CategoricalDistribution]
) -> None:
    """Keep the choices with a new study, or compare them with those it was started with.

    Raises:
        SearchError: if they differ.
    """
    own = {name: list(distribution.choices) for name, distribution in distributions.items()}
    stored = study.user_attrs.get(_CHOICES)
    if stored is None:
        study.set_user_attr(_CHOICES, json.dumps(own))
    elif json.loads(stored) != own:
        old = json.loads(stored)
        changed = [name for name in {**old, **own} if old.get(name) != own.get(name)]
        raise SearchError(
            "the choices of a knob may not change within a study, but "
            f"{', '.join(changed)} differ from those that study {study.study_name!r} "
            "was started with; give the study a new name or folder."
        )

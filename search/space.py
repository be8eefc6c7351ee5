"""What may vary: every knob with its choices, counted and walked lazily.

A config names the knobs of the space only; `complete` adds what the base config or the knobs'
documented defaults say about the others, so that rules, cost model and hash see every knob.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mindtune.search.errors import SearchError
from mindtune.search.facts import StudyFacts
from mindtune.search.knobs import DERIVED, KNOBS, Config, KnobValue, canonical, knob
from mindtune.search.layout import micro_batch_num, offset_rows
from mindtune.search.stage_list import stage_list_text

__all__ = ["Space", "config_hash", "divisors"]


def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors of `number` in rising order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    large = [number // n for n in reversed(small) if n * n != number]
    return (*small, *large)


def config_hash(config: Mapping[str, KnobValue]) -> str:
    """Return the key of a config: 16 hexadecimal digits, whatever the order of its knobs."""
    text = json.dumps(dict(config), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _choices(name: str, entry: object, facts: StudyFacts) -> tuple[KnobValue, ...]:
    if entry == "auto":
        known = knob(name)
        if known.auto is not None:
            return known.auto
        if name not in KNOBS:
            raise SearchError(
                f"{name} must be a value or a list, but got 'auto'; list its values."
            )
        return divisors(facts.cluster.num_devices)
    values = entry if isinstance(entry, (list, tuple)) else [entry]
    if not values:
        raise SearchError(f"{name} must list at least one value, but got an empty list.")
    # Two spellings of one value are one choice; `dict` keeps the order. Booleans equal numbers
    # in Python, but never within one knob.
    return tuple(dict.fromkeys(canonical(name, value) for value in values))


@dataclass(frozen=True)
class Space:
    """Choices per knob, or an explicit list of candidates.

    Build it with `from_spec`.
    """

    facts: StudyFacts
    choices: dict[str, tuple[KnobValue, ...]]
    """Knob -> what the user allows, in the user's order; one choice: fixed."""
    base: Config
    """What holds for knobs that the user's base config names, and nothing else."""
    candidates: tuple[Config, ...] | None = None
    """The explicit list, if the user gave one; `choices` then holds the values that occur."""
    background: Config = field(init=False, repr=False)
    """Value of every knob that the space does not name."""

    def __post_init__(self) -> None:
        defaults = {k.name: k.default for k in KNOBS.values() if k.default is not None}
        object.__setattr__(self, "background", {**defaults, **self.base})

    @classmethod
    def from_spec(
        cls,
        spec: Mapping[str, object] | Sequence[Mapping[str, object]],
        facts: StudyFacts,
        base: Mapping[str, object] | None = None,
    ) -> Space:
        """Return the space that the study file's `space` section describes.

        Args:
            spec: Knob -> value (fixed), list (searched) or `auto`; or a list of candidates, each
                knob -> value, all with the same knobs.
            facts: What holds for the whole study.
            base: Knobs of the user's own config. Those that the space does not name keep their
                value from here in every config. Derived names are left out.

        Raises:
            SearchError: if a knob or value is not allowed, or the space is empty.
        """
        own = {
            name: canonical(name, value)
            for name, value in (base or {}).items()
            if name not in DERIVED
        }
        if not spec:
            raise SearchError("space must name at least one knob, but it is empty.")
        if isinstance(spec, Mapping):
            choices = {name: _choices(name, entry, facts) for name, entry in spec.items()}
            return cls(facts, choices, own)
        return cls._from_candidates(spec, facts, own)

    @classmethod
    def _from_candidates(
        cls, rows: Sequence[Mapping[str, object]], facts: StudyFacts, base: Config
    ) -> Space:
        names = list(rows[0])
        configs = []
        for number, row in enumerate(rows, 1):
            if list(row) != names and set(row) != set(names):
                raise SearchError(
                    f"every candidate must name the same knobs ({', '.join(names)}), but "
                    f"candidate {number} names {', '.join(row)}."
                )
            configs.append({name: canonical(name, row[name]) for name in names})
        unique = list({config_hash(config): config for config in configs}.values())
        choices = {name: tuple(dict.fromkeys(config[name] for config in unique)) for name in names}
        return cls(facts, choices, base, tuple(unique))

    @property
    def knobs(self) -> tuple[str, ...]:
        """Names of the knobs that configs of this space have."""
        return tuple(self.choices)

    @property
    def searched(self) -> tuple[str, ...]:
        """Names of the knobs with more than one choice."""
        return tuple(name for name, values in self.choices.items() if len(values) > 1)

    @property
    def total(self) -> int:
        """Number of configs before any rule."""
        if self.candidates is not None:
            return len(self.candidates)
        return math.prod(len(values) for values in self.choices.values())

    def configs(self) -> Iterator[Config]:
        """Yield every config, the last knob changing fastest."""
        if self.candidates is not None:
            yield from (dict(config) for config in self.candidates)
            return
        names = self.knobs
        for values in itertools.product(*self.choices.values()):
            yield dict(zip(names, values, strict=True))

    def __contains__(self, config: Mapping[str, KnobValue]) -> bool:
        """Whether the user allows this config; rules are another matter."""
        if set(config) != set(self.choices):
            return False
        if self.candidates is not None:
            return dict(config) in self.candidates
        return all(config[name] in values for name, values in self.choices.items())

    def complete(self, config: Mapping[str, KnobValue]) -> Config:
        """Return `config` with a value for every knob that has one."""
        return {**self.background, **config}

    def named(self, config: Mapping[str, KnobValue]) -> Config:
        """Return the knobs of this space out of a more complete config."""
        return {name: config[name] for name in self.choices}

    def key(self, config: Mapping[str, KnobValue]) -> str:
        """Return the hash of the completed config: equal for every way to spell it."""
        return config_hash(self.complete(config))

    def with_derived(self, config: Mapping[str, KnobValue]) -> Config:
        """Return `config` as a program needs it: with what follows from its knobs.

        That is the micro_batch_num of a named micro_batch_size, where it is whole, and the
        layers per stage that `offset = balanced` stands for.
        """
        complete, found = self.complete(config), dict(config)
        rounds = micro_batch_num(complete, self.facts)
        if "micro_batch_size" in config and rounds is not None:
            found["micro_batch_num"] = rounds
        model = self.facts.model
        if complete["offset"] == "balanced" and model is not None:
            found["offset"] = stage_list_text(offset_rows(complete, model.num_layers))
        return found

    def fill(self, given: Mapping[str, object]) -> Config:
        """Return the complete config that has `given`, in any spelling, and else what is known.

        Other knobs take the space's only choice, then the base config's value, then the default.

        Raises:
            SearchError: if a knob or value is not allowed.
        """
        fixed = {name: values[0] for name, values in self.choices.items() if len(values) == 1}
        own = {name: canonical(name, value) for name, value in given.items()}
        first = {name: values[0] for name, values in self.choices.items()}
        return {**first, **self.background, **fixed, **own}

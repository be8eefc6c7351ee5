"""The knobs of a config: one table of names, meanings and canonical spellings.

A canonical value is a scalar (int, bool or str) that is spelled the same way in YAML, CSV, on the
command line and in `effective`. To add a knob, add one line to `KNOBS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mindtune.search.errors import SearchError
from mindtune.search.stage_list import parse_stage_list, stage_list_text
from mindtune.search.unknown_knobs import DERIVED, refusal

__all__ = ["DERIVED", "ENV_PREFIX", "KNOBS", "Config", "Knob", "KnobValue", "canonical",
           "canonical_or_derived", "describe", "differences", "knob", "knob_text"]  # fmt: skip

KnobValue = bool | int | str
Config = dict[str, KnobValue]
"""Knob name -> canonical value."""

ENV_PREFIX = "env."

_LARGEST_COUNT = 10**9
"""Products of a few counts up to here stay numbers that any file can hold."""


@dataclass(frozen=True)
class Knob:
    """One knob: its meaning, what it is where nobody says anything, and what `auto` stands for."""

    name: str
    description: str
    parse: Callable[[object], KnobValue]
    """Value in any accepted spelling -> canonical value; raises `ValueError` with the rule."""
    default: KnobValue | None
    """Value of a config that does not name the knob; None: unknown, left to the user's program."""
    auto: tuple[KnobValue, ...] | None = None
    """What `auto` expands to; None for degrees, where it is the divisors of num_devices."""


def _count(minimum: int) -> Callable[[object], KnobValue]:
    def parse(value: object) -> KnobValue:
        if isinstance(value, str) and re.fullmatch(r"[0-9]+", value.strip()):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ValueError(f"must be a whole number of at least {minimum}")
        if value > _LARGEST_COUNT:
            raise ValueError(f"must be a whole number of at most {_LARGEST_COUNT}")
        return value

    return parse


def _flag(value: object) -> KnobValue:
    if isinstance(value, str) and value.strip().lower() in {"true", "false"}:
        return value.strip().lower() == "true"
    if not isinstance(value, bool):
        raise ValueError("must be true or false")  # noqa: TRY004 - one error class for callers
    return value


def _choice(
    *names: str, patterns: dict[str, str] | None = None, aliases: dict[str, str] | None = None
) -> Callable[[object], KnobValue]:
    """Names are taken as they are; a pattern `prefix` is `prefix:NUMBER`."""
    number_kinds = patterns or {}
    allowed = ", ".join([*names, *(f"{prefix}:{hint}" for prefix, hint in number_kinds.items())])

    def parse(value: object) -> KnobValue:
        # YAML reads a bare `none`-like null and `off` as other types than text.
        text = "none" if value is None or value is False else str(value).strip().lower()
        text = (aliases or {}).get(text, text)
        if text in names:
            return text
        prefix, _, number = text.partition(":")
        if prefix in number_kinds:
            return _parametrized(prefix, number, number_kinds[prefix])
        raise ValueError(f"must be one of {allowed}")

    return parse


def _parametrized(prefix: str, number: str, hint: str) -> str:
    try:
        value = float(number)
    except ValueError:
        value = float("nan")
    if hint == "R":
        if not 0.0 < value <= 1.0:
            raise ValueError(f"must be {prefix}:R with a ratio R in (0, 1]")
        return f"{prefix}:{value:g}"
    if not (value >= 1.0 and value.is_integer()):
        raise ValueError(f"must be {prefix}:{hint} with a whole number {hint} of at least 1")
    return f"{prefix}:{int(value)}"


_NESTED = "must be a word or a list; numbers per stage are a list among the values: [[2, 1, 1, 0]]"
_STAGE_KINDS = ("layers", "selective")
"""Kinds of recomputation that a list per stage can say: whole layers, or attention alone."""


def _recompute(value: object) -> KnobValue:
    kind, _, numbers = str(value).strip().lower().partition(":")
    listed: object
    if isinstance(value, (list, tuple)):
        kind, listed = "layers", value
    elif kind in _STAGE_KINDS and numbers:
        listed = numbers
    else:
        if isinstance(value, int) and not isinstance(value, bool):
            raise ValueError(_NESTED)  # noqa: TRY004 - one error class for callers
        hint = {"interval": "K", "layers": "A/B/...", "selective": "A/B/..."}
        text = _choice("none", "selective", "full", patterns=hint)(value)
        # Recomputing every block and every first block are the same config.
        return "full" if text == "interval:1" else text
    try:
        rows = parse_stage_list(listed)
    except ValueError as error:
        raise ValueError(f"{kind} {error}") from None
    if min(map(min, rows)) < 0:
        raise ValueError(f"{kind} must hold numbers of layers of at least 0")
    return f"{kind}:{stage_list_text(rows)}" if any(map(any, rows)) else "none"


def _offset(value: object) -> KnobValue:
    if value in (0, None, "none") or (isinstance(value, str) and value.strip() == "0"):
        return "even"
    if isinstance(value, str) and value.strip().lower() in {"even", "balanced"}:
        return value.strip().lower()
    if isinstance(value, (int, float)):
        raise ValueError(_NESTED)  # noqa: TRY004
    rows = parse_stage_list(value)
    return stage_list_text(rows) if any(map(any, rows)) else "even"


def _text(value: object) -> KnobValue:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError("must be a text or a number")  # noqa: TRY004 - one error class
    text = str(value)
    if re.search("[\0\ud800-\udfff]", text):
        raise ValueError("must be a text without NUL and halves of characters")
    return text


_PRECISION_ALIASES = {
    "fp32": "float32", "f32": "float32", "fp16": "float16", "f16": "float16", "half": "float16",
    "bf16": "bfloat16",
}  # fmt: skip

KNOBS: dict[str, Knob] = {
    entry.name: entry
    for entry in (
        Knob("data_parallel", "ranks that hold the same parameters", _count(1), 1),
        Knob("model_parallel", "ranks that share each layer (tensor parallel)", _count(1), 1),
        Knob("pipeline_stage", "stages that the layers are spread over", _count(1), 1),
        Knob("pp_interleave_num", "model chunks per pipeline stage", _count(1), 1, (1, 2)),
        Knob("offset", "where the layers beyond an even split go: even (there are none), balanced "
             "(to stages in the middle), or how many to each stage, such as 0/1/1/0",
             _offset, "even", ("even", "balanced")),
        Knob("context_parallel", "ranks that share each sequence", _count(1), 1),
        Knob("expert_parallel", "ranks, inside data parallel, that share the experts",
             _count(1), 1),
        Knob("use_seq_parallel", "split activations along the sequence inside the tensor group",
             _flag, False, (False, True)),
        Knob("micro_batch_size", "samples per rank and micro-batch", _count(1), 1, (1, 2, 4, 8)),
        Knob("optimizer_sharding", "what is spread over the data-parallel ranks",
             _choice("none", "optimizer", "gradient", "parameter"), "none",
             ("none", "optimizer")),
        Knob("precision", "number format of the matrix products",
             _choice("float32", "float16", "bfloat16", aliases=_PRECISION_ALIASES), None,
             ("float16", "bfloat16")),
        Knob("recompute", "activations computed again in the backward pass", _recompute, "none",
             ("none", "interval:2", "full")),
        Knob("optimizer_offload", "keep the optimizer state in host memory", _flag, False,
             (False, True)),
        Knob("gradient_compression", "how gradients are shrunk before they are exchanged",
             _choice("none", "float16", "int8", patterns={"topk": "R", "powersgd": "K"}), "none",
             ("none", "float16", "topk:0.1")),
        Knob("comm_overlap", "exchange gradients while the backward pass runs", _flag, False,
             (False, True)),
        Knob("comm_fusion", "number of gradients fused into one exchange; 0 for no fusion",
             _count(0), 0, (0, 8)),
        Knob("data_workers", "worker threads or processes of the data pipeline", _count(1), 1,
             (1, 2, 4)),
        Knob("prefetch", "batches prepared ahead", _count(1), 2, (2, 8)),
    )
}  # fmt: skip
"""Every knob by name; `env.NAME` stands beside them for environment variables of the launcher."""


def knob(name: str) -> Knob:
    """Return the knob called `name`.

    Raises:
        SearchError: if there is none, with the reason why it cannot be searched.
    """
    if name in KNOBS:
        return KNOBS[name]
    if name.startswith(ENV_PREFIX) and re.fullmatch(r"[A-Za-z_]\w*", name[len(ENV_PREFIX) :]):
        return Knob(name, "environment variable of the launcher", _text, None)
    raise SearchError(refusal(name, KNOBS))


def canonical(name: str, value: object) -> KnobValue:
    """Return `value` of knob `name` in its one canonical spelling.

    Raises:
        SearchError: if the knob or the value is not allowed.
    """
    entry = knob(name)
    try:
        return entry.parse(value)
    except ValueError as error:
        raise SearchError(f"{name} {error}, but got {value!r}.") from None


def canonical_or_derived(name: str, value: object) -> KnobValue:
    """Return the same for a value that was chosen, where derived names stand beside the knobs.

    Raises:
        SearchError: if the knob or the value is not allowed.
    """
    if name not in DERIVED:
        return canonical(name, value)
    try:
        return _count(1)(value)
    except ValueError as error:
        raise SearchError(
            f"{name} {error}, as {DERIVED[name]} gives it, but got {value!r}."
        ) from None


def knob_text(value: KnobValue) -> str:
    """Return a canonical value as text, as the keys of `values` in an override spell it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def describe(config: Mapping[str, KnobValue]) -> str:
    """Return a config for reading, such as `recompute=none, data_parallel=2`."""
    return ", ".join(f"{name}={knob_text(value)}" for name, value in config.items())


def differences(config: Config, base: Config | None) -> Config:
    """Return the knobs in which a config differs from the base config; empty without one."""
    if base is None:
        return {}
    return {name: value for name, value in config.items() if base.get(name) != value}

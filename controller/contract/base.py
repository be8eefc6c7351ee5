"""What all contract models share: strictness, non-finite numbers, and readable refusals."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import ErrorDetails

from mindtune.controller.errors import ConfigError

__all__ = ["ContractModel", "Count", "Document", "Number", "PositiveCount", "parse",
           "refusal"]  # fmt: skip

_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "infinity": math.inf,
               "-infinity": -math.inf, "+inf": math.inf}  # fmt: skip


def _read_number(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError(f"must be a number, but got {value}")  # noqa: TRY004 - pydantic takes it
    if isinstance(value, str):
        return _NON_FINITE.get(value.strip().lower(), value)
    return value


def _write_number(value: float) -> float | str:
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return value


_LINE_CHARS = 600
"""Longest line of a refusal: a user's value may be of any length."""
_NOT_SHOWN = "what is not shown, since it may be a secret"
_NAME = re.compile(r"[A-Za-z_]\w{0,30}")
"""A key that was meant as one."""

Number = Annotated[
    float,
    BeforeValidator(_read_number),
    PlainSerializer(
        _write_number,
        return_type=float | Literal["nan", "inf", "-inf"],
        when_used="json",
    ),
]
"""A float that may be non-finite: "nan", "inf", "-inf" in JSON; bare forms are read as well."""

_LARGEST_COUNT = 10**18
Count = Annotated[int, Field(ge=0, le=_LARGEST_COUNT)]
"""A number of steps, samples or bytes; up to here products and figures of them have room."""
PositiveCount = Annotated[int, Field(ge=1, le=_LARGEST_COUNT)]
"""The same where there is at least one."""


def _alternatives(annotation: Any) -> set[Any]:
    """Return the types that a value may have, without what they hold."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _alternatives(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return {kind for part in get_args(annotation) for kind in _alternatives(part)}
    return {annotation}


class ContractModel(BaseModel):
    """A part of a document. Unknown keys are errors, values are immutable."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=True,
        validate_default=True,
        protected_namespaces=(),
        use_attribute_docstrings=True,
        populate_by_name=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _whole_characters(cls, value: object) -> object:
        """Spell halves of characters out, which JSON can name and no file can hold."""
        if isinstance(value, str) and not value.isascii():
            return value.encode("utf-8", "backslashreplace").decode("utf-8")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_as_number(cls, value: object, info: ValidationInfo) -> object:
        """Refuse YAML's yes, no, on and off, which pydantic takes as 1 and 0."""
        if isinstance(value, bool) and info.field_name is not None:
            kinds = _alternatives(cls.model_fields[info.field_name].annotation)
            if kinds & {int, float} and bool not in kinds:
                raise ValueError(f"must be a number, but got {value}")
        return value

    SHOWS_VALUES: ClassVar[bool] = True
    """Whether a refusal may repeat what a user wrote; not where that may be a secret."""

    def to_json(self, *, indent: int | None = 2) -> str:
        """Return the model as JSON text without bare NaN or Infinity."""
        return self.model_dump_json(by_alias=True, indent=indent)

    def to_plain(self) -> dict[str, Any]:
        """Return the model as plain JSON-ready data."""
        return self.model_dump(mode="json", by_alias=True)


class Document(ContractModel):
    """A whole file; carries the version of its schema."""

    FILE: ClassVar[str]
    """What a user calls this document, for messages."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    """Version of the document's shape."""


ModelT = TypeVar("ModelT", bound=ContractModel)


def parse(
    model: type[ModelT], content: object, *, source: str, beside: Iterable[str] = ()
) -> ModelT:
    """Validate `content` (plain data) as `model`.

    Args:
        model: the contract model.
        content: what was read.
        source: file or option that it came from, for the message.
        beside: keys that are allowed at the top level as well, and were taken out before.

    Raises:
        ConfigError: naming every offending key with its rule, value and the allowed keys.
    """
    if not isinstance(content, dict):
        raise ConfigError(
            f"{source} must hold a mapping of keys, but got {type(content).__name__}; "
            "see `mindtune init` for a commented example."
        )
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise ConfigError(refusal(error, model, source=source, beside=beside)) from None


def refusal(
    error: ValidationError, model: type[BaseModel], *, source: str, beside: Iterable[str] = ()
) -> str:
    """Return a validation error as text for a user: one line per key."""
    lines = [_line(detail, model, tuple(beside)) for detail in error.errors(include_url=False)]
    head = f"{source} is not valid:"
    return "\n  ".join([head, *dict.fromkeys(lines)])


def _line(detail: ErrorDetails, model: type[BaseModel], beside: tuple[str, ...]) -> str:
    path = [str(part) for part in detail["loc"] if not _is_branch(part)]
    where = ".".join(path) or "the document"
    hidden = any(not getattr(at, "SHOWS_VALUES", True) for at in _models_along(model, path))
    if detail["type"] == "extra_forbidden":
        allowed = ", ".join((*_allowed_keys(model, path[:-1]), *(() if path[1:] else beside)))
        at = ".".join(path[:-1]) or "the top level"
        key = _NOT_SHOWN if hidden and not _NAME.fullmatch(path[-1]) else repr(path[-1])
        return f"unknown key {key:.{_LINE_CHARS}} at {at}; allowed: {allowed}"
    if detail["type"] == "missing":
        return f"{where} is required"
    message = detail["msg"].removeprefix("Value error, ").rstrip(".")
    if hidden:
        # Our own rules may have put the value into the message already.
        for spelling in {repr(detail["input"]), str(detail["input"])} - {""}:
            message = message.replace(spelling, _NOT_SHOWN)
        return _cut(
            f"{where} {message}"
            if "but got" in message
            else f"{where}: {message}, but got {_NOT_SHOWN}"
        )
    if "but got" in message:
        return _cut(f"{where} {message}")
    # A whole section says nothing as a value, but for the kind in it.
    if isinstance(detail["input"], dict) and detail["type"] != "fault_kind":
        return _cut(f"{where}: {message}")
    return _cut(f"{where}: {message}, but got {detail['input']!r}")


def _cut(text: str) -> str:
    return text if len(text) <= _LINE_CHARS else text[: _LINE_CHARS - 3] + "..."


def _is_branch(part: int | str) -> bool:
    """Tell whether a part of an error's path names a branch of a union, not a key."""
    return isinstance(part, str) and ("[" in part or part in {"str", "int", "float", "bool"})


def _allowed_keys(model: type[BaseModel], path: list[str]) -> list[str]:
    *_, innermost = _models_along(model, path)
    return [field.alias or name for name, field in innermost.model_fields.items()]


def _models_along(model: type[BaseModel], path: list[str]) -> list[type[BaseModel]]:
    """Return the models that a path leads through, the outermost first."""
    along, choices = [model], [model]
    for part in path:
        fields = choices[0].model_fields.items()
        field = next((f for n, f in fields if part in (n, f.alias)), None)
        if field is not None:
            choices = _nested_models(field.annotation) or choices
        else:
            # In a union of kinds, the path names the kind.
            choices = [choice for choice in choices if _is_kind(choice, part)] or choices
        along.append(choices[0])
    return along


def _nested_models(annotation: object) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    arguments = getattr(annotation, "__args__", ())
    return [model for argument in arguments for model in _nested_models(argument)]


def _is_kind(model: type[BaseModel], name: str) -> bool:
    kind = model.model_fields.get("kind")
    return kind is not None and name in get_args(kind.annotation)

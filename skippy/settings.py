"""What all of skippy's settings share: they are frozen, and what they refuse they refuse by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from skippy.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Count", "Settings", "Text", "Whole", "refusals", "refuse_unknown"]

_LONGEST_VALUE = 120


def _no_truth(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("expected a number")
    return value


Whole = Annotated[int, BeforeValidator(_no_truth), Field(le=2**31 - 1)]
"""A whole number, or text of one; llama.cpp counts in 32 bits."""

Count = Annotated[Whole, Field(ge=0)]
"""A whole number from 0."""

Text = Annotated[str, Field(min_length=1)]
"""Text that is not empty: where nothing is meant, None says so."""


def refuse_unknown(owner: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise ConfigError for the first name that is not known: it names `owner` and the nearest known name.

    >>> refuse_unknown("skippy.toml", ["moed"], ["max_entries", "mode"])
    Traceback (most recent call last):
    skippy.errors.ConfigError: skippy.toml: unknown key 'moed', did you mean 'mode'? Known: max_entries, mode
    """
    names = list(known)
    for name in given:
        if name not in names:
            folded = {each.casefold(): each for each in names}
            nearest = folded[get_close_matches(name.casefold(), folded, n=1, cutoff=0.0)[0]]
            raise ConfigError(f"{owner}: unknown key {name!r}, did you mean {nearest!r}? Known: {', '.join(names)}")


@contextmanager
def refusals(owner: str, origin: Callable[[str], str] = lambda field: "") -> Iterator[None]:
    """Turn pydantic's ValidationError into a ConfigError; `origin` says where a field's value came from."""
    try:
        yield
    except ValidationError as error:
        raise ConfigError("; ".join(_sentences(owner, error, origin))) from None


def _sentences(owner: str, error: ValidationError, origin: Callable[[str], str]) -> Iterator[str]:
    for entry in error.errors(include_url=False):
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in entry["loc"])
        cause = entry.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):  # it has named field, value and what is allowed itself
            yield f"{owner}{where}: {cause}"
        elif entry["type"] == "missing":
            yield f"{owner}{where} is missing: it must be given"
        else:
            value = repr(entry["input"])
            if len(value) > _LONGEST_VALUE:
                value = value[:_LONGEST_VALUE] + "..."
            allowed = str(cause or entry["msg"])
            yield f"{owner}{where}={value}{origin(str(entry['loc'][0])) if entry['loc'] else ''}: {allowed}"


class Settings(BaseModel):
    """Base of all settings: frozen, no unknown keys, every refusal a ConfigError, copies checked like new ones."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    def __init__(self, **values: Any) -> None:
        refuse_unknown(type(self).__name__, values, type(self).model_fields)
        with refusals(type(self).__name__, self._origin(values)):
            super().__init__(**values)

    @classmethod
    def _origin(cls, values: dict[str, Any]) -> Callable[[str], str]:
        return lambda field: ""

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """An instance of the values in `obj`.  Raises ConfigError."""
        with refusals(cls.__name__):
            return super().model_validate(obj, **options)

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
        """An instance of the values in a JSON text.  Raises ConfigError."""
        with refusals(cls.__name__):
            return super().model_validate_json(json_data, **options)

    def model_copy(self, *, update: Any = None, deep: bool = False) -> Self:
        """A copy with some fields changed, checked like a new one (pydantic's own is not).  Raises ConfigError."""
        return type(self)(**{**dict(self), **(update or {})})

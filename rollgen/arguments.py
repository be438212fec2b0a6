"""What callers give to the public functions, checked where it comes in: UsageError names what is wrong, and the fix.

Paths and URLs are checked where they are told apart, in `remote.objects`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from operator import index
from typing import Any, SupportsIndex, TypeVar, get_args

from rollgen.errors import UsageError

T = TypeVar("T")


def check_choices(**choices: tuple[object, Any]) -> None:
    """Each a value, and the Literal that it has to be of."""
    for name, (value, choice) in choices.items():
        if value not in get_args(choice):
            raise UsageError(f"{name} must be one of {', '.join(map(repr, get_args(choice)))}, not {value!r}")


def check_numbers(least: int, **numbers: SupportsIndex) -> None:
    """Whole numbers of 64 bits, also numpy's; True is none."""
    for name, value in numbers.items():
        if isinstance(value, bool) or not hasattr(value, "__index__") or not least <= index(value) < 1 << 63:
            raise UsageError(f"{name} must be a whole number, {least} or more, not {value!r}")


def check_texts(*, or_none: bool = False, **texts: object) -> None:
    """Texts, `or_none`."""
    for name, value in texts.items():
        if not isinstance(value, str) and not (or_none and value is None):
            raise UsageError(f"{name} must be a text, not of type {type(value).__name__}")


def list_of(kind: type | tuple[type, ...], values: Iterable[T], wanted: str) -> list[T]:
    """The `values`, each of this kind. `wanted`, as in "names: give a list of texts", is said of all others.

    A text is no list of its letters, and what has no order is none either.
    """
    is_iterable = hasattr(values, "__iter__") or hasattr(values, "__getitem__")  # a map-style Dataset has the latter
    if is_iterable and not isinstance(values, str | bytes | Set | Mapping):
        items = list(values)
        if all(isinstance(item, kind) for item in items):
            return items
    raise UsageError(wanted)

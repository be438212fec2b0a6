"""Settings as TOML, as `--config` takes them: what differs from the defaults first, then the rest."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from typing import Any, Final

from rollgen.config import make_config
from rollgen.inert import plain
from rollgen.preflight import public_settings

_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")


class _Unsaid(ValueError):
    """TOML has no word for it."""


def describe_settings(settings: dict[str, Any]) -> Iterator[str]:
    """Lines of valid TOML that make these settings (JSON values, by field of RunConfig) again. Inert on a terminal."""
    defaults = public_settings(make_config({}, {}))
    changed = [name for name, value in settings.items() if value != defaults[name]]
    kept = [name for name, value in settings.items() if name not in changed and value is not None]
    unset = [name for name, value in settings.items() if name not in changed and value is None]
    yield from (_line(name, settings[name]) for name in changed)
    yield "\n# as by default:"
    yield from (_line(name, settings[name]) for name in kept)
    yield f"# not set: {', '.join(unset)}"


def _line(name: str, value: Any) -> str:
    try:
        return f"{name} = {_toml(value)}"
    except _Unsaid:
        return f"# {name}: has a null, which TOML cannot say: give it on the command line"


def _toml(value: Any) -> str:
    """A JSON value in TOML."""
    match value:
        case None:
            raise _Unsaid
        case bool():
            return str(value).lower()
        case str():
            return _text(value)
        case list():
            return f"[{', '.join(map(_toml, value))}]"
        case dict():
            pairs = (
                f"{name if _BARE_KEY.fullmatch(name) else _text(name)} = {_toml(it)}" for name, it in value.items()
            )
            inner = ", ".join(pairs)
            return f"{{ {inner} }}" if inner else "{}"
    return repr(value)


def _text(text: str) -> str:
    return '"' + "".join(map(_character, text)) + '"'


def _character(character: str) -> str:
    """As it is, where it shows and does nothing."""
    if character in '"\\':
        return f"\\{character}"
    is_shown = plain(character) == character and not unicodedata.combining(character)
    return character if is_shown else f"\\U{ord(character):08x}"

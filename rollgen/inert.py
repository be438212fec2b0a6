"""Text from elsewhere: inert where people read it, impersonal where it travels with a dataset.

Prompts, completions, ids, names, the records of a dataset and the errors of an engine are data, whoever wrote them.

    plain       on a terminal or in a log nothing acts: no escape sequence, no reordering, nothing invisible
    brief       the same, and not longer than a few lines
    Discretion  in a file of a dataset: no directories, no secrets of this process's environment

Nothing here changes what is stored of prompts and completions themselves.
"""

from __future__ import annotations

import os
import re
import tempfile
import unicodedata
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

BRIEF: Final = 400
"""Characters of one item of data in a line."""
LINE: Final = 2000
"""Characters of a line that is an error, a note or a log entry: two paths of some length, and what to do."""
_JOINERS: Final = "\u200c\u200d"
"""Zero-width (non-)joiners: invisible, harmless, and part of many scripts and emoji."""
_INVISIBLE: Final = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0")
"""Letters and marks that show nothing (`Default_Ignorable_Code_Point`), which Python counts as printable."""
_STACKED: Final = 8
"""Characters without a width that may follow each other: no language needs more, and a pile of them hides its
neighbours, or a message."""

_DIRECTORIES: Final = re.compile(
    r"(?<=['\"`])(?:file:/)?/(?:[^/\n'\"`]*/)+"  # in quotes there may be spaces
    r"|(?:file://|(?<![\w./-])(?<!:/))/(?:[^\s/:'\"`]+/)+"
)
"""The directories of an absolute path; a URL or a relative path has none."""
_LOGIN: Final = re.compile(r"(?<=://)[^\s/@]+@")
"""User and password of a URL."""
_TOKEN: Final = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[opsur]_[A-Za-z0-9]{16,}|(?:AKIA|ASIA)[A-Z0-9]{16})"
)
"""Access tokens that tell by their form what they are: of Hugging Face, OpenAI and others, GitHub, AWS."""
_SECRET_VARIABLE: Final = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
_SECRET_SETTING: Final = re.compile(
    r"secret|passw|credential|(?:^|_)(?:api|access|auth|private)_?key|(?:^|_)(?:hf|api|access|auth|bearer)_?token$",
    re.IGNORECASE,
)
_SHORTEST_SECRET: Final = 8
"""Characters: the value of a variable that is shorter (`true`, `0`) would be found in any text."""


def plain(text: str) -> str:
    """`text` with everything spelled out that is not visible or could act: ESC becomes `\\x1b`.

    That is control, format (bidi, zero width, tags), separator, surrogate and unassigned characters, and combining
    marks beyond `_STACKED` in a row. Spaces of any width are spaces; joiners stay.
    """
    if text.isascii() and text.isprintable():
        return text
    shown, stacked = [], 0
    for character in text:
        stacked = stacked + 1 if _is_stacked(character) else 0
        shown.append(_visible(character) if stacked <= _STACKED else _spelled(character))
    return "".join(shown)


def shorten(text: str, limit: int, *, tail: bool = False) -> str:
    """The first (or last) `limit` characters of `text`, marked with an ellipsis where it was cut."""
    if len(text) <= limit:
        return text
    return f"…{text[-limit:]}" if tail else f"{text[:limit]}…"


def brief(text: str, limit: int = BRIEF) -> str:
    """`plain(text)`, of which at most about `limit` characters: the beginning and the end, where an error has its
    fix."""
    return _cut(plain(_cut(text, limit)), limit)


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    tail = limit // 4
    return f"{text[: limit - tail]}…{text[-tail:]}"


def _is_stacked(character: str) -> bool:
    return character in _JOINERS or unicodedata.category(character) in ("Mn", "Me")


def _visible(character: str) -> str:
    if (character.isprintable() and character not in _INVISIBLE) or character in _JOINERS:
        return character
    return " " if unicodedata.category(character) == "Zs" else _spelled(character)


def _spelled(character: str) -> str:
    return character.encode("unicode_escape").decode()


def impersonal(text: str) -> str:
    """`text` without the directories of absolute paths, logins of URLs and access tokens of a known form."""
    return _TOKEN.sub("(secret)", _LOGIN.sub("", _DIRECTORIES.sub("", text)))


class Discretion:
    """Makes a text fit to travel: `impersonal`, and without what only this process knows.

    Directories that it knows (home, working and temporary directory, and `private` ones) are found also where a path
    with spaces stands without quotes. The value of an environment variable that is called a token, key, secret,
    password, credential or auth becomes the variable's name.
    """

    def __init__(self, private: Iterable[Path] = ()) -> None:
        home = os.path.expanduser("~")  # noqa: PTH111 (pathlib's raises for a user without a home)
        known = {str(path.absolute()) for path in (Path(home), Path(tempfile.gettempdir()), *private)}
        with suppress(FileNotFoundError):  # the working directory of a sandbox may be gone
            known.add(str(Path.cwd()))
        self._directories = sorted(known - {"/"}, key=len, reverse=True)
        self._secrets = {
            value: f"${name}"
            for name, value in os.environ.items()
            if _SECRET_VARIABLE.search(name) and len(value) >= _SHORTEST_SECRET
        }

    def __call__(self, text: str) -> str:
        """`text` as it may be written into a dataset."""
        for secret, name in self._secrets.items():
            text = text.replace(secret, name)
        for directory in self._directories:
            text = text.replace(f"{directory}/", "")
        return impersonal(text)


def is_secret(name: str, value: object) -> bool:
    """Whether a setting is called a secret, or a text in it has the form of one."""
    if isinstance(value, dict):
        return any(is_secret(str(inner), member) for inner, member in value.items())
    if isinstance(value, list):
        return any(is_secret(name, member) for member in value)
    return isinstance(value, str) and bool(value and (_SECRET_SETTING.search(name) or _TOKEN.search(value)))


def by_name(value: Any) -> Any:
    """A JSON value in which every text that is an absolute path has become its last part: datasets travel."""
    if isinstance(value, dict):
        return {name: by_name(member) for name, member in value.items()}
    if isinstance(value, list):
        return [by_name(member) for member in value]
    return Path(value).name if isinstance(value, str) and _is_path(value) else value


def _is_path(text: str) -> bool:
    return text.startswith(("/", "~/", "file:///")) and "\n" not in text and bool(Path(text).name)

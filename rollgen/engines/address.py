"""Where a server is and how it knows us: URLs and keys as users give them, and what of them may be told.

Nobody is told a login or a key: they are no part of an address's text, and of no message.
"""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import SplitResult, unquote, urlsplit

from rollgen.errors import UsageError

_KEY_CHARACTERS = range(0x21, 0x7F)
"""What a header carries: visible ASCII."""


@dataclass(frozen=True, slots=True)
class Address:
    """A server's address."""

    base: str
    """`http://host:port/prefix`: what the paths of its routes are put behind."""
    authorization: str | None = field(repr=False)
    """The value of the header, if there is one."""

    def __str__(self) -> str:
        return self.base


def parse_address(url: str, api_key: str | None = None) -> Address:
    """The address that a user gave, with or without `/v1` at its end. Raises UsageError for what is none."""
    parts = _split(url)
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"--server: {redacted(url)!r} is no URL of a server; expected one like http://host:8000")
    if parts.query or parts.fragment:
        raise UsageError(f"--server: {redacted(url)} has a query or a fragment; give the URL without it")
    if api_key is not None and parts.username is not None:
        raise UsageError(f"--server: {redacted(url)}: there is both a login in the URL and an API key; leave one out")
    authorization = None if api_key is None else f"Bearer {api_key}"
    if parts.username is not None:
        login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        authorization = f"Basic {b64encode(login.encode()).decode()}"
    return Address(redacted(url), authorization)


def redacted(url: str) -> str:
    """`url` as it may be told: scheme, host, port and path, without login, query, fragment, and `/v1` at the end."""
    parts = _split(url)
    if parts is None or not parts.netloc:
        return url.rpartition("@")[2].partition("?")[0].partition("#")[0]
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{path}"


def read_api_key(variable: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """The key in an environment variable, None where there is none. Raises UsageError for what no header can carry."""
    key = environment.get(variable, "").strip()
    if any(ord(character) not in _KEY_CHARACTERS for character in key):
        raise UsageError(f"environment: {variable} is no API key: it has characters that no HTTP header can carry")
    return key or None


def _split(url: str) -> SplitResult | None:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:  # a bad port, or half of an IPv6 address
        return None
    return parts

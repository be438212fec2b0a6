"""Where a server is and how it knows us: URLs and keys as users give them, and what of them may be told.

Nobody is told a login or a key: they are no part of an address's text, and of no message, whatever a server repeats.
"""

from __future__ import annotations

import os
import re
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import SplitResult, quote, unquote, urlsplit

from rollgen.config import RunConfig
from rollgen.engines.base import RequestError
from rollgen.errors import RollgenError, UsageError

DEFAULT_KEY_VARIABLE: Final = RunConfig.model_fields["api_key_env"].default
"""Need not be set."""
_KEY_CHARACTERS = range(0x21, 0x7F)
"""What a header carries: visible ASCII."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PORTS: Final = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Address:
    """A server's address."""

    base: str
    """`http://host:port/prefix`: what the paths of its routes are put behind."""
    authorization: str | None = field(repr=False)
    """The value of the header, if there is one."""

    def __str__(self) -> str:
        return self.base

    def conceal(self, text: str) -> str:
        """`text` of a server without what it was sent to know us by."""
        for secret in _secrets(self.authorization):
            text = text.replace(secret, "(secret)")
        return text

    @contextmanager
    def discreet(self) -> Iterator[None]:
        """No error that leaves this repeats a secret."""
        try:
            yield
        except (RollgenError, RequestError) as error:
            told = self.conceal(str(error))
            if told == str(error):
                raise
            raise type(error)(told) from None


def parse_addresses(urls: Sequence[str], api_key: str | None = None) -> list[Address]:
    """The addresses of different servers. Raises UsageError as `parse_address`, and for one that is named twice."""
    addresses = [parse_address(url, api_key) for url in urls]
    named: set[tuple[object, ...]] = set()
    for address in addresses:
        parts = urlsplit(address.base)
        place = (parts.hostname, parts.port or _PORTS[parts.scheme], parts.path)
        if place in named:
            raise UsageError(f"--server: {address} is named twice; name each server once")
        named.add(place)
    return addresses


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


def check_key_variable(variable: str, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse what is no variable that is set, but for the default: it is recorded, and may be the key by mistake."""
    if variable != DEFAULT_KEY_VARIABLE and not (_VARIABLE.fullmatch(variable) and variable in environment):
        raise UsageError(
            f"--api-key-env: expected the name of an environment variable that is set and holds the API key, like "
            f"{DEFAULT_KEY_VARIABLE}; there is none of the name that was given (not shown: it may be the key itself)"
        )


def read_api_key(variable: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """The key in an environment variable, None where there is none.

    Raises UsageError as `check_key_variable`, and for what no header can carry.
    """
    check_key_variable(variable, environment)
    key = environment.get(variable, "").strip()
    if any(ord(character) not in _KEY_CHARACTERS for character in key):
        raise UsageError(f"environment: {variable} is no API key: it has characters that no HTTP header can carry")
    return key or None


def _secrets(authorization: str | None) -> list[str]:
    """All that must not be repeated, the longest first: also as it stands in a URL."""
    scheme, _, sent = (authorization or "").partition(" ")
    login = b64decode(sent).decode() if scheme == "Basic" else ""
    secrets = {sent, login, login.partition(":")[2]} - {""}
    return sorted(secrets | {quote(secret, safe="") for secret in secrets}, key=len, reverse=True)


def _split(url: str) -> SplitResult | None:
    try:
        parts = urlsplit(url)
        _ = parts.port
        _ = url.encode(), (parts.hostname or "").encode("idna")
    except ValueError:  # a bad port, half of an IPv6 address, a host name that no network has, no UTF-8
        return None
    is_cut = "@" in parts.path + parts.query + parts.fragment  # by a `/`, `?` or `#` inside of the login
    return None if is_cut else parts

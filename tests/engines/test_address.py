"""URLs and keys of servers: what is understood, and what is never told."""

from __future__ import annotations

import pytest

from rollgen.engines.address import (
    DEFAULT_KEY_VARIABLE,
    check_key_variable,
    parse_address,
    parse_addresses,
    read_api_key,
    redacted,
)
from rollgen.engines.base import RequestError
from rollgen.errors import UnfitEngine, UsageError


@pytest.mark.parametrize(
    ("given", "base"),
    [
        ("http://host:8000", "http://host:8000"),
        ("http://host:8000/", "http://host:8000"),
        ("http://host:8000/v1", "http://host:8000"),
        ("http://host:8000/v1/", "http://host:8000"),
        ("https://host/models/a/v1", "https://host/models/a"),
        ("http://[::1]:8000", "http://[::1]:8000"),
        ("http://me:secret@host:8000/a", "http://host:8000/a"),
    ],
)
def test_base(given: str, base: str) -> None:
    """With or without what other clients want at the end, and never with a login."""
    address = parse_address(given)
    assert str(address) == address.base == redacted(given) == base
    assert "secret" not in repr(address)


def test_authorization() -> None:
    """A key, or the login of the URL, percent-decoded: `me:s@e` in base64."""
    assert parse_address("http://host").authorization is None
    assert parse_address("http://host", "k").authorization == "Bearer k"
    assert parse_address("http://me:s%40e@host").authorization == "Basic bWU6c0Bl"


@pytest.mark.parametrize(
    ("given", "api_key", "problem"),
    [
        ("host:8000", None, "no URL"),
        ("ftp://host", None, "no URL"),
        ("http://", None, "no URL"),
        ("http://host:port", None, "no URL"),
        ("http://[::1", None, "no URL"),
        ("me:secret@host", None, "'host'"),
        ("http://host?token=secret", None, "without it"),
        ("http://host#secret", None, "without it"),
        ("http://me:secret@host", "secret", "leave one out"),
        ("http://me:12/secret@host", None, "'host' is no URL"),
        ("http://me:12?secret@host", None, "'host' is no URL"),
        ("http://me:12#secret@host", None, "'host' is no URL"),
        ("http://x..y:80", None, "no URL"),
        ("http://.x", None, "no URL"),
        (f"http://{'a' * 64}:80", None, "no URL"),
        ("http://host/\udce9", None, "no URL"),
    ],
)
def test_refused(given: str, api_key: str | None, problem: str) -> None:
    """In words that hold no secret."""
    with pytest.raises(UsageError, match=problem) as caught:
        parse_address(given, api_key)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "urls",
    [
        ("http://host:8000", "http://host:8000"),
        ("http://host:8000", "http://HOST:8000/v1/"),
        ("http://host", "http://other", "http://me:secret@host:80"),
        ("https://host/a", "https://host:443/a"),
    ],
    ids=str,
)
def test_named_twice(urls: tuple[str, ...]) -> None:
    """It would get twice its share, however it is spelled."""
    with pytest.raises(UsageError, match="is named twice"):
        parse_addresses(urls)
    assert len(parse_addresses(urls[:-1])) == len(urls) - 1


@pytest.mark.parametrize(
    ("url", "key"), [("http://host", "s3cr3t/k"), ("http://me:s3cr3t%2Fk@host", None)], ids=["key", "login"]
)
def test_nothing_is_repeated(url: str, key: str | None) -> None:
    """Neither as it was given, nor as it was sent, nor as it stands in a URL; the class of an error stays."""
    address = parse_address(url, key)
    assert address.authorization is not None
    for text in ("s3cr3t/k", "s3cr3t%2Fk", address.authorization.partition(" ")[2]):
        with pytest.raises(UnfitEngine, match=r"^said \(secret\)\.$"), address.discreet():
            raise UnfitEngine(f"said {text}.")
    with pytest.raises(RequestError, match=r"^harmless$"), address.discreet():
        raise RequestError("harmless")


def test_api_key() -> None:
    """Of an environment variable, without the space around it; nothing is no key."""
    assert read_api_key("K", {"K": " key\n"}) == "key"
    assert read_api_key("K", {"K": ""}) is None
    assert read_api_key(DEFAULT_KEY_VARIABLE, {}) is None
    with pytest.raises(UsageError, match="environment: K") as caught:
        read_api_key("K", {"K": "s3cr3t\nk3y"})
    assert "3" not in str(caught.value)


@pytest.mark.parametrize("given", ["sk-s3cr3t", "s3cr3t", "", "3K", "K ", "K\n", "K=s3cr3t", "\u00c4"])
def test_no_variable(given: str) -> None:
    """The key itself by mistake, what no variable is called, and one that is not set: not repeated."""
    for check in (check_key_variable, read_api_key):
        with pytest.raises(UsageError, match="--api-key-env: expected the name of an environment variable") as caught:
            check(given, {"K": "key", "sk-s3cr3t": "1"})
        assert "s3cr3t" not in str(caught.value)

"""Text from elsewhere: what a terminal is shown of it, and what of it a dataset may hold."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest

from rollgen.inert import Discretion, brief, by_name, impersonal, is_secret, plain, shorten


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("\x1b", r"\x1b", id="esc"),
        pytest.param("\x1b[31mred", r"\x1b[31mred", id="csi"),
        pytest.param("\x1b]0;title\x07", r"\x1b]0;title\x07", id="osc"),
        pytest.param("\x9b2J\x85\x7f", r"\x9b2J\x85\x7f", id="c1 and del"),
        pytest.param("\u202eabc\u202c\u200e", r"\u202eabc\u202c\u200e", id="bidi"),
        pytest.param("a\u2028b", r"a\u2028b", id="separator"),
        pytest.param("a\tb\nc\x00", r"a\tb\nc\x00", id="whitespace"),
        pytest.param("a\u00a0b\u3000c", "a b c", id="spaces"),
        pytest.param("\U000e0041", r"\U000e0041", id="tag"),
        pytest.param("\ud800", r"\ud800", id="surrogate"),
        pytest.param("a\u3164b\u034f", r"a\u3164b\u034f", id="fillers"),
        pytest.param("[red]x[/red]", "[red]x[/red]", id="markup"),
        pytest.param("héllo 👨‍👩‍👧 日本 کی‌بورد", "héllo 👨‍👩‍👧 日本 کی‌بورد", id="printable"),
        pytest.param("z" + "\u0301" * 10, "z" + "\u0301" * 8 + r"\u0301\u0301", id="a pile of marks"),
        pytest.param("x" + "\u200d" * 9, "x" + "\u200d" * 8 + r"\u200d", id="a pile of joiners"),
    ],
)
def test_plain_spells_out_what_is_not_visible(text: str, expected: str) -> None:
    """Letters, emoji and brackets stay; everything that could act on a terminal or hide becomes an escape."""
    assert plain(text) == expected


def test_plain_leaves_no_control_or_format_character() -> None:
    """Over all of Unicode, only the two joiners of scripts and emoji are left of the invisible characters."""
    everything = "".join(map(chr, range(0x110000)))
    left = {c for c in plain(everything) if unicodedata.category(c) in {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}}
    assert left == {"\u200c", "\u200d"}


def test_shorten_marks_the_cut() -> None:
    """The head of a text, the tail of a prompt, and nothing where it fits."""
    assert (shorten("abcdef", 3), shorten("abcdef", 3, tail=True), shorten("abc", 3)) == ("abc…", "…def", "abc")


def test_brief_keeps_both_ends() -> None:
    """Three quarters from the beginning, where the place is, one from the end, where the fix is."""
    assert brief("abcdefgh", 8) == "abcdefgh"
    assert brief("0123456789", 8) == "012345…89"


@pytest.mark.parametrize("text", ["x" * 1_000_000, "\x1b" * 1_000_000, "a\u0301" * 500_000, "\U000e0041" * 1_000_000])
def test_brief_is_brief(text: str) -> None:
    """Also when each character takes ten to spell out."""
    assert len(brief(text, 100)) == 101


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("/home/me/out/data/part-w0-000001.parquet: damaged", "part-w0-000001.parquet: damaged"),
        ("a/b/c.jsonl:3: no prompt", "a/b/c.jsonl:3: no prompt"),
        ("see https://host/a/b and '/etc/secret/key'", "see https://host/a/b and 'key'"),
        ("12 tokens/s, 3/4 done", "12 tokens/s, 3/4 done"),
        ("error:/home/me/x/y, file:///home/me/z", "error:y, z"),
        ("[Errno 2] No such file: '/home/al ice/x y/z.py', \"/a b/c\"", "[Errno 2] No such file: 'z.py', \"c\""),
        ("GET https://me:pass@host/x", "GET https://host/x"),
        ("with hf_AbCdEfGhIjKlMnOpQrSt: 401", "with (secret): 401"),
        ("sk-proj-0123456789abcdef, AKIA0123456789ABCDEF", "(secret), (secret)"),
    ],
)
def test_impersonal(message: str, expected: str) -> None:
    """Absolute paths by name, relative ones and URLs as they are; no login, no access token."""
    assert impersonal(message) == expected


def test_discretion_knows_its_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its directories are recognised also with spaces and without quotes, its secrets by the variable's name."""
    monkeypatch.setenv("HOME", str(tmp_path / "al ice"))
    monkeypatch.setenv("SERVICE_API_KEY", "p4ss w0rd/x")
    monkeypatch.setenv("HAS_TOKEN", "yes")
    discreet = Discretion([tmp_path / "our models"])
    assert discreet(f"{tmp_path}/al ice/.cache/x.py: {tmp_path}/our models/tiny") == ".cache/x.py: tiny"
    assert discreet("denied: p4ss w0rd/x, yes") == "denied: $SERVICE_API_KEY, yes"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("hf_token", "x", True),
        ("api_key", "x", True),
        ("my_password", "x", True),
        ("extra", {"headers": [{"access_token": "x"}]}, True),
        ("anything", "hf_AbCdEfGhIjKlMnOpQrSt", True),
        ("hf_token", True, False),
        ("api_key", "", False),
        ("max_num_batched_tokens", 4096, False),
        ("tokenizer_mode", "slow", False),
        ("pad_token", "</s>", False),
        ("key", "value", False),
    ],
)
def test_is_secret(name: str, value: object, expected: bool) -> None:
    """By its own name or that of a member, or by the form of the text."""
    assert is_secret(name, value) is expected


def test_by_name() -> None:
    """At any depth; what is no absolute path stays."""
    value = {"a": "/home/me/x.json", "b": ["~/y/z", "rel/x", 3, None], "c": {"d": "file:///home/me/q"}, "e": "/"}
    assert by_name(value) == {"a": "x.json", "b": ["z", "rel/x", 3, None], "c": {"d": "q"}, "e": "/"}


def test_discretion_without_a_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scoring function may have left its process in one that is gone."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert Discretion()("/srv/a/b.txt is missing") == "b.txt is missing"

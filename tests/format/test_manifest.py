"""The manifest: created once, by one starter; refused when it is edited, damaged, foreign or of a later version."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollgen.config import digest
from rollgen.errors import DatasetError, ResumeRefused, Unreadable
from rollgen.format.manifest import (
    Manifest,
    Retry,
    check_format_version,
    check_identity,
    create_manifest,
    read_manifest,
    replace_manifest,
)
from rollgen.format.schema import FORMAT_VERSION

MakeManifest = Callable[..., Manifest]


@pytest.fixture
def stored(tmp_path: Path, make_manifest: MakeManifest) -> Manifest:
    """A manifest on disk, in `tmp_path`."""
    manifest = make_manifest()
    assert create_manifest(tmp_path, manifest)
    return manifest


def edit(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = directory / "rollgen.json"
    raw = json.loads(path.read_text())
    del raw["sha256"]
    change(raw)
    path.write_text(json.dumps(raw | {"sha256": digest(raw)}))


def test_round_trip(tmp_path: Path, stored: Manifest) -> None:
    """What is read equals what was written, and nothing else lies in the directory."""
    assert read_manifest(tmp_path) == stored
    assert [path.name for path in tmp_path.iterdir()] == ["rollgen.json"]


def test_second_starter_writes_nothing(tmp_path: Path, stored: Manifest, make_manifest: MakeManifest) -> None:
    """The first manifest stays to the byte, and no temporary file is left."""
    before = (tmp_path / "rollgen.json").read_bytes()
    assert not create_manifest(tmp_path, make_manifest(created_at="later"))
    assert (tmp_path / "rollgen.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["rollgen.json"]


RACER = """
import sys
from pathlib import Path
import conftest
from rollgen.format.manifest import create_manifest

directory, name = sys.argv[1:]
manifest = conftest.some_manifest(created_at=name)
print("ready", flush=True)
sys.stdin.read()
print(create_manifest(Path(directory), manifest))
"""


def test_of_many_racers_one_wins(tmp_path: Path) -> None:
    """Four processes create at once: exactly one is told that it did, and the manifest is that one's, whole."""
    racers = {
        name: subprocess.Popen(
            [sys.executable, "-c", RACER, str(tmp_path), name],
            cwd=Path(__file__).parents[1],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in "abcd"
    }
    for racer in racers.values():
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers.values():
        assert racer.stdin is not None
        racer.stdin.close()  # the starting shot
        racer.stdin = None
    outcomes = {name: racer.communicate(timeout=180)[0] for name, racer in racers.items()}
    assert sorted(outcomes.values()) == ["False\n"] * 3 + ["True\n"]
    [winner] = [name for name, created in outcomes.items() if created == "True\n"]
    assert read_manifest(tmp_path).created_at == winner
    assert [path.name for path in tmp_path.iterdir()] == ["rollgen.json"]


def test_replace_is_seen_whole(tmp_path: Path, stored: Manifest) -> None:
    """A new attempt: the new manifest, no leftovers."""
    replace_manifest(tmp_path, stored.model_copy(update={"attempts": [*stored.attempts, *stored.attempts]}))
    assert len(read_manifest(tmp_path).attempts) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["rollgen.json"]


def test_same_identity_passes(stored: Manifest) -> None:
    """In any order of keys."""
    check_identity(stored, dict(reversed(stored.identity.items())))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"top_k": 9}, ["top_k (8 -> 9)"]),
        ({"top_k": 9, "seed": 1}, ["seed (0 -> 1)", "top_k (8 -> 9)"]),
        ({"temperature": 1.0}, ["temperature (0.75 -> 1.0)"]),
        ({"support_logprobs": True}, ["support_logprobs (false -> true)"]),
        ({"chat": True}, ["chat (null -> true)"]),
        ({"seed": None}, ["seed (0 -> null)"]),
        ({"system_prompt": "x" * 100}, ['system_prompt (null -> "' + "x" * 76 + "...)"]),
    ],
)
def test_each_changed_key_is_named(stored: Manifest, change: dict[str, Any], named: list[str]) -> None:
    """Old and new value, sorted by key, long values shortened to 80 characters; unchanged keys are not mentioned."""
    with pytest.raises(ResumeRefused) as raised:
        check_identity(stored, stored.identity | change)
    assert f"other settings: {', '.join(named)}; repeat the first command with --resume" in str(raised.value)


def test_a_removed_key_is_named(stored: Manifest) -> None:
    """A key that only the stored run has counts as changed."""
    with pytest.raises(ResumeRefused, match=r"settings: seed \(0 -> null\);"):
        check_identity(stored, {key: value for key, value in stored.identity.items() if key != "seed"})


@pytest.mark.parametrize("version", ["1.0", "1.7", "1"])
def test_minor_versions_are_read(version: str) -> None:
    """MINOR adds what may be ignored."""
    check_format_version(version, Path("rollgen.json"))


@pytest.mark.parametrize("version", ["2.0", "0.9", "10.0", "", "None", "one"])
def test_other_major_versions_are_refused(version: str) -> None:
    """The message names the file, the version and the way out."""
    with pytest.raises(DatasetError, match=r"^rollgen\.json: format version .* is not readable here .*upgrade rollgen"):
        check_format_version(version, Path("rollgen.json"))


def test_its_own_hash_is_not_optional(tmp_path: Path, stored: Manifest) -> None:
    """A flipped bit in the key would take it away. Manifests of 1.0 have none."""
    path = tmp_path / "rollgen.json"
    text = path.read_text().replace('\n  "sha256": "', '\n  "shc256": "')
    path.write_text(text)
    with pytest.raises(DatasetError, match="sha256 is not that of its content"):
        read_manifest(tmp_path)
    path.write_text(text.replace(f'"format_version": "{FORMAT_VERSION}"', '"format_version": "1.0"'))
    assert read_manifest(tmp_path).format_version == "1.0"


def test_any_change_is_noticed(tmp_path: Path, stored: Manifest) -> None:
    """The manifest vouches for what nothing else does, and a writer renews its hash."""
    path = tmp_path / "rollgen.json"
    text = path.read_text()
    path.write_text(text.replace('"context_length": 256', '"context_length": 257'))
    with pytest.raises(DatasetError, match=r"rollgen\.json: sha256 is not that of its content: edited or damaged"):
        read_manifest(tmp_path)
    replace_manifest(tmp_path, stored.model_copy(update={"created_at": "later"}))
    assert read_manifest(tmp_path).created_at == "later"


def test_unknown_keys_are_kept(tmp_path: Path, stored: Manifest) -> None:
    """A later MINOR version may add some: they survive a resume by this one."""
    edit(tmp_path, lambda raw: (raw.update(format_version="1.9", novelty=[1]), raw["model"].update(novelty=2)))
    manifest = read_manifest(tmp_path)
    replace_manifest(tmp_path, manifest)
    raw = json.loads((tmp_path / "rollgen.json").read_text())
    assert (raw["format_version"], raw["novelty"], raw["model"]["novelty"]) == ("1.9", [1], 2)


RETRY = {"generation": 1, "started_at": "", "where": {"finish_reason": "length"}, "max_tokens": 9, "samples": 2}


def test_a_manifest_without_retries_has_none(tmp_path: Path, stored: Manifest) -> None:
    """Format 1.0 has no such key."""
    edit(tmp_path, lambda raw: raw.pop("retries"))
    assert read_manifest(tmp_path) == stored
    assert stored.retries == []


@pytest.mark.parametrize(("before", "after"), [("1.0", "1.1"), ("1.1", "1.1"), ("1.7", "1.7")])
def test_a_retry_needs_its_minor(make_manifest: MakeManifest, before: str, after: str) -> None:
    """1.0 is raised, a later MINOR stays; retries are kept in order."""
    manifest = make_manifest(format_version=before)
    retries = [Retry(**RETRY), Retry(**RETRY | {"generation": 2})]
    for retry in retries:
        manifest = manifest.with_retry(retry)
    assert (manifest.format_version, manifest.retries) == (after, retries)


DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "identity edited": (lambda raw: raw["identity"].update(top_k=9), "config_digest does not match identity"),
    "digest edited": (lambda raw: raw.update(config_digest=digest({})), "config_digest does not match identity"),
    "another format": (lambda raw: raw.update(format="other"), "not a rollgen manifest"),
    "no format": (lambda raw: raw.pop("format"), "not a rollgen manifest"),
    "later version": (lambda raw: raw.update(format_version="2.0"), "format version 2.0 is not readable here"),
    "no version": (lambda raw: raw.pop("format_version"), "format version None is not readable here"),
    "key missing": (lambda raw: raw.pop("vocab_size"), "vocab_size: Field required"),
    "wrong type": (lambda raw: raw.update(vocab_size="many"), "vocab_size: Input should be a valid integer"),
    "unknown capture": (lambda raw: raw.update(capture="guess"), "capture: Input should be 'native', 'logprobs'"),
    "retry 1 lost": (lambda raw: raw.update(retries=[RETRY | {"generation": 2}]), "retries: generations do not"),
    "nested key missing": (lambda raw: raw["attempts"][0]["engine"].pop("name"), "attempts.0.engine.name: Field requ"),
}


@pytest.mark.parametrize(("change", "expected"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_refused(tmp_path: Path, stored: Manifest, change: Callable[..., object], expected: str) -> None:
    """Each error is one line that begins with the file and says what is wrong with it."""
    edit(tmp_path, change)
    with pytest.raises(DatasetError) as raised:
        read_manifest(tmp_path)
    assert str(raised.value).startswith(f"{tmp_path / 'rollgen.json'}: {expected}")
    assert "--clean" not in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b"null"],
    ids=["empty", "torn", "list", "bytes", "deep", "null"],
)
def test_not_json_is_refused(tmp_path: Path, content: bytes) -> None:
    """Whatever is in the file, the error names it."""
    (tmp_path / "rollgen.json").write_bytes(content)
    with pytest.raises(DatasetError, match=rf"^{tmp_path / 'rollgen.json'}: not "):
        read_manifest(tmp_path)


def test_shards_without_a_manifest(tmp_path: Path, make_dataset: Callable[..., Path]) -> None:
    """They are sound, and nothing that would remove them is advised."""
    directory = make_dataset(tmp_path / "out")
    (directory / "rollgen.json").unlink()
    with pytest.raises(DatasetError, match=r"out: holds shards but no rollgen\.json; put it back from a copy: the sh"):
        read_manifest(directory)


def test_no_manifest_no_dataset(tmp_path: Path) -> None:
    """The directory is named too: it may be the wrong one."""
    with pytest.raises(DatasetError, match=f"not found; {tmp_path} is not a rollgen dataset"):
        read_manifest(tmp_path)


def test_a_disk_that_fails(
    tmp_path: Path, make_manifest: Callable[..., Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Says nothing about the manifest: nobody is told to put another one there."""
    create_manifest(tmp_path, make_manifest())

    def fail(*_: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("rollgen.format.manifest.read_regular", fail)
    with pytest.raises(
        Unreadable, match=r"rollgen\.json: this machine could not read it: .*; mend that, and try again$"
    ):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("identity", "expected"), [({"planless": True}, True), ({"planless": False}, False), ({}, False)]
)
def test_whether_there_is_a_plan(make_manifest: MakeManifest, identity: dict[str, Any], expected: bool) -> None:
    """By the value of the key: one that is there and false says that there is a plan."""
    assert make_manifest(identity=identity).is_planless is expected

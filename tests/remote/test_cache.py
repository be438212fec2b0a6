"""The cache of parts: bounded, shared by processes and threads, and never wrong."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollgen.errors import DatasetError, MissingFile, Unreadable, UsageError
from rollgen.remote.cache import PartCache, open_cache

BLOCK = 4_096
"""Bytes of a part: what a file of one byte takes, too."""


def read_part(path: Path) -> bytes:
    """A part, which says itself whether it is sound."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise MissingFile(str(path)) from None
    if not content.endswith(b"sound"):
        raise DatasetError("damaged")
    return content


class Source:
    """Makes parts, and counts them."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def get(self, cache: PartCache, key: str, *, end: bytes = b"sound") -> bytes:
        """The part `key`, of one block."""

        def fetch(path: Path) -> None:
            self.made.append(key)
            path.write_bytes(key.encode().ljust(BLOCK - len(end)) + end)

        return cache.open(key, fetch, read_part)


@pytest.fixture
def source() -> Source:
    """Where parts come from."""
    return Source()


@pytest.fixture
def cache(tmp_path: Path) -> PartCache:
    """Holds eight parts."""
    return open_cache(tmp_path / "cache", 8 * BLOCK)


def parts(cache: PartCache) -> list[Path]:
    return [path for path in cache.directory.rglob("*") if path.is_file() and len(path.name) == 64]


def taken(cache: PartCache) -> int:
    return sum(path.stat().st_blocks * 512 for path in parts(cache))


def test_a_part_is_fetched_once(tmp_path: Path, cache: PartCache, source: Source) -> None:
    """Then it is there, for a cache that was pickled too, and one of another limit."""
    contents = {
        source.get(each, "a") for each in (cache, pickle.loads(pickle.dumps(cache)), open_cache(tmp_path / "cache"))
    }
    assert len(contents) == 1
    assert source.made == ["a"]
    assert cache.directory.stat().st_mode & 0o77 == 0


def test_the_limit_is_kept(cache: PartCache, source: Source) -> None:
    """After each fetch; those used last stay."""
    for number in range(40):
        assert source.get(cache, str(number)).startswith(str(number).encode())
        source.get(cache, "0")
        assert taken(cache) <= cache.max_bytes
        time.sleep(0.001)  # times of use differ
    assert source.made.count("0") == 1
    assert len(source.made) == 40
    source.get(cache, "39")
    assert len(source.made) == 40


@pytest.mark.parametrize("max_bytes", [1, BLOCK])
def test_a_part_larger_than_the_limit(tmp_path: Path, source: Source, max_bytes: int) -> None:
    """It is used, and is there alone."""
    cache = open_cache(tmp_path, max_bytes)
    for key in "abab":
        source.get(cache, key)
        assert len(parts(cache)) == 1
    assert source.made == ["a", "b", "a", "b"]


def test_an_open_part_can_be_read_when_it_has_left(tmp_path: Path, source: Source) -> None:
    """Its room is given back when it is closed."""
    cache = open_cache(tmp_path, BLOCK)
    with cache.open("a", lambda path: path.write_bytes(b"here") and None, lambda path: path.open("rb")) as file:
        source.get(cache, "b")
        assert len(parts(cache)) == 1
        assert file.read() == b"here"


@pytest.mark.parametrize("content", [b"", b"short", None], ids=["empty", "other", "gone"])
def test_damage_is_fetched_again(cache: PartCache, source: Source, content: bytes | None) -> None:
    """So is what somebody has removed."""
    source.get(cache, "a")
    (path,) = parts(cache)
    path.unlink() if content is None else path.write_bytes(content)
    assert source.get(cache, "a").startswith(b"a ")
    assert source.made == ["a", "a"]


def test_damage_at_the_source(cache: PartCache, source: Source) -> None:
    """An error, and nothing is kept."""
    with pytest.raises(DatasetError, match="damaged"):
        source.get(cache, "a", end=b"")
    assert not parts(cache)
    assert source.get(cache, "a")


def test_drop(cache: PartCache, source: Source) -> None:
    """A part that turned out to be damaged further on."""
    source.get(cache, "a")
    assert cache.drop("a")
    assert not cache.drop("a")
    source.get(cache, "a")
    assert source.made == ["a", "a"]


def test_what_a_machine_cannot_read_is_no_damage(cache: PartCache, source: Source) -> None:
    """The part stays."""
    source.get(cache, "a")

    def unreadable(path: Path) -> bytes:
        raise Unreadable("no memory")

    with pytest.raises(Unreadable):
        cache.open("a", lambda path: None, unreadable)
    assert len(parts(cache)) == 1


def _fetch_slowly(directory: Path, keys: str, log: Path) -> None:
    cache = PartCache(directory, 1 << 30)

    def fetch(path: Path) -> None:
        with log.open("a") as file:
            file.write(key)
        time.sleep(0.05)
        path.write_bytes(b"sound")

    for key in keys:
        assert cache.open(key, fetch, read_part) == b"sound"


@pytest.mark.parametrize("kind", ["processes", "threads"])
def test_one_fetches_and_others_wait(tmp_path: Path, cache: PartCache, kind: str) -> None:
    """Four at once want the same parts, in other orders."""
    make: Callable[..., multiprocessing.Process | threading.Thread] = (
        multiprocessing.get_context("fork").Process if kind == "processes" else threading.Thread
    )
    log = tmp_path / "log"
    workers = [make(target=_fetch_slowly, args=(cache.directory, keys, log)) for keys in ("abcd", "bcda", "dcba", "aa")]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(log.read_text()) == list("abcd")
    if kind == "processes":
        assert [worker.exitcode for worker in workers] == [0] * 4


def _fetch_and_die(directory: Path) -> None:
    def fetch(path: Path) -> None:
        path.write_bytes(bytes(50 * BLOCK))
        os._exit(9)

    PartCache(directory, 8 * BLOCK).open("a", fetch, read_part)


def test_what_the_dead_leave_is_removed(cache: PartCache, source: Source) -> None:
    """When the same bucket is used again, and when room is made for any other part."""
    for key in ("a", "b"):
        cache.drop("a")
        process = multiprocessing.get_context("fork").Process(target=_fetch_and_die, args=(cache.directory,))
        process.start()
        process.join()
        assert process.exitcode == 9
        (left,) = cache.directory.rglob(".tmp")
        assert left.stat().st_size == 50 * BLOCK
        for number in range(1 if key == "a" else 9):
            source.get(cache, f"{key}{number}" if key == "b" else "a")
        assert not list(cache.directory.rglob(".tmp"))


def test_a_child_that_was_forked_meanwhile(cache: PartCache, source: Source) -> None:
    """It inherits an open lock, and keeps nobody from fetching."""
    children: list[multiprocessing.Process] = []

    def fetch(path: Path) -> None:
        path.write_bytes(b"sound")
        children.append(multiprocessing.get_context("fork").Process(target=time.sleep, args=(3600,), daemon=True))
        children[0].start()

    cache.open("a", fetch, read_part)
    cache.drop("a")
    source.get(cache, "a")
    assert children[0].is_alive()
    children[0].kill()
    children[0].join()


def test_a_counter_that_is_nonsense(cache: PartCache, source: Source) -> None:
    """The files are counted then."""
    for number in range(6):
        source.get(cache, str(number))
    for content in (b"", b"-1", b"none", b"999999999999"):
        (cache.directory / ".lock").write_bytes(content)
        source.get(cache, f"after {content!r}")
        assert taken(cache) <= cache.max_bytes
        assert int((cache.directory / ".lock").read_bytes()) == taken(cache)


def test_a_directory_that_cannot_be_written(tmp_path: Path, cache: PartCache, source: Source) -> None:
    """A usage error at the start; later the machine is to blame, and not a shard."""
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"file/rollgen/parts: cannot keep what is fetched there: .*disk_cache"):
        open_cache(tmp_path / "file")
    cache.directory.rename(tmp_path / "away")
    cache.directory.touch()
    with pytest.raises(Unreadable, match=r"cannot keep what is fetched here: Not a directory; .* another disk_cache"):
        source.get(cache, "a")


def test_the_default_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where caches belong."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert open_cache().directory == tmp_path / "rollgen" / "parts"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert open_cache().directory == tmp_path / "home" / ".cache" / "rollgen" / "parts"


def test_files_that_are_not_its_own(tmp_path: Path, source: Source) -> None:
    """What a user has in the directory stays, whatever it is called, and so does what is no part inside the cache."""
    cache = open_cache(tmp_path, 8 * BLOCK)
    source.get(cache, "a")
    (part,) = parts(cache)
    for directory in (tmp_path, cache.directory):
        for name in (
            "ml/weights.bin",
            "ab/notes",
            f"ab/{'0' * 64}/inside",
            f"abc/{part.name}",
            f"zz/{part.name}",
            "xy",
        ):
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(2 * BLOCK))
    (part.parent / ("f" * 64)).symlink_to(tmp_path / "xy")
    mine = {path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size == 2 * BLOCK}
    assert len(mine) == 13
    for number in range(40):
        source.get(cache, str(number))
    assert all(path.exists() for path in mine)
    assert not part.exists()
    assert 5 < len(set(parts(cache)) - mine) <= 8
    assert {path.parent.parent for path in tmp_path.rglob(".lock")} == {cache.directory, cache.directory.parent}
    assert not (cache.directory / "ml/.lock").exists()


@pytest.mark.parametrize(
    ("directory", "max_bytes", "problem"),
    [
        ("", 1, "disk_cache must be a directory of this machine, not ''"),
        ("s3://bucket/cache", 1, "disk_cache must be a directory of this machine, not 's3://bucket/cache'"),
        ("file://host/cache", 1, "file://host/cache: not the URL of a local file"),
        (".", -5, "disk_cache_bytes must be a whole number, 1 or more, not -5"),
        (".", 0, "disk_cache_bytes must be a whole number, 1 or more, not 0"),
        (".", 1.5, "disk_cache_bytes must be a whole number, 1 or more, not 1.5"),
        (".", True, "disk_cache_bytes must be a whole number, 1 or more, not True"),
        (".", None, "disk_cache_bytes must be a whole number, 1 or more, not None"),
    ],
)
def test_settings_that_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, directory: str, max_bytes: Any, problem: str
) -> None:
    """In one line, and nothing is made."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as refused:
        open_cache(directory, max_bytes)
    assert str(refused.value).startswith(problem)
    assert not list(tmp_path.iterdir())


def test_a_directory_by_its_url(tmp_path: Path) -> None:
    """`file://` is a path wherever one is taken."""
    assert open_cache(f"file://{tmp_path}").directory == tmp_path / "rollgen/parts"


@pytest.mark.parametrize("kind", ["file", "directory", "temporary", "link"])
def test_what_is_in_the_way(cache: PartCache, source: Source, kind: str) -> None:
    """Told in one line with its place, and left as it is."""
    source.get(cache, "a")
    (part,) = parts(cache)
    shutil.rmtree(part.parent)
    place = {"file": part.parent, "temporary": part.with_name(".tmp")}.get(kind, part)
    if kind == "file":
        place.touch()
    elif kind == "link":
        place.parent.mkdir()
        place.symlink_to("/dev/null")
    else:
        place.mkdir(parents=True)
    with pytest.raises(Unreadable, match=rf"^{part.parent}.*name another disk_cache$"):
        source.get(cache, "a")
    assert os.path.lexists(place)
    assert source.made == ["a"]


def test_a_directory_that_is_removed(cache: PartCache, source: Source) -> None:
    """It is made again, as private as before, and the part is fetched again."""
    source.get(cache, "a")
    shutil.rmtree(cache.directory.parent)
    assert source.get(cache, "a")
    assert source.made == ["a", "a"]
    assert cache.directory.stat().st_mode & 0o77 == 0


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("times", [1, 99])
def test_a_directory_that_is_removed_during_a_fetch(cache: PartCache, when: str, times: int) -> None:
    """Before or after the part is written: then it is fetched again, but not for ever."""
    made = []

    def fetch(path: Path) -> None:
        made.append(path)
        if when == "after":
            path.write_bytes(b"sound")
        if len(made) <= times:
            shutil.rmtree(cache.directory)
        if when == "before":
            path.write_bytes(b"sound")

    if times == 1:
        assert cache.open("a", fetch, read_part) == b"sound"
        assert len(made) == 2
        assert len(parts(cache)) == 1
    else:
        with pytest.raises(Unreadable, match=rf"^{cache.directory}: somebody removes what is fetched"):
            cache.open("a", fetch, read_part)


def test_another_cache_in_its_place(cache: PartCache) -> None:
    """Removed and made again by another process meanwhile, which works under the same names: not to be mixed up."""
    made = []

    def fetch(path: Path) -> None:
        made.append(path)
        path.write_bytes(b"sound")
        if len(made) == 1:
            shutil.rmtree(cache.directory)
            path.parent.mkdir(parents=True)
            path.with_name(".lock").touch()
            path.write_bytes(b"half of what the other one fet")

    assert cache.open("a", fetch, read_part) == b"sound"
    assert len(made) == 2


def test_a_full_disk(cache: PartCache) -> None:
    """The machine's fault, with the place, the reason and the way out; nothing is left."""

    def fetch(path: Path) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(Unreadable, match=rf"^{cache.directory}: cannot keep .*: No space left on device; make room"):
        cache.open("a", fetch, read_part)
    assert not list(cache.directory.rglob(".tmp"))

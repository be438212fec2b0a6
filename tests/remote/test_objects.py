"""Objects: created once, uploaded and verified, read in part; errors in our words, and no secret in them."""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
from collections.abc import Callable
from datetime import UTC, datetime, tzinfo
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from uuid import uuid4

import pytest
from fsspec.implementations.memory import MemoryFile
from fsspec.registry import _registry
from models.disk import largest_file

from rollgen.errors import DatasetError, MissingFile, RollgenError, Unreadable, Unsent, UsageError
from rollgen.remote.objects import ObjectStore, is_url, local_path, output_store


@pytest.fixture(params=["s3", "memory"])
def store(request: pytest.FixtureRequest) -> ObjectStore:
    """An empty one; it has been pickled, as those that workers get."""
    root = request.getfixturevalue("bucket") if request.param == "s3" else "memory://bucket"
    return pickle.loads(pickle.dumps(ObjectStore(f"{root}/{uuid4().hex}/")))


def written(path: Path, content: bytes) -> tuple[Path, str]:
    path.write_bytes(content)
    return path, hashlib.sha256(content).hexdigest()


def test_what_is_a_url() -> None:
    """Whatever has a scheme, be it misspelt, but file:// is a path."""
    assert all(map(is_url, ("s3://b/run", "gs://b", "memory://b/run", "S3://b", Path("s3://b/run"), "zip::s3://b/run")))
    assert not any(map(is_url, ("run", "/data/run", "file:///data/run", "./s3:/b", "C:\\run", "C:/run", "a::b", "a:b")))
    assert local_path("file:///data/my%20run") == Path("/data/my run")
    assert local_path("FILE://localhost/run") == Path("/run")
    assert local_path("run") == Path("run")


@pytest.mark.parametrize("url", ["file://", "file://data/run", "file:///run?x", "file:///run#1"])
def test_local_urls_that_are_refused(url: str) -> None:
    """What would be another directory than the one meant."""
    with pytest.raises(UsageError, match="not the URL of a local file; write file:///path, or the path"):
        local_path(url)


def test_a_scheme_is_in_small_letters() -> None:
    """However it was given, so that all means of naming a dataset come to the same name."""
    assert ObjectStore("S3://Bucket/Run/").url == "s3://Bucket/Run"
    assert ObjectStore("Memory://x").list() == {}


def test_created_once(store: ObjectStore) -> None:
    """The first content stays; the same content again is a request that was sent again."""
    assert store.create("journal/w0.lock", b"one")
    assert store.create("journal/w0.lock", b"one")
    assert not store.create("journal/w0.lock", b"two")
    assert store.read("journal/w0.lock", 3) == b"one"
    store.replace("journal/w0.lock", b"three")
    assert store.read("journal/w0.lock", 5) == b"three"
    store.delete("journal/w0.lock")
    store.delete("journal/w0.lock")
    assert not store.exists("journal/w0.lock")
    assert not store.exists("journal")


def test_listed_anew_each_time(store: ObjectStore) -> None:
    """Names are relative and sorted, with sizes; what came since is there, through another connection too."""
    assert store.list() == store.list("data") == {}
    store.create("data/b", b"12")
    store.create("rollgen.json", b"1")
    assert store.list() == {"data/b": 2, "rollgen.json": 1}
    ObjectStore(store.url).create("data/a", b"")
    assert store.list("data") == {"data/a": 0, "data/b": 2}
    assert (store.size("data/a"), store.read("data/a", 10)) == (0, b"")


def test_folders_are_no_objects(store: ObjectStore) -> None:
    """Consoles make empty ones that end in a slash; an object with content is one, whatever it is called."""
    system, root = store._connect()
    for name in ("", "data/", "data/deep/"):
        put(system, f"{root}/{name}", b"")
    store.create("data/a", b"")
    put(system, f"{root}/odd/", b"content")
    assert store.list() == {"data/a": 0, "odd/": 7}
    assert store.list("data") == {"data/a": 0}


def put(system: Any, path: str, content: bytes) -> None:
    """An object of exactly this name, which fsspec's own ways would shorten."""
    if hasattr(system, "call_s3"):
        bucket, _, key = path.partition("/")
        system.call_s3("put_object", Bucket=bucket, Key=key, Body=content)
    else:
        system.store[path] = MemoryFile(system, path, content)


def test_uploaded_and_downloaded(store: ObjectStore, tmp_path: Path) -> None:
    """A file arrives as it is; again it is the same one, and another one is refused and stays as it was."""
    path, sha256 = written(tmp_path / "shard", os.urandom(100_000))
    store.upload(path, "data/shard", sha256)
    store.upload(path, "data/shard", sha256)
    assert store.sha256("data/shard", 100_000) == sha256
    other, other_sha256 = written(tmp_path / "other", os.urandom(100_000))
    with pytest.raises(DatasetError, match="is there already and is another file"):
        store.upload(other, "data/shard", other_sha256)
    store.download("data/shard", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == path.read_bytes()
    assert store.read_range("data/shard", 99_990, 100_000) == path.read_bytes()[99_990:]
    assert store.read_range("data/shard", 5, 5) == b""
    assert {path.name for path in tmp_path.iterdir()} == {"copy", "other", "shard"}


def test_a_full_disk(store: ObjectStore, tmp_path: Path) -> None:
    """Is not the storage's fault: the error is the disk's, names a file there, and leaves nothing."""
    size = 4 << 20
    store.create("big", bytes(size))
    with pytest.raises(OSError, match="File too large") as full, largest_file(size // 2):
        store.download("big", tmp_path / "copy")
    assert Path(full.value.filename).parent == tmp_path
    assert not any(tmp_path.iterdir())


def test_a_local_file_that_is_gone(store: ObjectStore, tmp_path: Path) -> None:
    """Nor is that."""
    with pytest.raises(FileNotFoundError) as gone:
        store.put(tmp_path / "gone", "x")
    assert gone.value.filename == str(tmp_path / "gone")


def test_age(store: ObjectStore) -> None:
    """In seconds, of what was written just now."""
    store.create("x", b"")
    assert -5 < store.age("x") < 60


def test_age_that_is_told_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time that passes until the answer is here, as this process is stopped, is no part of it."""

    class Clock(datetime):
        seconds = 0.0

        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Clock:
            return cls.fromtimestamp(cls.seconds, tz)

    class Storage:
        def invalidate_cache(self) -> None: ...

        def modified(self, path: str) -> Clock:
            written = Clock.now(UTC)
            Clock.seconds += 2000
            return written

    monkeypatch.setattr("rollgen.remote.objects.datetime", Clock)
    monkeypatch.setattr(ObjectStore, "_connect", lambda store: (Storage(), "run"))
    assert ObjectStore("memory://run").age("x") == 0.0


def test_a_file_that_has_changed_is_not_sent(store: ObjectStore, tmp_path: Path) -> None:
    """Its hash is that of its journal line, or it stays."""
    path, _ = written(tmp_path / "shard", b"rotten")
    with pytest.raises(DatasetError, match="damaged since it was committed"):
        store.upload(path, "data/shard", "0" * 64)
    assert store.list() == {}


def test_an_object_without_a_telling_tag_is_read_back(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encrypted objects and those sent in parts have no MD5: what arrived damaged is removed again, and told."""
    path, sha256 = written(tmp_path / "shard", os.urandom(1000))
    monkeypatch.setattr("rollgen.remote.objects._told_md5", lambda info: set())
    store.upload(path, "data/shard", sha256)
    monkeypatch.setattr(ObjectStore, "read_range", lambda self, name, start, stop: bytes(stop - start))
    with pytest.raises(Unsent, match="arrived damaged"):
        store.upload(path, "data/other", sha256)
    assert store.list() == {"data/shard": 1000}


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda store, path: store.read("x", 9), MissingFile, "/x: not there"),
        (lambda store, path: store.size("x"), MissingFile, "/x: not there"),
        (lambda store, path: store.read_range("x", 0, 1), MissingFile, "/x: not there"),
        (lambda store, path: store.download("x", path), MissingFile, "/x: not there"),
        (lambda store, path: store.read("big", 9), DatasetError, "larger than 9 bytes"),
        (lambda store, path: store.read_range("big", 5, 11), DatasetError, "ends before byte 11"),
    ],
    ids=["read", "size", "range", "download", "larger", "shorter"],
)
def test_what_is_not_there(
    store: ObjectStore, tmp_path: Path, call: Callable[..., Any], error: type[RollgenError], says: str
) -> None:
    """Errors name the URL, and nothing is left of a download."""
    store.create("big", bytes(10))
    with pytest.raises(error, match=f"{store.url}.*{says}"):
        call(store, tmp_path / "copy")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s3://user:hunter2@bucket/run", "with a user, a query or a fragment"),
        ("https://host/run?sig=hunter2", "with a user, a query or a fragment"),
        ("s3://bucket/run#hunter2", "with a user, a query or a fragment"),
        ("s3://bucket//run", "empty part"),
        ("s3://bucket/../run", "empty part"),
        ("bucket/run", "not a URL of object storage"),
        ("s3://", r"names no bucket; write s3://BUCKET/run"),
        ("GS:///run", r"names no bucket; write GS://BUCKET/run"),
        ("abfs:///a/b", r"names no bucket; write abfs://BUCKET/a/b"),
        ("s3:/user:hunter2@bucket/run", r"^s3:/\.\.\.: this URL has lost a slash; write s3://, or \./s3:/"),
        ("simplecache::s3://user:hunter2@bucket/run", r"^simplecache::\.\.\.: a chain of storages is refused"),
        ("s3://bucket/a\nb", "has a line break or another invisible character"),
    ],
)
def test_urls_that_are_refused(url: str, says: str) -> None:
    """Before anything is asked for; what may be a secret is not shown."""
    with pytest.raises(UsageError, match=says) as refused:
        ObjectStore(url)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("gs://bucket/run", "pip install gcsfs"),
        ("abfs://bucket/run", "pip install adlfs"),
        ("abfss://bucket/run", "pip install adlfs"),  # which makes this scheme known
        ("nope://bucket/run", "is nope:// right?"),
        ("dir://x", "is dir:// right?"),
        ("zip://a.zip", "is zip:// right?"),
        ("ftp://127.0.0.1:9/x", "Connection refused; is ftp:// right?"),
        ("reference://x", "is reference:// right?"),
    ],
)
def test_storages_that_cannot_be_used(url: str, says: str) -> None:
    """The error says what to install, or what the storage said, in whatever way it did."""
    with pytest.raises(UsageError, match=says) as refused:
        ObjectStore(url).list()
    assert "\n" not in str(refused.value)


def test_without_s3fs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package itself is named, which is on every index."""
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(_registry, "s3", raising=False)
    with pytest.raises(UsageError, match=r"pip install s3fs$"):
        ObjectStore("s3://bucket/run").list()


@pytest.mark.parametrize("scheme", ["s3", "S3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory"])
def test_where_datasets_can_be_written(scheme: str) -> None:
    """Storages that create an object only where there is none."""
    assert output_store(f"{scheme}://bucket/run").url == f"{scheme.lower()}://bucket/run"


@pytest.mark.parametrize(
    "scheme", ["http", "https", "ftp", "sftp", "hdfs", "hf", "dir", "zip", "local", "data", "nope"]
)
def test_where_they_cannot(scheme: str) -> None:
    """Told before anything is asked for, with those that can."""
    with pytest.raises(
        UsageError, match=f"^{scheme}://host/run: no dataset can be written there.*s3://, .*gs://, .*az:"
    ):
        output_store(f"{scheme}://host/run")


def test_a_web_server(tmp_path: Path) -> None:
    """Is listed, with sizes, and read; one that knows no ranges says so, and nothing is written."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a b.jsonl").write_bytes(b"content")
    handler = partial(SilentHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever).start()
        store = ObjectStore(f"http://127.0.0.1:{server.server_port}")
        try:
            assert list(store.list().values()) == [7]
            assert store.read("data/a%20b.jsonl", 7) == b"content"
            assert not store.exists("data/b")
            with pytest.raises(Unreadable, match="comes whole, whatever part is asked for"):
                store.read_range("data/a%20b.jsonl", 2, 4)
            with pytest.raises(DatasetError, match="cannot be written"):
                store.create("x", b"")
        finally:
            server.shutdown()


class SilentHandler(SimpleHTTPRequestHandler):
    """Python's own server of a directory."""

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing."""


def test_a_bucket_that_is_missing(bucket: str) -> None:
    """Looks empty, and cannot be written."""
    with pytest.raises(MissingFile, match="does the bucket exist"):
        ObjectStore("s3://no-such-bucket/run").create("x", b"")


def test_credentials_that_are_missing(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake in the environment, not damage."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    with pytest.raises(UsageError, match="credentials in the environment"):
        ObjectStore(f"{bucket}/run").create("x", b"")


def test_storage_that_does_not_answer(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of what is there; a secret of the environment is not in the error, be it in an answer."""
    import s3fs

    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("STORAGE_TOKEN", "hunter2hunter2")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9/hunter2hunter2")  # nobody is there
    store = ObjectStore(f"{bucket}/run")
    with pytest.raises(Unreadable, match="cannot be listed") as refused:
        store.list()
    assert "hunter2" not in str(refused.value)
    with pytest.raises(Unreadable, match="cannot be read"):
        store.exists("x")
    with pytest.raises(Unsent, match="cannot be written"):
        store.replace("x", b"")


def test_each_process_has_a_connection_of_its_own(bucket: str) -> None:
    """A store that was used is used again after a fork, where the parent's connection would hang."""
    store = ObjectStore(f"{bucket}/{uuid4().hex}")
    store.create("parent", b"")
    child = os.fork()
    if child == 0:
        store.create("child", b"")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert store.list().keys() == {"parent", "child"}

"""Objects below one URL: read, listed, created exclusively, uploaded and verified. All that is known of fsspec is here.

A name is relative to the URL and has `/` between its parts. An object appears whole or not at all, and is seen by
everyone from then on: S3, GCS and Azure keep that promise. `create` and `upload` never overwrite: where two want the
same name, one of them gets it.

Settings and credentials come from where the storage's own tools look (for S3 `AWS_*` and `~/.aws`, then `FSSPEC_S3_*`),
never from the URL. What a storage says when it fails is shown without secrets. Nothing is cached. A store is cheap,
can be pickled, and is right after a fork: each process makes its own connection when it first needs one.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from rollgen.errors import DatasetError, MissingFile, RollgenError, Unreadable, Unsent, UsageError
from rollgen.inert import Discretion, brief

_LIKE_A_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)(:/|::(?=.*:/))")
"""Also what lost a slash, and chains as fsspec has them, which are refused: a directory would be made of either."""
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_S3, _GCS, _AZURE = "s3fs", "gcsfs", "adlfs"
_BUCKETS: Final = {
    **{"s3": _S3, "s3a": _S3, "gs": _GCS, "gcs": _GCS, "az": _AZURE, "abfs": _AZURE, "abfss": _AZURE},
    "memory": "fsspec",
}
"""What to install for the schemes of storages that create an object only where there is none, as writers need it."""
_USAGE: Final = frozenset(
    {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "DefaultCredentialsError"}
    | {"ParamValidationError"}  # no name of a bucket
)
"""Classes of botocore and google.auth, by name: neither package may be there."""
_LOCAL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})
"""What only a disk says, and when a file is filled without its name."""
_CHUNK: Final = 8 << 20
THREADS: Final = 16
"""Requests at a time, where there are many small ones: they mostly wait."""


def for_each(call: Callable[[str], object], names: Iterable[str]) -> None:
    """`call(name)` for all of them, several at a time. Raises what the first one that fails raises."""
    with ThreadPoolExecutor(THREADS, "rollgen-remote") as threads:
        for _ in threads.map(call, names):
            pass


def place_name(place: str | os.PathLike[str]) -> str:
    """The text of a path or a URL. Raises UsageError for what is neither."""
    name = os.fspath(place) if isinstance(place, str | os.PathLike) else place
    if not isinstance(name, str):
        raise UsageError(f"a directory is given as its path or as its URL, not as {type(name).__name__}")
    return name


def is_url(text: str | os.PathLike[str]) -> bool:
    """Whether this names something in object storage, or looks like it. `file://` does not: see `local_path`."""
    name = place_name(text)
    return _LIKE_A_URL.match(name) is not None and not name.lower().startswith("file://")


def local_path(text: str | os.PathLike[str]) -> Path:
    """The path that this is, or that a `file://` URL means. Raises UsageError for one that means none."""
    name = place_name(text)
    if not name.lower().startswith("file://"):
        return Path(name)
    parts = urlsplit(name)
    if parts.netloc not in ("", "localhost") or parts.path in ("", "/") or parts.query or parts.fragment:
        raise UsageError(f"{name}: not the URL of a local file; write file:///path, or the path")
    return Path(unquote(parts.path))


def output_store(url: str) -> ObjectStore:
    """What lies below a URL where a dataset can be written. Raises UsageError where none can: see `_BUCKETS`."""
    store = ObjectStore(url)
    if store.url.partition(":")[0] not in _BUCKETS:
        known = ", ".join(f"{scheme}://" for scheme in _BUCKETS if scheme != "memory")
        raise UsageError(
            f"{store.url}: no dataset can be written there, where nothing keeps one writer from overwriting what "
            f"another has written; give a directory, or a URL of {known}"
        )
    return store


class ObjectStore:
    """What lies below a URL. Raises UsageError for a URL that no dataset can have, or one with credentials in it.

    Methods raise MissingFile for an object (or a bucket) that is not there, Unreadable when the storage does not
    answer or refuses to, Unsent when something could not be written or removed, and UsageError when the package or the
    credentials for this storage are missing. All but the last may pass; other DatasetErrors do not.
    """

    def __init__(self, url: str) -> None:
        scheme = _check_url(url)
        self.url = scheme.lower() + url[len(scheme) :].rstrip("/")
        self._made: tuple[int, Any, str] | None = None
        """The process, its filesystem, and the root there."""

    def __reduce__(self) -> tuple[type[ObjectStore], tuple[str]]:
        return (ObjectStore, (self.url,))

    def __repr__(self) -> str:
        return f"ObjectStore({self.url!r})"

    @property
    def endpoint(self) -> str:
        """Which storage it is, of those where this URL means something: a host, or empty where the URL says it all.

        Amazon's is the same in all regions: no two of its buckets have one name.
        """
        system, _ = self._connect()
        with self._spoken("", "be reached"):
            client = getattr(system, "s3", None)
            told = getattr(system, "account_url", "") if client is None else client.meta.endpoint_url
        host = urlsplit(str(told or "")).netloc
        return "".join(host.partition("amazonaws.com")[1:]) or host

    def list(self, prefix: str = "") -> dict[str, int]:
        """Size of every object in the folder `prefix`, at any depth, by name; sorted. Empty when there is none.

        Objects that stand for a folder, empty and with a name that ends in `/`, are left out: consoles make them.
        """
        system, root = self._connect()
        with self._spoken(prefix, "be listed"):
            system.invalidate_cache()
            found = system.find(self._path(prefix) if prefix else root, detail=True)
        above = root.lstrip("/") + "/"
        paths = {path.lstrip("/"): info for path, info in found.items() if info["type"] == "file"}
        named = {path.removeprefix(above): info for path, info in sorted(paths.items()) if path.startswith(above)}
        sizes = {name: self._size(name, info) for name, info in named.items() if name}
        return {name: size for name, size in sizes.items() if size or not name.endswith("/")}

    def exists(self, name: str) -> bool:
        """Whether there is an object of this name."""
        try:
            self.size(name)
        except MissingFile:
            return False
        return True

    def size(self, name: str) -> int:
        """Bytes of an object."""
        return self._size(name, self._info(name))

    def read(self, name: str, max_bytes: int) -> bytes:
        """All of a small object. Raises DatasetError for one that is larger."""
        system, _ = self._connect()
        size = self.size(name)
        with self._spoken(name, "be read"):
            content: bytes = system.cat_file(self._path(name)) if size <= max_bytes else b""
        if max(size, len(content)) > max_bytes:
            raise DatasetError(f"{self._place(name)}: larger than {max_bytes:,} bytes, which no such object is")
        return content

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop` of an object. Raises DatasetError when it does not have them all."""
        if start == stop:
            return b""
        system, _ = self._connect()
        with self._spoken(name, "be read"):
            content: bytes = system.cat_file(self._path(name), start=start, end=stop)
        if len(content) > stop - start:
            raise Unreadable(
                f"{self._place(name)}: comes whole, whatever part is asked for; copy it here, and read that"
            )
        if len(content) < stop - start:
            raise DatasetError(f"{self._place(name)}: ends before byte {stop}: it is not what was committed")
        return content

    def sha256(self, name: str, size: int) -> str:
        """Of the first `size` bytes of an object, which are read. Raises DatasetError when it has fewer."""
        sha256 = hashlib.sha256()
        for start in range(0, size, _CHUNK):
            sha256.update(self.read_range(name, start, min(size, start + _CHUNK)))
        return sha256.hexdigest()

    def age(self, name: str) -> float:
        """Seconds since an object was written, as far as this machine's clock agrees with that of the storage.

        0.0 where the storage does not say.
        """
        system, _ = self._connect()
        with self._spoken(name, "be read"):
            system.invalidate_cache()
            asked = datetime.now(UTC)  # before: this process may be stopped until the answer is here
            try:
                written = system.modified(self._path(name))
            except NotImplementedError:
                return 0.0
        if not isinstance(written, datetime):
            return 0.0
        return (asked - (written if written.tzinfo else written.replace(tzinfo=UTC))).total_seconds()

    def create(self, name: str, content: bytes) -> bool:
        """Make an object, unless there is one: False then.

        True also when that has this very content, because a request whose answer is lost is sent again. Content that
        is to be somebody's must therefore be unique.
        """
        system, _ = self._connect()
        try:
            with self._spoken(name, "be written", exclusive=True):
                system.pipe_file(self._path(name), content, mode="create")
        except FileExistsError:
            return self._holds(name, content)
        except DatasetError:
            if self.exists(name):  # two at once: some storages call that a conflict
                return self._holds(name, content)
            raise
        return True

    def replace(self, name: str, content: bytes) -> None:
        """Make an object, in place of the one that there may be."""
        system, _ = self._connect()
        with self._spoken(name, "be written"):
            system.pipe_file(self._path(name), content)

    def put(self, path: Path, name: str) -> None:
        """Make an object of a local file, in place of the one that there may be. Raises OSError as `download` does."""
        system, _ = self._connect()
        with self._spoken(name, "be written", local=path):
            system.put_file(str(path), self._path(name))

    def upload(self, path: Path, name: str, sha256: str) -> None:
        """Make an object of a local file that has this SHA-256, and see that it is what was sent.

        Where the same object is there already, that is it. Raises DatasetError when another one is, or the file is
        damaged; OSError as `download` does.
        """
        size, digest, md5 = _digests(path)
        if digest != sha256:
            raise DatasetError(f"{path}: its SHA-256 is not the journal's: damaged since it was committed")
        system, _ = self._connect()
        created = True
        try:
            with self._spoken(name, "be written", exclusive=True, local=path):
                system.put_file(str(path), self._path(name), mode="create")
        except FileExistsError:
            created = False
        if self._is_stored(name, size, md5, sha256):
            return
        if created:
            self.delete(name)
            raise Unsent(f"{self._place(name)}: arrived damaged; continue with --resume, which sends it again")
        raise DatasetError(f"{self._place(name)}: is there already and is another file; is a second run writing there?")

    def download(self, name: str, path: Path) -> None:
        """Copy an object to `path`, where it appears whole. Raises OSError, with a path, for the local disk."""
        system, _ = self._connect()
        descriptor, temporary = tempfile.mkstemp(prefix=f".tmp-{path.name}-", dir=path.parent)
        os.close(descriptor)
        try:
            with self._spoken(name, "be read", local=Path(temporary)):
                system.get_file(self._path(name), temporary)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    def delete(self, name: str) -> None:
        """Remove an object, if there is one."""
        system, _ = self._connect()
        with suppress(MissingFile), self._spoken(name, "be removed"):
            system.rm_file(self._path(name))

    def _connect(self) -> tuple[Any, str]:
        """This process's filesystem, and the root there."""
        if self._made is None or self._made[0] != os.getpid():
            self._made = (os.getpid(), *_filesystem(self.url))
        return self._made[1:]

    def _path(self, name: str) -> str:
        return f"{self._connect()[1]}/{name}"

    def _place(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    def _info(self, name: str) -> dict[str, Any]:
        system, _ = self._connect()
        with self._spoken(name, "be read"):
            system.invalidate_cache()
            info: dict[str, Any] = system.info(self._path(name))
            if info["type"] != "file":
                raise FileNotFoundError
        return info

    def _size(self, name: str, info: dict[str, Any]) -> int:
        """Bytes of an object; listings of web servers do not say."""
        size = info["size"] if info["size"] is not None else self._info(name)["size"]
        if size is None:
            raise Unreadable(
                f"{self._place(name)}: the server does not say how large it is; copy it here, and read that"
            )
        return int(size)

    def _holds(self, name: str, content: bytes) -> bool:
        try:
            return self.size(name) == len(content) and self.read(name, len(content)) == content
        except MissingFile:  # it was there just now
            return False

    def _is_stored(self, name: str, size: int, md5: str, sha256: str) -> bool:
        """Whether the object is this file: by the MD5 that storages tell of an object sent in one piece, or read back.

        An MD5 that differs proves nothing: encrypted objects and those sent in parts (s3fs: from 100 MiB) have other
        tags.
        """
        info = self._info(name)
        if self._size(name, info) != size:
            return False
        return md5 in _told_md5(info) or self.sha256(name, size) == sha256

    @contextmanager
    def _spoken(self, name: str, what: str, *, exclusive: bool = False, local: Path | None = None) -> Iterator[None]:
        """Turn whatever the storage raises into one line. With `exclusive`, FileExistsError passes; with `local`, what
        is about that file does."""
        try:
            yield
        except Exception as error:
            if isinstance(error, RollgenError) or (exclusive and isinstance(error, FileExistsError)):
                raise
            if local is not None and isinstance(error, OSError) and _is_about(error, local):
                raise
            if isinstance(error, FileNotFoundError):
                place = self._place(name)
                raise MissingFile(f"{place}: not there; is the URL right, and does the bucket exist?") from None
            kind: type[RollgenError] = Unsent if what in ("be written", "be removed") else Unreadable
            if type(error).__name__ in _USAGE:
                kind = UsageError
            raise kind(
                f"{self._place(name)}: cannot {what}: {_reason(error)}; see to the connection and to the storage's "
                "credentials in the environment, then try again"
            ) from error


def _is_about(error: OSError, path: Path) -> bool:
    """Whether the disk failed that this file is on, and not the storage. The error names the file from now on."""
    if error.filename is None and error.errno in _LOCAL:
        error.filename = str(path)
    return bool(error.filename == str(path))


def _check_url(url: str) -> str:
    """The scheme. Raises UsageError, without showing what may be a secret."""
    scheme = _SCHEME.match(url)
    if not url.isprintable():
        raise UsageError(f"{brief(url)}: has a line break or another invisible character in it; write it without")
    if scheme is None:
        raise UsageError(_no_url(url))
    authority, _, path = url[scheme.end() :].partition("/")
    if "@" in authority or "?" in url or "#" in url:
        raise UsageError(
            f"{scheme[0]}{authority.rpartition('@')[2].split('?')[0].split('#')[0]}: a URL with a user, a query or a "
            "fragment is refused, because it would be written down; give credentials in the environment"
        )
    if not authority and scheme[1].lower() in _BUCKETS:
        raise UsageError(f"{url}: names no bucket; write {scheme[0]}BUCKET/{path or 'run'}")
    if any(part in ("", ".", "..") for part in path.rstrip("/").split("/")) and path.strip("/"):
        raise UsageError(f"{url}: has an empty part, or . or .. in it; write it out")
    return scheme[1]


def _no_url(text: str) -> str:
    """What is wrong with a text that has no scheme."""
    like = _LIKE_A_URL.match(text)
    if like is None:
        return f"{text}: not a URL of object storage, such as s3://bucket/run"
    if like[2] == "::":
        return f"{like[0]}...: a chain of storages is refused; give the URL behind the last ::"
    return (
        f"{like[0]}...: this URL has lost a slash; write {like[1]}://, or ./{like[0]}... for a directory of this name"
    )


def _filesystem(url: str) -> tuple[Any, str]:
    """A filesystem of its own, never one that another thread or the parent of a fork uses too, and the root in it."""
    import fsspec

    scheme = url.partition(":")[0]
    try:
        system, root = fsspec.core.url_to_fs(url, skip_instance_cache=True, use_listings_cache=False)
    except Exception as error:  # each implementation has ways of its own to refuse a URL
        is_known = scheme in fsspec.available_protocols()
        if isinstance(error, ImportError) or (scheme in _BUCKETS and not is_known):
            package = _BUCKETS.get(scheme) or getattr(error, "name", None) or "what fsspec names"
            raise UsageError(
                f"{url}: {scheme}:// needs a package that is not installed: pip install {package}"
            ) from error
        raise UsageError(f"{url}: {_reason(error)}; is {scheme}:// right?") from error
    return system, root.rstrip("/")


def _reason(error: Exception) -> str:
    """What went wrong, on one line and without secrets."""
    if isinstance(error, PermissionError):
        return "access denied"
    text = " ".join(str(error).split())
    return brief(Discretion()(text)) or type(error).__name__


def _digests(path: Path) -> tuple[int, str, str]:
    """Size, SHA-256 and MD5 of a file."""
    size, sha256, md5 = 0, hashlib.sha256(), hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            size += len(chunk)
            sha256.update(chunk)
            md5.update(chunk)
    return size, sha256.hexdigest(), md5.hexdigest()


def _told_md5(info: dict[str, Any]) -> set[str]:
    """What may be the MD5 of an object, in hexadecimal: S3's ETag, Google's md5Hash."""
    told = {str(info.get("ETag", "")).strip('"')}
    with suppress(ValueError):
        told.add(base64.b64decode(str(info.get("md5Hash", ""))).hex())
    return told

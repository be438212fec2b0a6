"""Object storage for tests: an S3 server on the loopback interface, and folders of objects made from directories."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from rollgen.remote.objects import ObjectStore

BUCKET = "rollgen-test"


@contextmanager
def s3_server(port: int = 0) -> Iterator[str]:
    """The URL of a bucket, of a server in a thread; the environment leads s3fs there, in children too. Port 0 is any.

    All servers of a process, one after the other too, have the same objects.
    """
    import s3fs
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    settings = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    try:
        with pytest.MonkeyPatch.context() as environment:
            environment.setattr(s3fs.S3FileSystem, "read_timeout", 180)
            for name, value in settings.items():
                environment.setenv(name, value)
            s3fs.S3FileSystem(skip_instance_cache=True).makedirs(BUCKET, exist_ok=True)
            yield f"s3://{BUCKET}"
    finally:
        server.stop()


def send(directory: Path, root: str) -> ObjectStore:
    """All files of a directory as objects below a new folder of `root`."""
    store = ObjectStore(f"{root}/{uuid4().hex}")
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            assert store.create(path.relative_to(directory).as_posix(), path.read_bytes())
    return store

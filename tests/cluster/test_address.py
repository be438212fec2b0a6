"""Where a cluster is, and whether one answers there."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import ray

from rollgen.cluster import probe
from rollgen.cluster.address import Address, check, resolve
from rollgen.errors import EngineError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*")
"""One after the other: clusters of one machine would see each other."""


def refusal(address: Address) -> str:
    """Why there is no cluster there."""
    with pytest.raises(UsageError) as caught:
        check(address, lambda: False)
    return str(caught.value)


@pytest.mark.parametrize(
    ("given", "named", "message"),
    [
        pytest.param("ray://head:10001", "", r"--ray ray://head:10001: a client .*ray job submit", id="client"),
        pytest.param("auto", "ray://head:10001", "--ray auto: RAY_ADDRESS says ray://head:10001: a client", id="found"),
        pytest.param("head", "", "--ray head: no address; give host:port", id="no port"),
    ],
)
def test_what_is_no_address_of_a_head(monkeypatch: pytest.MonkeyPatch, given: str, named: str, message: str) -> None:
    """Told without asking anybody. A client would commit into its own file system."""
    monkeypatch.setenv("RAY_ADDRESS", named)
    with pytest.raises(UsageError, match=f"^{message}"):
        resolve(given)


def test_auto_is_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Like for Ray: also when that is to start one. An address that is given counts more."""
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert resolve("auto") == Address("auto", "head:6379", "RAY_ADDRESS")
    assert resolve("other:6379") == Address("other:6379", "other:6379")
    assert resolve("local") is None
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert resolve("auto") is None


@pytest.mark.parametrize("last", ["", "127.0.0.1:9"], ids=["none", "dead"])
def test_no_cluster_here(tmp_path: Path, last: str) -> None:
    """Neither a process but our own, as far as can be seen, nor the address of the last cluster, or only that."""
    record = tmp_path / "ray" / "ray_current_cluster"
    program = "\n".join(
        (
            "import sys",
            "from rollgen.cluster.connect import connect",
            "from rollgen.errors import UsageError",
            "import psutil",
            "psutil.PROCFS_PATH = sys.argv[1]",  # Ray looks for one among all processes of the machine
            "try: connect('auto')",
            "except UsageError as error: print(error)",
        )
    )
    (tmp_path / "proc").mkdir()
    for name in ("stat", str(os.getpid())):
        (tmp_path / "proc" / name).symlink_to(f"/proc/{name}")
    if last:
        record.parent.mkdir()
        record.write_text(last)
    ended = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "proc"],
        env=os.environ | {"RAY_TMPDIR": str(tmp_path), "RAY_ADDRESS": ""},
        capture_output=True,
        text=True,
    )
    reason = f"no cluster answers at {last} (from {record}): Connection refused" if last else "no cluster runs here"
    assert ended.stdout.startswith(f"--ray auto: {reason}"), ended.stderr
    assert "start a cluster with `ray start --head`" in ended.stdout


@pytest.mark.parametrize(
    ("place", "why"),
    [
        pytest.param("127.0.0.1:9", "Connection refused", id="nobody"),
        pytest.param("[::1]:9", "", id="nobody, IPv6"),
        pytest.param("no.such.host.invalid:6379", "", id="no such host"),
        pytest.param("127.0.0.1:port", "invalid literal", id="no number"),
    ],
)
def test_nobody_at_an_address(place: str, why: str) -> None:
    """Told at once: Ray itself would try for ever."""
    message = refusal(Address(place, place))
    assert message.startswith(f"--ray {place}: no cluster answers there: {why}")
    assert message.endswith("; give host:port of its head, auto, or local")
    assert "(from RAY_ADDRESS): " in (found := refusal(Address("auto", place, "RAY_ADDRESS")))
    assert "; unset it, give host:port of the head" in found


def test_something_else_at_an_address(local_ray: None) -> None:
    """A part of Ray that is not its head."""
    [node] = ray.nodes()
    place = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
    assert "no cluster answers there: what listens is no head (" in (message := refusal(Address(place, place)))
    assert "whose port is 6379 unless" in message


def test_silence_at_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends by itself, and at once when nobody wants to know any more: no process is left then."""
    monkeypatch.setenv("RAY_gcs_rpc_server_connect_timeout_s", "1")
    monkeypatch.setenv("RAY_py_gcs_connect_timeout_s", "1")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(EngineError, match="interrupted"):
            check(Address(place, place), lambda: True)
        assert not [child for child in psutil.Process().children() if probe.__file__ in child.cmdline()]
        assert "what listens is no head (Timed out" in refusal(Address(place, place))


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "another-token-of-thirty-two-chars"}, id="another"),
        pytest.param({"RAY_AUTH_MODE": "token", "HOME": "/nowhere"}, id="none"),
        pytest.param({"RAY_AUTH_MODE": "disabled"}, id="not sent"),
    ],
)
def test_a_cluster_that_wants_its_token(
    local_ray: None, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str]
) -> None:
    """Ray says of its own clusters, which have one, only that they do not answer."""
    address = ray.get_runtime_context().gcs_address
    check(Address(address, address), lambda: False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    message = refusal(Address(address, address))
    assert message.startswith(f"--ray {address}: the cluster there wants its token: ")
    assert "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or" in message

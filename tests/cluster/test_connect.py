"""Joining a cluster: what is in the way is told within seconds, and who gives up is let go."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import ray
from models.gates import gate

from rollgen.cluster.connect import connect
from rollgen.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*")
"""One after the other: clusters of one machine would see each other."""


def test_a_cluster_that_was_joined_before_is_not_left(local_ray: None) -> None:
    """It is its user's."""
    connect("local").close()
    assert ray.is_initialized()


def test_who_gives_up_is_let_go_whatever_ray_does(local_ray: None) -> None:
    """The head answers when it is asked whether it is there, and nothing more: Ray would try again for ever."""
    program = "\n".join(
        (
            "import sys",
            "from rollgen.cluster import connect",
            "from rollgen.errors import EngineError",
            "connect.LEAVE_SECONDS = 0.1",
            "looks = iter([False, False, True])",
            "try: connect.connect(sys.argv[1], lambda: next(looks))",
            "except EngineError as error: print(error)",
        )
    )
    with gate(ray.get_runtime_context().gcs_address) as address:
        ended = subprocess.run([sys.executable, "-c", program, address], capture_output=True, text=True, timeout=180)
    assert (ended.returncode, ended.stdout) == (0, "interrupted while the cluster was waited for\n"), ended.stderr


def test_a_ray_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever Ray raises, of whatever class, is told in one line."""

    def init(**settings: object) -> None:
        raise Exception("The node timed out.\nIt could be slow.")

    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", init)
    monkeypatch.setattr("ray.shutdown", lambda: None)
    with pytest.raises(UsageError, match=r"^--ray local: The node timed out. It could be slow.; its logs may say why"):
        connect("local")


def test_engines_do_not_wait_for_others() -> None:
    """A Ray that is started here gives its processes no niceness, as Ray otherwise does."""
    program = "\n".join(
        (
            "import os, ray",
            "from rollgen.cluster.connect import connect",
            "with connect('local'): niceness = ray.get(ray.remote(lambda: os.nice(0)).remote())",
            "print(niceness - os.nice(0))",
        )
    )
    environment = {name: value for name, value in os.environ.items() if name != "RAY_worker_niceness"}
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    assert (ended.returncode, ended.stdout) == (0, "0\n"), ended.stderr


def test_ray_connects_to_nothing_by_itself() -> None:
    """After a lost connection it would start a cluster of its own: it reads that when it is imported."""
    program = (
        "import rollgen.cluster.replica; from ray._private import auto_init_hook as a; print(a.enable_auto_connect)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout == "False\n"

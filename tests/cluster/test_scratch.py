"""The directory of a process: gone with it, or with the next one when it was killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rollgen.cluster.scratch import Scratch


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's temporary directory."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_is_of_one_process_and_nothing_stays(parent: Path) -> None:
    """Two live side by side; each removes its own, once."""
    one, other = Scratch(), Scratch()
    (one.path / "file").touch()
    assert sorted(parent.iterdir()) == sorted([one.path, other.path])
    one.close()
    one.close()
    assert list(parent.iterdir()) == [other.path]
    del other
    assert list(parent.iterdir()) == []


@pytest.mark.parametrize(
    ("end", "left"),
    [pytest.param("pass", 0, id="ended"), pytest.param("os.kill(os.getpid(), 9)", 1, id="killed")],
)
def test_what_a_process_leaves(parent: Path, end: str, left: int) -> None:
    """Nothing, unless it was killed: then it is the next one's to remove. What is not of our kind stays."""
    program = f"import os; from rollgen.cluster.scratch import Scratch; s = Scratch(); {end}"
    subprocess.run([sys.executable, "-c", program], env=os.environ | {"TMPDIR": str(parent)}, check=left == 0)
    assert len(list(parent.iterdir())) == left
    (parent / "rollgen-replica-link").symlink_to("elsewhere")
    (parent / "elsewhere").mkdir()
    Scratch().close()
    assert sorted(path.name for path in parent.iterdir()) == ["elsewhere", "rollgen-replica-link"]

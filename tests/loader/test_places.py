"""What callers may give as the place of a dataset: anything else is one clear line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollgen.errors import DatasetError, RollgenError, Unreadable, UsageError
from rollgen.loader import RolloutDataset, RolloutStream
from rollgen.loader.places import place_of


class BytesPath:
    """As `os.scandir(b".")` gives them."""

    def __fspath__(self) -> bytes:
        return b"run"


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        pytest.param(None, UsageError, "not as NoneType$", id="nothing"),
        pytest.param(5, UsageError, "not as int$", id="number"),
        pytest.param(b"/path", UsageError, "not as bytes$", id="bytes"),
        pytest.param(BytesPath(), UsageError, "not as bytes$", id="path-of-bytes"),
        pytest.param("x\0y", UsageError, r"^'x\\x00y': cannot be a path: embedded null byte$", id="nul"),
        pytest.param("file:///x%00y", UsageError, "cannot be a path: embedded null byte$", id="nul-in-url"),
        pytest.param("\ud800", UsageError, r"^'\\ud800': cannot be a path: .*surrogates", id="surrogate"),
        pytest.param("a" * 300, Unreadable, "could not read it: File name too long; mend that", id="too-long"),
    ],
)
def test_what_is_no_place(given: Any, error: type[RollgenError], message: str) -> None:
    """Of either class."""
    for read in (RolloutDataset, RolloutStream):
        with pytest.raises(error, match=message):
            read(given)


def test_a_list_is_for_a_stream_only(tmp_path: Path) -> None:
    """Which takes several, of any kind of collection."""
    with pytest.raises(UsageError, match=r"its path or as its URL, not as list$"):
        RolloutDataset([tmp_path])  # type: ignore[arg-type]
    with pytest.raises(DatasetError, match=r"first/rollgen\.json: not found"):
        RolloutStream(tmp_path / name for name in ("first", "second"))  # type: ignore[arg-type]


def test_a_file(tmp_path: Path) -> None:
    """Named; what lies below one is not there."""
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=f"^{tmp_path / 'file'}: is a file, not a dataset's directory$"):
        place_of(tmp_path / "file")
    assert place_of(tmp_path / "file" / "run") == tmp_path / "file" / "run"


def test_a_loop_of_links(tmp_path: Path) -> None:
    """No directory, and not missing either."""
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(Unreadable, match="loop: this machine could not read it: Too many levels of symbolic links"):
        place_of(tmp_path / "loop")

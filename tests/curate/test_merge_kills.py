"""A merge that is killed: the whole dataset is there, or what was there before, or nothing, and it can be repeated."""

from __future__ import annotations

import itertools
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from models.deaths import STEPS, Killed, contents, dying, killed
from models.disk import largest_file

from rollgen.curate.merge import merge
from rollgen.errors import DatasetError, UsageError
from rollgen.format.journal import list_shards
from rollgen.format.reader import open_dataset
from rollgen.verify.dataset import verify_dataset

MakeRun = Callable[..., Path]


@pytest.fixture
def two(tmp_path: Path, make_run: MakeRun) -> list[Path]:
    """The runs `base` and `step-1`."""
    return [make_run(tmp_path / name, number) for number, name in enumerate(("base", "step-1"))]


ALL_STEPS = (*STEPS, "os.rmdir")


@pytest.mark.parametrize("how", [Killed, KeyboardInterrupt])
def test_killed_at_every_step(two: list[Path], tmp_path: Path, how: type[BaseException]) -> None:
    """There is the whole dataset, or none: readers refuse what is there, and the same command makes it.

    Only between the first shard's name and the manifest a kill leaves shards, for which the command wants `clean`.
    """
    seen = Counter[str]()
    for at in itertools.count(1):
        out = tmp_path / f"out-{at}"
        with dying(at, how=how, steps=ALL_STEPS) as count, suppress(how):
            merge(two, out, shard_tokens=100)
        if (out / "rollgen.json").exists():
            assert verify_dataset(out).rows == 24
            seen["whole"] += 1
        else:
            with pytest.raises(DatasetError, match=r"not found; .* is not a rollgen dataset|holds shards but no"):
                open_dataset(out)
            left = bool(list_shards(out))
            seen["shards" if left else "nothing"] += 1
            if left:
                with pytest.raises(
                    UsageError, match="holds shards without a manifest already; replace it with --clean"
                ):
                    merge(two, out, shard_tokens=100)
            merge(two, out, shard_tokens=100, clean=left)
            assert verify_dataset(out).is_clean
            assert not list(out.rglob(".tmp-*"))
        if count[0] < at:  # it was not killed: that was the last step
            break
    if how is Killed:
        assert set(seen) == {"whole", "shards", "nothing"}, "not every state has been tried"
    else:
        assert set(seen) == {"whole", "nothing"}, "whoever is interrupted takes away what there is"


def test_killed_while_it_replaces(tmp_path: Path, make_run: MakeRun) -> None:
    """What `clean` replaces is there, whole, until all of the new dataset is ready; only for an instant there is none.

    Steps that take it away and put the new one in place are some 20 of the 60.
    """
    sources = [make_run(tmp_path / str(number), number, shards=1, prompts=1) for number in range(2)]
    old = make_run(tmp_path / "old", 5)
    held = contents(old)
    seen = Counter[str]()
    for at in itertools.count(1, 2):
        out = Path(shutil.copytree(old, tmp_path / f"out-{at}"))
        with dying(at, steps=ALL_STEPS) as count, suppress(Killed):
            merge(sources, out, clean=True)
        if not (out / "rollgen.json").exists():
            seen["none"] += 1
        elif (out / "plan.parquet").exists():
            assert held.items() <= contents(out).items()
            seen["old"] += 1
        else:
            assert verify_dataset(out).rows == 4
            seen["new"] += 1
        merge(sources, out, clean=True)
        assert verify_dataset(out).is_clean
        assert not list(out.rglob(".tmp-*"))
        if count[0] < at:
            break
    assert set(seen) == {"old", "none", "new"}, "not every state has been tried"
    assert seen["none"] < seen["old"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_interrupted_while_it_replaces(tmp_path: Path, make_run: MakeRun, number: signal.Signals) -> None:
    """A signal that can wait does: there is the old dataset, whole, or the new one. At whatever step it comes."""
    sources = [make_run(tmp_path / str(number), number, shards=1, prompts=1) for number in range(2)]
    old = make_run(tmp_path / "old", 5)
    held = contents(old)
    seen = Counter[str]()
    before = signal.signal(number, signal.default_int_handler)  # raises KeyboardInterrupt
    try:
        for at in itertools.count(1, 2):
            out = Path(shutil.copytree(old, tmp_path / f"out-{at}"))
            with dying(at, how=number, steps=ALL_STEPS) as count:
                try:
                    merge(sources, out, clean=True)
                except KeyboardInterrupt:
                    seen["interrupted"] += 1
            if count[0] < at:
                break
            if (out / "plan.parquet").exists():
                assert held.items() <= contents(out).items()
                seen["old"] += 1
            else:
                assert verify_dataset(out).rows == 4
                seen["new"] += 1
            assert not list(out.rglob(".tmp-*"))
    finally:
        signal.signal(number, before)
    assert seen["old"] > 0
    assert seen["new"] > 0
    assert seen["interrupted"] == seen["old"] + seen["new"]


def test_a_full_disk_leaves_what_there_was(tmp_path: Path, make_run: MakeRun) -> None:
    """Whatever `clean` was to replace; the error says so."""
    sources = [make_run(tmp_path / str(n), n, shards=1, prompts=1, n=1, tokens=4000, full=n == 0) for n in range(2)]
    old = make_run(tmp_path / "old", 5)
    held = contents(old)
    with largest_file(40_000), pytest.raises(DatasetError, match="nothing was merged, and --out is as it was"):
        merge(sources, old, shard_tokens=4000, clean=True)
    assert contents(old) == held


@pytest.mark.parametrize(("call", "at", "clean"), [("fsync", 2, False), ("link", 3, True)], ids=["building", "naming"])
def test_sigkill(two: list[Path], tmp_path: Path, call: str, at: int, clean: bool) -> None:
    """A real one, of a real process. The second fsync is that of the shard, the third link that of the manifest: the
    first is a trial."""
    out = tmp_path / "out"
    assert killed("merge", *two, out, name=call, at=at) == -signal.SIGKILL
    assert bool(list_shards(out)) is clean
    merge(two, out, clean=clean)
    assert verify_dataset(out).is_clean
    assert not list(out.rglob(".tmp-*"))
    assert [path.name for path in (out / "data").iterdir()] == ["part-merge-000000.parquet"]

"""Where a dataset lies: no room, no permission, another writer, another place on another machine."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from models import own_loop
from models.datasets import planned_keys, read_rows
from models.program import Program
from models.stages import GROWN, Life


@contextmanager
def mounted(directory: Path, options: str) -> Iterator[Path]:
    """A file system of its own there. Skips where the system does not let us."""
    directory.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", directory], capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"cannot mount a file system here: {mount.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", directory], check=True)


def remount(directory: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", directory], check=True)


def is_one_line(stderr: str) -> bool:
    """An error as it should be."""
    return stderr.startswith("rollgen: error: ") and stderr.count("\n") == 1


def check_finished(life: Life, program: Program, out: Path) -> None:
    """With nothing in its way, it is finished like any other."""
    resumed = life.generate(out, "--n", 2, "--resume").wait()
    assert resumed.code == 0, resumed.stderr
    assert read_rows(out) == life.stages["begin"].rows
    assert not list(out.rglob(".tmp-*"))
    program("verify", out)


def test_files_that_may_not_grow(life: Life, program: Program, tmp_path: Path) -> None:
    """The second shard does not fit (EFBIG): told in one line."""
    out = Path(shutil.copytree(life.stages["grow"].before, tmp_path / "out"))
    failed = life.generate(out, *GROWN, "--resume", largest_file=8192).wait()
    assert failed.code == 1
    assert is_one_line(failed.stderr), failed.stderr
    assert "data/.tmp-w0-000001: cannot be written: " in failed.stderr
    assert "File too large" in failed.stderr
    assert life.resume(out).code == 0
    assert read_rows(out) == life.stages["grow"].rows
    program("verify", out)


@pytest.mark.parametrize("size", [16, 32, 40, 48, 64])
def test_a_full_disk(life: Life, program: Program, tmp_path: Path, size: int) -> None:
    """Of so many KiB (ENOSPC), full at the tokenizer, the manifest, the card, the shard: told in one line."""
    with mounted(tmp_path / "disk", f"size={size}k") as disk:
        failed = life.generate(disk / "out", "--n", 2).wait()
        assert failed.code in (1, 2), failed
        assert is_one_line(failed.stderr), failed.stderr
        assert "No space left on device" in failed.stderr
        remount(disk, "size=10m")
        check_finished(life, program, disk / "out")


def test_a_read_only_disk(life: Life, program: Program, tmp_path: Path) -> None:
    """It can be read and verified there; what would write is refused in one line."""
    with mounted(tmp_path / "disk", "size=10m") as disk:
        out = Path(shutil.copytree(life.finished, disk / "out"))
        remount(disk, "ro")
        refused = [life.resume(out), life.generate(disk / "new").wait(), program.start("compact", out).wait()]
        for one in refused:
            assert one.code == 2, one
            assert is_one_line(one.stderr), one.stderr
            assert "Read-only file system" in one.stderr
        program("verify", out)
        assert read_rows(out) == life.rows


def test_two_at_once(life: Life, program: Program, tmp_path: Path) -> None:
    """The second is refused, whatever it wants, and the first does not notice."""
    out = tmp_path / "out"
    first = life.generate(out, "--n", 2, hang_after=5)
    while not (out / "rollgen.json").exists():
        assert first.alive
    for second in (
        life.generate(out, "--n", 2, "--resume"),
        life.generate(out, "--n", 2, "--clean"),
        program.start("compact", out),
    ):
        refused = second.wait()
        assert refused.code == 4, refused
        assert is_one_line(refused.stderr), refused.stderr
        assert "stop it" in refused.stderr
    first.signal_group(signal.SIGINT)
    assert first.wait().code == 130
    check_finished(life, program, out)


def test_two_started_at_once(life: Life, program: Program, tmp_path: Path) -> None:
    """On nothing: one makes everything, the other is refused."""
    out = tmp_path / "out"
    both = [life.generate(out, "--n", 2, delay=0.1) for _ in range(2)]
    codes = sorted(one.wait().code for one in both)
    assert codes[0] == 0
    assert codes[1] in (2, 4)  # there is a run already, or it is alive
    check_finished(life, program, out)


def test_another_place_on_another_machine(life: Life, program: Program, tmp_path: Path) -> None:
    """Killed here; copied with its locks and leftovers, but without its times, and continued there."""
    here, there = tmp_path / "here", tmp_path / "elsewhere" / "there"
    assert life.generate(here, "--n", 1).wait().code == 0
    assert life.generate(here, "--n", 2, "--resume", kill_at="link").wait().code == -9
    shutil.copytree(here, there, copy_function=shutil.copyfile)
    shutil.rmtree(here)
    for number, path in enumerate(there.rglob("*")):
        os.utime(path, (0, 10**9 * (number % 5)))
    assert list(there.glob("data/.tmp-w0-*"))
    resumed = life.generate(there, "--n", 2, "--resume", hostname="elsewhere").wait()
    assert resumed.code == 0, resumed.stderr
    check_finished(life, program, there)


def test_leftovers_of_a_dead_writer_beside_a_live_one(program: Program, tiny_model: Path, tmp_path: Path) -> None:
    """Two loops of half the prompts each; one is killed while it commits, and started again beside the other."""
    out, release = tmp_path / "out", tmp_path / "release"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"id": "p{number}", "prompt": "Number {number} is"}}\n' for number in range(6)))
    arguments = (out, prompts, tiny_model)
    alive = program.start(*arguments, 0, 2, release, entry=own_loop.main)
    while "half" not in alive.output[0]:
        assert alive.alive, alive.wait()
    (out / "data/.tmp-w0-000099").touch()  # as if it were writing at this moment
    assert program.start(*arguments, 1, 2, release, entry=own_loop.main, kill_at="link").wait().code == -9
    assert list(out.glob("data/.tmp-w1-*"))
    again = program.start(*arguments, 1, 2, release, entry=own_loop.main)
    while "half" not in again.output[0]:
        assert again.alive, again.wait()
    while [path.name for path in out.glob("data/.tmp-*")] != [".tmp-w0-000099"]:  # its own commits come and go
        assert again.alive, again.wait()
    (out / "data/.tmp-w0-000099").unlink()
    release.touch()
    assert [one.wait().code for one in (alive, again)] == [0, 0]
    assert read_rows(out).keys() == planned_keys(6, 2)
    program("verify", out)

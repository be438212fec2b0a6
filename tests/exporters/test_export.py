"""The frame of every export: what is written beside the data, what is left of one that came to nothing."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from models.rewards import SCORER

import rollgen
from rollgen.curate.compact import compact
from rollgen.errors import DatasetError, MissingFile, Unreadable, UsageError
from rollgen.exporters.directory import new_directory
from rollgen.exporters.export import RECORD_FILE, TRAINERS, make_exporter
from rollgen.exporters.exporter import Exporter
from rollgen.exporters.records import LISTS, SCALARS, Records
from rollgen.format.manifest import read_manifest

DOCS = Path(__file__).parents[2] / "docs" / "export.md"
COMPUTED = {"reward", "advantage"}
OPTIONAL = {"support_logprobs", "weight_versions", "routed_experts", "run"}


def test_the_record(write_odd: Callable[..., Path], tmp_path: Path) -> None:
    """export.json: of what it was made and how, what is lost, every file with its size."""
    directory, out = write_odd(), tmp_path / "out"
    exported = rollgen.export(directory, "slime", out, reward="correct", prompts_per_step=3)
    record = json.loads((out / RECORD_FILE).read_text())
    assert (record["format"], record["version"], record["rollgen_version"]) == (
        "rollgen-export",
        1,
        rollgen.__version__,
    )
    assert record["dataset"]["config_digest"] == read_manifest(directory).config_digest
    assert record["reward"] == {"name": "correct", "scorer": asdict(SCORER), "advantages": None}
    assert record["options"] == {"routed_experts": False, "prompts_per_step": 3}
    assert record["written"] == {f"{step}.pt": (out / f"{step}.pt").stat().st_size for step in range(2)}
    assert (record["samples"], record["prompts"], record["lost"]) == (24, 6, exported.lost)
    assert record["places"]["sampling_mask"] == "rollout_top_p_token_ids, rollout_top_p_token_offsets"
    assert exported.files == 2
    assert exported.bytes == sum(record["written"].values())


@pytest.mark.parametrize("to", sorted(TRAINERS))
def test_advantages_that_change_nothing(to: str, write_odd: Callable[..., Path], tmp_path: Path) -> None:
    """A trainer that makes its own takes none; what others are given is recorded. Without a reward there are none."""
    directory, out = write_odd(), tmp_path / "out"
    taken = make_exporter(to, {}).takes_advantages
    assert taken == (to in ("jsonl", "prime-rl", "trl"))
    if taken:
        rollgen.export(directory, to, out, reward="correct", advantages="mean_std")
        assert json.loads((out / RECORD_FILE).read_text())["reward"]["advantages"] == "mean_std"
    else:
        with pytest.raises(UsageError, match=rf"^--advantages mean: {to} takes no advantages"):
            rollgen.export(directory, to, out, reward="correct", advantages="mean")
    if to == "jsonl":
        with pytest.raises(UsageError, match=r"^--advantages mean: are made of a reward"):
            rollgen.export(directory, to, tmp_path / "plain", advantages="mean")


@pytest.mark.parametrize("to", sorted(TRAINERS))
def test_every_exporter(to: str) -> None:
    """Names its version; its places are columns; every option has a description and stands in the documentation."""
    exporter = make_exporter(to, {})
    assert isinstance(exporter, Exporter)
    assert exporter.follows
    assert exporter.places.keys() <= {*LISTS, *SCALARS, *OPTIONAL, *COMPUTED}
    text = DOCS.read_text()
    assert exporter.follows in text
    for name, field in type(exporter).model_fields.items():
        assert field.description, name
        assert f"`{name}`" in text, name
        if field.annotation is int:
            with pytest.raises(UsageError, match=f"^--option {name}: Input should be less than or equal to"):
                make_exporter(to, {name: str(10**30)})


def test_an_unknown_trainer() -> None:
    """Those that there are are named."""
    with pytest.raises(UsageError, match=r"^--to verlx: not known; choose one of jsonl, miles, prime-rl, "):
        make_exporter("verlx", {})


def test_out_must_not_exist(write_odd: Callable[..., Path], tmp_path: Path) -> None:
    """Nothing is overwritten or mixed, not even through a link that leads nowhere."""
    directory = write_odd()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("dataset", "link"):
        with pytest.raises(UsageError, match=r": exists; choose another path, or remove it$"):
            rollgen.export(directory, "jsonl", tmp_path / name)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    ("out", "message"),
    [
        pytest.param("", "exists", id="empty"),
        pytest.param("/", "exists", id="root"),
        pytest.param("new/..", "gives the new directory no name", id="no name"),
        pytest.param("a\0b", r"^--out 'a\\x00b': no path has a NUL", id="NUL"),
        pytest.param("dataset/data/out", "is inside the dataset", id="inside"),
        pytest.param("link/out", "is inside the dataset", id="inside, by a link"),
        pytest.param("other/new/out", r"is inside the dataset /.*/other;", id="inside another dataset"),
        pytest.param("loop/out", "cannot be made: Too many levels", id="a loop of links"),
        pytest.param("nowhere/a/out", r": nowhere is a link to nothing; make what", id="below a link to nothing"),
        pytest.param("other/rollgen.json/out", "cannot be made: Not a directory", id="below a file"),
        pytest.param("x" * 256, "cannot be made: File name too long", id="too long"),
        pytest.param("s3://bucket/out", "an export is a directory; give a path", id="URL"),
        pytest.param("s3:/bucket/out", "an export is a directory; give a path", id="URL that lost a slash"),
        pytest.param("file://host/out", "not the URL of a local file", id="URL of a file elsewhere"),
    ],
)
def test_what_out_cannot_be(
    out: str, message: str, write_odd: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before anything is done; nothing is made."""
    directory = write_odd()
    (tmp_path / "link").symlink_to(directory)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "nowhere").symlink_to("nothing")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "rollgen.json").touch()
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match=message):
        rollgen.export(directory, "jsonl", out)
    assert sorted(tmp_path.rglob("*")) == before


def test_parents_are_made(write_odd: Callable[..., Path], tmp_path: Path) -> None:
    """And the directory is as readable as any other."""
    out = tmp_path / "a" / "b"
    rollgen.export(write_odd(), "jsonl", out)
    assert {path.name for path in out.iterdir()} == {"rollouts.jsonl.zst", RECORD_FILE}
    assert out.stat().st_mode == out.parent.stat().st_mode


@pytest.mark.parametrize("name", ["x" * 255, "ü" * 127])
def test_the_longest_names(name: str, write_odd: Callable[..., Path], tmp_path: Path) -> None:
    """Of 255 bytes, as the temporary name beside it must not have more; by the URL of a file, too."""
    rollgen.export(write_odd(), "jsonl", (tmp_path / name).as_uri())
    assert (tmp_path / name / RECORD_FILE).exists()


@pytest.mark.parametrize("made", ["file", "directory", "link"])
def test_somebody_else_makes_out_meanwhile(made: str, tmp_path: Path) -> None:
    """It stays as it is, and what would have been there goes. Another path is needed: no disk has failed."""
    out = tmp_path / "out"
    make: dict[str, Callable[[], None]] = {
        "file": out.touch,
        "directory": lambda: (out / "theirs").mkdir(parents=True),
        "link": lambda: out.symlink_to(tmp_path),
    }
    with pytest.raises(UsageError, match=r"^--out .*/out: somebody else made it meanwhile; choose another path$"):  # noqa: SIM117
        with new_directory(out):
            make[made]()
    assert list(tmp_path.iterdir()) == [out]
    assert made != "directory" or [path.name for path in out.iterdir()] == ["theirs"]


def test_a_dataset_that_is_a_link_to_itself(tmp_path: Path) -> None:
    """One line, as for any other that is none."""
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(DatasetError, match="loop"):
        rollgen.export(tmp_path / "loop", "jsonl", tmp_path / "out")


def test_damage_leaves_nothing(write_odd: Callable[..., Path], tmp_path: Path) -> None:
    """A damaged row group is found when it is read, in the middle of the export."""
    directory = write_odd()
    shard = sorted((directory / "data").iterdir())[0]
    row_group = pq.read_metadata(shard).row_group(2)
    logprobs = next(
        row_group.column(place) for place in range(30) if "logprobs" in row_group.column(place).path_in_schema
    )
    content = bytearray(shard.read_bytes())
    content[logprobs.data_page_offset + logprobs.total_compressed_size - 4] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DatasetError, match="row group 2"):
        rollgen.export(directory, "jsonl", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"dataset"}


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """It is not `out` that fails then."""
    with pytest.raises(Unreadable, match=r"shard: this machine could not read it: No such file"):  # noqa: SIM117
        with new_directory(tmp_path / "out"):
            (tmp_path / "shard").read_bytes()
    assert not list(tmp_path.iterdir())


def test_a_dataset_that_is_compacted_meanwhile(make_dataset: Callable[..., Path], tmp_path: Path) -> None:
    """Its old shards are gone; nothing is to be generated for that."""
    directory = make_dataset(tmp_path / "run", shards=3)
    records = Records(directory)
    compact(directory)
    with pytest.raises(MissingFile, match=r"replaced, or set aside, since the dataset was opened; start again$"):
        list(records.blocks())


KILLED = """
import os, signal, sys, rollgen
from rollgen.exporters.jsonl import JSONLines

class Stopping(JSONLines):
    def write(self, records, directory):
        advice = super().write(records, directory)
        os.kill(os.getpid(), int(sys.argv[3]))
        return advice

import rollgen.exporters.jsonl
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in a shell's background
rollgen.exporters.jsonl.JSONLines = Stopping
rollgen.export(sys.argv[1], "jsonl", sys.argv[2])
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=lambda number: number.name)
def test_an_interrupted_export_is_none(number: signal.Signals, write_odd: Callable[..., Path], tmp_path: Path) -> None:
    """All data is written when the signal comes: `out` is not there, and what SIGKILL leaves is a temporary name."""
    directory, out = write_odd(), tmp_path / "out"
    arguments = [sys.executable, "-c", KILLED, str(directory), str(out), str(int(number))]
    done = subprocess.run(arguments, capture_output=True, timeout=180, check=False)
    assert done.returncode == (-number if number == signal.SIGKILL else -signal.SIGINT), done.stderr
    left = sorted({path.name for path in tmp_path.iterdir()} - {"dataset"})
    assert [name.startswith(".tmp-out-") for name in left] == [True] * (number == signal.SIGKILL)
    rollgen.export(directory, "jsonl", out)
    assert (out / RECORD_FILE).exists()
    assert os.access(out, os.R_OK)


@pytest.fixture
def full_disk() -> Iterator[None]:
    """No file can grow beyond 100 bytes; a write that would fails with EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.usefixtures("full_disk")
@pytest.mark.parametrize("to", sorted(TRAINERS))
def test_a_full_disk_leaves_nothing(to: str, write_odd: Callable[..., Path], tmp_path: Path) -> None:
    """Whatever library writes the files: one line that says so."""
    directory = write_odd()
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    with pytest.raises(DatasetError, match=r"out: cannot be written: .*File too large; nothing is left of it$"):
        rollgen.export(
            directory, to, tmp_path / "out", reward="correct", **({"carry_masks": True} if to == "verl" else {})
        )
    assert {path.name for path in tmp_path.iterdir()} == {"dataset"}

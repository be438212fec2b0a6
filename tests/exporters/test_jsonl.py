"""JSON lines: what any JSON parser reads is what the dataset holds."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import zstandard

import rollgen

Rows = Callable[[Path], dict[tuple[str, int], dict[str, Any]]]
DATA = "rollouts.jsonl.zst"


def read(out: Path) -> list[dict[str, Any]]:
    with (out / DATA).open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as reader:
        return [json.loads(line) for line in io.TextIOWrapper(reader, "utf-8")]


@pytest.mark.parametrize(
    "features",
    [
        pytest.param({}, id="plain"),
        pytest.param({"support_logprobs": True}, id="support_logprobs"),
        pytest.param({"temperatures": (0.7, 1.3), "untruncated": (2, 5)}, id="mixed sampling"),
        pytest.param({"extras": True}, id="weights and experts"),
    ],
)
def test_every_column(features: dict[str, Any], write_odd: Callable[..., Path], current: Rows, tmp_path: Path) -> None:
    """As pyarrow reads them from the shards, numbers exactly; and a row more for what is computed."""
    rows = current(directory := write_odd(**features))
    experts = "extras" in features
    exported = rollgen.export(directory, "jsonl", tmp_path / "out", reward="correct", routed_experts=experts)
    assert exported.lost == {}
    read_back = read(tmp_path / "out")
    assert len(read_back) == len(rows)
    for line in read_back:
        row = rows[line["prompt_id"], line["sample_index"]]
        wanted = {name: value for name, value in row.items() if name not in ("prompt_length", "response_length")}
        assert line.pop("group") == row["prompt_index"]
        assert line.pop("advantage") == pytest.approx(wanted.pop("advantage"), abs=1e-15)
        assert line == wanted


def test_floats_are_exact(write_odd: Callable[..., Path], tmp_path: Path) -> None:
    """0.7 is stored as float32, and written as that number, not as 0.7: whatever a parser makes of it is the same."""
    rollgen.export(write_odd(temperatures=(0.7,)), "jsonl", tmp_path / "out")
    assert {line["temperature"] for line in read(tmp_path / "out")} == {float(np.float32(0.7))}


def test_slices_do_not_show(write_odd: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is made a few rows at a time."""
    directory = write_odd(support_logprobs=True)
    rollgen.export(directory, "jsonl", tmp_path / "one")
    monkeypatch.setattr("rollgen.exporters.jsonl._SLICE_BYTES", 500)
    rollgen.export(directory, "jsonl", tmp_path / "many")
    assert read(tmp_path / "many") == read(tmp_path / "one")


def test_without_reward(write_odd: Callable[..., Path], tmp_path: Path) -> None:
    """No column is made up."""
    rollgen.export(write_odd(), "jsonl", tmp_path / "out")
    assert not {"reward", "advantage"} & read(tmp_path / "out")[0].keys()


def test_other_tools_read_it(write_odd: Callable[..., Path], tmp_path: Path) -> None:
    """Polars as it is."""
    rollgen.export(write_odd(), "jsonl", tmp_path / "out")
    with zstandard.open(tmp_path / "out" / DATA, "rb") as file:
        frame = pl.read_ndjson(file.read())
    assert len(frame) == 24


def test_a_file_that_was_cut_does_not_pass(write_odd: Callable[..., Path], tmp_path: Path) -> None:
    """The frame has a checksum, and an end."""
    rollgen.export(write_odd(), "jsonl", tmp_path / "out")
    content = (tmp_path / "out" / DATA).read_bytes()
    with pytest.raises(zstandard.ZstdError):
        zstandard.ZstdDecompressor().decompress(content[:-1], max_output_size=1 << 24)

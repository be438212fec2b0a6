"""Shards: what a file is, against the journal and the manifest. One that is damaged is read as far as it goes.

Datasets have two shards of six samples; `w0` wrote them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from models.spoilt import Spoil, as_directory, as_file, not_utf8, with_text

from rollgen.format.journal import JournalLine, Totals, list_shards
from rollgen.format.keys import Keys
from rollgen.format.manifest import Manifest, read_manifest
from rollgen.verify.dataset import verify_dataset
from rollgen.verify.files import ShardContent, check_bytes, check_content, check_counts
from rollgen.verify.findings import Findings

FIRST, SECOND = "data/part-w0-000000.parquet", "data/part-w0-000001.parquet"
JOURNAL = "journal/w0.jsonl"
Rows = list[dict[str, Any]]


def said(findings: Findings) -> list[tuple[str, str, str]]:
    return [(finding.kind, finding.place, finding.problem) for finding in findings.kept]


def with_link(directory: Path) -> None:
    (directory / FIRST).unlink()
    (directory / FIRST).symlink_to("nowhere")


HOSTILE: dict[str, tuple[Spoil, set[str]]] = {
    "data is a file": (as_file("data"), {"missing"}),
    "a shard is a directory": (as_directory(FIRST), {"bytes", "damaged"}),
    "an unknown shard is a directory": (as_directory("data/part-w9-000000.parquet"), {"unjournalled", "damaged"}),
    "a shard is a link to nothing": (with_link, {"missing"}),
    "a shard is empty": (with_text(FIRST, b""), {"bytes", "damaged"}),
    "a shard is text": (with_text(FIRST, b"PAR1" * 1000), {"bytes", "damaged"}),
    "a shard's ids are not UTF-8": (not_utf8(FIRST, "prompt_id"), {"bytes", "damaged"}),
    "a shard's reasons are not UTF-8": (not_utf8(FIRST, "finish_reason"), {"bytes", "damaged"}),
    "a shard's texts are not UTF-8": (not_utf8(FIRST, "text"), {"bytes", "damaged"}),
}


@pytest.mark.parametrize(("spoil", "kinds"), HOSTILE.values(), ids=HOSTILE)
def test_nothing_raises(directory: Path, spoil: Spoil, kinds: set[str]) -> None:
    """Whatever a shard is: it is found, and the other one is verified."""
    spoil(directory)
    verification = verify_dataset(directory)
    assert set(verification.by_kind) == kinds, verification.findings
    assert verification.rows in (6, 12) or not (directory / "data").is_dir()
    json.dumps(verification.to_json())


@pytest.mark.parametrize("column", ["prompt_id", "finish_reason", "stop_reason", "text", "prompt", "metadata"])
def test_texts_that_are_no_text(directory: Path, set_line: Any, column: str) -> None:
    """The journal vouches for the file and pages have their checksums: a writer stored something else."""
    not_utf8(FIRST, column)(directory)
    set_line(directory / FIRST, **hashes(directory / FIRST))
    (finding,) = verify_dataset(directory).findings
    assert (finding.kind, finding.place) == ("damaged", "row group 0")


def hashes(path: Path) -> dict[str, Any]:
    from rollgen.format.journal import file_sha256, footer_sha256

    return {"bytes": path.stat().st_size, "sha256": file_sha256(path), "footer_sha256": footer_sha256(path)}


def line_of(directory: Path, **changes: Any) -> JournalLine:
    return JournalLine(**(json.loads((directory / JOURNAL).read_text().splitlines()[0]) | changes))


LINES: dict[str, tuple[dict[str, Any], list[tuple[str, str]]]] = {
    "right": ({}, []),
    "bytes": ({"bytes": 5}, [("bytes", "bytes, the journal says 5: truncated or overwritten")]),
    "sha256": ({"sha256": "0" * 64}, [("sha256", "not the bytes that were committed")]),
    "footer": ({"footer_sha256": "0" * 64}, [("footer", "footer_sha256 of its journal line is not that of the file")]),
    "all": ({"bytes": 5, "sha256": "", "footer_sha256": ""}, [("bytes", "the journal says 5")]),
}


@pytest.mark.parametrize(("changes", "expected"), LINES.values(), ids=LINES)
def test_the_bytes_of_a_shard(directory: Path, changes: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    """Size, hash, footer: the first that is wrong says it all."""
    findings = Findings(directory)
    assert check_bytes(directory / FIRST, line_of(directory, **changes), findings) is not bool(expected)
    assert [kind for kind, *_ in said(findings)] == [kind for kind, _ in expected]
    for (*_, problem), (_, text) in zip(said(findings), expected, strict=True):
        assert text in problem


def test_counts(directory: Path) -> None:
    """Each that differs."""
    findings = Findings(directory)
    check_counts(directory / FIRST, line_of(directory, rows=6, tokens=48, mask_ids=0), Totals(6, 48, 0), findings)
    assert findings.total == 0
    check_counts(directory / FIRST, line_of(directory, rows=6, tokens=48, mask_ids=0), Totals(5, 48, 9), findings)
    assert said(findings) == [
        ("counts", "", "5 rows, the journal says 6"),
        ("counts", "", "9 mask_ids, the journal says 0"),
    ]


def content_of(directory: Path, findings: Findings, **changes: Any) -> ShardContent | None:
    manifest: Manifest = read_manifest(directory).model_copy(update=changes)
    return check_content(directory / FIRST, manifest, lambda table: (), findings)


FOOTERS: dict[str, tuple[dict[bytes, bytes | None], list[tuple[str, str]]]] = {
    "no digest": ({b"rollgen.config_digest": None}, [("foreign", "of another dataset: its config digest is absent")]),
    "another digest": ({b"rollgen.config_digest": b"a" * 64}, [("foreign", f"its config digest is {'a' * 12}")]),
    "digest that is no text": ({b"rollgen.config_digest": b"\xff"}, [("", "")]),
    "vocabulary": ({b"rollgen.vocab_size": b"513"}, [("footer", "rollgen.vocab_size is '513', the manifest says 512")]),
    "no vocabulary": ({b"rollgen.vocab_size": None}, [("footer", "rollgen.vocab_size is '', the manifest says 512")]),
    "tokenizer": (
        {b"rollgen.tokenizer_vocab_size": b"0500"},
        [("footer", "rollgen.tokenizer_vocab_size is '0500', the manifest says 500")],
    ),
    "format": ({b"rollgen.format_version": b"2.0"}, [("damaged", "2.0")]),
    "no format": ({b"rollgen.format_version": None}, [("damaged", "not a rollgen shard")]),
    "later minor": ({b"rollgen.format_version": b"1.99"}, []),
    "further key": ({b"rollgen.more": b"\xff"}, []),
}


@pytest.mark.parametrize(("footer", "expected"), FOOTERS.values(), ids=FOOTERS)
def test_what_a_footer_says(
    directory: Path, rewrite: Any, footer: dict[bytes, bytes | None], expected: list[tuple[str, str]]
) -> None:
    """Of another dataset or format nothing is read; another vocabulary is wrong, the rows are checked all the same."""
    rewrite(directory / FIRST, footer=footer)
    findings = Findings(directory)
    content = content_of(directory, findings)
    if expected == [("", "")]:
        assert (content, set(findings.by_kind) <= {"foreign", "damaged"}, findings.total) == (None, True, 1)
        return
    assert [kind for kind, *_ in said(findings)] == [kind for kind, _ in expected]
    for (*_, problem), (_, text) in zip(said(findings), expected, strict=True):
        assert text in problem
    assert (content is None) is any(kind in ("foreign", "damaged") for kind, _ in expected)


@pytest.mark.parametrize("stored", [True, False])
def test_support_logprobs_are_in_all_shards_or_in_none(tmp_path: Path, make_dataset: Any, stored: bool) -> None:
    """As the manifest says."""
    directory = make_dataset(tmp_path / "other", support_logprobs=stored)
    findings = Findings(directory)
    assert content_of(directory, findings, support_logprobs=not stored) is not None
    ((kind, _, problem),) = said(findings)
    assert (kind, "support_logprobs" in problem) == ("footer", True)


@pytest.mark.parametrize("group", [0, 1, 2])
def test_the_row_groups_beside_a_damaged_one(directory: Path, rewrite: Any, group: int) -> None:
    """Are read and counted, and what is wrong there has its place in the file."""
    rewrite(directory / FIRST, lambda rows: [row | {"seed": -1} for row in rows], rows_a_group=2)
    with pq.ParquetFile(directory / FIRST) as file:
        chunk = file.metadata.row_group(group).column(8)
    with (directory / FIRST).open("r+b") as file:
        file.seek(chunk.data_page_offset + chunk.total_compressed_size - 1)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    findings = Findings(directory)
    content = content_of(directory, findings)
    assert content is not None
    others = [number for number in range(3) if number != group]
    assert [(kind, place) for kind, place, _ in said(findings)] == [
        ("damaged", f"row group {number}")
        if number == group
        else ("sampling", f"row group {number}, row 0 (p{number}, 0)")
        for number in range(3)
    ]
    assert content.totals[:2] == (4, 32)
    assert content.row_groups == tuple((number, 2) for number in others)
    assert [content.place(row) for row in range(4)] == [
        f"row group {number}, row {row}" for number in others for row in range(2)
    ]


def test_a_shard_without_rows(directory: Path, rewrite: Any) -> None:
    """Is a shard; its line says so."""
    rewrite(directory / FIRST, lambda rows: [])
    assert verify_dataset(directory).is_clean
    content = content_of(directory, Findings(directory))
    assert content is not None
    assert (content.totals, content.row_groups) == (Totals(0, 0, 0), ())


def test_contents_are_joined() -> None:
    """Of nothing, nothing."""
    whole = ShardContent.joined([])
    assert (whole.totals, len(whole.keys.prompt_index), whole.row_groups) == (Totals(0, 0, 0), 0, ())
    keys = Keys.joined([])
    parts = [ShardContent(Totals(1, 2, 3), keys, 1, ((0, 1),)), ShardContent(Totals(4, 5, 6), keys, 2, ((2, 4),))]
    whole = ShardContent.joined(parts)
    assert (whole.totals, whole.beyond_tokenizer, whole.row_groups) == (Totals(5, 7, 9), 3, ((0, 1), (2, 4)))
    assert [whole.place(row) for row in (0, 1, 4)] == ["row group 0, row 0", "row group 2, row 0", "row group 2, row 3"]


def test_ids_beyond_the_tokenizer_are_noted(directory: Path, rewrite: Any) -> None:
    """The tokenizer has 500 ids, the model 512; an id beyond both is wrong instead."""

    def edit(rows: Rows) -> Iterator[dict[str, Any]]:
        for row, ids in zip(rows, ([500, 511], [511], [512, 512], [499]), strict=False):
            changed = [*ids, *row["token_ids"][len(ids) :]]
            masks = [[token] for token in ids] + row["sampling_mask"][len(ids) :]
            yield row | {
                "token_ids": changed,
                "sampling_mask": masks,
                "logprobs": [0.0] * len(ids) + row["logprobs"][len(ids) :],
            }

    rewrite(directory / FIRST, lambda rows: [*edit(rows), *rows[4:]])
    verification = verify_dataset(directory)
    beyond = sum(500 <= token < 512 for path in list_shards(directory) for token in _tokens(path))
    assert beyond >= 3
    assert verification.notes == (f"sampled ids beyond the tokenizer, inside the model's vocabulary: {beyond}",)
    assert verification.by_kind == {"ids": 1, "support": 1}


def _tokens(path: Path) -> list[int]:
    with pq.ParquetFile(path) as file:
        return [token for row in file.read(["token_ids"])["token_ids"].to_pylist() for token in row]

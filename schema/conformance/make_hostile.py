"""Write the hostile datasets, and what a reader and a verifier must make of them.

    python schema/conformance/make_hostile.py [DIRECTORY]     (default: `hostile/` beside this file)

Each case is the small dataset of `hostile_dataset.py` with one thing wrong and all else made to fit. `hostile.json`
says of each: what is wrong (`about`), the verdict (`must`, see README.md), and the finding that a verifier reports
(`kind` and `file`). What a repository cannot hold (a pipe, a file of a gigabyte) is in RECIPES, for a test to make.

Committed files are made once and stay: a new case is written by `write_hostile(directory, only=[name])`.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal, NamedTuple

import hostile_changes as change
import pyarrow as pa
from hostile_changes import HUGE, TOKENS, Spoil
from hostile_dataset import JOURNAL, MANIFEST, PLAN, SHARD, Hostile, loose, write_base
from parquet_bytes import (
    CHUNKS,
    CODEC,
    COMPRESSED,
    DATA_PAGE,
    I64,
    LIST,
    PAGE_COMPRESSED,
    PAGE_CRC,
    PAGE_UNCOMPRESSED,
    ROW_GROUPS,
    ROWS_OF_FILE,
    ROWS_OF_GROUP,
    VALUES,
    put,
)

Must = Literal["read", "report", "refuse"]
NAN, INFINITY = float("nan"), float("inf")
RETRY = "retry-1.parquet"
FAILURES = "failures/w0.jsonl"
RECORD = "journal/replacement.json"


class Case(NamedTuple):
    """One hostile dataset."""

    about: str
    spoil: Spoil
    must: Must = "refuse"
    kind: str | None = "damaged"
    """Of the verifier's finding; None where there is none."""
    file: str = SHARD


def report(about: str, spoil: Spoil, kind: str, file: str = SHARD) -> Case:
    """A case that a loader may read."""
    return Case(about, spoil, "report", kind, file)


def read(about: str, spoil: Spoil) -> Case:
    """A case in which nothing is wrong."""
    return Case(about, spoil, "read", None)


BYTES = {
    "shard-empty": Case("a shard of no bytes", change.raw(lambda content: b"")),
    "shard-magic-only": Case("twelve bytes: magic, length 0, magic", change.raw(lambda content: b"PAR1\0\0\0\0PAR1")),
    "shard-text": Case("a shard that is text", change.raw(lambda content: b"not a Parquet file\n" * 20)),
    "shard-cut": Case("the second half is gone", change.raw(lambda content: content[: len(content) // 2])),
    "footer-length": Case("2^31 bytes of footer", change.raw(lambda content: content[:-8] + b"\xff\xff\xff\x7fPAR1")),
    "footer-garbage": Case(
        "a footer of 0xff", change.raw(lambda content: content[:-3000] + b"\xff" * 2992 + content[-8:])
    ),
    "footer-bottomless": Case("an unknown field of 5,000 structs in each other", change.raw(change.bottomless)),
    "footer-gigabyte-text": Case("a footer key that claims 1 GB", change.raw(change.claimed_text)),
    "footer-rows": Case("2^31 rows of the file", change.footer(lambda fields: put(fields, ROWS_OF_FILE, HUGE))),
    "footer-no-groups": Case("no row group", change.footer(lambda fields: put(fields, ROW_GROUPS, (12, [])))),
    "group-rows": Case(
        "2^31 rows of the row group and of the file",
        change.footer(
            lambda fields: (
                put(fields, ROWS_OF_FILE, HUGE),
                put(fields[ROW_GROUPS][1][1][0], ROWS_OF_GROUP, HUGE),
            )
        ),
    ),
    "group-columns": Case(
        "a row group with a column less",
        change.group(lambda group: put(group, CHUNKS, (12, group[CHUNKS][1][1][:-1]))),
    ),
    "chunk-beyond": Case("pages behind the file", change.meta(lambda meta: put(meta, DATA_PAGE, 1 << 40))),
    "chunk-before": Case("pages before the file", change.meta(lambda meta: put(meta, DATA_PAGE, -4))),
    "chunk-elsewhere": Case("the pages of another column", change.meta(lambda meta: put(meta, DATA_PAGE, 4))),
    "chunk-huge": Case("2^40 bytes of pages", change.meta(lambda meta: put(meta, COMPRESSED, 1 << 40))),
    "chunk-values": Case("2^31 values in the footer", change.meta(lambda meta: put(meta, VALUES, HUGE))),
    "chunk-codec": Case("a codec that does not exist", change.meta(lambda meta: put(meta, CODEC, 77))),
    "chunk-sizes": Case(
        "size statistics that contradict the schema: pyarrow 26 ends the process when asked for this column chunk",
        change.meta(
            lambda meta: meta.__setitem__(16, (12, {2: (LIST, (I64, [1, 2, 3])), 3: (LIST, (I64, [1, 2, 3]))}))
        ),
    ),
    "page-uncompressed": Case(
        "a page header that claims 2 GiB", change.page(lambda header: put(header, PAGE_UNCOMPRESSED, HUGE))
    ),
    "page-negative": Case("a negative size", change.page(lambda header: put(header, PAGE_UNCOMPRESSED, -1))),
    "page-compressed": Case("a page beyond its chunk", change.page(lambda header: put(header, PAGE_COMPRESSED, HUGE))),
    "page-values": Case("2^31 values in a page", change.page(lambda header: put(change.nested(header), 1, HUGE))),
    "page-values-agreed": Case(
        "2^31 values in a page and in the footer",
        change.page(lambda header: put(change.nested(header), 1, HUGE), lambda meta: put(meta, VALUES, HUGE), TOKENS),
    ),
    "page-wrong-crc": Case("a page with the CRC of another", change.page(lambda header: put(header, PAGE_CRC, 1))),
    "page-no-crc": Case(
        "no page has a CRC, though the manifest says so", change.table(lambda rows: rows, write_page_checksum=False)
    ),
    "page-wide-integer": Case(
        "a CRC of 2^32 more than it is, which is the same in 32 bits",
        change.page(lambda header: put(header, PAGE_CRC, header[PAGE_CRC][1] + (1 << 32))),
    ),
    "field-hidden-values": Case("2^30 values in field 65537 of a page header", change.raw(change.hidden_values)),
    "field-hidden-pages": Case("pages without CRC in field 65545 of a column chunk", change.raw(change.hidden_pages)),
    "field-twice": Case("the metadata of a column chunk twice", change.raw(change.twice)),
    "list-other": Case("a path that is a list of numbers", change.raw(change.other_list)),
    "bomb-text": Case("metadata of 5 x 768 MiB in 120 KB", change.raw(change.text_bomb)),
    "bomb-dictionary": Case("2^29 tokens in 200 bytes", change.raw(change.dictionary_bomb)),
    "bomb-lookup": Case("4,096 rows share one metadata text of 1 MiB", change.lookup_bomb),
    "levels-mid-row": Case("a column that begins in the middle of a row", change.raw(change.mid_row)),
    "text-not-utf8": Case("text is not UTF-8", change.table(change.bytes_of_text("text", b"\xff\xfe"))),
    "text-surrogates": Case(
        "text holds an encoded surrogate", change.table(change.bytes_of_text("text", b"\xed\xa0\x80"))
    ),
    "id-not-utf8": Case("prompt_id is not UTF-8", change.table(change.bytes_of_text("prompt_id", b"p\xff"))),
}
"""Files that are not what they say."""

COLUMNS = {
    "column-missing": Case("no logprobs", change.table(lambda rows: rows.drop_columns("logprobs"))),
    "column-twice": Case("two columns seed", change.table(lambda rows: rows.append_column("seed", rows["seed"]))),
    "column-wider": Case("sample_index is int64", change.table(change.retyped("sample_index", pa.int64()))),
    "column-flat": Case("sampling_mask is a list", change.table(change.retyped("sampling_mask", pa.list_(pa.int32())))),
    "key-values-missing": Case(
        "no footer keys", change.table(lambda rows: rows.replace_schema_metadata({})), kind="damaged"
    ),
    "other-dataset": Case(
        "the config digest of another dataset",
        change.table(
            lambda rows: rows.replace_schema_metadata(rows.schema.metadata | {b"rollgen.config_digest": b"0" * 64})
        ),
        kind="foreign",
    ),
    "later-major": Case(
        "a shard of format 2.0",
        change.table(
            lambda rows: rows.replace_schema_metadata(rows.schema.metadata | {b"rollgen.format_version": b"2.0"})
        ),
    ),
    "later-minor": read("format 1.7: unknown columns, keys and files everywhere", change.later_minor),
    "other-types": read("large lists and texts, everything nullable", change.table(change.as_others_write)),
    "null-key": Case("a null prompt_id", change.rows(lambda rows: rows[0].update(prompt_id=None), nullable=True)),
    "null-list": Case("null token_ids", change.rows(lambda rows: rows[0].update(token_ids=None), nullable=True)),
    "null-token": Case("a null token", change.item("token_ids", 0, 1, None, nullable=True)),
    "null-in-support": Case("a null in a support", change.item("sampling_mask", 0, 1, [10, None], nullable=True)),
    "not-null-anywhere": read(
        "columns that may be null and are not", change.table(lambda rows: rows.cast(loose(rows.schema)))
    ),
}
"""Schemas, and nulls where there may be none."""

ROW_CASES = {
    "lengths-logprobs": Case("a logprob too few", change.row(0, logprobs=[0.0, -0.5, 0.0]), kind="lengths"),
    "lengths-masks": Case("a support too many", change.row(1, sampling_mask=[[0, 9, 12], [1]]), kind="lengths"),
    "response-length": Case("response_length is not T", change.row(0, response_length=3), kind="lengths"),
    "prompt-length": report("prompt_length is not P", change.row(0, prompt_length=9), "lengths"),
    "no-tokens": Case(
        "a row of no tokens",
        change.row(1, token_ids=[], logprobs=[], sampling_mask=[], response_length=0),
        kind="lengths",
    ),
    "support-empty": Case("an empty support", change.item("sampling_mask", 0, 1, []), kind="support"),
    "support-null": Case(
        "a null support in a row that truncates", change.item("sampling_mask", 0, 1, None), kind="support"
    ),
    "support-listed": Case(
        "a support in a row that does not truncate", change.item("sampling_mask", 2, 0, [50]), kind="support"
    ),
    "support-beyond": Case("an id beyond the vocabulary", change.item("sampling_mask", 0, 1, [10, 64]), kind="support"),
    "support-negative": Case("a negative id", change.item("sampling_mask", 0, 1, [-1, 10]), kind="support"),
    "support-unsorted": report("ids that fall", change.item("sampling_mask", 0, 1, [33, 10]), "support"),
    "support-twice": report("an id twice", change.item("sampling_mask", 0, 1, [10, 10]), "support"),
    "support-foreign": report(
        "the sampled id is not in its support", change.item("sampling_mask", 0, 1, [11, 33]), "support"
    ),
    "token-beyond": report("a sampled id beyond the vocabulary", change.item("token_ids", 2, 0, 64), "ids"),
    "token-negative": report("a negative sampled id", change.item("token_ids", 2, 0, -1), "ids"),
    "prompt-beyond": report("a prompt id beyond the vocabulary", change.row(0, prompt_token_ids=[1, 5, 64]), "ids"),
    "logprob-nan": report("NaN", change.item("logprobs", 0, 1, NAN), "logprobs"),
    "logprob-infinite": report("minus infinity", change.item("logprobs", 0, 1, -INFINITY), "logprobs"),
    "logprob-positive": report("above 0", change.item("logprobs", 0, 1, 0.5), "logprobs"),
    "logprob-singleton": report("not 0 for a support of one", change.item("logprobs", 0, 0, -0.5), "logprobs"),
    "temperature-zero": Case("temperature 0", change.row(0, temperature=0.0), kind="sampling"),
    "temperature-nan": Case("temperature NaN", change.row(0, temperature=NAN), kind="sampling"),
    "top-p-range": report("top_p 1.5 beside a top_k", change.row(0, top_p=1.5), "sampling"),
    "finish-reason": report("an aborted sample", change.row(0, finish_reason="abort"), "sampling"),
    "too-long": report("more tokens than max_tokens", change.row(0, max_tokens=2), "lengths"),
    "key-twice": Case("two rows of one key", change.row(1, sample_index=0), kind="duplicate"),
    "key-in-two-shards": Case(
        "a copy of a shard", change.second_shard, kind="duplicate", file="data/part-w0-000001.parquet"
    ),
    "rows-unsorted": report("rows in another order", change.rows(lambda rows: rows.reverse()), "order"),
    "sample-unplanned": report("sample 99 of 2", change.row(1, sample_index=99), "unplanned"),
    "sample-negative": report("a negative sample_index", change.row(0, sample_index=-1), "unplanned"),
    "prompt-unplanned": report("prompt 2^62", change.row(4, prompt_index=1 << 62), "unplanned"),
    "prompt-tombstone": report(
        "a sample of a skipped row", change.row(4, prompt_index=3, prompt_id="bad"), "unplanned"
    ),
    "prompt-renamed": report("another prompt_id than planned", change.row(4, prompt_id="by-id"), "mismatch"),
    "prompt-changed": report(
        "other prompt tokens than planned", change.row(4, prompt_token_ids=[1, 8, 8, 9]), "mismatch"
    ),
    "seed-wrong": report("a seed of another sample", change.row(4, seed=1), "seed"),
    "generation-unknown": report("generation 5 of no retry", change.row(4, generation=5), "unplanned"),
}
"""Rows that no sampler can have made, or that nobody asked for."""

LINES = {
    "line-rows": Case("the journal counts another row", change.line(rows=6), kind="counts"),
    "line-tokens": report("the journal counts other tokens", change.line(tokens=999), "counts"),
    "line-traversal": Case(
        "a file outside the dataset", change.line(file="../../../etc/passwd"), kind="journal", file=JOURNAL
    ),
    "line-separator": Case(
        "a slash in a name", change.line(file="x/part-w0-000000.parquet"), kind="journal", file=JOURNAL
    ),
    "line-sequence": Case(
        "a number of 5,000 digits", change.line(file=f"part-w0-{'9' * 5000}.parquet"), kind="journal", file=JOURNAL
    ),
    "line-garbage": Case(
        "a line of garbage", change.line_text(lambda text: "\x00garbage\n" + text), kind="journal", file=JOURNAL
    ),
    "line-key-twice": Case(
        "a key twice",
        change.line_text(lambda text: text.replace('"rows": 5', '"rows": 5, "rows": 5')),
        kind="journal",
        file=JOURNAL,
    ),
    "line-boolean": Case("true rows", change.line(rows=True), kind="journal", file=JOURNAL),
    "line-negative": Case("negative bytes", change.line(bytes=-1), kind="journal", file=JOURNAL),
    "line-digits": Case(
        "5,000 digits of rows",
        change.line_text(lambda text: text.replace('"rows": 5', f'"rows": {"9" * 5000}')),
        kind="journal",
        file=JOURNAL,
    ),
    "line-nan": Case(
        "NaN", change.line_text(lambda text: text.replace('"rows": 5', '"rows": NaN')), kind="journal", file=JOURNAL
    ),
    "line-surrogate": Case(
        "half of a surrogate pair",
        change.line_text(lambda text: text.replace('"rows"', '"x": "\\ud800", "rows"')),
        kind="journal",
        file=JOURNAL,
    ),
    "line-bottomless": Case(
        "lists nested 3,000 deep",
        change.line_text(lambda text: text.replace('"rows"', f'"x": {"[" * 3000}{"]" * 3000}, "rows"')),
        kind="journal",
        file=JOURNAL,
    ),
    "line-torn": read("a last line without its end", change.line_text(lambda text: text + '{"file": "part-w0-0000')),
    "replacement-garbage": Case(
        "a record that is no JSON", lambda case: change.replacement(case, "{"), kind="replacement", file=RECORD
    ),
    "failures-garbage": report(
        "a failure line of garbage", lambda case: change.failures(case, "garbage\n"), "failures", FAILURES
    ),
    "failures-range": report(
        "a sample_index of 2^40",
        lambda case: change.failures(
            case,
            json.dumps(
                {
                    "prompt_id": "7",
                    "prompt_index": 1,
                    "sample_index": 1 << 40,
                    "stage": "engine",
                    "error": "",
                    "time": "",
                }
            )
            + "\n",
        ),
        "failures",
        FAILURES,
    ),
    "name-doubled": read(
        "a file of the name part-w0-000000.parquet.parquet",
        lambda case: shutil.copy(case.path(SHARD), case.path(SHARD + ".parquet")),
    ),
    "name-digits": read(
        "a shard name in Arabic digits",
        lambda case: shutil.copy(case.path(SHARD), case.path("data/part-w0-٠٠٠٠٠١.parquet")),
    ),
}
"""Journal, failures, names."""


def _manifest(about: str, spoil: Spoil) -> Case:
    return Case(about, spoil, "refuse", "manifest", MANIFEST)


def _plan(about: str, spoil: Spoil, kind: str = "plan") -> Case:
    return Case(about, spoil, "report", kind, PLAN)


RECORDS = {
    "manifest-later-major": _manifest("format 2.0", change.manifest(format_version="2.0")),
    "manifest-empty": _manifest("no bytes", change.manifest_text(lambda text: "")),
    "manifest-list": _manifest("a list", change.manifest_text(lambda text: f"[{text}]")),
    "manifest-key-twice": _manifest(
        "vocab_size twice", change.manifest_text(lambda text: text.replace("{", '{"vocab_size": 1000000,', 1))
    ),
    "manifest-nan": _manifest("NaN", change.manifest_text(lambda text: text.replace('"top_p": 0.95', '"top_p": NaN'))),
    "manifest-surrogate": _manifest(
        "half of a surrogate pair",
        change.manifest_text(lambda text: text.replace('"capture"', '"x": "\\udfff", "capture"')),
    ),
    "manifest-bottomless": _manifest(
        "lists nested 3,000 deep",
        change.manifest_text(lambda text: text.replace('"capture"', f'"x": {"[" * 3000}{"]" * 3000}, "capture"')),
    ),
    "manifest-boolean": _manifest("a vocabulary of true", change.manifest(vocab_size=True)),
    "manifest-text-number": _manifest('a vocabulary of "64"', change.manifest(vocab_size="64")),
    "manifest-vocabulary": _manifest("a vocabulary of 10^30", change.manifest(vocab_size=10**30)),
    "manifest-digits": _manifest(
        "5,000 digits",
        change.manifest_text(lambda text: text.replace('"vocab_size": 64', f'"vocab_size": {"9" * 5000}')),
    ),
    "manifest-edited": _manifest(
        "another hash than its own", lambda case: case.manifest(sealed=False, capture="native")
    ),
    "manifest-identity": _manifest("an identity of another digest", change.manifest(identity={"top_k": 5})),
    "manifest-no-checksums": _manifest("page_checksums is false", change.manifest(page_checksums=False)),
    "manifest-support-logprobs": Case(
        "support_logprobs is true, and no shard has the column", change.manifest(support_logprobs=True), kind="footer"
    ),
    "manifest-other-vocabulary": Case(
        "a vocabulary of 8: ids in all shards are beyond", change.manifest(vocab_size=8), kind="ids"
    ),
    "plan-no-samples": _plan(
        "n is 0",
        change.plan(lambda plan: plan.set_column(2, plan.schema.field("n"), pa.array([0] * len(plan), pa.int32()))),
    ),
    "plan-unsorted": _plan("rows in another order", change.plan(lambda plan: plan.take([1, 0, 2, 3]))),
    "plan-empty": _plan("no rows", change.plan(lambda plan: plan.slice(0, 0))),
    "plan-cut": _plan(
        "the second half is gone", lambda case: case.plan_bytes(lambda content: content[: len(content) // 2])
    ),
    "plan-no-crc": _plan("no page has a CRC", change.plan(lambda plan: plan, write_page_checksum=False)),
    "plan-column-missing": _plan("no seed", change.plan(lambda plan: plan.drop_columns("seed"))),
    "plan-not-utf8": _plan("metadata that is not UTF-8", change.plan(change.bytes_of_text("metadata", b"\xff"))),
    "plan-foreign": _plan("not the plan that the manifest vouches for", change.manifest(plan_sha256="0" * 64)),
    "plan-missing": _plan("no plan", lambda case: case.path(PLAN).unlink()),
    "retry-unsorted": Case(
        "a list that falls", lambda case: change.retry(case, [(2, 0), (1, 1)]), "report", "retries", RETRY
    ),
    "retry-unplanned": Case(
        "a sample that is not planned", lambda case: change.retry(case, [(9, 0)]), "report", "retries", RETRY
    ),
    "retry-count": Case(
        "fewer rows than the manifest says",
        lambda case: change.retry(case, [(2, 0)], samples=2),
        "report",
        "retries",
        RETRY,
    ),
    "retry-foreign": Case(
        "another hash", lambda case: change.retry(case, [(2, 0)], sha256="0" * 64), "report", "retries", RETRY
    ),
    "retry-missing": Case("no list", change.missing_retry, "report", "retries", RETRY),
}
"""Manifest, plan, retry lists."""

CASES = BYTES | COLUMNS | ROW_CASES | LINES | RECORDS


def _pipe(name: str) -> Spoil:
    def spoil(case: Hostile) -> None:
        case.path(name).unlink(missing_ok=True)
        os.mkfifo(case.path(name))

    return spoil


def _folder(name: str) -> Spoil:
    def spoil(case: Hostile) -> None:
        case.path(name).unlink()
        case.path(name).mkdir()

    return spoil


def _link(name: str, target: str) -> Spoil:
    def spoil(case: Hostile) -> None:
        case.path(name).unlink()
        case.path(name).symlink_to(target)

    return spoil


def _gigabyte(name: str) -> Spoil:
    """A sparse file: it takes no room."""

    def spoil(case: Hostile) -> None:
        with case.path(name).open("ab") as file:
            file.truncate(1 << 30)

    return spoil


def _linked_shard(case: Hostile) -> None:
    """As caches of downloads do."""
    case.path(SHARD).rename(case.path("blob"))
    case.path(SHARD).symlink_to(case.path("blob"))


RECIPES = {
    "pipe-shard": Case("a pipe in place of a shard", _pipe(SHARD), kind="bytes"),
    "pipe-new-shard": Case(
        "a pipe as a shard without a line", _pipe("data/part-w1-000000.parquet"), file="data/part-w1-000000.parquet"
    ),
    "pipe-journal": Case("a pipe as a journal", _pipe(JOURNAL), kind="journal", file=JOURNAL),
    "pipe-manifest": _manifest("a pipe as manifest", _pipe(MANIFEST)),
    "pipe-plan": _plan("a pipe as plan", _pipe(PLAN)),
    "folder-shard": Case("a directory in place of a shard", _folder(SHARD), kind="bytes"),
    "folder-journal": Case("a directory as a journal", _folder(JOURNAL), kind="journal", file=JOURNAL),
    "folder-manifest": _manifest("a directory as manifest", _folder(MANIFEST)),
    "device-manifest": _manifest("a link to a device that never ends", _link(MANIFEST, "/dev/zero")),
    "device-journal": Case(
        "a link to a device that never ends", _link(JOURNAL, "/dev/zero"), kind="journal", file=JOURNAL
    ),
    "gigabyte-manifest": _manifest("a manifest of 1 GiB", _gigabyte(MANIFEST)),
    "gigabyte-line": Case("a journal line of 1 GiB", _gigabyte(JOURNAL), kind="journal", file=JOURNAL),
    "group-flood": Case("20,000 row groups of no rows", change.raw(change.many_groups(20_000))),
    "linked-shard": read("a shard that is a link to a file", _linked_shard),
}
"""What cannot be stored in a repository."""


def write_hostile(directory: Path, only: Collection[str] = CASES.keys()) -> None:
    """The hostile datasets, replacing those of these names in `directory`, and the table of all."""
    for name in only:
        shutil.rmtree(directory / name, ignore_errors=True)
        CASES[name].spoil(write_base(directory / name))
    table = {name: expectation(case) for name, case in CASES.items()}
    (directory / "hostile.json").write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def expectation(case: Case) -> dict[str, Any]:
    """What is said of a case in `hostile.json`."""
    finding = None if case.kind is None else {"kind": case.kind, "file": case.file}
    return {"about": case.about, "must": case.must, "finding": finding}


if __name__ == "__main__":
    write_hostile(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "hostile")

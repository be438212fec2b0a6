"""The dataset card: front matter that hubs understand, text that data cannot break."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from rollgen.errors import DatasetError
from rollgen.format.reader import open_dataset
from rollgen.format.schema import shard_schema
from rollgen.inspect import card as module
from rollgen.inspect.card import MEANINGS, dataset_card, markdown, write_card
from rollgen.inspect.stats import stats_of

if TYPE_CHECKING:
    from collections.abc import Callable

COLUMNS = Path(__file__).parents[2] / "schema" / "v1" / "columns.json"


def test_front_matter_points_at_the_shards(make_dataset: Callable[..., Any]) -> None:
    """Hubs read the YAML between the first two rules; the licence is a field that its owner fills in."""
    directory = make_dataset(0).directory
    write_card(directory)
    _, front_matter, body = (directory / "README.md").read_text().split("---\n", 2)
    fields = yaml.safe_load(front_matter)
    (config,) = fields["configs"]
    assert config == {"config_name": "default", "data_files": [{"split": "train", "path": "data/*.parquet"}]}
    assert fields["license"] == "unknown"
    assert body.startswith("\n# data\\_0\n")


def test_front_matter_is_its_owners(make_dataset: Callable[..., Any]) -> None:
    """A licence that was filled in stays when the card is written again."""
    directory = make_dataset(0).directory
    card = directory / "README.md"
    write_card(directory)
    written = card.read_text()
    licensed = written.replace("license: unknown", "license: apache-2.0", 1)
    assert licensed != written
    card.write_text(licensed)
    moved = directory.rename(directory.with_name("moved"))
    write_card(moved)
    assert (moved / "README.md").read_text().startswith(licensed.partition("\n# ")[0] + "\n# moved\n")


def test_a_mark_of_the_whole_card_is_known(make_dataset: Callable[..., Any]) -> None:
    """As 0.1.0 made them, over the front matter too: the card is written anew, with all of today's fields."""
    directory = make_dataset(0).directory
    write_card(directory)
    card = directory / "README.md"
    written = card.read_text()
    old = "---\ntags:\n- rollgen\n---\n\n# old\n"
    mark = "\n" + written.splitlines()[-1].replace(
        hashlib.sha256(written.partition("\n---\n")[2].rpartition("\n<!--")[0].encode()).hexdigest()[:16],
        hashlib.sha256(old.encode()).hexdigest()[:16],
    )
    card.write_text(old + mark + "\n")
    write_card(directory)
    assert card.read_text() == written


@pytest.mark.parametrize("removed", ["", "\n"], ids=["front matter", "and the empty line below"])
def test_front_matter_that_was_removed_stays_away(make_dataset: Callable[..., Any], removed: str) -> None:
    """A page of a hub may have its own: the text below is written again, and no licence is put in front."""
    directory = make_dataset(0).directory
    card = directory / "README.md"
    write_card(directory)
    text = card.read_text().partition("\n---\n")[2]
    card.write_text(text.removeprefix(removed))
    moved = directory.rename(directory.with_name("moved"))
    write_card(moved)
    written = (moved / "README.md").read_text()
    assert written.startswith("\n# moved\n")
    assert written.splitlines()[2:-1] == text.splitlines()[2:-1]


def test_nothing_is_left_of_a_card_that_was_interrupted(
    make_dataset: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Ctrl-C, say."""
    directory = make_dataset(0).directory
    before = sorted(directory.iterdir())
    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_card(directory)
    assert sorted(directory.iterdir()) == before


def interrupted(*paths: Path) -> None:
    raise KeyboardInterrupt


def test_an_error_is_the_first_one(make_dataset: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of taking away what was begun, which fails for the same reason."""
    directory = make_dataset(0).directory
    monkeypatch.setattr(module, "new_file", refused)
    monkeypatch.setattr(Path, "unlink", refused)
    with pytest.raises(DatasetError, match=r"README\.md: cannot be written: Read-only file system"):
        write_card(directory)


def refused(path: Path, **settings: object) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))


def test_edited_text_is_left_alone(make_dataset: Callable[..., Any]) -> None:
    """Whoever wrote something about the data finds it again, figures or not."""
    directory = make_dataset(0).directory
    card = directory / "README.md"
    write_card(directory)
    edited = card.read_text().replace("## Columns", "Do not train on the third prompt.\n\n## Columns")
    card.write_text(edited)
    write_card(directory)
    assert card.read_text() == edited


@pytest.mark.parametrize(
    "change",
    [
        lambda card: card.replace(b"license: unknown", b"license: \xff"),
        lambda card: b"\xef\xbb\xbf" + card,
        lambda card: card.replace(b"\n", b"\r\n"),
        lambda card: b"Read me first.\n" + card,
        lambda card: card.replace(b"tags:", b"tags:" + b"\n- more" * 10**6, 1),
    ],
    ids=["no UTF-8", "a byte order mark", "other line ends", "text in front", "7 MB"],
)
def test_what_is_no_card_of_ours_is_left_alone(make_dataset: Callable[..., Any], change: Any) -> None:
    """Its bytes stay: reading them as text would lose some of them."""
    directory = make_dataset(0).directory
    card = directory / "README.md"
    write_card(directory)
    changed = change(card.read_bytes())
    assert changed != card.read_bytes()
    card.write_bytes(changed)
    write_card(directory.rename(directory.with_name("moved")))
    assert (directory.with_name("moved") / "README.md").read_bytes() == changed


def test_counts_of_the_card(make_dataset: Callable[..., Any], make_extras: Callable[..., Path], tmp_path: Path) -> None:
    """Some prompts of the one dataset are not truncated, and its mean is of the others; none of the other one."""
    stats = stats_of(open_dataset(make_dataset(0).directory))
    assert stats.support is not None
    untruncated = stats.support.full_vocabulary / stats.support.tokens
    assert f"| drawn from the full vocabulary | {untruncated:.1%} |" in dataset_card(stats)
    assert "full vocabulary" not in dataset_card(stats_of(open_dataset(make_extras(tmp_path / "run", shards=1))))
    assert "in 1 file |" in dataset_card(stats_of(open_dataset(tmp_path / "run")))


@pytest.mark.parametrize("support_logprobs", [False, True])
def test_every_column_is_explained(make_dataset: Callable[..., Any], support_logprobs: bool) -> None:
    """One table row for each column that the dataset has."""
    card = dataset_card(stats_of(open_dataset(make_dataset(0, support_logprobs=support_logprobs).directory)))
    for name in shard_schema(support_logprobs=True).names:
        expected = 1 if name != "support_logprobs" or support_logprobs else 0
        assert card.count(f"\n| `{name}` | `") == expected


def test_meanings_are_those_of_the_contract() -> None:
    """The card and `columns.json` say the same, so neither can drift."""
    contract = json.loads(COLUMNS.read_text(encoding="utf-8"))["shard"]
    assert {column["name"]: column["meaning"] for column in contract} == MEANINGS


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a|b", r"a\|b"),
        ("[x](http://y)", r"\[x\](http\://y)"),
        ("<script>", "&lt;script&gt;"),
        ("`code` *b* _i_", r"\`code\` \*b\* \_i\_"),
        ("line\nbreak", r"line\\nbreak"),
        ("@me $x$ a&b", r"\@me \$x\$ a&amp;b"),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
    ],
)
def test_markdown_escapes(text: str, expected: str) -> None:
    """Data stays inline text in a table cell."""
    assert markdown(text) == expected


def test_hostile_names_stay_in_their_cell(make_dataset: Callable[..., Any]) -> None:
    """A model name cannot add a table row, a heading, a tag or front matter."""
    hostile = "x|y\n---\n# heading <img src=x>\u202e"
    stats = stats_of(open_dataset(make_dataset(0, model_name=hostile).directory))
    card = dataset_card(dataclasses.replace(stats, name=hostile))
    assert "---\n" not in card
    assert "\n# heading" not in card
    assert "<img" not in card
    assert "\u202e" not in card


def test_card_of_a_run_that_has_just_started(empty_dataset: Path) -> None:
    """It is written at the start of a run, before there are figures."""
    card = dataset_card(stats_of(open_dataset(empty_dataset)))
    assert "| planned samples | 24, of which owed: 24 |" in card
    assert "nats" not in card.split("## Columns")[0]

"""The dataset card: front matter that hubs understand, text that data cannot break."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rollgen.format.schema import shard_schema
from rollgen.inspect.card import MEANINGS, dataset_card, markdown
from rollgen.inspect.stats import dataset_stats

if TYPE_CHECKING:
    from collections.abc import Callable

COLUMNS = Path(__file__).parents[2] / "schema" / "v1" / "columns.json"


def test_front_matter_points_at_the_shards(make_dataset: Callable[..., Any]) -> None:
    """`datasets.load_dataset` reads the YAML between the first two rules; the licence is left to the user."""
    _, front_matter, body = dataset_card(dataset_stats(make_dataset(0).directory)).split("---\n", 2)
    assert "configs:\n- config_name: default\n  data_files: data/*.parquet\n" in front_matter
    assert "\n# license:" in front_matter
    assert body.startswith("\n# data\\_0\n")


@pytest.mark.parametrize("support_logprobs", [False, True])
def test_every_column_is_explained(make_dataset: Callable[..., Any], support_logprobs: bool) -> None:
    """One table row for each column that the dataset has."""
    card = dataset_card(dataset_stats(make_dataset(0, support_logprobs=support_logprobs).directory))
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
    stats = dataset_stats(make_dataset(0, model_name=hostile).directory)
    card = dataset_card(dataclasses.replace(stats, name=hostile))
    assert card.count("---\n") == 2  # the front matter's own
    assert "\n# heading" not in card
    assert "<img" not in card
    assert "\u202e" not in card


def test_card_of_a_run_that_has_just_started(empty_dataset: Path) -> None:
    """It is written at the start of a run, before there are figures."""
    card = dataset_card(dataset_stats(empty_dataset))
    assert "| planned samples | 24, of which owed: 24 |" in card
    assert "nats" not in card.split("## Columns")[0]

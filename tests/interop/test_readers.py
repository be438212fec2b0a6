"""Everything opens a dataset, and finds there what the loader finds: also where nested lists cross page borders.

Libraries have got this wrong: lists that went on in the next page, the next row group or the next batch of a reader
were cut, joined or lost.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow.parquet as pq
import pytest
from models.readers import READERS, Found, with_the_loader

from rollgen import RolloutDataset
from rollgen.format.schema import DATA_PAGE_BYTES, ROW_GROUP_TOKENS
from rollgen.inspect.card import write_card
from rollgen.rollouts import Sampling

TOKENS = 7_000
"""Of a row: some nine fill a row group, and six of them a page."""
SCHEMA = Path(__file__).parents[2] / "schema"
SHAPES = [{"full": True}, {"tokens": 1}, {"extras": True}, {"support_logprobs": True}]


@pytest.fixture(scope="module")
def large(make_dataset: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards of ten rows and two row groups each, whose ids fill more than one page."""
    sampling = Sampling(temperature=0.75, top_p=0.875, top_k=48, max_tokens=TOKENS)
    directory = tmp_path_factory.mktemp("large") / "run"
    make_dataset(directory, prompts=5, tokens=TOKENS, largest=48, sampling=sampling)
    write_card(directory)
    return directory


@pytest.fixture(scope="module")
def found(large: Path) -> Found:
    """What the loader finds there."""
    return with_the_loader(large)


def test_lists_do_cross_pages_and_row_groups(large: Path) -> None:
    """Or the tests below would show less than they say."""
    for path in large.glob("data/*.parquet"):
        metadata = pq.read_metadata(path)
        assert metadata.num_row_groups == 2
        group = metadata.row_group(0)
        (masks,) = (
            group.column(number)
            for number in range(group.num_columns)
            if group.column(number).path_in_schema.startswith("sampling_mask")
        )
        assert masks.num_values * 4 > DATA_PAGE_BYTES
    assert 10 * TOKENS > ROW_GROUP_TOKENS


@pytest.mark.parametrize("reader", READERS)
def test_reader_agrees_with_the_loader(large: Path, found: Found, reader: str) -> None:
    """140,000 tokens and 3.4 million ids, bit by bit."""
    READERS[reader](large).assert_equals(found)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reader_agrees_on_every_kind_of_row(
    make_dataset: Callable[..., Path], tmp_path: Path, reader: str, shape: dict[str, Any]
) -> None:
    """Null supports, rows of one token, and datasets with each of the optional columns."""
    directory = make_dataset(tmp_path / "run", **shape)
    write_card(directory)
    READERS[reader](directory).assert_equals(with_the_loader(directory))


def documented(language: str) -> str:
    """The first lines of `language` below "Plain readers" in the format's description."""
    _, _, below = (SCHEMA / "SPEC.md").read_text().partition("**Plain readers.**")
    [lines] = re.findall(rf"```{language}\n(.*?)```", below, re.DOTALL)[:1]
    return str(lines)


def current_with_duckdb() -> list[tuple[Any, ...]]:
    return duckdb.sql(f"select prompt_index, sample_index, token_ids from ({documented('sql')})").fetchall()


def current_with_polars() -> list[tuple[Any, ...]]:
    names: dict[str, Any] = {"pl": pl}
    exec(documented("python"), names)
    return list(names["current"].select("prompt_index", "sample_index", "token_ids").collect().rows())


@pytest.mark.parametrize("current", [current_with_duckdb, current_with_polars])
@pytest.mark.parametrize("name", ["runs", "generations"])
def test_documented_queries_give_the_current_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, current: Callable[[], list[tuple[Any, ...]]]
) -> None:
    """Those that the loader hands out: all of a merged dataset, and of a sample that was made again the last."""
    directory = Path(shutil.copytree(SCHEMA / "conformance" / "golden" / name, tmp_path / name))
    monkeypatch.chdir(directory)
    dataset = RolloutDataset(directory, allow_unreplayable=True)
    found = (dataset[index] for index in range(len(dataset)))
    keys = [(rollout.prompt_index, rollout.sample_index, rollout.token_ids.tolist()) for rollout in found]
    assert sorted(current()) == sorted(keys)
    assert len(keys) < pl.scan_parquet("data/*.parquet").collect().height or name == "runs"

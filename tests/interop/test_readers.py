"""Everything opens a dataset, and finds there what the loader finds: also where nested lists cross page borders.

Libraries have got this wrong: lists that went on in the next page, the next row group or the next batch of a reader
were cut, joined or lost.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from models.readers import READERS, Found, with_the_loader

from rollgen.format.schema import DATA_PAGE_BYTES, ROW_GROUP_TOKENS
from rollgen.inspect.card import write_card
from rollgen.rollouts import Sampling

TOKENS = 7_000
"""Of a row: some nine fill a row group, and six of them a page."""
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

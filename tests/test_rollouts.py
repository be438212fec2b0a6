"""The nouns: what they derive from their fields."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from rollgen.engines.base import SampleRequest
from rollgen.rollouts import (
    OVERHEAD_BYTES,
    TRUNCATING,
    Completion,
    Prompt,
    Sampling,
    WeightVersions,
    sample_seed,
    text_length,
    truncates,
)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), True),  # top_k is 50 by default
        (Sampling(top_k=0), False),
        (Sampling(top_k=1), True),
        (Sampling(top_k=0, top_p=0.99), True),
        (Sampling(top_k=0, min_p=0.01), True),
        (Sampling(top_k=0, temperature=0.5, max_tokens=1, stop=("a",), stop_token_ids=(1,)), False),
    ],
)
def test_truncates(sampling: Sampling, expected: bool) -> None:
    """Any of the three cuts; temperature and stops do not."""
    assert sampling.truncates is expected


@pytest.mark.parametrize(
    ("key", "seed"),
    [
        ((0, "p0", 0), 0xDC8F592212D35AD3 >> 1),
        ((17, "é😀", 3), 0x0A1049685811310A >> 1),
    ],
)
def test_sample_seed_is_fixed(key: tuple[int, str, int], seed: int) -> None:
    """`printf '0\\np0\\n0' | sha256sum | cut -c1-16`, shifted right by one bit: datasets on disk hold these."""
    assert sample_seed(*key) == seed


def test_sample_seeds_fit_int64_and_differ() -> None:
    """63 bits, and no two alike over neighbouring seeds, ids and indices: 8 * 8 * 8 = 512 different ones."""
    seeds = {sample_seed(seed, f"p{p}", k) for seed, p, k in itertools.product(range(8), repeat=3)}
    assert len(seeds) == 512
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_sample_seed_keeps_its_parts_apart() -> None:
    """("p1", 0) is not ("p", 10), nor seed 1 with "1" seed 11 with ""."""
    assert sample_seed(0, "p1", 0) != sample_seed(0, "p", 10)
    assert sample_seed(1, "1", 0) != sample_seed(11, "", 0)


def test_request_derives_its_seed_from_the_row(make_prompt: Callable[..., Prompt]) -> None:
    """The row's own seed where it has one; independent of its place in the plan."""
    request = SampleRequest(make_prompt(3, seed=7), 2)
    assert request.seed == sample_seed(7, "p3", 2)
    assert SampleRequest(replace(request.prompt, prompt_index=9), 2).seed == request.seed
    assert request.request_id == "3-2"


def test_nbytes_counts_every_array(make_completion: Callable[..., Completion]) -> None:
    """4 bytes a token, logprob, mask id, prompt id and support logprob; 8 an offset, of which there is one more.

    The constant stands for what Python takes around them: without it, short completions would seem to be free.
    """
    completion = make_completion(4, 0, tokens=10, support_logprobs=True)  # prompt 4 has 5 token ids
    ids = len(completion.mask_ids)
    assert completion.nbytes == 4 * 5 + 4 * 10 + 4 * 10 + 4 * ids + 8 * 11 + 4 * ids + OVERHEAD_BYTES
    assert replace(completion, support_logprobs=None).nbytes == completion.nbytes - 4 * ids
    # 5 + 10 - 1 positions of 3 layers with 2 experts each, 2 bytes a number.
    with_extras = make_completion(4, 0, tokens=10, support_logprobs=True, extras=True)
    assert with_extras.nbytes == completion.nbytes + 2 * 14 * 3 * 2


def test_texts_of_a_completion(make_completion: Callable[..., Completion]) -> None:
    """What the engine calls its weights is text of the row as well, and so are its id and what stopped it."""
    completion = make_completion(text="ab", prompt="c", metadata=None, prompt_id="p")
    assert text_length(completion) == 4
    assert text_length(replace(completion, stop_reason='"."')) == 7
    assert text_length(replace(completion, weight_versions=WeightVersions(("x", "yz"), (0, 1)))) == 7


def test_nouns_are_frozen(make_prompt: Callable[..., Prompt], make_completion: Callable[..., Completion]) -> None:
    """They pass through threads and buffers: nobody may change one in place."""
    for noun in (Sampling(), make_prompt(0), make_completion()):
        name = dataclasses.fields(noun)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(noun, name, None)
        assert not hasattr(noun, "__dict__")


def test_truncation_of_columns_is_that_of_each_row() -> None:
    """Every combination of what is on and off, in float32 as shards have them."""
    rows = [Sampling(top_k=k, top_p=p, min_p=m) for k, p, m in itertools.product((0, 1, 50), (1.0, 0.5), (0.0, 0.25))]
    columns = {name: np.array([getattr(row, name) for row in rows], np.float32) for name in TRUNCATING}
    assert truncates(**columns).tolist() == [row.truncates for row in rows]

"""A completion on a terminal: aligned, wrapped, readable without colour, and inert."""

from __future__ import annotations

import io
import unicodedata
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from models.tiny import make_tiny_tokenizer
from rich.cells import cell_len
from rich.console import Console

from rollgen.inspect.decoding import Decoder
from rollgen.inspect.sample import Sample, read_sample
from rollgen.inspect.sample_view import BANDS, Column, columns_of, percent, render_sample, style_of, visible, wrap
from rollgen.rollouts import WeightVersions

if TYPE_CHECKING:
    from collections.abc import Callable

TOKENIZER = make_tiny_tokenizer()
HOSTILE = "\x1b[31mred\x1b]0;title\x07\x9b2J\u202edesrever\u2066 [red]markup[/red] \u200d\x00\r\n"


def shown(sample: Sample, at: int | None = None, *, width: int = 80, colour: bool = False) -> str:
    console = Console(
        file=io.StringIO(), width=width, force_terminal=colour, color_system="truecolor" if colour else None
    )
    render_sample(sample, console, at)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        pytest.param(WeightVersions(("step 7",), (0,)), "step 7 for all tokens", id="one"),
        pytest.param(WeightVersions(("a", "b"), (0, 2)), "a for tokens 0-1 · b for tokens 2-5", id="two"),
        pytest.param(
            WeightVersions(tuple("abcdef"), tuple(range(6))),
            "a for tokens 0-0 · b for tokens 1-1 · c for tokens 2-2 · d for tokens 3-3 · 2 more; --json has all",
            id="many",
        ),
        pytest.param(WeightVersions(("\x1b[31m",), (0,)), "\\x1b[31m for all tokens", id="hostile"),
    ],
)
def test_weights(make_completion: Callable[..., Any], told: WeightVersions, expected: str) -> None:
    """Which weights sampled which of six tokens, on one line."""
    sample = sample_of(make_completion, [5, 6, 7, 8, 9, 10], weight_versions=told)
    assert f"Weights {expected}" in " ".join(shown(sample, width=200).split())
    assert "Weights" not in shown(sample_of(make_completion, [5]))


def sample_of(
    make_completion: Callable[..., Any],
    token_ids: list[int],
    *,
    probabilities: list[float] | None = None,
    decoder: Decoder | None = None,
    **changes: Any,
) -> Sample:
    """Each token alone in its support, unless `changes` say otherwise."""
    tokens = len(token_ids)
    values = {
        "token_ids": np.array(token_ids, np.int32),
        "logprobs": np.log(np.array(probabilities or [1.0] * tokens, np.float32)),
        "mask_ids": np.array(token_ids, np.int32),
        "mask_offsets": np.arange(tokens + 1),
    }
    return Sample(
        completion=make_completion(tokens=tokens, **values | changes),
        n=4,
        samples=(0, 1),
        generations=(0,),
        file="part-w0-000000.parquet",
        row_group=2,
        row=7,
        vocab_size=512,
        decoder=decoder or Decoder(TOKENIZER.backend_tokenizer),
    )


def ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" sea", "␣sea"),
        ("\n", r"\n"),
        ("\u200d", r"\u200d"),
        ("\u0301", "◌\u0301"),
        ("e\u0301", "e\u0301"),
        ("\x1b[2J", r"\x1b[2J"),
        ("\u1161", "◌\u1161"),
        ("한", "한"),
        ("", ""),
    ],
    ids=["space", "newline", "joiner", "lone mark", "mark", "escape", "lone vowel", "wide", "empty"],
)
def test_visible(text: str, expected: str) -> None:
    """Nothing in a token is invisible or joins its neighbour."""
    assert visible(text) == expected


@pytest.mark.parametrize(
    ("probability", "expected"), [(1.0, "100"), (0.995, "100"), (0.5, "50"), (0.006, "1"), (0.004, "<1"), (0.0, "<1")]
)
def test_percent(probability: float, expected: str) -> None:
    """Never 0: what was sampled was possible."""
    assert percent(probability) == expected


def test_bands() -> None:
    """Every probability has one; what is likely looks like text, everything else sets both of its colours."""
    assert [style_of(p) for p in (1.0, 0.9, 0.89, 0.0)] == ["", "", BANDS[1][1], BANDS[-1][1]]
    assert all(" on " in style for _, style in BANDS[1:])


def test_tokens_and_sizes_are_aligned(make_completion: Callable[..., Any]) -> None:
    """Below each token its probability and its support, in the column where it begins."""
    sample = sample_of(
        make_completion,
        ids("abc"),
        probabilities=[1, 0.25, 0.001],
        mask_ids=np.arange(14, dtype=np.int32),
        mask_offsets=np.array([0, 1, 13, 14]),
    )
    lines = shown(sample).splitlines()
    first = lines.index("a   b  c")
    assert lines[first + 1 : first + 3] == ["100 25 <1", "1   12 1"]


def test_wide_characters_take_two_cells(make_completion: Callable[..., Any]) -> None:
    """Hangul and emoji: three and four tokens of one byte are one column, and the next one begins behind it."""
    sample = sample_of(make_completion, ids("한👨a"), probabilities=[1, 0.5, 0.5, 1, 1, 1, 1, 1])
    columns = list(columns_of(sample, colour=True))
    assert [column.text for column in columns] == ["한", "👨", "a"]
    assert [column.below for column in columns] == [("1+1+1",), ("1+1+1+1",), ("1",)]
    assert [column.probability for column in columns] == pytest.approx([0.25, 1, 1])  # of a cell: the product
    lines = shown(sample).splitlines()
    texts = next(line for line in lines if line.startswith("한"))
    chances = lines[lines.index(texts) + 1]
    assert chances == "100+50+50 100+100+100+100 100"
    assert [cell_len(texts[: texts.index(text)]) for text in "👨a"] == [10, 26]


@pytest.mark.parametrize("width", [24, 80, 200])
def test_lines_fit(make_completion: Callable[..., Any], width: int) -> None:
    """Of any width, whatever the tokens are."""
    text = "안녕하세요 👨‍👩‍👧 The sea is wide and the wind is strong. " * 3
    sample = sample_of(make_completion, ids(text))
    assert max(map(cell_len, shown(sample, width=width).splitlines())) <= width


def test_wrap() -> None:
    """Rows fill up and no more; a text that ends a line ends the row; what is too wide is cut."""
    columns = [Column(text, 1.0, ("1",), text.endswith("n")) for text in ("aa", "bb", r"\n", "cc", "d" * 9)]
    rows = [[column.text for column in row] for row in wrap(columns, 8)]
    assert rows == [["aa", "bb", r"\n"], ["cc"], ["d" * 7 + "…"]]


def test_colour_only_where_there_is_some(make_completion: Callable[..., Any]) -> None:
    """With colour two lines, without three; escape sequences with colour only."""
    sample = sample_of(make_completion, ids("ab"), probabilities=[0.5, 0.001])
    assert "\x1b" not in shown(sample)
    assert "50  <1\n1   1" in shown(sample) or "50 <1\n1  1" in shown(sample)
    coloured = shown(sample, colour=True)
    assert "\x1b[30;46ma\x1b[0m" in coloured  # black on cyan: 40 to 70 %
    assert "\x1b[1;37;45mb\x1b[0m" in coloured  # bold white on magenta: below 1 %
    assert "<1" not in coloured


def test_header(make_completion: Callable[..., Any]) -> None:
    """Everything that is asked for first: which, why it ended, how it was sampled, how likely it was, where it is."""
    sample = sample_of(
        make_completion, ids("ab"), probabilities=[1, 0.25], stop_reason='"END"', prompt="p", replayable=False
    )
    output = shown(sample, width=200)
    for text in (
        "p0",
        '0 of 0-3 · finished by stop ("END") · 2 tokens',
        "temperature 0.75 · top_k 8 · top_p 0.875 · min_p 0 · max_tokens 64 · seed ",
        "mean logprob -0.693 · least likely token 25.00% · mean support 1 ids",
        "part-w0-000000.parquet · row group 2 · row 7",
        "cannot be replayed",
    ):
        assert text in output
    assert "Generation" not in output


def test_generations_are_told(make_again: Callable[..., Any]) -> None:
    """That there are others, and how to see them."""
    directory = make_again().directory
    assert "1, current · also stored: 0; see p0:0@G" in shown(read_sample(directory, "p0"), width=120)
    assert "0, superseded · also stored: 1; see p0:0@G" in shown(read_sample(directory, "p0:0@0"), width=120)


def test_long_prompt_is_bounded(make_completion: Callable[..., Any]) -> None:
    """Its end is shown, where the question is."""
    prompt = np.array(ids("x" * 200 + " the end") * 5, np.int32)
    output = shown(sample_of(make_completion, ids("a"), prompt_token_ids=prompt))
    assert "the last 800 characters" in output
    assert "…x" in output
    assert "the end\n\n" in output
    assert output.count("x") <= 800


def test_support_of_a_token(make_dataset: Callable[..., Any]) -> None:
    """A row an id, most likely first, the sampled one marked."""
    sample = read_sample(make_dataset(0, support_logprobs=True).directory, "p0")
    output = shown(sample, -1)
    last = len(sample.completion.token_ids) - 1
    support = sample.support(last)
    assert support is not None
    assert f"Token {last} of 0-{last} · sampled '" in output
    rows = output[output.index("probability\n") :].splitlines()[1:]
    assert [int(row.split()[0]) for row in rows] == [entry.id for entry in support]
    assert [row.split()[-1] == "sampled" for row in rows] == [entry.sampled for entry in support]


def test_support_without_logprobs(make_dataset: Callable[..., Any]) -> None:
    """It is said that only one probability is known, and no other is shown."""
    sample = read_sample(make_dataset(0).directory, "p0")
    output = shown(sample, 0)
    assert "Only the sampled id's probability is stored" in output
    assert output.count("%") == 2 + 1  # the least likely token, the sampled one in the title and in the table


def test_long_support_is_bounded(make_completion: Callable[..., Any]) -> None:
    """40 ids of 200 and the sampled one, the last of all; the count of the others."""
    token = ids("a")[0]
    others = np.setdiff1d(np.arange(201, dtype=np.int32), [token])[:199]
    mask = np.sort(np.append(others, np.int32(token)))
    logprobs = np.where(mask == token, -9.0, -1.0).astype(np.float32)
    sample = sample_of(
        make_completion,
        [token],
        mask_ids=mask,
        mask_offsets=np.array([0, 200]),
        logprobs=np.array([-9], np.float32),
    )
    stored = replace(sample.completion, support_logprobs=logprobs)
    output = shown(replace(sample, completion=stored), 0)
    assert "159 more ids; --json has all" in output
    assert output.count(" sampled\n") == 1


def test_untruncated_token(make_dataset: Callable[..., Any]) -> None:
    """There is no support to show, and sizes say so."""
    sample = read_sample(make_dataset(0).directory, "p3")
    assert "Not truncated: any of the 500 ids could be sampled." in shown(sample, 0)
    assert "all all" in shown(sample).replace("  ", " ")
    assert "not truncated" in shown(sample)


def test_a_part_of_a_character(make_completion: Callable[..., Any]) -> None:
    """The byte, and the character that it is a part of."""
    sample = sample_of(make_completion, ids("한"))
    assert "sampled '\\x95' (id " in shown(sample, 1, width=120)
    assert "a part of '한'" in shown(sample, 1, width=120)


def test_without_a_tokenizer(make_dataset: Callable[..., Any]) -> None:
    """Ids stand for the tokens, and the prompt is shown as it was given."""
    sample = read_sample(make_dataset(0).directory, "p0")
    output = shown(sample)
    assert "no tokenizer/tokenizer.json: tokens are shown as ids" in output
    assert "\nprompt p0\n" in output
    assert f"\n{sample.completion.token_ids[0]} " in output


@pytest.mark.parametrize("colour", [False, True])
@pytest.mark.parametrize("at", [None, 0])
def test_hostile_data_is_inert(make_completion: Callable[..., Any], colour: bool, at: int | None) -> None:
    """Ids, reasons, prompts and tokens reach the console as text; only rich's own colours are escape sequences."""
    sample = sample_of(
        make_completion,
        ids(HOSTILE),
        prompt_id=HOSTILE,
        stop_reason=HOSTILE,
        prompt=HOSTILE,
        prompt_token_ids=np.array(ids(HOSTILE), np.int32),
    )
    output = shown(replace(sample, file=HOSTILE, generations=(0, 1)), at, width=500, colour=colour)
    allowed = {"\n", "\x1b"} if colour else {"\n"}
    assert {c for c in output if unicodedata.category(c) in {"Cc", "Cf"}} <= allowed | {"\u200d"}
    assert "\x1b]" not in output
    assert "\x1b[2J" not in output
    assert "\x1b[31m" not in output
    assert "[red]markup[/red]" in output

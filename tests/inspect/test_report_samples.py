"""The samples of a page: which, and what of them, against the completions that were stored."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from models.rewards import write_rewards
from models.tiny import make_tiny_tokenizer

from rollgen.format.reader import open_dataset
from rollgen.inspect.decoding import Decoder, load_decoder
from rollgen.inspect.report import samples as module
from rollgen.inspect.report.choice import choose, in_turn
from rollgen.inspect.report.samples import middle_cut, samples_json, turns
from rollgen.inspect.report.texts import Names, parts_of_names, spelled
from rollgen.inspect.rewards import stored_rewards

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollgen.rollouts import Completion

CODES = [0] * 50 + [1] * 3 + [2] * 20


def read(directory: Path, decoder: Decoder | None = None) -> dict[str, Any]:
    """As the page gets it."""
    dataset = open_dataset(directory)
    shown = samples_json(dataset, decoder or load_decoder(directory), stored_rewards(dataset))
    return json.loads(json.dumps(shown, allow_nan=False))


def places_of(completion: Completion) -> list[int]:
    """Of the tokens that are shown."""
    places = list(range(len(completion.token_ids)))
    head, tail = module.HEAD, module.TAIL
    return places if len(places) <= head + tail else places[:head] + places[-tail:]


def support_of(completion: Completion, place: int) -> list[tuple[int, float | None]]:
    """Ids, the sampled one first, then by falling probability and rising id, cut to what is shown."""
    start, stop = completion.mask_offsets[place : place + 2].tolist()
    ids = completion.mask_ids[start:stop].tolist()
    stored = completion.support_logprobs
    nats = [None] * len(ids) if stored is None else [round(-1000 * float(x)) for x in stored[start:stop]]
    sampled = int(completion.token_ids[place])
    exact = [0.0] * len(ids) if stored is None else (-stored[start:stop]).tolist()
    order = sorted(range(len(ids)), key=lambda i: (ids[i] != sampled, exact[i], ids[i]))
    return [(ids[i], nats[i]) for i in order][: module.IDS]


@pytest.mark.parametrize("seed", range(5))
def test_codes_take_turns(seed: int) -> None:
    """Everything once; of the first nine three each, and then the rare code is used up."""
    order = in_turn(np.array(CODES), np.random.default_rng(seed))
    assert sorted(order.tolist()) == list(range(len(CODES)))
    taken = [CODES[place] for place in order.tolist()]
    assert Counter(taken[:9]) == {0: 3, 1: 3, 2: 3}
    assert Counter(taken[9:43]) == {0: 17, 2: 17}
    assert set(taken[43:]) == {0}


def test_the_choice_is_random_and_always_the_same(make_dataset: Callable[..., Any]) -> None:
    """Rows of all shards, not the first ones of each."""
    dataset = open_dataset(make_dataset(0).directory)
    chosen = [choose(dataset, most=10, tokens=10**6, longest=10**6) for _ in range(2)]
    assert chosen[0] == chosen[1]
    rows = chosen[0].rows
    assert (len(rows), len(set(rows)), chosen[0].of) == (10, 10, 36)
    assert len({row.shard.name for row in rows}) == 3
    assert [row.row for row in rows] != sorted(row.row for row in rows)


@pytest.mark.parametrize(("tokens", "longest"), [(0, 100), (60, 100), (100, 5), (200, 100)])
def test_the_choice_fits_its_tokens(make_dataset: Callable[..., Any], tokens: int, longest: int) -> None:
    """As many of the same order as fit, a long one counted as it is shown; always one."""
    directory, completions = make_dataset(0)
    dataset = open_dataset(directory)
    every = choose(dataset, most=36, tokens=10**6, longest=100).rows
    fitting = choose(dataset, most=36, tokens=tokens, longest=longest).rows
    assert fitting == every[: len(fitting)]
    shards = [shard.name for shard in dataset.shards]
    lengths = [min(longest, len(completions[shards.index(r.shard.name) * 12 + r.row].token_ids)) for r in every]
    assert len(fitting) == 1 or sum(lengths[: len(fitting)]) <= tokens
    assert sum(lengths[: len(fitting) + 1]) > tokens


@pytest.mark.parametrize("support_logprobs", [False, True])
@pytest.mark.parametrize(("head", "tail", "ids"), [(1536, 512, 24), (7, 3, 4), (1, 1, 1)])
def test_items_are_the_completions(
    make_dataset: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    support_logprobs: bool,
    head: int,
    tail: int,
    ids: int,
) -> None:
    """Ids, probabilities and supports of the tokens that are shown, and the count of those that are not."""
    for name, value in (("HEAD", head), ("TAIL", tail), ("IDS", ids)):
        monkeypatch.setattr(module, name, value)
    directory, completions = make_dataset(0, support_logprobs=support_logprobs)
    if not support_logprobs:
        completions = [replace(completion, support_logprobs=None) for completion in completions]
    shown = read(directory)
    assert (shown["of"], len(shown["items"])) == (36, 36)
    for item, completion in zip(shown["items"], completions, strict=True):
        places = places_of(completion)
        assert (item["id"], item["sample"]) == (completion.prompt_id, completion.sample_index)
        assert [shown["ids"][name] for name in item["tokens"]] == completion.token_ids[places].tolist()
        assert item["nats"] == [round(-1000 * float(x)) for x in completion.logprobs[places]]
        sizes = np.diff(completion.mask_offsets)[places].tolist()
        assert item["sizes"] == sizes
        supports = [pair for place in places for pair in support_of(completion, place)]
        assert [shown["ids"][name] for name in item["supports"]] == [member for member, _ in supports]
        assert (item["support_nats"] or [None] * len(supports)) == [nats for _, nats in supports]
        hidden = len(completion.token_ids) - len(places)
        assert item.get("gap") == ([head, hidden] if hidden else None)


def test_the_vocabulary_is_shared(make_dataset: Callable[..., Any]) -> None:
    """Each id once, the most frequent first; without a tokenizer an id's name is its number."""
    shown = read(make_dataset(0).directory)
    used = Counter(name for item in shown["items"] for name in (*item["tokens"], *item["supports"]))
    assert len(set(shown["ids"])) == len(shown["ids"]) == len(used)
    frequencies = [used[place] for place in range(len(used))]
    assert frequencies == sorted(frequencies, reverse=True)
    assert not shown["decoded"]
    assert shown["names"] == [str(token_id) for token_id in shown["ids"]]


def test_the_budget_of_bytes(make_dataset: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer samples, in the order of the dataset, and never none."""
    directory = make_dataset(0).directory
    keys = []
    for budget in (10**9, 20_000, 1):
        monkeypatch.setattr(module, "BYTES", budget)
        keys.append([(item["id"], item["sample"]) for item in read(directory)["items"]])
    every, some, one = keys
    assert (len(every), len(one)) == (36, 1)
    assert 1 < len(some) < 36
    assert some == [key for key in every if key in some]
    assert set(one) <= set(some)


def test_a_large_budget_is_about_that_of_the_json(make_dataset: Callable[..., Any]) -> None:
    """What is counted is what is written, to a third."""
    directory = make_dataset(0, support_logprobs=True).directory
    dataset, decoder = open_dataset(directory), Decoder(None)
    rows = choose(dataset, most=36, tokens=10**6, longest=100).rows
    counted = sum(sample.bytes for sample in module._shown(rows, decoder, Names(decoder)))
    assert counted == pytest.approx(len(json.dumps(read(directory)["items"], separators=(",", ":"))), rel=0.33)


def test_superseded_rows_are_left_out(make_again: Callable[[], Any]) -> None:
    """The first sample is there once, as generation 1, and 36 there are."""
    shown = read(make_again().directory)
    first = [item["generation"] for item in shown["items"] if (item["id"], item["sample"]) == ("p0", 0)]
    assert (first, shown["of"], len(shown["items"])) == ([1], 36, 36)


@pytest.mark.parametrize(("head", "tail"), [(100, 100), (3, 2)])
def test_texts_join_to_the_text(
    make_completion: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, head: int, tail: int
) -> None:
    """Also of characters that are several tokens: the first has the text, the others none."""
    monkeypatch.setattr(module, "HEAD", head)
    monkeypatch.setattr(module, "TAIL", tail)
    tokenizer = make_tiny_tokenizer()
    decoder = Decoder(tokenizer.backend_tokenizer)
    ids = np.array(tokenizer.encode("a\U0001f600\u00e9 b", add_special_tokens=False), np.int32)
    assert len(ids) > 7  # the emoji alone is four bytes, and no token of its own
    completion = replace(make_completion(0, 0, tokens=len(ids)), token_ids=ids)
    names = Names(decoder)
    texts = dict(module._texts(completion, decoder, names, is_long=len(ids) > head + tail))
    shown = [texts.get(place, names[int(ids[token])]) for place, token in enumerate(places_of(completion))]
    if len(ids) <= head + tail:
        assert "".join(shown) == "a\U0001f600\u00e9 b"
        assert "" in shown
    else:
        assert len(shown) == head + tail
        assert shown[-1] == "b"


CHAT = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
CALL = [{"role": "assistant", "content": "c", "tool_calls": [1]}, {"role": "tool", "content": None}]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("plain", [("", "plain")]),
        ("[1]", [("", "[1]")]),
        ("[]", [("", "[]")]),
        ("7", [("", "7")]),
        ('[{"content": "no role"}]', [("", '[{"content": "no role"}]')]),
        (json.dumps(CHAT), [("system", "s"), ("user", "u")]),
        (json.dumps(PARTS), [("user", '{"content": [{"type": "text", "text": "x"}]}')]),
        (json.dumps(CALL), [("assistant", 'c\n{"tool_calls": [1]}'), ("tool", "")]),
        (json.dumps(CHAT * 20), [("", "… 8 turns before these …"), *[("system", "s"), ("user", "u")] * 16]),
        ("[" * 100_000, [("", middle_cut("[" * 100_000))]),
        (None, [("", "3 4")]),
    ],
    ids=["text", "list", "empty list", "number", "no role", "chat", "parts", "calls", "long", "deep", "ids"],
)
def test_turns(make_completion: Callable[..., Any], prompt: str | None, expected: list[tuple[str, str]]) -> None:
    """A chat by its turns, with what they hold besides text as JSON; anything else as it is."""
    completion = replace(make_completion(0, 0), prompt=prompt, prompt_token_ids=np.array([3, 4], np.int32))
    assert list(turns(completion, Decoder(None))) == expected


@pytest.mark.parametrize("before", ["", "User: "])
def test_text_that_looks_like_a_chat(make_completion: Callable[..., Any], before: str) -> None:
    """The model was shown the JSON itself: no chat. Where it was shown something else, it was one."""
    tokenizer, prompt = make_tiny_tokenizer(), json.dumps(CHAT)
    decoder = Decoder(tokenizer.backend_tokenizer)
    for text, expected in ((f"{before}{prompt}\n", [("", prompt)]), ("s u", [("system", "s"), ("user", "u")])):
        ids = np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)
        assert list(turns(replace(make_completion(0, 0), prompt=prompt, prompt_token_ids=ids), decoder)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain \u00a0\n\u0301", None),
        (r"\t", None),
        ("\t", ["", "\t"]),
        ("a\t\x1bb\n\u202e", ["a", "\t\x1b", "b\n", "\u202e"]),
    ],
)
def test_spelled_parts(text: str, expected: list[str] | None) -> None:
    """What the page spells out stands at odd places; text that has the letters of a spelling is text."""
    assert dict(spelled([(3, text)])) == ({} if expected is None else {3: expected})


def test_names_that_are_no_text() -> None:
    """A special token, a broken byte and an id that nobody knows are told from text that has their letters."""
    tokenizer = make_tiny_tokenizer()
    special, letter = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("a")
    (byte,) = (it for it in range(len(tokenizer)) if tokenizer.convert_ids_to_tokens(it) == "\u00ec")
    decoder = Decoder(tokenizer.backend_tokenizer)
    found = dict(parts_of_names([special, byte, 10**6, letter], decoder, Names(decoder)))
    assert found == {0: ["", tokenizer.eos_token], 1: ["", r"\xec"], 2: ["", "<1000000>"]}
    assert not dict(parts_of_names([1, 2], Decoder(None), Names(Decoder(None))))


@pytest.mark.parametrize(
    ("name", "run", "prompt_id", "expected"),
    [
        ("data", None, "p0", "data --sample p0:1"),
        ("-data", "r", "it's", "./-data --sample 'r/it'\"'\"'s:1'"),
        ("data", None, "", "data --sample :1"),
        ("data", None, "a\tb", None),
        ("d\u200eta", None, "p0", None),
    ],
)
def test_commands_can_be_typed(name: str, run: str | None, prompt_id: str, expected: str | None) -> None:
    """Or there is none: what is spelled out on the page is not what the dataset has."""
    told = {"run": run, "id": prompt_id, "sample": 1}
    assert module._command(Path(name), told) == (expected and f"rollgen inspect {expected}")


def test_long_texts_lose_their_middle() -> None:
    """4,000 characters stay, three quarters of them from the beginning."""
    text = "a" * 3000 + "b" * 5000 + "c" * 1000
    assert middle_cut(text) == "a" * 3000 + "\n… 5,000 characters more …\n" + "c" * 1000
    assert middle_cut("a" * 4000) == "a" * 4000


def test_nothing_is_stored_yet(empty_dataset: Path) -> None:
    """No item, and no error."""
    shown = read(empty_dataset)
    assert (shown["of"], shown["items"], shown["ids"]) == (0, [], [])


def test_rewards_belong_to_tokens(make_dataset: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sample has its own, none where it was not scored, and none where other tokens were."""
    directory = make_dataset(0).directory
    write_rewards(directory, "correct", lambda row: float(row["prompt_index"]) if row["sample_index"] else None)
    write_rewards(directory, "style", lambda row: {"reward": 0.5, "tone": 0.25})
    monkeypatch.setattr("models.rewards.crc_of", lambda ids: 1)
    write_rewards(directory, "correct", lambda row: 9.0, only=lambda row: row["prompt_id"] == "p7")
    shown = read(directory)
    assert shown["rewards"] == ["correct", "style", "style.tone"]
    for item in shown["items"]:
        number = int(item["id"][1:])
        correct = float(number) if item["sample"] and number != 7 else None
        assert item["rewards"] == {"correct": correct, "style": 0.5, "style.tone": 0.25}


def test_runs_of_a_merged_dataset(merged: Path) -> None:
    """Each item says its run: prompts of the same id are told apart."""
    shown = read(merged)
    assert Counter(item["run"] for item in shown["items"]) == {"base": 12, "step-1": 12}
    lengths = {(item["run"], item["length"]) for item in shown["items"]}
    assert lengths == {("base", 8), ("step-1", 9)}  # samples of the second run are one token longer

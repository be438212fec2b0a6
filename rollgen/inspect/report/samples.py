"""Samples as a page shows them, token by token: `samples_json(dataset, decoder)`.

A page is for looking, and has to open soon: of a dataset it gets a choice (`choice.py`) within a budget of tokens and
bytes, of a long response its beginning and its end, of a large support the likeliest ids. What is left out is counted
on the page. Tokens and supports are numbers of a vocabulary that all samples share, the most frequent ids first, so
that a support costs some four bytes an id.
"""

from __future__ import annotations

import json
import math
import shlex
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from rollgen.format.keys import Keys
from rollgen.format.ragged import Ragged
from rollgen.format.rewards import token_checksums
from rollgen.inert import plain, shorten
from rollgen.inspect.chat import text_of
from rollgen.inspect.report.choice import choose
from rollgen.inspect.report.texts import TOKEN, Names, cell_texts, parts_of_names, spelled
from rollgen.inspect.sample import read_completions
from rollgen.inspect.terminal import number
from rollgen.prompts.messages import stored_messages
from rollgen.rollouts import REWARD

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from rollgen.format.reader import StoredDataset
    from rollgen.format.rewards import Rewards
    from rollgen.inspect.decoding import Decoder
    from rollgen.inspect.report.choice import Row
    from rollgen.rollouts import Completion

SAMPLES: Final = 400
TOKENS: Final = 120_000
"""Generated tokens of all samples: their texts take a few seconds to decode."""
BYTES: Final = 8_000_000
"""Of all samples, about."""
HEAD, TAIL = 1536, 512
"""Tokens of a long response that are shown, from its beginning and from its end."""
IDS: Final = 24
"""Ids of a support that are shown: the sampled one, then the likeliest, or the lowest where no logprobs are stored."""
TURNS: Final = 32
"""Turns of a chat that are shown, the last ones."""
TEXT: Final = 4000
"""Characters of a turn, or of metadata, that are shown."""
_LEAST: Final = 1e6
"""Millinats of a token that has no probability to speak of: of a thousand nats float64 has none either."""
_INTEGER_BYTES: Final = 5
"""Of a number in a list, about, with its comma."""

Ints = npt.NDArray[np.int64]


class Supports(NamedTuple):
    """What is shown of the supports of N tokens, one after the other, the sampled id of each first."""

    ids: Ints
    """[K], at most IDS of each."""
    nats: Ints | None
    """[K], -1000 log pi_old of each; None where they are not stored."""
    sizes: Ints
    """[N], of the whole supports; 0: not truncated."""


@dataclass(frozen=True, slots=True, eq=False)
class Shown:
    """A sample, cut to what a page shows. Arrays are copies: a row group is not kept for a few of its rows."""

    row: Row
    key: tuple[int, int, int]
    """prompt_index, sample_index, generation."""
    checksum: int
    """Of the tokens: a reward belongs to these."""
    told: dict[str, Any]
    """JSON-able: what is not per token."""
    token_ids: Ints
    """[N]"""
    nats: Ints
    """[N], -1000 log pi_old of each token."""
    supports: Supports
    texts: dict[int, str]
    """Of the tokens (counted among the N) that do not stand for their own text where they are: the first of several
    that decode only together has the text of all, the others none."""

    @property
    def bytes(self) -> int:
        """Of its JSON, about."""
        numbers = 3 * len(self.token_ids) + len(self.supports.ids) * (1 if self.supports.nats is None else 2)
        return numbers * _INTEGER_BYTES + len(json.dumps([self.told, self.texts]))


def samples_json(dataset: StoredDataset, decoder: Decoder, stored: Mapping[str, Rewards]) -> dict[str, Any]:
    """JSON-able: `of` samples these `items`, in the order of the dataset, the names of their `rewards`, the `ids` that
    occur with their `names`, and the `parts` of names of which some is spelled out.

    Raises DatasetError for damage.
    """
    choice = choose(dataset, most=SAMPLES, tokens=TOKENS, longest=HEAD + TAIL)
    names = Names(decoder)
    shown = sorted(_within_budget(_shown(choice.rows, decoder, names)), key=_place)
    rewards = _rewards(stored, shown)
    vocabulary = Vocabulary(shown)
    ids = vocabulary.ids.tolist()
    return {
        "of": choice.of,
        "decoded": decoder.has_tokenizer,
        "ids": ids,
        "names": [names[token_id] for token_id in ids],
        "parts": dict(parts_of_names(ids, decoder, names)),
        "rewards": list(rewards),
        "items": [
            _item(sample, vocabulary)
            | {"rewards": {name: values[place] for name, values in rewards.items()}}
            | ({"command": _command(dataset.directory, sample.told)} if "gap" in sample.told else {})
            for place, sample in enumerate(shown)
        ],
    }


def _place(sample: Shown) -> tuple[str, int, int]:
    return sample.row.shard.name, sample.row.row_group, sample.row.row


def _rewards(stored: Mapping[str, Rewards], shown: Sequence[Shown]) -> dict[str, list[float | None]]:
    """Of each of these samples every reward and further value, by name; None where it has none."""
    prompts, samples, generations = (np.array([sample.key[place] for sample in shown], np.int64) for place in range(3))
    keys = Keys(prompts, samples.astype(np.int32), generations.astype(np.int32))
    checksums = np.array([sample.checksum for sample in shown], np.int64)
    rewards = {}
    for name, those in stored.items():
        for column, values in those.of(keys, checksums).items():
            known = [None if math.isnan(value) else value for value in values.tolist()]
            rewards[name if column == REWARD else f"{name}.{column}"] = known
    return rewards


def _shown(rows: Sequence[Row], decoder: Decoder, names: Names) -> list[Shown]:
    """In the order of `rows`; a row group is read once."""
    by_group = defaultdict(list)
    for row in rows:
        by_group[row.shard, row.row_group].append(row)
    shown = {}
    for (shard, row_group), those in by_group.items():
        completions = read_completions(shard, row_group, [row.row for row in those])
        for row, completion in zip(those, completions, strict=True):
            shown[row] = _cut(row, completion, decoder, names)
    return [shown[row] for row in rows]


def _within_budget(shown: list[Shown]) -> list[Shown]:
    """The first samples that fit into BYTES; one at least."""
    fitting = int((np.cumsum([sample.bytes for sample in shown]) <= BYTES).sum())
    return shown[: max(1, fitting)]


def _cut(row: Row, completion: Completion, decoder: Decoder, names: Names) -> Shown:
    tokens = len(completion.token_ids)
    is_long = tokens > HEAD + TAIL
    places = np.append(np.arange(HEAD), np.arange(tokens - TAIL, tokens)) if is_long else np.arange(tokens)
    return Shown(
        row=row,
        key=(completion.prompt_index, completion.sample_index, completion.generation),
        checksum=int(token_checksums(Ragged(completion.token_ids, np.array([0, tokens])))[0]),
        told=_told(completion, decoder) | ({"gap": [HEAD, tokens - HEAD - TAIL]} if is_long else {}),
        token_ids=completion.token_ids[places].astype(np.int64),
        nats=_millinats(completion.logprobs[places]),
        supports=_supports(completion, places),
        texts=dict(_texts(completion, decoder, names, is_long=is_long)),
    )


def _told(completion: Completion, decoder: Decoder) -> dict[str, Any]:
    sizes = np.diff(completion.mask_offsets)
    sizes = sizes[sizes > 0]
    return {
        "run": completion.run,
        "id": completion.prompt_id,
        "sample": completion.sample_index,
        "generation": completion.generation,
        "reason": completion.finish_reason,
        "length": len(completion.token_ids),
        "prompt_length": len(completion.prompt_token_ids),
        "logprob": round(float(completion.logprobs.mean(dtype=np.float64)), 4),
        "support": round(float(sizes.mean()), 2) if len(sizes) else None,
        "prompt": list(turns(completion, decoder)),
        "metadata": None if completion.metadata is None else middle_cut(completion.metadata),
        "facts": [[label, value] for label, value in _facts(completion)],
    }


def _facts(completion: Completion) -> Iterator[tuple[str, str]]:
    sampling = completion.sampling
    names = ("temperature", "top_k", "top_p", "min_p", "max_tokens")
    yield "Sampling", ", ".join(f"{name} {number(getattr(sampling, name))}" for name in names)
    yield "Seed", str(completion.seed)  # 63 bits, which a number of JavaScript does not hold
    if completion.stop_reason is not None:
        yield "Stopped by", shorten(completion.stop_reason, TOKEN)
    if not completion.replayable:
        yield "Replay", "not possible: penalties or biases changed relative logits"


def turns(completion: Completion, decoder: Decoder) -> Iterator[tuple[str, str]]:
    """Role and text of each turn of the prompt; the role of a prompt that is no chat is empty."""
    if completion.prompt is None:
        yield "", middle_cut(decoder.text(completion.prompt_token_ids.tolist()))
        return
    chat = _chat(completion, completion.prompt, decoder)
    if chat is None:
        yield "", middle_cut(completion.prompt)
        return
    if (hidden := len(chat) - TURNS) > 0:
        yield "", f"… {hidden:,} turns before these …"
    for turn in chat[-TURNS:]:
        yield shorten(turn["role"], TOKEN), middle_cut(text_of(turn))


def _chat(completion: Completion, prompt: str, decoder: Decoder) -> list[dict[str, Any]] | None:
    """The turns of a prompt that was messages: the model was not shown their JSON text. None for any other."""
    chat = stored_messages(prompt)
    if chat is None or not decoder.has_tokenizer:
        return chat
    return None if prompt.strip() in decoder.text(completion.prompt_token_ids.tolist()) else chat


def middle_cut(text: str) -> str:
    """`text` without its middle where it is long."""
    if len(text) <= TEXT:
        return text
    tail = TEXT // 4
    return f"{text[: TEXT - tail]}\n… {len(text) - TEXT:,} characters more …\n{text[-tail:]}"


def _texts(completion: Completion, decoder: Decoder, names: Names, *, is_long: bool) -> Iterator[tuple[int, str]]:
    """`cell_texts` of the shown tokens, by their place among them."""
    ids, prompt = completion.token_ids.tolist(), completion.prompt_token_ids.tolist()
    parts = [(0, ids, prompt)]
    if is_long:
        parts = [(0, ids[:HEAD], prompt), (HEAD, ids[-TAIL:], ids[-TAIL - 1 : -TAIL])]
    for first, part, before in parts:
        yield from ((first + place, text) for place, text in cell_texts(part, before, decoder, names))


def _command(directory: Path, told: Mapping[str, Any]) -> str | None:
    """What shows all of a sample, of which the page shows a part; None where it cannot be typed."""
    name, run = directory.resolve().name, told["run"]
    reference = f"{'' if run is None else f'{run}/'}{told['id']}:{told['sample']}"
    if plain(name) != name or plain(reference) != reference:
        return None
    place = f"./{name}" if name.startswith("-") else name
    return f"rollgen inspect {shlex.quote(place)} --sample {shlex.quote(reference)}"


def _supports(completion: Completion, places: Ints) -> Supports:
    """Of the tokens at `places`."""
    starts = completion.mask_offsets[places]
    sizes = completion.mask_offsets[places + 1] - starts
    rank = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    entries = np.repeat(starts, sizes) + rank
    ids, owner = completion.mask_ids[entries], np.repeat(places, sizes)
    stored = completion.support_logprobs
    likely = np.zeros(len(ids), np.float32) if stored is None else stored[entries]
    order = np.lexsort((ids, -likely, ids != completion.token_ids[owner], owner))
    kept = order[rank < IDS]  # sorted by owner, so `rank` counts inside each of them as before
    return Supports(ids[kept].astype(np.int64), None if stored is None else _millinats(likely[kept]), sizes)


def _millinats(logprobs: npt.NDArray[np.float32]) -> Ints:
    nats: Ints = np.rint(np.minimum(logprobs.astype(np.float64) * -1000, _LEAST)).astype(np.int64)
    return nats


class Vocabulary:
    """The ids that occur in some samples, the most frequent first."""

    def __init__(self, shown: Sequence[Shown]) -> None:
        every = [np.concatenate([sample.token_ids, sample.supports.ids]) for sample in shown]
        self._sorted, counts = np.unique(np.concatenate([np.empty(0, np.int64), *every]), return_counts=True)
        order = np.argsort(-counts, kind="stable")
        self.ids: Ints = self._sorted[order]
        self._place = np.empty(len(order), np.int64)
        self._place[order] = np.arange(len(order))

    def places(self, ids: Ints) -> list[int]:
        """Of each of these ids."""
        places: list[int] = self._place[np.searchsorted(self._sorted, ids)].tolist()
        return places


def _item(sample: Shown, vocabulary: Vocabulary) -> dict[str, Any]:
    """JSON-able: ids as places in the vocabulary, the shown ids of each support, and its whole size."""
    supports = sample.supports
    return sample.told | {
        "tokens": vocabulary.places(sample.token_ids),
        "nats": sample.nats.tolist(),
        "texts": sample.texts,
        "parts": dict(spelled(sample.texts.items())),
        "sizes": supports.sizes.tolist(),
        "supports": vocabulary.places(supports.ids),
        "support_nats": None if supports.nats is None else supports.nats.tolist(),
    }

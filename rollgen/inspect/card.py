"""The README.md of a dataset: what it holds, how it was sampled, how to load it.

Whoever sampled writes it, and the next one replaces it unless somebody has edited its text since. The front matter,
the licence above all, is the user's: an edited one is kept. As it is written it points at `data/*.parquet`, so that
`datasets.load_dataset(directory)` works and a hub shows the rows.
Everything that comes from the data is escaped: it can be neither Markdown nor HTML, and the front matter holds none.
"""

from __future__ import annotations

import hashlib
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich import filesize

from rollgen.errors import DatasetError, ResumeRefused
from rollgen.format.commit import Remote, live_writers, start_section
from rollgen.format.files import new_file, open_regular
from rollgen.format.journal import list_shards, read_journal, totals
from rollgen.format.layout import CARD_FILE
from rollgen.format.manifest import read_manifest
from rollgen.format.reader import open_dataset
from rollgen.format.schema import shard_schema
from rollgen.inert import brief, shorten
from rollgen.inspect.provenance import owed_when_merged, provenance, setting
from rollgen.inspect.stats import settings_of, stats_of
from rollgen.inspect.terminal import counted, number, share

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rollgen.format.manifest import Manifest
    from rollgen.inspect.stats import DatasetStats

FRONT_MATTER: Final = """\
---
license: unknown # say under which terms the prompts and the model's outputs may be used
task_categories:
- reinforcement-learning
- text-generation
tags:
- rollgen
- rollouts
- sampling-masks
configs:
- config_name: default
  data_files:
  - split: train
    path: data/*.parquet
---
"""
LOADING: Final = """\
## Loading

```python
import rollgen

stream = rollgen.RolloutStream("path/to/this/directory", batch_tokens=16_384)
batch = next(iter(stream))
batch.input_ids           # [B, L]; also attention_mask, response_mask, logprobs
batch.support             # the supports as ids and offsets: rollgen.ops.Support
```

The rows are plain Parquet, and open without rollgen:

```python
datasets.load_dataset("path/to/this/directory", split="train")            # or the name of the repository on a hub
polars.scan_parquet("path/to/this/directory/data/*.parquet")
pandas.read_parquet("path/to/this/directory/data")
duckdb.read_parquet("path/to/this/directory/data/*.parquet")
```
"""
_MARK: Final = "\n<!-- Written by rollgen, which replaces this card as long as nobody edits it. {} -->\n"
RETRIED: Final = """\
Some samples were made again, with a larger `max_tokens`. Their earlier rows are still here, superseded:
`RolloutDataset` passes over them, and so should you, by keeping the highest `generation` (null is 0) of each
`prompt_index` and `sample_index`.
"""
MERGED: Final = """\
It was merged from several runs, which `run` tells apart: a prompt id that is in two of them is two prompts.
"""
MEANINGS: Final = {
    "run": "Of a merged dataset, the run that sampled this row: one of those that the manifest names.",
    "prompt_id": "Id of the prompt; (prompt_id, sample_index, generation) is unique in each run of a dataset.",
    "sample_index": "Which of the prompt's n samples this is.",
    "generation": "0, or which retry made this sample again; the row of the highest one is current.",
    "prompt_index": "Place of the prompt in the plan.",
    "prompt_length": "P, the length of prompt_token_ids.",
    "response_length": "T, the length of token_ids.",
    "prompt_token_ids": "What the engine was given.",
    "token_ids": "What was sampled, the end-of-sequence token included.",
    "logprobs": "log pi_old of each sampled token: after temperature, over its support; finite, at most 0.",
    "sampling_mask": "Support of each generated token: strictly increasing ids below vocab_size, with the sampled id.",
    "support_logprobs": "log pi_old of every id of the support, in the order of sampling_mask.",
    "weight_versions": "What the engine calls the weights that sampled, one stretch of tokens after the other.",
    "weight_version_starts": "First token of each of these stretches, from 0; it ends where the next one starts.",
    "routed_experts": "Experts of each token of prompt and response but the last one, in each layer, row-major.",
    "finish_reason": "Why generation ended: stop, length or repetition.",
    "stop_reason": 'The stop token id or stop string that ended generation, as JSON text: 2 is an id, "2" a string.',
    "temperature": "Effective temperature, above 0; divides the logits before truncation.",
    "top_p": "Effective top-p, in (0, 1]; 1 is off.",
    "min_p": "Effective min-p, in [0, 1]; 0 is off.",
    "top_k": "Effective top-k, at least 1; 0 is off. A support may be larger: boundary ties are kept.",
    "max_tokens": "Upper bound of T, after clamping to the context.",
    "seed": "Seed of this sample's random numbers, in [0, 2^63).",
    "replayable": "Whether a softmax over the support reproduces pi_old; false after penalties or biases.",
    "text": "Decoded token_ids without special tokens, for people; token_ids are the truth.",
    "prompt": "The prompt as given: raw text, or messages as JSON text.",
    "metadata": "All other fields of the prompt's row, as the text of one JSON object.",
}
"""The `meaning` of each column in `schema/v1/columns.json`."""
_SPECIAL: Final = re.compile(r"([\\`*_\[\]|~$@:#]|(?<=www)\.)", re.IGNORECASE)
"""What starts inline markup, a table cell, a mention, a link or a formula on the usual hubs."""
_SETTING: Final = 200
_MAX_BYTES: Final = 4 << 20
"""Of a card: more than a thousand runs of a merged dataset take."""
_OF_ALL: Final = ("vocabulary", "format")
"""What is the same in all runs of a merged dataset, or says nothing of it."""
_RULE: Final = "\n---\n"
"""What ends the front matter."""


def markdown(text: str) -> str:
    """`text` as brief inline Markdown that shows it literally, on one line, also inside a table."""
    escaped = _SPECIAL.sub(r"\\\1", brief(text))
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def write_card(directory: Path, *, url: str | None = None) -> None:
    """Atomically write `directory/README.md` from what the dataset holds now; an edited one is left alone.

    For who holds the start section, as `refresh_card` does. With `url` the directory is the workspace of the dataset
    there: without its shards, figures are those of the journal. Raises DatasetError when it cannot be written.
    """
    card = directory / CARD_FILE
    front_matter = _kept_front_matter(card)
    if front_matter is None:
        return
    text = dataset_card(stats_of(open_dataset(directory))) if url is None else journal_card(directory, url)
    temporary = directory / f".tmp-{CARD_FILE}-{os.getpid()}"
    try:
        with new_file(temporary) as file:
            file.write((front_matter + text + _mark(text)).encode())
        with suppress(FileNotFoundError):  # who started meanwhile took it for a leftover, and will write a newer one
            os.replace(temporary, card)
    except OSError as error:
        raise DatasetError(
            f"{card}: cannot be written: {error.strerror or error}; the samples are stored, and whole "
            "without it; the next run that stores some writes it"
        ) from error
    finally:
        with suppress(OSError):  # renamed, it is not there; where it cannot be removed, the error is the first one
            temporary.unlink()


def begin_card(directory: Path) -> None:
    """`write_card` where there is none, unless others are in the start section: the last one to leave writes it too."""
    if not (directory / CARD_FILE).exists():
        with suppress(ResumeRefused), start_section(directory, given_up=lambda: True):
            write_card(directory)


def refresh_card(directory: Path, *, remote: Remote | None = None) -> None:
    """`write_card` in the start section, where one at a time can tell whether a writer is left, who will do it then.

    Nothing without shards, unless a card tells of some. In object storage each writer that leaves does it: what the
    journal says of the whole is soon read, and in the start section has all that those committed who left before.
    """
    if remote is not None:
        with remote.section():
            write_card(directory, url=remote.url)
        return
    with start_section(directory):
        if not live_writers(directory) and (list_shards(directory) or (directory / CARD_FILE).exists()):
            write_card(directory)


def dataset_card(stats: DatasetStats) -> str:
    """The README.md below its front matter, from an empty line to a newline."""
    return _card(stats.name, stats.manifest, _figures(stats))


def journal_card(directory: Path, url: str) -> str:
    """The same from manifest and journal only. Raises DatasetError when they are damaged."""
    lines = read_journal(directory).committed.values()
    rows, tokens, mask_ids = totals(lines)
    figures = [("rows", f"{rows:,}"), ("generated tokens", f"{tokens:,}")]
    if mask_ids:
        figures.append(("ids in supports", f"{mask_ids:,}"))
    figures.append(("size", f"{filesize.decimal(sum(line.bytes for line in lines))} in {counted(len(lines), 'file')}"))
    return _card(url.rpartition("/")[2], read_manifest(directory), figures)


def _card(name: str, manifest: Manifest, figures: Iterable[tuple[str, str]]) -> str:
    sections = (
        "",
        _introduction(name, manifest),
        LOADING,
        *([RETRIED] if manifest.retries else []),
        "## How it was sampled\n",
        _table(("key", "value"), _sampled(manifest)),
        *([MERGED, _runs(manifest)] if manifest.runs else []),
        "## Figures\n",
        _table(("figure", "value"), figures),
        "## Columns\n",
        "One row is one completion. Per-token columns align with `token_ids`.\n",
        _table(("column", "type", "meaning"), _columns(manifest)),
    )
    return "\n".join(sections)


def _introduction(name: str, manifest: Manifest) -> str:
    model = markdown(manifest.model.name)
    return (
        f"# {markdown(name)}\n\n"
        f"Completions of {model}, sampled for reinforcement learning with rollgen. Beside token ids and\n"
        "log-probabilities there is the *support* of every generated token: the ids that survived top-k, top-p\n"
        "and min-p. A trainer that normalises over the support has unbiased importance ratios.\n"
    )


def _sampled(manifest: Manifest) -> Iterable[tuple[str, str]]:
    for label, text in provenance(manifest).items():
        yield label, markdown(text)
    for name, value in settings_of(manifest).items():
        yield f"`{name}`", markdown(shorten(setting(value), _SETTING))


def _runs(manifest: Manifest) -> str:
    """How each run of a merged dataset was sampled."""
    sections = []
    for run in manifest.runs:
        own = [(key, value) for key, value in _sampled(manifest.of_run(run)) if key not in _OF_ALL]
        sections += [f"### {markdown(run.name)}\n", _table(("key", "value"), own)]
    return "\n".join(sections)


def _figures(stats: DatasetStats) -> Iterable[tuple[str, str]]:
    samples, support, logprobs = stats.samples, stats.support, stats.logprobs
    yield "samples", f"{samples.samples:,}, of {samples.prompts:,} prompts"
    for record, run in zip(stats.manifest.runs, stats.runs, strict=True):
        owed = f"; {counted(missing, 'sample')} owed when merged" if (missing := owed_when_merged(record)) else ""
        yield f"of run {markdown(run.name)}", f"{run.samples:,}, of {run.prompts:,} prompts{owed}"
    if (plan := stats.plan) is not None:
        yield "planned samples", f"{plan.samples:,}, of which owed: {plan.owed:,}"
        yield "input rows skipped", f"{plan.tombstones:,}"
    if samples.superseded:
        yield "superseded rows, in no other figure", f"{samples.superseded:,}"
    yield "generated tokens", f"{samples.generated_tokens:,}"
    if (length := samples.response_length) is not None:
        yield "response length", f"median {number(length.median)}, 95th percentile {number(length.p95)} tokens"
    for reason, count in samples.finish_reasons.items():
        yield f"finished by {markdown(reason)}", f"{count:,} ({share(count, samples.samples)})"
    if support is not None and support.size is not None:
        yield "support size", f"mean {number(round(support.size.mean, 1))}, largest {number(support.size.max)} ids"
        yield "singleton supports", share(support.singletons, support.tokens)
    if support is not None and support.full_vocabulary:
        yield "drawn from the full vocabulary", share(support.full_vocabulary, support.tokens)
    if logprobs is not None:
        yield "mean surprisal", f"{number(logprobs.surprisal)} nats a token"
    if samples.unreplayable:
        yield "samples that cannot be replayed", f"{samples.unreplayable:,}"
    yield "size", f"{filesize.decimal(stats.files.bytes)} in {counted(stats.files.shards, 'file')}"


def _columns(manifest: Manifest) -> Iterable[tuple[str, str, str]]:
    for field in shard_schema(**manifest.optional_columns):
        kind = str(field.type).replace("element: ", "").replace(" not null", "")
        yield f"`{field.name}`", f"`{kind}`", MEANINGS[field.name]


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _mark(text: str) -> str:
    return _MARK.format(hashlib.sha256(text.encode()).hexdigest()[:16])


def _kept_front_matter(card: Path) -> str | None:
    """The front matter to write: that of a card whose text is as it was written, or a new one without a card.

    Empty for a card of which it was removed. None for a card that is to be left alone: a link or a pipe is somebody's,
    whatever comes out of it, and so is what is no UTF-8, has another text before its own, or is larger than any card.
    Raises DatasetError when it cannot be read.
    """
    if not os.path.lexists(card):
        return FRONT_MATTER
    if card.is_symlink() or not card.is_file():
        return None
    try:
        with open_regular(card) as file:
            content = file.read(_MAX_BYTES).decode()  # what is cut off has no mark
    except UnicodeDecodeError:
        return None
    except OSError as error:
        raise DatasetError(
            f"{card}: cannot be read: {error.strerror or error}; make it readable, or take it away to have a new one"
        ) from error
    if _is_marked(content):  # the mark of 0.1.0 was of the front matter too, which nobody has edited then
        return FRONT_MATTER if content.startswith(_RULE[1:]) else ""  # else somebody has taken it away
    if content.startswith("# ") and _is_marked("\n" + content):  # and the empty line below it
        return ""
    front_matter, rule, text = content.partition(_RULE)
    return front_matter + rule if content.startswith(_RULE[1:]) and _is_marked(text) else None


def _is_marked(text: str) -> bool:
    """Whether its last line is the mark of what is above."""
    above = text[: -len(_mark(""))]
    return text == above + _mark(above)

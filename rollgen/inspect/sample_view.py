"""One completion on a terminal: each token coloured by its probability, the size of its support below it.

Tokens are columns that wrap at the width of the terminal, measured in cells (a Hangul syllable or an emoji takes two).
Without colour a third line has the probabilities. Everything that comes from the data is inert: see `terminal.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.table import Table
from rich.text import Text

from rollgen.inert import plain, shorten
from rollgen.inspect.terminal import facts, line, number, show

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rich.console import Console

    from rollgen.inspect.sample import Sample, SupportId, WeightSpan
    from rollgen.inspect.terminal import Row

BANDS: Final = (
    (0.9, ""),
    (0.7, "black on green"),
    (0.4, "black on cyan"),
    (0.1, "black on yellow"),
    (0.01, "white on red"),
    (0.0, "bold white on magenta"),
)
"""Lower bounds of probabilities and their styles. Text and background are both set, in colours that every terminal has,
so that a dark one and a light one can show them; likely tokens, most of any text, look like text."""
SUPPORT_ROWS: Final = 40
"""Ids of a support that are shown."""
WEIGHT_SPANS: Final = 4
"""Changes of weights that are shown."""
_PROMPT_TAIL: Final = 800
_TOKEN: Final = 512
"""Characters of a token that are looked at: it is cut to the width of the terminal."""
_NAME: Final = 80
"""Characters of a token in the middle of a line, or of a support."""
_JOINERS: Final = str.maketrans({"\u200c": "\\u200c", "\u200d": "\\u200d", " ": "␣"})
_CARRIER: Final = "◌"
"""Carries a combining mark that begins a token, as in the Unicode charts."""


class Column(NamedTuple):
    """One cell of the response, and what stands below it."""

    text: str
    probability: float
    below: tuple[str, ...]
    breaks: bool
    """Whether the next column begins a new line: the text ends one."""

    @property
    def width(self) -> int:
        """In cells of the terminal."""
        return max(map(cell_len, (self.text, *self.below)))


def visible(text: str) -> str:
    """A token's text with nothing invisible in it: spaces and joiners are spelled out, a leading mark is carried."""
    shown = plain(shorten(text, _TOKEN)).translate(_JOINERS)
    return _CARRIER + shown if shown and not cell_len(shown[0]) else shown


def style_of(probability: float) -> str:
    """The style of the band that `probability` lies in."""
    return next(style for bound, style in BANDS if probability >= bound)


def percent(probability: float) -> str:
    """A whole percentage; `<1` below a half, because 0 would say impossible."""
    return f"{probability:.0%}".removesuffix("%") if probability >= 0.005 else "<1"


def render_sample(sample: Sample, console: Console, at: int | None = None) -> None:
    """Print a completion; with `at`, the support of that token in place of the response."""
    position = None if at is None else sample.position(at)
    show(console, facts(_header(sample)))
    if position is None:
        _print_texts(sample, console)
    else:
        _print_support(sample, position, console)


def columns_of(sample: Sample, *, colour: bool) -> Iterator[Column]:
    """The response, a column a cell: text, probability where there is no colour, support sizes."""
    probabilities, sizes = sample.probabilities, sample.support_sizes
    for cell in sample.cells:
        tokens = slice(cell.start, cell.stop)
        size = "+".join("all" if size is None else str(size) for size in sizes[tokens])
        chance = "+".join(map(percent, probabilities[tokens].tolist()))
        joint = float(np.prod(probabilities[tokens]))
        yield Column(visible(cell.text), joint, (size,) if colour else (chance, size), cell.text.endswith("\n"))


def wrap(columns: Iterable[Column], width: int) -> Iterator[list[Column]]:
    """Columns, one space apart, in rows of at most `width` cells; a column that is wider is cut."""
    row: list[Column] = []
    used = 0
    for column in columns:
        fitting = column if column.width <= width else _cut(column, width)
        if row and (used + fitting.width > width or row[-1].breaks):
            yield row
            row, used = [], 0
        row.append(fitting)
        used += fitting.width + 1
    if row:
        yield row


def _cut(column: Column, width: int) -> Column:
    texts = (
        text if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"
        for text in (column.text, *column.below)
    )
    text, *below = texts
    return column._replace(text=text, below=tuple(below))


def _header(sample: Sample) -> Iterator[Row]:
    completion, sampling = sample.completion, sample.completion.sampling
    planned = "" if sample.n is None else f" of 0-{sample.n - 1}"
    reason = completion.finish_reason + (f" ({completion.stop_reason})" if completion.stop_reason else "")
    yield "Prompt id", line(completion.prompt_id)
    if completion.run is not None:
        yield "Run", line(completion.run)
    yield (
        "Sample",
        line(f"{completion.sample_index}{planned}", f"finished by {reason}", f"{len(completion.token_ids):,} tokens"),
    )
    if len(sample.generations) > 1:
        others = ", ".join(str(other) for other in sample.generations if other != completion.generation)
        current = "current" if completion.generation == sample.generations[-1] else "superseded"
        reference = f"{completion.prompt_id}:{completion.sample_index}@G"
        yield "Generation", line(f"{completion.generation}, {current}", f"also stored: {others}; see {reference}")
    names = ("temperature", "top_k", "top_p", "min_p", "max_tokens")
    settings = [f"{name} {number(getattr(sampling, name))}" for name in names]
    yield "Sampling", line(*settings, f"seed {completion.seed}")
    least, support = float(sample.probabilities.min()), sample.mean_support
    yield (
        "Figures",
        line(
            f"mean logprob {number(float(completion.logprobs.mean(dtype=np.float64)))}",
            f"least likely token {least:.2%}",
            "not truncated" if support is None else f"mean support {number(round(support, 1))} ids",
        ),
    )
    if sample.weights is not None:
        yield "Weights", line(*_weights(sample.weights))
    if not completion.replayable:
        yield "Note", Text("cannot be replayed: penalties or biases changed relative logits", style="yellow")
    yield "Stored in", line(sample.file, f"row group {sample.row_group}", f"row {sample.row}")


def _weights(spans: Sequence[WeightSpan]) -> Iterator[str]:
    """What sampled which tokens, the first spans of many."""
    if len(spans) == 1:
        yield f"{shorten(spans[0].version, _NAME)} for all tokens"
        return
    for span in spans[:WEIGHT_SPANS]:
        yield f"{shorten(span.version, _NAME)} for tokens {span.start}-{span.end - 1}"
    if (hidden := len(spans) - WEIGHT_SPANS) > 0:
        yield f"{hidden:,} more; --json has all"


def _print_texts(sample: Sample, console: Console) -> None:
    colour = console.color_system is not None and not console.no_color
    prompt = sample.prompt_text
    cut = f", the last {_PROMPT_TAIL:,} characters" if len(prompt) > _PROMPT_TAIL else ""
    console.print(Text(f"Prompt, {len(sample.completion.prompt_token_ids):,} tokens{cut}", style="bold cyan"))
    shown = ("…" if cut else "") + prompt[-_PROMPT_TAIL:]
    console.print(Text("\n".join(map(plain, shown.split("\n"))), style="dim"), end="\n\n")
    console.print(Text.assemble(("Response  ", "bold cyan"), _legend(colour=colour)), end="\n\n")
    for row in wrap(columns_of(sample, colour=colour), console.width):
        for printed in _lines(row):
            console.print(printed, no_wrap=True, crop=False, overflow="ignore")
    if not sample.decoder.has_tokenizer:
        console.print(Text("This dataset has no tokenizer/tokenizer.json: tokens are shown as ids.", style="yellow"))


def _legend(*, colour: bool) -> Text:
    below = "support size (all: not truncated); a+b: tokens that decode only together"
    if not colour:
        return Text(f"below each token: its probability in %, {below}")
    legend = Text("probability ")
    upper = 1.0
    for bound, style in BANDS:
        legend.append(f" {percent(bound) if bound else '0'}-{percent(upper)} % ", style)
        upper = bound
    return legend.append(f"  below: {below}")


def _lines(row: Sequence[Column]) -> Iterator[Text]:
    """The lines of one row: texts, then what stands below them, then an empty one."""
    texts = Text()
    for column in row:
        texts.append(column.text, style_of(column.probability))
        texts.append(" " * (column.width - cell_len(column.text) + 1))
    texts.rstrip()
    yield texts
    for place in range(len(row[0].below)):
        yield Text("".join(f"{column.below[place]:<{column.width + 1}}" for column in row).rstrip(), style="dim")
    yield Text()


def _print_support(sample: Sample, position: int, console: Console) -> None:
    completion = sample.completion
    token_id = int(completion.token_ids[position])
    probability = float(sample.probabilities[position])
    support = sample.support(position)
    last = len(completion.token_ids) - 1
    sampled = f"sampled {_quoted(sample.decoder.name(token_id))} (id {token_id}) with {probability:.2%}"
    cell = next(cell for cell in sample.cells if cell.start <= position < cell.stop)
    if cell.stop - cell.start > 1:
        sampled += f", a part of {_quoted(cell.text)}"
    console.print(line(f"Token {position} of 0-{last}", sampled), style="bold")
    if support is None:
        console.print(f"Not truncated: any of the {sample.vocab_size:,} ids could be sampled.")
        return
    if completion.support_logprobs is None:
        console.print("Only the sampled id's probability is stored (--support-logprobs stores all).")
    show(console, _support_table(support))


def _support_table(support: Sequence[SupportId]) -> Table:
    shown = [row for place, row in enumerate(support) if place < SUPPORT_ROWS or row.sampled]
    table = Table(box=None, pad_edge=False)
    for name in ("id", "token", "probability", ""):
        table.add_column(name, justify="right" if name in ("id", "probability") else "left")
    for row in shown:
        probability = "" if row.logprob is None else f"{np.exp(row.logprob):.3%}"
        mark = "sampled" if row.sampled else ""
        table.add_row(str(row.id), Text(_name(row.text)), probability, mark, style="bold" if row.sampled else "")
    if hidden := len(support) - len(shown):
        table.add_row("…", Text(f"{hidden:,} more ids; --json has all"), "", "")
    return table


def _quoted(text: str) -> str:
    return f"'{_name(text)}'"


def _name(text: str) -> str:
    return visible(shorten(text, _NAME))

"""Merged datasets: figures of each run, samples by run and id, how they stand, and their card.

`merged` has the runs `base` and `step-1` of the same six prompts, two samples each, of 8 and 9 tokens.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from rollgen.curate.merge import merge
from rollgen.errors import UsageError
from rollgen.format.journal import list_shards
from rollgen.format.manifest import read_manifest, replace_manifest
from rollgen.format.reader import open_dataset
from rollgen.inspect.card import dataset_card, write_card
from rollgen.inspect.curves import curves_of
from rollgen.inspect.find import Reading, find_sample, readings
from rollgen.inspect.report.content import report_content
from rollgen.inspect.runs import MergedRunStats
from rollgen.inspect.sample import read_sample
from rollgen.inspect.sample_view import render_sample
from rollgen.inspect.stats import stats_of
from rollgen.inspect.status import run_status
from rollgen.inspect.status_view import render_status
from rollgen.inspect.terminal import render
from rollgen.rollouts import sample_seed


def console() -> Console:
    return Console(file=io.StringIO(), width=100, color_system=None)


def text_of(shown: Console) -> str:
    assert isinstance(shown.file, io.StringIO)
    return shown.file.getvalue()


def test_figures_of_each_run(merged: Path) -> None:
    """Six prompts of two samples in each, which are twelve prompts in all; the settings are those of the run."""
    stats = stats_of(open_dataset(merged))
    assert stats.runs == (
        MergedRunStats("base", merged=12, samples=12, prompts=6, generated_tokens=96),
        MergedRunStats("step-1", merged=12, samples=12, prompts=6, generated_tokens=108),
    )
    assert (stats.samples.samples, stats.samples.prompts) == (24, 12)
    assert [settings["top_k"] for settings in stats.run_settings] == [8, 8]
    assert {example.run for example in stats.examples} <= {"base", "step-1"}
    assert json.loads(json.dumps(stats.to_json()))["runs"][1]["generated_tokens"] == 108


def test_figures_on_a_terminal(merged: Path) -> None:
    """Each run with its model; no line of attempts or of settings, which the whole does not have."""
    shown = console()
    render(stats_of(open_dataset(merged)), shown)
    text = text_of(shown)
    assert "base · 12 samples · 96 tokens" in text
    assert "step-1 · 12 samples · 108 tokens" in text
    assert "model-1 · float32 · logprobs" in text
    assert "Settings" not in text


def test_many_runs_on_a_terminal(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    """The first few; the rest is counted."""
    sources = [make_run(tmp_path / f"run-{n}", n, shards=1, prompts=1, n=1) for n in range(10)]
    merge(sources, tmp_path / "merged")
    shown = console()
    render(stats_of(open_dataset(tmp_path / "merged")), shown)
    assert "run-7 · 1 sample" in text_of(shown)
    assert "2 runs more; --json has all" in text_of(shown)


def test_figures_of_other_datasets(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    """They have no runs."""
    assert stats_of(open_dataset(make_run(tmp_path / "plain", 0))).runs == ()


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("base/p0:1", [Reading("p0:1", run="base"), Reading("p0", 1, run="base")]),
        ("base/a/b", [Reading("a/b", run="base")]),
        ("other/p0", []),
        ("base", []),
        ("/p0", []),
    ],
)
def test_a_run_in_front_is_meant_first(reference: str, expected: list[Reading]) -> None:
    """Then come the readings that there are without runs."""
    assert list(readings(reference, ["base", "step-1"])) == [*expected, *readings(reference)]


def test_samples_are_found_by_run_and_id(merged: Path) -> None:
    """Eight tokens or nine tell which run a sample is of."""
    for run, tokens in (("base", 8), ("step-1", 9)):
        sample = read_sample(merged, f"{run}/p3:1")
        assert (sample.completion.run, sample.completion.prompt_id, sample.completion.sample_index) == (run, "p3", 1)
        assert len(sample.completion.token_ids) == tokens
        assert sample.to_json()["run"] == run
        shown = console()
        render_sample(sample, shown)
        assert run in text_of(shown)


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("p0", "--sample: prompt 'p0' is in several runs (base, step-1); name one of them, like base/p0"),
        ("p0:1", "--sample: prompt 'p0' is in several runs (base, step-1); name one of them, like base/p0"),
        ("base/p9", "--sample: no prompt 'p9' of run 'base' in this dataset; ids are those of the prompt rows, like "),
        ("base/p0:7", "--sample: sample 7 of 'p0' of run 'base' is not stored; stored: 0-1"),
    ],
)
def test_what_is_not_one_sample(merged: Path, reference: str, expected: str) -> None:
    """The error says how to name one."""
    with pytest.raises(UsageError) as error:
        find_sample(open_dataset(merged), reference)
    assert str(error.value).startswith(expected)


def test_ids_with_slashes(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    """`a/p0` is prompt p0 of the run a before it is the prompt `a/p0` of b, which `b/a/p0` names; both are in reach."""
    slash = {"prompt_id": "a/p0"}
    sources = [
        make_run(tmp_path / "a", 0, shards=1, prompts=1, n=1),
        make_run(tmp_path / "b", 1, shards=1, prompts=1, n=1, planned=slash, **slash, seed=sample_seed(0, "a/p0", 0)),
    ]
    merge(sources, tmp_path / "merged")
    dataset = open_dataset(tmp_path / "merged")
    found = [find_sample(dataset, reference).location for reference in ("a/p0", "b/a/p0", "p0")]
    assert [(it.run, it.prompt_id) for it in found] == [("a", "p0"), ("b", "a/p0"), ("a", "p0")]


def test_status(merged: Path) -> None:
    """Complete, with what it was merged from; a lost shard makes it incomplete, and nothing to be resumed."""
    status = run_status(merged)
    assert (status.state, status.runs, status.stored, status.owed) == ("complete", ("base", "step-1"), 24, None)
    shown = console()
    render_status("merged", status, shown)
    assert "from 2 runs · base · step-1" in text_of(shown)
    assert "no plan: nothing is owed" in text_of(shown)
    list_shards(merged)[0].unlink()
    lost = run_status(merged)
    assert lost.state == "stopped"
    shown = console()
    render_status("merged", lost, shown)
    assert "merge again to have what they held" in " ".join(text_of(shown).split())


def test_what_runs_owed_is_told(merged: Path) -> None:
    """Nothing makes it any more, and still it is missing: on the terminal, in the card, the report and the status."""
    record = read_manifest(merged)
    runs = [run.model_copy(update={"owed": owed}) for run, owed in zip(record.runs, (None, 12), strict=True)]
    replace_manifest(merged, record.model_copy(update={"runs": runs}))
    dataset = open_dataset(merged)
    stats = stats_of(dataset)
    shown = console()
    render(stats, shown)
    assert "24 samples for 12 prompts · 12 samples owed when merged" in text_of(shown)
    assert "step-1 · 12 samples · 108 tokens · 12 owed when merged" in text_of(shown)
    assert "| of run step-1 | 12, of 6 prompts; 12 samples owed when merged |" in dataset_card(stats)
    headline = report_content(dataset, stats, curves_of(dataset, stats), {})["headline"]
    assert {"label": "Samples", "value": "24", "more": "12 samples owed when merged"} in headline
    status = run_status(merged)
    assert (status.state, status.owed, status.owed_when_merged) == ("stopped", None, 12)
    shown = console()
    render_status("merged", status, shown)
    assert "24 samples · 12 samples owed when merged" in text_of(shown)


def test_the_card(merged: Path) -> None:
    """How each run was sampled, with its own digest, and how many samples are of it."""
    write_card(merged)
    text = (merged / "README.md").read_text()
    assert "It was merged from several runs" in text
    for name in ("base", "step-1"):
        assert f"### {name}\n" in text
        assert f"| of run {name} | 12, of 6 prompts |" in text
    assert "| `run` | `string` |" in text
    assert "| model | model-1 |" in text

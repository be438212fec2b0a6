"""Which datasets can be merged: names, vocabularies, columns, and that none of them is there twice."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollgen.curate.compact import compact
from rollgen.curate.merge import merge
from rollgen.errors import DatasetError, UsageError
from rollgen.format.journal import list_shards
from rollgen.format.manifest import RoutedExperts, read_manifest, replace_manifest
from rollgen.format.reader import open_dataset, read_columns
from rollgen.rollouts import sample_seed

MakeRun = Callable[..., Path]


def runs_of(directory: Path) -> tuple[str, ...]:
    return read_manifest(directory).run_names


@pytest.fixture
def two(tmp_path: Path, make_run: MakeRun) -> list[Path]:
    """The runs `base` and `step-1`."""
    return [make_run(tmp_path / name, number) for number, name in enumerate(("base", "step-1"))]


@pytest.mark.parametrize(
    ("directories", "names", "expected"),
    [
        (("base", "step-100"), None, ("base", "step-100")),
        (("a b", "ü/rollouts"), None, ("a-b", "rollouts")),
        (("../base", "v1.2_x"), None, ("base", "v1.2_x")),
        (("x/rollouts", "y/rollouts"), ["x", "y"], ("x", "y")),
    ],
)
def test_names_of_runs(
    tmp_path: Path, make_run: MakeRun, directories: tuple[str, ...], names: list[str] | None, expected: tuple[str, ...]
) -> None:
    """Those of the directories, with a hyphen for what a name may not have; or those that were given, in order."""
    inside = tmp_path / "inside"
    sources = [make_run(inside / name, number) for number, name in enumerate(directories)]
    merge(sources, tmp_path / "out", names=names)
    assert runs_of(tmp_path / "out") == expected


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["one"], "--as: 1 for 2 datasets; give one for each, in their order"),
        (["one", "two", "three"], "--as: 3 for 2 datasets"),
        (["same", "same"], "step-1: its run would be called 'same', like that of .*base; call them by --as"),
        (["a/b", "c"], "base: 'a/b' is no name for a run; give one of at most 100 letters, digits"),
        (["", "c"], "base: '' is no name for a run"),
        (["a\n", "c"], r"base: 'a.*n' is no name for a run"),
        (["a" * 101, "c"], "base: 'a+' is no name for a run; give one of at most 100"),
        ("xy", "names: give a list of texts, one for each dataset, in their order"),
        ({"x", "y"}, "names: give a list of texts"),
        ([1, 2], "names: give a list of texts"),
    ],
)
def test_names_that_cannot_be(two: list[Path], tmp_path: Path, names: Any, expected: str) -> None:
    """Each is told, and nothing is written."""
    with pytest.raises(UsageError, match=expected):
        merge(two, tmp_path / "out", names=names)
    assert not (tmp_path / "out").exists()


def test_directories_of_one_name(tmp_path: Path, make_run: MakeRun) -> None:
    """It is for the user to say which is which."""
    sources = [make_run(tmp_path / name / "rollouts", number) for number, name in enumerate(("a", "b"))]
    with pytest.raises(
        UsageError, match=r"its run would be called 'rollouts', like that of .*a/rollouts; call them by"
    ):
        merge(sources, tmp_path / "out")


def test_a_merge_with_one_of_its_runs(two: list[Path], tmp_path: Path) -> None:
    """Refused by its name, and under another one because the samples are the same."""
    merge(two, tmp_path / "merged")
    with pytest.raises(UsageError, match="its run would be called 'base', like that of"):
        merge([tmp_path / "merged", two[0]], tmp_path / "out")
    with pytest.raises(UsageError, match=r"runs 'm\.base' and 'b' are copies of one dataset"):
        merge([tmp_path / "merged", two[0]], tmp_path / "out", names=["m", "b"])


def test_one_dataset(two: list[Path], tmp_path: Path) -> None:
    """Nothing to merge."""
    with pytest.raises(UsageError, match="merge: give two datasets or more"):
        merge(two[:1], tmp_path / "out")


def test_nothing_stored(tmp_path: Path, make_run: MakeRun) -> None:
    """A run before its first commit may be one of them, but not all."""
    empty = [make_run(tmp_path / str(number), number) for number in range(2)]
    for path in empty:
        shutil.rmtree(path / "data")
        (path / "journal" / "w0.jsonl").unlink()
    with pytest.raises(UsageError, match="holds no sample, nor do the others: there is nothing to merge"):
        merge(empty, tmp_path / "out")
    done = merge([empty[0], make_run(tmp_path / "some", 2)], tmp_path / "out")
    assert [(run.samples, run.owed) for run in done.runs] == [(0, 12), (12, 0)]


def test_the_same_dataset_twice(two: list[Path], tmp_path: Path) -> None:
    """By its path, through a link, and as a copy whose shards are others by now."""
    link, copy = tmp_path / "link", Path(shutil.copytree(two[0], tmp_path / "copy"))
    link.symlink_to(two[0])
    for again in (two[0], link):
        with pytest.raises(UsageError, match="the same dataset directory was given twice"):
            merge([two[0], again], tmp_path / "out")
    compact(copy)
    with pytest.raises(
        UsageError, match="runs 'base' and 'copy' are copies of one dataset: its samples would be there"
    ):
        merge([two[0], copy], tmp_path / "out")


def test_writers_that_began_together(tmp_path: Path, make_run: MakeRun) -> None:
    """Ranks of a job have the same settings and start, and prompts by the same ids: with other tokens, no copies."""
    ranks = [make_run(tmp_path / f"rank-{rank}", 0, shards=1, prompts=1, tokens=8 + rank) for rank in range(3)]
    assert merge(ranks, tmp_path / "out").samples == 6


def test_short_answers_are_often_the_same(tmp_path: Path, make_run: MakeRun) -> None:
    """Of ranks of a job too: with other seeds, no copies."""
    one = {"shards": 1, "prompts": 1, "n": 1, "tokens": 8}
    ranks = [
        make_run(tmp_path / f"rank-{rank}", 0, **one, planned={"seed": rank}, seed=sample_seed(rank, "p0", 0))
        for rank in range(2)
    ]
    assert merge(ranks, tmp_path / "out").samples == 2


ONE_SEED = (
    "samples of '{}' that {} has too, token by token: {}; they were drawn with the same seeds, and training would "
    "count them twice: give each run a --seed of its own"
)


@pytest.mark.parametrize("dry_run", [True, False])
def test_runs_of_one_seed(tmp_path: Path, make_run: MakeRun, dry_run: bool) -> None:
    """Of the same model: what both drew is told, whatever else each has. Of another model nothing is the same.

    The second run has 4 of the 12 samples, the third 2 of these 4 (the last run that has them is named); the samples of
    the fourth are a token longer.
    """
    same = {"model": read_manifest(make_run(tmp_path / "a", 0)).model}
    sources = [tmp_path / "a"]
    sources += [make_run(tmp_path / "b", 1, shards=1, prompts=2, tokens=8, said=same)]
    sources += [make_run(tmp_path / "c", 2, shards=1, prompts=2, n=1, tokens=8, said=same)]
    sources += [make_run(tmp_path / "longer", 3, tokens=9, said=same), make_run(tmp_path / "other", 4, tokens=8)]
    notes = merge(sources, tmp_path / "out", dry_run=dry_run).notes
    assert notes == (ONE_SEED.format("b", "'a'", 4), ONE_SEED.format("c", "'b'", 2))


def test_runs_of_other_seeds(tmp_path: Path, make_run: MakeRun) -> None:
    """Short answers are often the same: nothing to tell."""
    same = {"model": read_manifest(make_run(tmp_path / "a", 0)).model}
    one = {"shards": 1, "prompts": 1, "n": 1, "tokens": 8, "planned": {"seed": 5}}
    other = make_run(tmp_path / "b", 1, **one, said=same, seed=sample_seed(5, "p0", 0))
    assert merge([tmp_path / "a", other], tmp_path / "out").notes == ()


def test_what_is_no_directory(two: list[Path], tmp_path: Path) -> None:
    """A link to itself, and a name that there cannot be."""
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for place in (tmp_path / "loop", tmp_path / "a\0b"):
        with pytest.raises(UsageError, match=r"not a directory; name one that holds rollgen\.json"):
            merge([two[0], place], tmp_path / "out")
    with pytest.raises(UsageError, match="s3://bucket/x: merge reads and writes directories: copy the dataset here"):
        merge([two[0], "s3://bucket/x"], tmp_path / "out")


@pytest.mark.parametrize(
    ("key", "value"), [("vocab_size", 600), ("tokenizer_vocab_size", 501), ("tokenizer_sha256", "f" * 64)]
)
def test_ids_that_do_not_mean_the_same(tmp_path: Path, make_run: MakeRun, key: str, value: object) -> None:
    """Both values are told: of `make_run` 512, 500 and a hash."""
    one, other = make_run(tmp_path / "one", 0), make_run(tmp_path / "other", 1, said={key: value})
    own = getattr(read_manifest(one), key)
    with pytest.raises(UsageError, match=rf"other: its {key} is {value}, that of .*one is {own}: ids would not mean"):
        merge([one, other], tmp_path / "out")


@pytest.fixture
def unlike(tmp_path: Path, make_run: MakeRun) -> list[Path]:
    """The first stores everything, the second nothing that is optional."""
    everything = make_run(tmp_path / "everything", 0, support_logprobs=True, extras=True)
    return [everything, make_run(tmp_path / "plain", 1)]


def test_columns_that_not_all_have(unlike: list[Path], tmp_path: Path) -> None:
    """One by one they are refused until all are left out on request. The list of starts goes with its versions."""
    drop: list[str] = []
    for name in ("support_logprobs", "weight_versions", "routed_experts"):
        with pytest.raises(
            UsageError, match=rf"plain: does not store {name}, which .*everything stores; .*--drop {name}"
        ):
            merge(unlike, tmp_path / "out", drop=drop)
        drop.append(name)
    assert merge(unlike, tmp_path / "out", drop=drop).dropped == tuple(drop)
    [stored] = open_dataset(tmp_path / "out").shards
    with stored.open() as shard:
        assert shard.stored & {*drop, "weight_version_starts"} == set()
        assert set(read_columns(shard, ["run"])["run"].to_pylist()) == {"everything", "plain"}
    first, _ = read_manifest(tmp_path / "out").runs
    assert (first.support_logprobs, first.weight_versions) == (True, True), "what the run stored is still known"


def test_columns_that_all_have(tmp_path: Path, make_run: MakeRun) -> None:
    """They stay, unless they are dropped."""
    sources = [make_run(tmp_path / str(n), n, support_logprobs=True, extras=True) for n in range(2)]
    merge(sources, tmp_path / "out")
    assert read_manifest(tmp_path / "out").optional_columns == dict.fromkeys(
        ("run", "support_logprobs", "weight_versions", "routed_experts"), True
    )
    merge(sources, tmp_path / "less", drop=["routed_experts"])
    assert read_manifest(tmp_path / "less").routed_experts is None


@pytest.mark.parametrize("name", ["run", "text", "support_logprob", "support_logprobs"])
def test_a_column_that_cannot_be_dropped(two: list[Path], tmp_path: Path, name: str) -> None:
    """None that a dataset must have, and none that is not there."""
    with pytest.raises(UsageError, match=f"--drop {name}: no optional column of these datasets; they have: none"):
        merge(two, tmp_path / "out", drop=[name])


@pytest.mark.parametrize(("experts", "expected"), [((8, 16), 16), ((None, 16), None)])
def test_models_of_as_many_layers(
    tmp_path: Path, make_run: MakeRun, experts: tuple[int | None, int], expected: int | None
) -> None:
    """Their numbers of experts are bounded by the largest; where one is not known, by none."""
    layouts = [RoutedExperts(layers=3, top_k=2, experts=count) for count in experts]
    sources = [
        make_run(tmp_path / str(n), n, extras=True, said={"routed_experts": each}) for n, each in enumerate(layouts)
    ]
    merge(sources, tmp_path / "out")
    assert read_manifest(tmp_path / "out").routed_experts == RoutedExperts(layers=3, top_k=2, experts=expected)


def test_experts_of_other_layers(tmp_path: Path, make_run: MakeRun) -> None:
    """Their numbers have another shape; without them the rest goes together."""
    other = RoutedExperts(layers=2, top_k=3, experts=8)
    sources = [
        make_run(tmp_path / "three", 0, extras=True),
        make_run(tmp_path / "two", 1, extras=True, said={"routed_experts": other}),
    ]
    with pytest.raises(
        UsageError, match=r"two: its routed_experts are of 2 layers and 3 experts a token, those of .*3 and"
    ):
        merge(sources, tmp_path / "out")
    assert merge(sources, tmp_path / "out", drop=["routed_experts"]).samples == 24


def test_no_dataset(two: list[Path], tmp_path: Path) -> None:
    """As for any reader; nothing is written."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(DatasetError, match="empty is not a rollgen dataset"):
        merge([two[0], tmp_path / "empty"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_run_that_the_manifest_does_not_name(two: list[Path], tmp_path: Path, make_run: Any) -> None:
    """A merged dataset whose manifest is an older copy: its rows would lose their run."""
    merge(two, tmp_path / "merged")
    manifest = read_manifest(tmp_path / "merged")
    replace_manifest(tmp_path / "merged", manifest.model_copy(update={"runs": manifest.runs[:1]}))
    with pytest.raises(DatasetError, match=r"part-merge-000000\.parquet: row group 0: holds rows of a run that the"):
        merge([tmp_path / "merged", make_run(tmp_path / "third", 2)], tmp_path / "out")
    assert len(list_shards(tmp_path / "merged")) == 1

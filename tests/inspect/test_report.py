"""The page as a file: its figures are plotly's, its data cannot leave their element, its target is replaced whole."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import os
import re
import sys
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from models.rewards import write_rewards

from rollgen.errors import UsageError
from rollgen.format.reader import open_dataset
from rollgen.inspect import report as module
from rollgen.inspect.curves import LogprobBar, curves_of
from rollgen.inspect.failures import ErrorCount, FailureStats
from rollgen.inspect.report import write_report
from rollgen.inspect.report.content import report_content
from rollgen.inspect.report.figures import Figure, figures, label
from rollgen.inspect.report.page import json_for_html, read_plotly, render_page
from rollgen.inspect.rewards import RewardBar, RewardFigures, RewardStats
from rollgen.inspect.stats import stats_of
from rollgen.inspect.throughput import Throughput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rollgen.format.reader import StoredDataset
    from rollgen.inspect.curves import Curves
    from rollgen.inspect.stats import DatasetStats

ASSETS = files("rollgen.inspect.report") / "assets"
HOSTILE = "</script><!-- <script>x</script> \u2028\u2029 & \x1b[31m \u202e %{y} <b>b</b>"
REWARDS = RewardStats(
    name="correct",
    scorer=HOSTILE,
    scored=4,
    not_scored=2,
    figures=RewardFigures(0.75, 0.433, 0, 1, 2, 1, (RewardBar(0, 0, 1), RewardBar(1, 1, 3))),
    further=(),
)


def measured(directory: Path) -> tuple[DatasetStats, Curves]:
    """With failures, rewards and a history of speed, so that every figure is there."""
    dataset = open_dataset(directory)
    stats = stats_of(dataset)
    failures = FailureStats(7, 0, {"engine": 7}, (ErrorCount("engine", HOSTILE, 4), ErrorCount("capture", HOSTILE, 2)))
    curves = dataclasses.replace(curves_of(dataset, stats), throughput=Throughput(7200.0, 9000, (1.0, 1.5)))
    return dataclasses.replace(stats, failures=failures, rewards=(REWARDS,)), curves


def content_of(directory: Path) -> dict[str, Any]:
    stats, curves = measured(directory)
    return report_content(open_dataset(directory), stats, curves, {})


@pytest.fixture
def drawn(make_dataset: Callable[..., Any]) -> dict[str, Figure]:
    """All figures of a dataset, by key."""
    stats, curves = measured(make_dataset(0, support_logprobs=True).directory)
    return {figure.key: figure for figure in figures(stats, curves)}


def test_every_figure_is_there(drawn: dict[str, Figure]) -> None:
    """In the order of the page, each with what to see in it and with its numbers."""
    assert [*drawn] == (
        "supports supports-by-position surprisal-by-position logprobs responses prompts speed bytes failures "
        "rewards-0".split()
    )
    for figure in drawn.values():
        assert figure.sentence.endswith(".")
        assert figure.rows
        assert {len(row) for row in figure.rows} == {len(figure.head)}


def test_figures_are_what_plotly_draws(drawn: dict[str, Figure]) -> None:
    """Every trace and every setting has the name and type that plotly's schema knows."""
    objects = pytest.importorskip("plotly.graph_objects")
    for figure in drawn.values():
        shown = json.loads(re.sub('"@[a-z-]+"', '"red"', json.dumps(figure.to_json(), allow_nan=False)))
        objects.Figure(data=shown["data"], layout=shown["layout"])


def each(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every value inside of `value`, with its key."""
    if isinstance(value, dict):
        for name, member in value.items():
            yield from each(member, name)
    elif isinstance(value, list | tuple):
        for member in value:
            yield from each(member, key)
    else:
        yield key, value


def test_colours_are_those_of_the_theme(drawn: dict[str, Figure]) -> None:
    """Each is a name that the style sheet knows, light and dark, and stands where the page looks for one."""
    style = (ASSETS / "page.css").read_text()
    names = {(key, value) for figure in drawn.values() for key, value in each([figure.data, figure.layout])}
    colours = [(key, value) for key, value in names if isinstance(value, str) and value.startswith("@")]
    assert colours
    for key, value in colours:
        assert key.endswith("color")
        assert f"--plot-{value[1:]}: " in style


def test_data_is_no_markup_to_plotly(drawn: dict[str, Figure]) -> None:
    """In labels it is escaped; templates hold none of it."""
    for key, value in each([drawn["failures"].data, drawn["failures"].layout]):
        if isinstance(value, str) and "x1b" in value:
            assert key == "ticktext"
            assert not re.search("[<>\x1b\u202e]", value.replace("<br>", ""))
            assert "&lt;/script&gt;" in value.replace("<br>", "")


def test_labels_are_brief_and_inert() -> None:
    """60 characters and an ellipsis, no control character, no tag."""
    assert label("x" * 100) == "x" * 45 + "…" + "x" * 15
    assert label("<a href='x'>\x1b&") == r"&lt;a href='x'&gt;\x1b&amp;"


@pytest.mark.parametrize("value", [HOSTILE, {HOSTILE: [HOSTILE]}, ["a\nb\r\u0000", 1.5, None, True]])
def test_json_cannot_end_its_element(value: Any) -> None:
    """No character that HTML gives a meaning is left, and the texts come back inert."""
    text = json_for_html(value)
    assert not re.search("[<>&\u2028\u2029\x1b\u202e]", text)
    back = json.dumps(json.loads(text), ensure_ascii=False)
    assert "\x1b" not in back
    if not isinstance(value, list):
        assert "</script>" in back
    else:
        assert json.loads(text) == ["a\nb\\r\\x00", 1.5, None, True]


class Page(HTMLParser):
    """The elements of a page, and what stands in its scripts and style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.raw: list[tuple[str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] in ("script", "style", "title") and data.strip():
            if self.raw and self.raw[-1][0] == f"{self.tags[-1]}{len(self.tags)}":
                self.raw[-1] = (self.raw[-1][0], self.raw[-1][1] + data)
            else:
                self.raw.append((f"{self.tags[-1]}{len(self.tags)}", data))


def test_the_page_is_its_frame(make_dataset: Callable[..., Any]) -> None:
    """Whatever the data: the same few elements, no handler, and a policy that has the hash of each script."""
    content = content_of(make_dataset(0, model_name=HOSTILE).directory) | {"name": HOSTILE}
    page = Page(render_page(content, "var plotly = 1 < 2 && '</b>';"))
    assert page.tags == "html head meta meta meta meta meta meta title style body noscript script script script".split()
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "href")]
    (policy,) = [value for _, value in page.attributes if value is not None and "default-src" in value]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    title, style, data, plotly, script = [text for _, text in page.raw]
    for text in (style, plotly, script):
        assert f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" in policy
    assert len(re.findall("sha256-", policy)) == 3
    assert json.loads(data)["headline"][0]["value"].startswith("</script><!-- <script>x</script>")
    assert title.startswith("</script><!-- <script>x</script>")
    assert "\x1b" not in title + data


@pytest.mark.parametrize("name", [path.name for path in ASSETS.iterdir()])
def test_assets_make_no_html_and_ask_for_nothing(name: str) -> None:
    """No way to parse a text as markup or as code, and no address."""
    text = (ASSETS / name).read_text()
    forbidden = (
        r"innerHTML|outerHTML|insertAdjacent|document\.write|DOMParser|createContextualFragment|\beval\b|Function\("
    )
    assert not re.search(forbidden, text)
    assert not re.search(r"https?:|//[a-z]+\.|url\(|@import|fetch\(|XMLHttpRequest|WebSocket|import\(", text)
    assert "</" not in text


def test_every_asset_is_in_the_page(make_dataset: Callable[..., Any]) -> None:
    """None was forgotten."""
    page = render_page(content_of(make_dataset(0).directory), "")
    for path in ASSETS.iterdir():
        assert path.read_text() in page


def test_a_report_is_written_whole(make_dataset: Callable[..., Any], tmp_path: Path) -> None:
    """In place of the one before, with nothing left beside it; the same dataset gives the same bytes."""
    pytest.importorskip("plotly")
    directory = make_dataset(0).directory
    (tmp_path / "out").mkdir()
    target = tmp_path / "out" / "report.html"
    report = write_report(directory, target)
    page = target.read_bytes()
    assert (report.file, report.bytes, report.shown, report.samples) == (str(target), len(page), 36, 36)
    assert list(target.parent.iterdir()) == [target]
    for before in (page, page[:1000], b""):
        target.write_bytes(before)
        write_report(directory, target)
        assert target.read_bytes() == page


def test_nothing_is_left_of_a_report_that_was_interrupted(
    make_dataset: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Ctrl-C, say: the one before stays, and nothing lies beside it."""
    pytest.importorskip("plotly")
    directory, target = make_dataset(0).directory, tmp_path / "out" / "report.html"
    target.parent.mkdir()
    target.touch()

    def interrupted(*paths: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_report(directory, target)
    assert ([*target.parent.iterdir()], target.read_bytes()) == ([target], b"")


def test_a_page_has_the_rewards_of_one_scorer(
    make_dataset: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when a rescoring ends while it is made: figures, headline and samples are of the one in force before."""
    pytest.importorskip("plotly")
    directory = make_dataset(0).directory
    write_rewards(directory, "correct", lambda row: 0.5)

    def rescored(dataset: StoredDataset, stats: DatasetStats) -> Curves:
        write_rewards(directory, "correct", lambda row: 3.0, scoring=2, closes=True)
        return curves_of(dataset, stats)

    monkeypatch.setattr(module, "curves_of", rescored)
    write_report(directory, tmp_path / "report.html")
    page = Page((tmp_path / "report.html").read_text())
    (content,) = [json.loads(text) for _, text in page.raw if text.startswith('{"name"')]
    (value,) = [card["value"] for card in content["headline"] if card["label"] == "Reward correct"]
    assert (value, {item["rewards"]["correct"] for item in content["samples"]["items"]}) == ("0.5", {0.5})


def test_bytes_add_up(make_dataset: Callable[..., Any]) -> None:
    """To those of the files, footers among them: a token's, and the share of the largest part."""
    directory = make_dataset(0).directory
    stats, curves = measured(directory)
    (figure,) = [it for it in figures(stats, curves) if it.key == "bytes"]
    size = sum(path.stat().st_size for path in (directory / "data").iterdir())
    each = size / stats.samples.generated_tokens
    assert sum(float(bytes) for _, bytes in figure.rows) == pytest.approx(each, abs=0.01)
    largest, bytes_of_it = max(stats.files.parts.items(), key=lambda part: part[1])
    assert figure.sentence.startswith(f"{each:.1f} bytes a generated token")
    assert figure.sentence.endswith(f"the largest part, {largest}, takes {bytes_of_it / size:.1%} of it.")


def test_owed_retries_are_told_apart(make_again: Callable[[], Any]) -> None:
    """One of two was made; of the plan 12 samples are owed, which has nothing to do with them."""
    headline = content_of(make_again().directory)["headline"]
    (told,) = [card["more"] for card in headline if card["label"] == "Samples"]
    assert told == "of 48 planned, 12 owed; 1 owed again, as retries"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("report", "name a file that ends in .html"),
        ("data_0/rollgen.json", "name a file that ends in .html"),
        ("dir.html", "is a directory"),
        ("no/report.html", "/no is not there; make it first"),
        ("own.html/report.html", "/own.html is not a directory"),
        (".", r"^--html \.: name a file"),
        ("s3://bucket/report.html", "/report.html: a report is written to a file of this machine"),
        ("own.html", "is there, and no report of rollgen"),
        ("link.html", "is there, and no report of rollgen"),
        ("pipe.html", "is there, and no report of rollgen"),
        ("data_0/data/report.html", "a place of the dataset's own"),
        ("data_0/journal/report.html", "a place of the dataset's own"),
        ("data_1/report.html", "data_1 is another dataset; name a file beside it"),
        ("data_1/data/report.html", "data_1 is another dataset; name a file beside it"),
        ("linked/report.html", "data_1 is another dataset; name a file beside it"),
        (f"{251 * 'x'}.html", "cannot be written: File name too long"),
        (f"{256 * 'x'}/report.html", "cannot be written: File name too long"),
    ],
)
def test_targets_that_cannot_be(make_dataset: Callable[..., Any], tmp_path: Path, name: str, problem: str) -> None:
    """One line that says why; nothing is written."""
    directory = make_dataset(0).directory
    make_dataset(1)
    (tmp_path / "linked").symlink_to(tmp_path / "data_1" / "data")
    (tmp_path / "dir.html").mkdir()
    (tmp_path / "own.html").write_text("<!DOCTYPE html><p>mine")
    (tmp_path / "link.html").symlink_to(directory / "rollgen.json")
    os.mkfifo(tmp_path / "pipe.html")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match=problem):
        write_report(directory, Path(name) if name == "." or ":" in name else tmp_path / name)
    assert (tmp_path / "own.html").read_text() == "<!DOCTYPE html><p>mine"
    assert sorted(tmp_path.rglob("*")) == before


def test_the_longest_name(make_dataset: Callable[..., Any], tmp_path: Path) -> None:
    """Of 255 bytes, which a temporary name does not add to."""
    pytest.importorskip("plotly")
    target = tmp_path / f"{250 * 'x'}.html"
    write_report(make_dataset(0).directory, target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data_0", target.name]


def test_without_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names what to install, which is on every index."""
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(UsageError, match=r"pip install plotly$"):
        read_plotly()


def test_plotly_stands_in_one_element() -> None:
    """What would end a script element is not in it, so that the hash in the policy is of all of it."""
    pytest.importorskip("plotly")
    text = read_plotly()
    assert len(text) > 10**6
    assert not re.search("</script|<!--|\r", text, re.IGNORECASE)


def test_nothing_is_stored_yet(empty_dataset: Path) -> None:
    """A page without figures of tokens, and no error."""
    content = report_content(open_dataset(empty_dataset), *measured(empty_dataset), {})
    assert [figure["key"] for figure in content["figures"]] == ["speed", "failures", "rewards-0"]
    json_for_html(content)


def test_what_is_not_truncated_is_told(drawn: dict[str, Figure]) -> None:
    """Three of the twelve prompts are not: quartiles say of how many tokens they are, sentences what is not in them."""
    supports, surprisal = drawn["supports-by-position"], drawn["surprisal-by-position"]
    assert supports.head[2] == "truncated"
    truncated, every = (sum(int(row[2]) for row in figure.rows) for figure in (supports, surprisal))
    assert truncated == sum(row[1] for row in drawn["supports"].rows[:-1])  # the last one is the full vocabulary
    assert truncated < every
    assert "need not follow it" in surprisal.sentence
    assert "drawn from the full vocabulary" in drawn["supports"].sentence


def test_rare_tokens_are_drawn(make_dataset: Callable[..., Any]) -> None:
    """One of ten million tokens is above nothing, which a logarithmic axis cannot show."""
    stats, curves = measured(make_dataset(0).directory)
    bars = (LogprobBar(-40.0, -39.0, 1, 0), LogprobBar(-1.0, 0.0, 10**7, 0))
    (figure,) = [it for it in figures(stats, dataclasses.replace(curves, logprobs=bars)) if it.key == "logprobs"]
    assert figure.data[0]["y"][0] == pytest.approx(1e-5, rel=1e-5)


def test_ranges_of_rewards_are_named(make_dataset: Callable[..., Any]) -> None:
    """Bars stand side by side, and the axis names every fourth edge."""
    bars = tuple(RewardBar(place * 1e37, (place + 1) * 1e37, 1) for place in range(20))
    rewards = dataclasses.replace(REWARDS, figures=RewardFigures(1e38, 6e37, 0, 2e38, 2, 1, bars))
    stats, curves = measured(make_dataset(0).directory)
    (figure,) = [it for it in figures(dataclasses.replace(stats, rewards=(rewards,)), curves) if "rewards" in it.key]
    assert figure.data[0]["x"] == list(range(20))
    ticks, texts = (figure.layout["xaxis"][name] for name in ("tickvals", "ticktext"))
    assert ticks == [-0.5, 3.5, 7.5, 11.5, 15.5, 19.5]
    assert texts == ["0", "4e+37", "8e+37", "1.2e+38", "1.6e+38", "2e+38"]

"""The page in a real browser: it opens offline, its keys work, it can be read, and data does nothing in it."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from models.rewards import write_rewards
from models.tiny import make_tiny_tokenizer

from rollgen.config import digest
from rollgen.format.commit import WriterSlot
from rollgen.format.failures import FailureLog
from rollgen.format.manifest import PLANLESS, create_manifest
from rollgen.format.writer import ShardWriter
from rollgen.inspect.report import write_report

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from playwright.sync_api import Browser, Page

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
pytest.importorskip("plotly", reason="needs plotly")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt-get install chromium)")

ATTACKS = (
    "<script>window.ran = 1</script>",
    "</script><script>window.ran = 1</script>",
    "<img src=x onerror='window.ran = 1'>",
    '"><iframe src="javascript:top.ran = 1"></iframe>',
    "<!-- <script> <svg onload=window.ran=1> -->",
    "<style>* { display: none }</style>",
    "</title></style><a href='https://evil.example/'>click</a>",
    "%{x} {{ran}} ${window.ran = 1} $$x^2$$",
)
HOSTILE = "".join(ATTACKS) + "\x1b[31;2J\u202egpj.exe\u2066 \u2028\u2029\u200b\x00"
MODEL_IDS = 512
NEWLINE = "↵"
TIMEOUT = 180_000.0
"""Milliseconds."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=TIMEOUT)
        yield running
        running.close()


@pytest.fixture
def opened(browser: Browser) -> Iterator[Callable[..., Page]]:
    """`opened(path, **context)`: the page of a file, offline. Nothing was asked for, and nothing went wrong."""
    contexts, asked, wrong = [], [], []

    def open_page(path: Path, **settings: Any) -> Page:
        context = browser.new_context(offline=True, **({"viewport": {"width": 1440, "height": 900}} | settings))
        context.set_default_timeout(TIMEOUT)
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: wrong.append(dialog.message))
        page.goto(path.as_uri())
        asked.remove(path.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert (asked, wrong) == ([], [])


@pytest.fixture
def write_samples(tmp_path: Path, make_completion: Callable[..., Any], make_manifest: Callable[..., Any]) -> Callable:
    """`write_samples(changes, text="", rewards=None, **said)`: a report of a completion for each mapping of `changes`.

    `text` is the last token of the dataset's tokenizer, a key of its configuration and the error of a failure, `texts`
    are its last tokens; `rewards` gives each stored row its reward `correct`.
    """

    def write(
        changes: list[dict[str, Any]],
        *,
        text: str = "",
        rewards: Callable[[dict[str, Any]], float | None] | None = None,
        texts: Sequence[str] = (),
        **said: Any,
    ) -> Path:
        identity = {PLANLESS: True, "temperature": 0.75, text: text}
        manifest = make_manifest(identity=identity, config_digest=digest(identity), support_logprobs=True, **said)
        directory = tmp_path / "data"
        directory.mkdir()
        tokenizer = make_tiny_tokenizer()
        tokenizer.add_tokens([text] if text else [*texts])
        tokenizer.save_pretrained(directory / "tokenizer")
        create_manifest(directory, manifest)
        with WriterSlot(directory, "w0") as slot:
            with ShardWriter(slot, manifest, commit_interval=math.inf) as writer:
                for number, change in enumerate(changes):
                    made = make_completion(number, 0, support_logprobs=True)
                    writer.add(replace(made, **change))
            if text:
                FailureLog(directory, "w0").record(text, 0, 7, "engine", text)
        if rewards is not None:
            write_rewards(directory, "correct", rewards)
        report = tmp_path / "report.html"
        write_report(directory, report)
        return report

    return write


def tokens(ids: list[int]) -> dict[str, Any]:
    """Fields of a completion of these tokens, each drawn with 0.5 from itself and one more."""
    supports = [sorted({token_id, token_id + 1 if token_id + 1 < MODEL_IDS else 0}) for token_id in ids]
    half = math.log(0.5)
    return {
        "token_ids": np.array(ids, np.int32),
        "logprobs": np.full(len(ids), half, np.float32),
        "mask_ids": np.array([member for support in supports for member in support], np.int32),
        "mask_offsets": np.arange(0, 2 * len(ids) + 1, 2),
        "support_logprobs": np.full(2 * len(ids), half, np.float32),
    }


def chat(content: str, role: str = "user") -> str:
    return json.dumps([{"role": "system", "content": "Be brief."}, {"role": role, "content": content}])


@pytest.fixture
def report(write_samples: Callable[..., Path]) -> Path:
    """Three samples of eight tokens: p0, p1 (finished by length) and p2, with chats as prompts."""
    reasons = ("stop", "length", "stop")
    return write_samples(
        [{"prompt": chat(f"Question {number}?"), "finish_reason": reason} for number, reason in enumerate(reasons)]
    )


def draw_all(page: Page) -> None:
    """Scroll until every figure is drawn."""
    for figure in page.query_selector_all("figure"):
        figure.scroll_into_view_if_needed()
        figure.wait_for_selector(".main-svg")
    page.evaluate("scrollTo(0, 0)")


def selected(page: Page) -> str:
    return page.locator("#list [aria-selected=true] .key").inner_text()


def test_a_page_opens_offline(opened: Callable[..., Page], report: Path) -> None:
    """Figures are drawn, all samples are there, and the first one is shown with its prompt and its tokens."""
    page = opened(report)
    draw_all(page)
    assert page.locator("h1").inner_text() == "data"
    assert page.locator("figure .cartesianlayer .subplot").count() == page.locator("figure").count() == 7
    assert page.locator("#list li").count() == 3
    assert selected(page) == "p0:0"
    assert page.locator(".turn").all_inner_texts() == ["system\nBe brief.", "user\nQuestion 0?"]
    assert page.locator("#response .token").count() == 8
    assert page.get_by_text("All 3 samples of the dataset.").is_visible()


def test_keys_lead_through_samples(opened: Callable[..., Page], report: Path) -> None:
    """j and k from anywhere, into the list; there the arrows, Home and End. It does not run over its ends."""
    page = opened(report)
    visited = []
    for key in ("j", "j", "j", "k"):
        page.keyboard.press(key)
        visited.append(selected(page))
    assert page.evaluate("document.activeElement.id") == "list"
    assert page.evaluate("document.querySelector('#list [aria-selected=true]').getBoundingClientRect().bottom") <= 900
    for key in ("ArrowUp", "ArrowUp", "ArrowDown", "End", "Home"):
        page.keyboard.press(key)
        visited.append(selected(page))
    assert visited == [f"p{number}:0" for number in (1, 2, 2, 1, 0, 0, 1, 2, 0)]
    assert page.locator("#list").get_attribute("aria-activedescendant") == "sample-0"


@pytest.mark.parametrize("place", ["#descending", "button.theme"])
def test_keys_work_beside_the_list(opened: Callable[..., Page], report: Path, place: str) -> None:
    """j, k and / also while another control has the focus; in the filter they are letters."""
    page = opened(report)
    page.locator(place).focus()
    page.keyboard.press("j")
    assert selected(page) == "p1:0"
    page.locator(place).focus()
    page.keyboard.press("/")
    page.keyboard.type("jk/")
    assert page.locator("#filter").input_value() == "jk/"


def test_a_menu_keeps_its_letters(opened: Callable[..., Page], report: Path) -> None:
    """There they lead to the option that begins with them."""
    page = opened(report)
    page.locator("#sort").focus()
    page.keyboard.press("j")
    assert (page.evaluate("document.activeElement.id"), selected(page)) == ("sort", "p0:0")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "filter"


def test_a_narrow_window_shows_the_support_when_asked(opened: Callable[..., Page], report: Path) -> None:
    """It lies over the sample there: a token opens it, its button, Escape and the next sample close it."""
    page = opened(report, viewport={"width": 390, "height": 844})
    panel = page.locator(".panel")
    assert panel.is_hidden()
    page.locator("#response .token").nth(1).click()
    panel.get_by_role("button", name="Close").click()
    assert panel.is_hidden()
    assert page.evaluate("document.activeElement.id") == "list"
    for key in ("Escape", "j"):
        page.locator("#response .token").nth(2).click()
        assert panel.is_visible()
        page.keyboard.press(key)
        assert panel.is_hidden()


def test_keys_lead_through_tokens(opened: Callable[..., Page], report: Path) -> None:
    """Right goes in and on, left back, Escape out; the token with the focus is described and its support shown."""
    page = opened(report)
    page.locator("#list").focus()
    page.keyboard.press("ArrowRight")
    places = []
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "End", "ArrowRight", "Home"):
        page.keyboard.press(key)
        places.append(page.evaluate("document.activeElement.dataset.place"))
        assert page.locator(".panel h4").inner_text() == f"Token {places[-1]} of 0-7"
    assert places == ["1", "2", "1", "7", "7", "0"]
    focused = page.locator("#response [aria-selected=true]")
    assert focused.count() == 1
    assert "%" in (focused.get_attribute("aria-label") or "")
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "list"


def test_the_support_of_a_token(opened: Callable[..., Page], write_samples: Callable[..., Path]) -> None:
    """Every id with its probability, the likeliest first, the sampled one marked: under the mouse, or of the focus."""
    page = opened(write_samples([tokens([100, 200])]))
    page.locator("#response .token").nth(1).hover()
    rows = page.locator(".support tbody tr").all_inner_texts()
    assert [row.split("\t")[1:] for row in rows] == [["200", "50.0 %"], ["201", "50.0 %"]]
    assert "sampled" in rows[0]
    assert "sampled" not in rows[1]
    page.mouse.move(0, 0)
    assert page.locator(".panel h4").inner_text() == "Token 0 of 0-1"


def test_the_filter(opened: Callable[..., Page], report: Path) -> None:
    """By text and by finish reason; / goes to it, Escape clears it; the order can be turned."""
    page = opened(report)
    page.keyboard.press("/")
    page.keyboard.type("question 2")
    assert page.locator("#list .key").all_inner_texts() == ["p2:0"]
    assert page.locator(".status").inner_text() == "1 of 3 samples"
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "list"
    page.locator("#reason").select_option("length")
    assert page.locator("#list .key").all_inner_texts() == ["p1:0"]
    page.locator("#filter").fill("nowhere to be found")
    assert page.get_by_text("No sample matches the filter.").is_visible()
    page.locator("#filter").fill("")
    page.locator("#reason").select_option("")
    page.locator("#descending").check()
    assert page.locator("#list .key").all_inner_texts() == ["p2:0", "p1:0", "p0:0"]


@pytest.mark.parametrize("order", ["mean logprob", "mean support", "length"])
def test_orders(opened: Callable[..., Page], report: Path, order: str) -> None:
    """By numbers, ascending."""
    page = opened(report)
    page.locator("#sort").select_option(order)
    key = {"mean logprob": "logprob", "mean support": "support", "length": "length"}[order]
    stored = json.loads(page.locator("#content").text_content() or "")["samples"]["items"]
    values = {f"{item['id']}:{item['sample']}": item[key] for item in stored}
    shown = [values[name] for name in page.locator("#list .key").all_inner_texts()]
    assert shown == sorted(values.values())


@pytest.mark.parametrize("preferred", ["light", "dark"])
def test_themes(opened: Callable[..., Page], report: Path, preferred: Any) -> None:
    """The one that the system prefers, and the other one by the button, with figures in its colours."""
    page = opened(report, color_scheme=preferred)
    draw_all(page)
    other = {"light": "dark", "dark": "light"}[preferred]
    fill = "getComputedStyle(document.querySelector('.bars path')).fill"
    assert page.evaluate("document.documentElement.dataset.theme") == preferred
    before = page.evaluate(fill)
    page.get_by_role("button", name=f"Switch to {other} colours").click()
    assert page.evaluate("document.documentElement.dataset.theme") == other
    assert page.evaluate(fill) != before


def test_rewards_are_shown(opened: Callable[..., Page], write_samples: Callable[..., Path]) -> None:
    """In the list, in the facts of a sample, in a figure, and as an order; one that was not scored comes first."""
    rewards = {"p0": 0.5, "p1": None, "p2": 0.25}
    page = opened(write_samples([{}, {}, {}], rewards=lambda row: rewards[row["prompt_id"]]))
    page.locator("#sort").select_option("reward correct")
    assert page.locator("#list .key").all_inner_texts() == ["p1:0", "p2:0", "p0:0"]
    numbers = [text.partition("correct ")[2] for text in page.locator("#list .numbers").all_inner_texts()]
    assert numbers == ["not scored", "0.25", "0.5"]
    page.locator("#list li").last.click()
    assert "Reward correct\n0.5" in page.locator(".detail dl").inner_text()
    assert "mean 0.375" in page.locator("figure", has_text="Rewards: correct").inner_text()


def test_rewards_of_any_size(opened: Callable[..., Page], write_samples: Callable[..., Path]) -> None:
    """Small ones are not 0, huge ones no line of digits, nothing is -0."""
    rewards = {"p0": 0.00004, "p1": -1e38, "p2": -0.0}
    page = opened(write_samples([{}, {}, {}], rewards=lambda row: rewards[row["prompt_id"]]))
    numbers = [text.partition("correct ")[2] for text in page.locator("#list .numbers").all_inner_texts()]
    assert numbers == ["0.00004", "-1e+38", "0"]
    draw_all(page)
    figure = page.locator("figure", has_text="Rewards: correct")
    figure.locator("summary").click()
    rows = [text.split("\t")[0] for text in figure.locator("tbody tr").all_inner_texts()]
    assert rows == ["-1e+38", "0", "0.00004"]


def test_a_logprob_of_any_size(opened: Callable[..., Page], write_samples: Callable[..., Path]) -> None:
    """It is drawn without styles that the policy forbids, and told without 38 digits."""
    page = opened(write_samples([{"logprobs": np.array([-3e38] + [-1.0] * 7, np.float32)}, {}]))
    draw_all(page)
    assert "Mean logprob\n-3.75e+37 nats" in page.locator(".detail dl").inner_text()  # one of eight


def test_runs_of_a_merged_dataset(opened: Callable[..., Page], merged: Path, tmp_path: Path) -> None:
    """Samples are named with their run, as `--sample` names them; the configuration is that of each run."""
    write_report(merged, tmp_path / "report.html")
    page = opened(tmp_path / "report.html")
    names = page.locator("#list .key").all_inner_texts()
    assert sorted(names) == sorted(
        f"{run}/p{prompt}:{k}" for run in ("base", "step-1") for prompt in range(6) for k in "01"
    )
    assert page.get_by_role("heading", name="Run step-1: What decides the data").is_visible()


CONTRAST = """
() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (value) => (value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4);
  const luminance = ([r, g, b]) => 0.2126 * light(r) + 0.7152 * light(g) + 0.0722 * light(b);
  const under = (node) => {
    for (; node; node = node.parentElement) {
      const colour = parse(getComputedStyle(node).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
  };
  const poor = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text = walker.nextNode(); text; text = walker.nextNode()) {
    const parent = text.parentElement;
    if (!text.data.trim() || !parent.checkVisibility() || parent.closest("svg, script")) continue;
    const [one, other] = [parse(getComputedStyle(parent).color), under(parent)].map(luminance);
    const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    if (ratio < 4.5) poor.push([text.data.slice(0, 40), parent.className, ratio]);
  }
  return poor;
}
"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_texts_can_be_read(opened: Callable[..., Page], write_samples: Callable[..., Path], theme: Any) -> None:
    """A contrast of 4.5 at least (WCAG AA), tokens of every probability among them."""
    nats = -np.array([0, 0.2, 0.5, 1.5, 3, 6], np.float32)
    unlikely = {"logprobs": nats, "support_logprobs": np.repeat(nats, 2)} | tokens([9] * 6)
    page = opened(write_samples([unlikely | {"logprobs": nats}]), color_scheme=theme)
    assert page.locator("#response .token").count() == 6
    assert len(set(page.locator("#response .token").evaluate_all("nodes => nodes.map(it => it.className)"))) == 6
    page.locator("details").evaluate_all("nodes => nodes.forEach((node) => { node.open = true; })")
    assert page.evaluate(CONTRAST) == []


@pytest.mark.parametrize(("width", "height"), [(1440, 900), (1024, 768), (390, 844)])
def test_widths(opened: Callable[..., Page], report: Path, width: int, height: int) -> None:
    """Nothing is wider than the window."""
    page = opened(report, viewport={"width": width, "height": height})
    draw_all(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_data_does_nothing(opened: Callable[..., Page], write_samples: Callable[..., Path], make_manifest: Any) -> None:
    """Markup, code, CSS, escape sequences and reordering marks in every field are text, and are shown."""
    model = make_manifest().model.model_copy(update={"name": HOSTILE, "dtype": HOSTILE})
    hostile = {
        "prompt_id": HOSTILE.replace("\x00", ""),
        "prompt": chat(HOSTILE, role=HOSTILE),
        "metadata": json.dumps({HOSTILE: HOSTILE}),
        "finish_reason": HOSTILE,
        "stop_reason": json.dumps(HOSTILE),
        "text": HOSTILE,
        **tokens([300, 301, 302]),
    }
    added = len(make_tiny_tokenizer())
    raw = {"prompt_id": "raw", "prompt": HOSTILE, **tokens([added, added, 10])}
    report = write_samples([hostile, raw], text=HOSTILE, model=model)
    page = opened(report)
    draw_all(page)
    page.locator("details").evaluate_all("nodes => nodes.forEach((node) => { node.open = true; })")
    page.locator("#list").focus()
    for key in ("ArrowRight", "ArrowRight", "Escape", "j", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    assert page.evaluate("window.ran") is None
    made = {tag: page.locator(tag).count() for tag in ("script", "style", "img", "iframe", "link", "object", "a")}
    assert made == {"script": 3, "style": 1, "img": 0, "iframe": 0, "link": 0, "object": 0, "a": 4}
    assert page.locator("svg a, svg image, svg foreignObject").count() == 0
    handlers = "nodes => nodes.flatMap((it) => [...it.attributes]).filter((it) => it.name.startsWith('on')).length"
    assert page.locator("*").evaluate_all(handlers) == 0
    shown = page.locator("body").inner_text()
    for attack in ATTACKS:
        assert shown.count(attack) >= 2
        assert attack in page.locator("#response").inner_text()
    assert r"\x1b[31;2J\u202egpj.exe\u2066 \u2028\u2029\u200b\x00" in shown
    assert not set("\x1b\u202e\u2066\u200b\x00") & set(shown)
    failures = page.locator("figure", has_text="What failed").inner_text()
    assert "<script>window.ran" in failures


def test_a_character_of_several_tokens(opened: Callable[..., Page], write_samples: Callable[..., Path]) -> None:
    """It stands where it begins; the tokens that are the rest of it can be reached. Line ends are seen."""
    ids = make_tiny_tokenizer().encode("a\U0001f600\n\nb", add_special_tokens=False)
    page = opened(write_samples([tokens(ids)]))
    texts = page.locator("#response .token").all_text_contents()
    assert "".join(texts).replace("·", "") == f"a\U0001f600{NEWLINE}\n{NEWLINE}\nb"
    assert page.locator("#response .part").count() == 3  # of the four bytes of the emoji
    for place in range(1, 5):
        page.locator("#response .token").nth(place).click()
        assert "A part of \U0001f600" in page.locator(".panel").inner_text()
    page.locator("#response .token").first.click()
    assert "A part of" not in page.locator(".panel").inner_text()


def test_tokens_stay_apart(opened: Callable[..., Page], write_samples: Callable[..., Path]) -> None:
    """What is spelled out stands in a box, and marks that begin a token are carried; no token moves another."""
    texts = ["\t", r"\t", "\u0301", "\u05d0\u05d1"]
    tokenizer = len(make_tiny_tokenizer())
    ids = list(range(tokenizer, tokenizer + len(texts)))
    page = opened(write_samples([tokens([*ids, ids[-1]])], texts=texts))
    shown = page.locator("#response .token")
    assert shown.all_text_contents() == [r"\t", r"\t", "\u25cc\u0301", texts[3], texts[3]]
    assert [shown.nth(place).locator(".spelled").count() for place in range(4)] == [1, 0, 1, 0]
    left = [box["x"] for place in range(5) if (box := shown.nth(place).bounding_box())]
    assert left == sorted(left)
    shown.nth(0).locator(".spelled").click(force=True)
    assert page.locator(".panel .chosen .spelled").inner_text() == r"\t"


def test_what_is_left_out_is_told(
    opened: Callable[..., Page], write_samples: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples, tokens in the middle of a response, ids of a support."""
    from rollgen.inspect.report import content, samples

    monkeypatch.setattr(samples, "SAMPLES", 2)
    monkeypatch.setattr(samples, "HEAD", 3)
    monkeypatch.setattr(samples, "TAIL", 2)
    monkeypatch.setattr(samples, "IDS", 1)
    monkeypatch.setattr(content, "IDS", 1)
    page = opened(write_samples([tokens(list(range(50, 60)))] * 3))
    assert page.get_by_text("2 of 3 samples, chosen at random").is_visible()
    gap = page.locator("#response .gap").inner_text()
    assert gap.startswith("… 5 tokens not shown here; all: rollgen inspect data --sample p")
    page.locator("#response .token").nth(3).hover()
    assert page.locator(".panel h4").inner_text() == "Token 8 of 0-9"  # the last but one of ten
    assert page.locator(".panel").get_by_text("and 1 more").is_visible()

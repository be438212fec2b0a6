"""Text of somebody else's in the output of every command: shown, and inert, whatever it is.

`TEXTS` are put wherever a dataset, a prompt file, an engine or a tokenizer may hold a text; `COMMANDS` are all that
print any of it. Nothing but the command's own bytes may act: no control character but the newline (and rich's colours
on a terminal), nothing that reorders or hides text, no line of more than LONGEST characters.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from markdown_it import MarkdownIt
from models.fake_engine import FakeEngine
from models.printed import Printed
from models.rewards import write_rewards
from models.runs import Runs
from models.tiny import make_tiny_tokenizer

from rollgen.cli.progress import ConsoleReporter
from rollgen.cli.summary import print_summary
from rollgen.config import canonical_json, digest
from rollgen.engines.base import RequestError, SampleRequest
from rollgen.errors import EngineError, RollgenError
from rollgen.format.commit import WriterSlot
from rollgen.format.failures import FailureLog
from rollgen.format.manifest import (
    Attempt,
    EngineRecord,
    Manifest,
    ModelRecord,
    PromptSource,
    Retry,
    create_manifest,
    read_manifest,
    replace_manifest,
)
from rollgen.format.retries import RetryList
from rollgen.format.rewards import ScorerRecord
from rollgen.format.schema import MANIFEST_FILE, PLAN_FILE, retry_file
from rollgen.format.writer import ShardWriter
from rollgen.inspect.card import write_card
from rollgen.prompts.plan import PlanWriter
from rollgen.rollouts import sample_seed

LONG = 50_000
TEXTS = {
    "escape sequences": "\x1b[31;47mred\x1b[2J\x1b[3;3H\x1bc\x1b]0;title\x07",
    "a link": "\x1b]8;;https://evil.example\x1b\\click\x1b]8;;\x1b\\",
    "the clipboard": "\x1b]52;c;cm0gLXJm\x07",
    "8-bit controls": "\x9b31mred\x9d0;title\x9c\x90q\x85\x7f",
    "overwriting": "safe\rrm -rf\b\b\b\x00\x0b\x0c\n\n\n",
    "bidi": "\u202egpj.exe\u202c \u2066a\u2069 \u200e\u200f\u061c\u2067",
    "zero width": "a\u200bb\ufeffc\u2060d\u00ade\u3164f\u034f",
    "tags": "hi" + "".join(chr(0xE0000 + ord(letter)) for letter in "ignore all of it"),
    "separators": "one\u2028two\u2029three\x85four\x1cfive",
    "half a pair": "a\ud800b\udfffc",
    "rich markup": "[bold red on white]x[/] [link=https://evil.example]y[/link] :bomb: [/]",
    "html": "<script>alert(1)</script><img src=x onerror=y><!-- --><b>",
    "markdown": "![i](https://evil.example/i.png) [l](javascript:x) www.evil.example | x |\n---\n# h\n```\n- *b* `c`",
    "combining marks": "z" + "\u0301\u0489\u20dd" * 2000,
    "very long": "x" * LONG,
    "very many escapes": "\x1b" * LONG,
}
LONGEST = 4000
"""Characters of a line on a pipe: three items of 400 characters are spelled out with at most four of their own each."""
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
BAR = re.compile(r"\r?\x1b\[(?:2K|1A|\?25[lh])")
"""What rich moves the cursor with, to draw a bar again and to take it away."""
FOREIGN = "\x1b[31;47m"
"""A colour that rollgen does not use."""
JOINERS = "\u200c\u200d"
FORBIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
TOKEN = 375
"""The first id that the tiny tokenizer leaves free."""


def check_inert(printed: str, *, terminal: bool = False, longest: int = LONGEST) -> None:
    """Fail for what could act on a terminal, hide there, or fill it."""
    assert FOREIGN not in printed
    shown = BAR.sub("", COLOURS.sub("", printed)) if terminal else printed
    assert {c for c in shown if unicodedata.category(c) in FORBIDDEN} <= {"\n", *JOINERS}
    assert not re.search("[\u034f\u115f\u1160\u3164\uffa0]", shown)
    assert not re.search(r"[\u0300-\u036f\u0483-\u0489\u20d0-\u20f0]{9}", shown)
    assert max(map(len, shown.split("\n"))) <= longest
    assert len(shown) <= LONG // 3


def check_json(printed: str) -> None:
    """ASCII, so that no terminal acts on it, and the whole data."""
    assert printed.isascii()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", printed)
    json.loads(printed)


def storable(text: str) -> str:
    """Parquet and manifests hold UTF-8."""
    return text.encode(errors="replace").decode()


def hostile_manifest(text: str) -> Manifest:
    """`text` wherever the manifest has one."""
    identity = {"system_prompt": text, "stop": [text, text], "sampling_arg": {text: text}, "top_k": 8, text: text}
    engine = EngineRecord(name=text, version=text, device=text, versions={text: text}, processors=text)
    attempt = Attempt(
        started_at="2026-01-02T03:04:05+00:00",
        rollgen_version=text,
        n=1,
        limit=None,
        prompts=[PromptSource(name=text, bytes=0, sha256=text)] * 3,
        operational={text: text},
        engine=engine,
    )
    return Manifest(
        created_at=text,
        config_digest=digest(identity),
        identity=identity,
        capture="logprobs",
        support_logprobs=False,
        vocab_size=512,
        tokenizer_vocab_size=TOKEN + 1,
        model=ModelRecord(name=text, revision=text, fingerprint=text, dtype=text, context_length=256),
        tokenizer_sha256=text,
        attempts=[attempt],
        retries=[Retry(generation=1, started_at=text, where={text: text}, max_tokens=64, samples=2)],
    )


@pytest.fixture
def make_hostile(
    make_completion: Callable[..., Any], make_prompt: Callable[..., Any]
) -> Callable[[Path, str], tuple[Path, str]]:
    """`make_hostile(directory, text)`: a dataset that could have been downloaded, and the id of its prompt."""

    def make(directory: Path, given: str) -> tuple[Path, str]:
        text = storable(given)
        directory.mkdir()
        tokenizer = make_tiny_tokenizer()
        tokenizer.add_tokens([text])
        tokenizer.save_pretrained(directory / "tokenizer")
        manifest = hostile_manifest(text)
        assert create_manifest(directory, manifest)
        prompt = np.array([TOKEN, 4], np.int32)
        texts = {"prompt_id": text, "prompt": json.dumps([{"role": text, "content": given}]), "metadata": text}
        with PlanWriter(directory / PLAN_FILE) as plan:
            plan.write([make_prompt(0, n=9, token_ids=prompt, **texts), make_prompt(1, error=text)])
        retried = np.array([0, 0]), np.array([0, 1], np.int32), np.array([64, 64], np.int32)
        RetryList(1, *retried).write(directory / retry_file(1))
        row = {**texts, "text": text, "stop_reason": json.dumps(given), "finish_reason": text, "generation": 1}
        with WriterSlot(directory, "w0") as slot:
            with ShardWriter(slot, manifest, commit_interval=math.inf) as writer:
                for sample in range(2):
                    writer.add(
                        make_completion(
                            0,
                            sample,
                            token_ids=np.array([TOKEN, 3], np.int32),
                            logprobs=np.array([math.log(0.5), 0], np.float32),
                            mask_ids=np.array([3, TOKEN, 3], np.int32),
                            mask_offsets=np.array([0, 2, 3]),
                            prompt_token_ids=prompt,
                            seed=sample_seed(0, text, sample),
                            **row,
                        )
                    )
                    writer.flush()
            FailureLog(directory, "w0").record(text, 0, 7, "engine", given)
        write_rewards(directory, "r", lambda row: 1.0, scorer=ScorerRecord(text, text, text, text))
        return directory, text

    return make


COMMANDS: dict[str, Callable[[Path, str], list[object]]] = {
    "inspect": lambda out, prompt_id: ["inspect", out],
    "inspect --json": lambda out, prompt_id: ["inspect", out, "--json"],
    "inspect --sample": lambda out, prompt_id: ["inspect", out, "--sample", f"{prompt_id}:1"],
    "inspect --at": lambda out, prompt_id: ["inspect", out, "--sample", prompt_id, "--at", 0],
    "inspect --at --json": lambda out, prompt_id: ["inspect", out, "--sample", prompt_id, "--at", 0, "--json"],
    "inspect --html": lambda out, prompt_id: ["inspect", out, "--html", out.with_name("report.html")],
    "no such sample": lambda out, prompt_id: ["inspect", out, "--sample", f"{prompt_id[:200]}:7"],
    "no such id": lambda out, prompt_id: ["inspect", out, "--sample", prompt_id[:2]],
    "status": lambda out, prompt_id: ["status", out],
    "status --json": lambda out, prompt_id: ["status", out, "--json"],
    "verify": lambda out, prompt_id: ["verify", out],
    "verify --json": lambda out, prompt_id: ["verify", out, "--json"],
    "repair": lambda out, prompt_id: ["repair", out, "--dry-run"],
    "repair --json": lambda out, prompt_id: ["repair", out, "--dry-run", "--json"],
    "score": lambda out, prompt_id: ["score", out, "--with", "json:dumps", "--name", "r"],
    "compact": lambda out, prompt_id: ["compact", out],
    "not a directory": lambda out, prompt_id: ["status", prompt_id[:60]],
    "not an option": lambda out, prompt_id: ["inspect", out, f"--{prompt_id[:1000]}"],
    "wrong values": lambda out, prompt_id: ["generate", prompt_id[:90], "--top-k", prompt_id, "--out", out],
}
"""In this order: `compact` changes the dataset."""
CODES = {"verify": (1,), "repair": (0, 1), "score": (4,)}
"""Of commands that find something wrong with it."""
STYLED = ("inspect", "inspect --sample", "inspect --at", "no such sample", "status", "verify", "repair")
"""Commands that print another way on a terminal."""


@pytest.mark.parametrize("name", TEXTS)
def test_a_hostile_dataset(rollgen: Callable[..., Printed], make_hostile: Callable, tmp_path: Path, name: str) -> None:
    """Every command on it, on a pipe and on a terminal; then its card."""
    out, prompt_id = make_hostile(tmp_path / "out", TEXTS[name])
    for command, arguments in COMMANDS.items():
        for terminal in (False, True) if command in STYLED else (False,):
            printed = rollgen(*arguments(out, prompt_id), terminal=terminal)
            assert printed.code in CODES.get(command.split()[0], (0, 2)), (command, printed)
            check_inert(printed.err, terminal=terminal)
            if "--json" in command:
                check_json(printed.out)
            else:
                check_inert(printed.out, terminal=terminal)
    check_card(out / "README.md", terminal_limit=LONGEST)


@pytest.mark.parametrize("name", TEXTS)
def test_a_merge_of_hostile_datasets(
    rollgen: Callable[..., Printed], make_hostile: Callable, tmp_path: Path, name: str
) -> None:
    """What a merge says of the models, what others say of its runs, and its card."""
    sources = [make_hostile(tmp_path / place, TEXTS[name]) for place in ("one", "other")]
    other, prompt_id = sources[1]
    replace_manifest(other, read_manifest(other).model_copy(update={"created_at": "later"}))
    out = tmp_path / "out"
    for arguments in (
        ["merge", *(directory for directory, _ in sources), "--out", out],
        ["inspect", out],
        ["inspect", out, "--sample", f"one/{prompt_id}:1"],
        ["inspect", out, "--sample", f"other/{prompt_id[:200]}:7"],
        ["inspect", out, "--sample", prompt_id],
        ["status", out],
        ["verify", out],
    ):
        printed = rollgen(*arguments)
        assert printed.code in (1 if arguments[0] == "verify" else 0, 2), printed
        check_inert(printed.out)
        check_inert(printed.err)
    if (out / "README.md").exists():  # or the manifest would be larger than a reader takes
        check_inert((out / "README.md").read_text())


def check_card(path: Path, terminal_limit: int) -> None:
    """The headings and tables of any card, no HTML but the last comment, no link, no image, no code but our own."""
    card = path.read_text()
    check_inert(card, longest=terminal_limit)
    body = card.split("---\n", 2)[2].rpartition("\n<!-- ")[0]
    assert not re.search("<[a-zA-Z/!?]", re.sub("`[^`\n]*`", "", body))
    assert not re.search(r"www\.|https?:|javascript:", body)
    tokens = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).parse(body)
    inline = {child.type for token in tokens for child in token.children or ()}
    assert inline <= {"text", "code_inline", "em_open", "em_close", "softbreak"}
    kinds = [token.type for token in tokens]
    assert not {"html_block", "hr", "bullet_list_open", "ordered_list_open", "blockquote_open"} & {*kinds}
    assert (kinds.count("heading_open"), kinds.count("fence"), kinds.count("table_open")) == (5, 2, 3)


@pytest.mark.parametrize(
    ("style", "name"), [*(("log", name) for name in TEXTS), ("bar", "escape sequences"), ("bar", "rich markup")]
)
def test_a_run_on_hostile_prompts(
    runs: Runs, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, style: Any, name: str
) -> None:
    """Rows, names of files, what an engine says of itself and of requests, and its death: shown, logged, recorded."""
    text = TEXTS[name]
    rows = [{"id": "fine", "prompt": "x"}, {"id": text[:200], "prompt": text[:200], text[:50]: text}]
    rows += [{"id": "bad", "messages": text}, {"id": "stop", "prompt": "x", "stop": [storable(text)[:50]]}, {text: 1}]
    runs.prompts = runs.prompts.with_name(file_name(text))
    runs.prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    deaths = iter([True])

    async def before(request: SampleRequest) -> None:
        if request.sample_index == 1:
            raise RequestError(text)
        if next(deaths, False):
            raise EngineError(text)

    engine = FakeEngine(before=before)
    engine.notes = (text,)
    safe = storable(text)
    engine.record = EngineRecord(name=safe, version=safe, device=safe, versions={}, processors=safe)
    monkeypatch.setenv("TTY_COMPATIBLE", str(int(style == "bar")))
    with ConsoleReporter(style) as reporter:
        stats = runs(engine, reporter=reporter, on_bad_row="skip")
    write_card(runs.out)
    print_summary(runs.out, stats, as_json=False)
    printed = capfd.readouterr()
    assert stats.failed >= 2
    check_inert(printed.out)
    check_inert(printed.err, terminal=style == "bar")
    check_card(runs.out / "README.md", terminal_limit=LONGEST)
    [log] = (runs.out / "logs").iterdir()
    check_inert(log.read_text())
    for line in (runs.out / "failures" / "w0.jsonl").read_text().splitlines():
        assert line.isascii()
        failure = json.loads(line)
        check_inert(failure["error"])


def file_name(text: str) -> str:
    """A name that a file can have, with what is possible of `text`."""
    name = storable(text).replace("/", "_").replace("\0", "_")
    return name.encode()[:200].decode(errors="ignore") + ".jsonl"


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("flags", [[], ["--json"]], ids=["text", "json"])
def test_a_dry_run_on_hostile_prompts(
    rollgen: Callable[..., Printed], tiny_model: Path, tmp_path: Path, name: str, flags: list[str]
) -> None:
    """The configuration, and the first prompt as the model would see it."""
    text = storable(TEXTS[name])[:LONG]
    prompts = tmp_path / file_name(text)
    short = text[:40]
    prompts.write_text(json.dumps({"id": text, "prompt": short, "max_tokens": 1}) + "\n")
    given = [
        prompts,
        "--model",
        tiny_model,
        "--out",
        tmp_path / "out",
        "--stop",
        short,
        "--chat",
        "--system-prompt",
        short,
    ]
    printed = rollgen("generate", *given, "--dry-run", *flags)
    assert printed.code == 0, printed.err
    check_inert(printed.err)
    (check_json if flags else check_inert)(printed.out)


@pytest.mark.parametrize("name", TEXTS)
def test_bad_rows_of_hostile_prompts(
    rollgen: Callable[..., Printed], tiny_model: Path, tmp_path: Path, name: str
) -> None:
    """A line for each, with its place, and no more."""
    text = TEXTS[name]
    rows = [{text: text}, {"prompt": 7, "id": text}, {"messages": [{"role": text[:99], "content": [text[:99]]}] * 100}]
    rows += [{"prompt": "x", "id": "a" + text, "stop": text, "n": text}, {"prompt": "x", "id": "a" + text}]
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    printed = rollgen("generate", prompts, "--model", tiny_model, "--out", tmp_path / "out")
    assert printed.code == 2
    check_inert(printed.err)
    progress, *lines = printed.err.splitlines()
    assert progress == "rollgen: checking prompts"
    assert lines[0].startswith(f"rollgen: error: {prompts}:1: ")
    assert len(lines) <= 11
    assert all(line.startswith("rollgen: error: ") for line in lines)


def with_manifest(change: Callable[[dict[str, Any], str], object]) -> Callable[[Path, str], None]:
    """A manifest that was edited by hand."""

    def damage(out: Path, text: str) -> None:
        path = out / MANIFEST_FILE
        manifest = json.loads(path.read_text())
        del manifest["sha256"]
        change(manifest, text)
        sealed = hashlib.sha256(canonical_json(manifest).encode(errors="surrogatepass")).hexdigest()
        path.write_text(json.dumps(manifest | {"sha256": sealed}))

    return damage


def with_line(folder: str, key: str) -> Callable[[Path, str], None]:
    """A line of the journal or the failures with another value."""

    def damage(out: Path, text: str) -> None:
        path = out / folder / "w0.jsonl"
        line = json.loads(path.read_text().splitlines()[0])
        with path.open("a") as file:
            file.write(json.dumps(line | {key: text}) + "\n")

    return damage


def with_tokenizer(change: Callable[[str], object]) -> Callable[[Path, str], None]:
    """Another tokenizer.json."""

    def damage(out: Path, text: str) -> None:
        (out / "tokenizer" / "tokenizer.json").write_text(json.dumps(change(text)))

    return damage


DAMAGE: dict[str, Callable[[Path, str], None]] = {
    "format": with_manifest(lambda manifest, text: manifest.update(format=text)),
    "version": with_manifest(lambda manifest, text: manifest.update(format_version=text)),
    "a value": with_manifest(lambda manifest, text: manifest.update(capture=text)),
    "a key": with_manifest(lambda manifest, text: manifest["retries"][0].update(where={text: 1})),
    "the identity": with_manifest(lambda manifest, text: manifest["identity"].update({text: text})),
    "the name of a shard": with_line("journal", "file"),
    "a lost shard": lambda out, text: with_line("journal", "file")(out, f"part-{'a' * LONG}-000000.parquet"),
    "a failure": with_line("failures", "stage"),
    "no tokenizer": with_tokenizer(lambda text: [text]),
    "another tokenizer": with_tokenizer(lambda text: {"added_tokens": [], "model": {"type": text}, text: text}),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["overwriting", "half a pair", "very many escapes"])
def test_errors_about_a_hostile_dataset(
    rollgen: Callable[..., Printed], make_hostile: Callable, tmp_path: Path, name: str, damage: str
) -> None:
    """One line that names the file, and no traceback, from every command that finds it."""
    out, prompt_id = make_hostile(tmp_path / "out", "id")
    DAMAGE[damage](out, TEXTS[name])
    codes = set()
    for arguments in (["inspect", out], ["status", out], ["compact", out], ["inspect", out, "--sample", prompt_id]):
        printed = rollgen(*arguments)
        check_inert(printed.out)
        check_inert(printed.err)
        codes.add(printed.code)
        if printed.code:
            assert re.fullmatch(r"rollgen: error: .*\n", printed.err)
            assert str(out) in printed.err
    assert 1 in codes <= {0, 1}


def test_in_a_process_of_its_own(make_hostile: Callable, tmp_path: Path) -> None:
    """With the C locale and a terminal that is forced, to the last byte: ASCII, and rich's colours."""
    out, _ = make_hostile(tmp_path / "out", TEXTS["bidi"] + TEXTS["escape sequences"] + TEXTS["8-bit controls"])
    c_locale = {"LC_ALL": "C", "LANG": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    environment = {**os.environ, **c_locale, "FORCE_COLOR": "1", "TERM": "xterm"}
    command = [str(Path(sys.executable).with_name("rollgen")), "inspect", str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=180, check=True)
    assert done.stderr == b""
    check_inert(done.stdout.decode("ascii"), terminal=True)
    assert b"\\u202egpj.exe" in done.stdout


def test_a_note_is_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    """Whatever raised it."""
    with ConsoleReporter("log") as reporter:
        for text in TEXTS.values():
            reporter.note(str(RollgenError(text)))
    printed = capfd.readouterr().err
    check_inert(printed)
    assert printed.count("\n") == len(TEXTS)

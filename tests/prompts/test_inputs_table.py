"""Every kind of awkward input and what becomes of it; every kind of bad input and what is said about it.

A case is files to write into an empty working directory, what is named of them, and the exact outcome.
"""

import gzip
import json
import subprocess
import sys
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from models.tiny import CHAT_TEMPLATE

from rollgen.config import RunConfig
from rollgen.errors import UsageError
from rollgen.prompts.plan import Plan
from rollgen.prompts.planner import write_plan
from rollgen.prompts.sources import PromptFiles

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
ROLLGEN = Path(sys.executable).with_name("rollgen")
USER = {"role": "user", "content": "Hi"}
HI = "<s><|im_start|>user\nHi<|im_end|>\n"
ASKED = f"{HI}<|im_start|>assistant\n"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
CALL = {"function": {"name": "f", "arguments": "{}"}}
WITH_TOOLS = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}" + CHAT_TEMPLATE
WITH_CALLS = CHAT_TEMPLATE.replace("{{ message.content }}", "{{ message.content }}{{ message.tool_calls }}")
WITH_PARTS = CHAT_TEMPLATE.replace(
    "{{ message.content }}", "{% for part in message.content %}[{{ part.text }}]{% endfor %}"
)
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
SEVENS = b"7" * 70
A, B = b'{"prompt": "a"}\n', b'{"prompt": "b"}\n'


def line(**row: Any) -> bytes:
    return json.dumps(row).encode() + b"\n"


def parquet(**columns: Any) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue().to_pybytes()


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


@dataclass
class Case:
    """Input, and settings of the run."""

    files: dict[str, bytes] | bytes
    """Bytes alone are `p.jsonl`."""
    names: list[Any] = field(default_factory=lambda: ["p.jsonl"])
    template: str = CHAT_TEMPLATE
    config: dict[str, Any] = field(default_factory=dict)

    def plan(self, model_info):
        """Write the files into the working directory and plan what is named."""
        for name, content in ({"p.jsonl": self.files} if isinstance(self.files, bytes) else self.files).items():
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_bytes(content)
        config = RunConfig.model_validate({"max_tokens": 8} | self.config)
        model = replace(model_info, chat_template=self.template)
        with PromptFiles(self.names, config.limit) as lines:
            summary = write_plan(lines, config, model, Path("plan.parquet"), now=NOW)
        return list(Plan(Path("plan.parquet"))), summary


def awkward(name: str, case: Case, *texts: str, **expected: Any) -> Any:
    """`texts`: what the model sees of each prompt. `expected`: attributes of the first prompt."""
    return pytest.param(case, list(texts), expected, id=name)


AWKWARD = [
    awkward("byte order mark", Case(b"\xef\xbb\xbf" + A), "<s>a"),
    awkward("CRLF", Case(A.replace(b"\n", b"\r\n") * 2), "<s>a", "<s>a"),
    awkward("no last newline", Case(A + B.strip()), "<s>a", "<s>b"),
    awkward("blank lines", Case(b"\n \n" + A + b"\n\t\r\n"), "<s>a"),
    awkward("U+2028 in a string", Case('{"prompt": "a\u2028b"}'.encode()), "<s>a\u2028b"),
    awkward(
        "70-digit integer", Case(b'{"prompt": "a", "x": %s}' % (b"7" * 70)), "<s>a", metadata=f'{{"x": {"7" * 70}}}'
    ),
    awkward(
        "half a surrogate pair in metadata",
        Case(b'{"prompt": "a", "x": "\\ud800"}'),
        "<s>a",
        metadata='{"x": "\\ud800"}',
    ),
    awkward("float beyond doubles", Case(b'{"prompt": "a", "x": 1e400}'), "<s>a", metadata='{"x": 1e400}'),
    awkward("emoji as id", Case(line(prompt="a", id="😀")), "<s>a", prompt_id="😀"),
    awkward("integer as id", Case(line(prompt="a", id=7)), "<s>a", prompt_id="7"),
    awkward("a prompt twice without ids", Case(A + A), "<s>a", "<s>a"),
    awkward("gzip", Case({"p.jsonl.gz": gzip.compress(A + B)}, ["p.jsonl.gz"]), "<s>a", "<s>b"),
    awkward("gzip by another name", Case(gzip.compress(A)), "<s>a"),
    awkward("gzip, two members", Case(gzip.compress(A) + gzip.compress(B)), "<s>a", "<s>b"),
    awkward("zstd", Case({"p.jsonl.zst": zstd(A + B)}, ["p.jsonl.zst"]), "<s>a", "<s>b"),
    awkward("zstd, two frames", Case(zstd(A) + zstd(B)), "<s>a", "<s>b"),
    awkward(
        "Parquet with nested lists",
        Case({"p.parquet": parquet(messages=[[USER]], x=[[[1], [2, 3]]], id=[7])}, ["p.parquet"]),
        ASKED,
        prompt_id="7",
        metadata='{"x": [[1], [2, 3]]}',
    ),
    awkward("a directory", Case({"d/b.jsonl": B, "d/a.jsonl": A, "d/x.txt": b"x"}, ["d"]), "<s>a", "<s>b"),
    awkward("a pattern", Case({"d/b.jsonl": B, "d/a.jsonl": A}, ["d/*.jsonl"]), "<s>a", "<s>b"),
    awkward("rows from memory", Case({}, [{"prompt": "a", "x": (1, "é")}]), "<s>a", metadata='{"x": [1, "é"]}'),
    awkward(
        "parts, joined for a template of strings",
        Case(line(messages=[{"role": "user", "content": PARTS}])),
        ASKED.replace("Hi", "a\nb"),
    ),
    awkward(
        "parts, for a template that takes them",
        Case(line(messages=[{"role": "user", "content": PARTS}]), template=WITH_PARTS),
        ASKED.replace("Hi", "[a][b]"),
    ),
    awkward(
        "a last assistant turn",
        Case(line(messages=[USER, {"role": "assistant", "content": "So: "}])),
        f"{ASKED}So: ",
    ),
    awkward("an empty assistant turn", Case(line(messages=[USER, {"role": "assistant", "content": ""}])), ASKED),
    awkward(
        "tools",
        Case(line(messages=[USER], tools=[TOOL]), template=WITH_TOOLS),
        f"add{ASKED}",
        metadata=json.dumps({"tools": [TOOL]}),
    ),
    awkward(
        "tool calls",
        Case(
            line(
                messages=[
                    USER,
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
                    },
                    USER,
                ]
            ),
            template=WITH_CALLS,
        ),
        f"{ASKED}[{{'function': {{'name': 'f', 'arguments': {{}}}}}}]<|im_end|>\n{ASKED.removeprefix('<s>')}",
    ),
    awkward(
        "template variables of a row",
        Case(
            line(messages=[USER], chat_template_kwargs={"think": True}) + line(messages=[USER]),
            config={"chat_template_kwargs": {"think": False}},
        ),
        f"{ASKED}Let me think.",
        ASKED,
    ),
    awkward("a rendered chat as text", Case(line(prompt=ASKED)), ASKED, prompt=ASKED),
    awkward("token ids", Case(line(prompt_token_ids=[0, 1])), "<s><|im_start|>", prompt=None),
    awkward("a line of 1 MB", Case(line(prompt="a", x="x" * 1_000_000)), "<s>a"),
    awkward("n of a row", Case(line(prompt="a", n=3), config={"n": 2}), "<s>a", n=3),
    awkward("a seed of a row", Case(line(prompt="a", seed=2**63 - 1)), "<s>a", seed=2**63 - 1),
]


@pytest.mark.parametrize(("case", "texts", "expected"), AWKWARD)
def test_awkward_input(tmp_path, monkeypatch, model_info, case, texts, expected):
    """It survives: the model sees exactly these texts, ids are unique, and nothing of a row is lost."""
    monkeypatch.chdir(tmp_path)
    prompts, summary = case.plan(model_info)
    assert [model_info.tokenizer.decode(prompt.token_ids) for prompt in prompts] == texts
    assert {name: getattr(prompts[0], name) for name in expected} == expected
    assert len({prompt.prompt_id for prompt in prompts}) == summary.prompts == len(texts)


def bad(name: str, case: Case, message: str) -> Any:
    """`message`: the whole error, up to the end that `...` stands for."""
    return pytest.param(case, message, id=name)


BAD = [
    bad("empty file", Case(b""), "p.jsonl: no prompts: the file is empty; give JSON Lines, one object a line"),
    bad("missing file", Case({}), "p.jsonl: cannot read it: No such file or directory"),
    bad("empty directory", Case({"d/x.txt": b"x"}, ["d"]), "d: no prompt files in this directory; they end in ..."),
    bad("pattern of nothing", Case({}, ["*.jsonl"]), "*.jsonl: no file matches this pattern; check the path"),
    bad("a file twice", Case(A, ["p.jsonl", "p.jsonl"]), "p.jsonl: named twice; name each input once"),
    bad("standard input twice", Case({}, ["-", "-"]), "-: named twice; name each input once"),
    bad("gzip, cut", Case(gzip.compress(A)[:-4]), "p.jsonl: the gzip data end before they are complete; copy the ..."),
    bad("zstd, cut", Case(zstd(A)[:-2]), "p.jsonl: the zstd data end before they are complete; copy the ..."),
    bad("zip archive", Case(b"PK\x03\x04"), "p.jsonl: a zip archive; give JSON Lines (also as .gz or .zst) or Parquet"),
    bad("Parquet, cut", Case(parquet(prompt=["a"])[:-9]), "p.jsonl: not readable as Parquet ..."),
    bad(
        "Parquet with a binary column",
        Case(parquet(prompt=["a"], image=[b"x"])),
        "p.jsonl: column image is of type binary, which JSON cannot hold; drop it or store it as text",
    ),
    bad(
        "NaN in Parquet",
        Case(parquet(prompt=["a", "b"], score=[0.5, float("nan")])),
        "p.jsonl: row 1: NaN is not JSON (in score); use null or a string",
    ),
    bad("NaN", Case(A + b'{"prompt": "a", "x": NaN}'), "p.jsonl:2: NaN is not JSON (in x); use null or a string"),
    bad("bytes in a row", Case({}, [{"prompt": b"a"}]), "row 0: prompt: a bytes is not a JSON value; convert it ..."),
    bad(
        "a key twice",
        Case(b'{"prompt": "a", "prompt": "b"}'),
        'p.jsonl:1: key "prompt" occurs twice in one object; keep one',
    ),
    bad(
        "an id twice",
        Case(line(prompt="a", id=7) + b"\n" + line(prompt="b", id="7")),
        "p.jsonl:3: id '7' is also at p.jsonl:1; ids must be unique (7 and \"7\" are the same)",
    ),
    bad("invalid UTF-8", Case(b'{"prompt": "\xe9"}'), "p.jsonl:1: not UTF-8 at byte 13; save the file as UTF-8"),
    bad(
        "an array",
        Case(b"[" + A.strip() + b"]"),
        "p.jsonl:1: a JSON array, not an object; write one JSON object a line (jq -c '.[]' makes that of an array)",
    ),
    bad("a line of text", Case(b'"a"\n'), "p.jsonl:1: a JSON string, not an object; write one JSON object a line"),
    bad(
        "a CSV file",
        Case({"p.csv": b"prompt\n"}, ["p.csv"]),
        "p.csv:1: broken JSON: Expecting value at column 1; write one JSON object a line",
    ),
    bad("half a surrogate pair", Case(b'{"prompt": "\\ud800"}'), "p.jsonl:1: prompt holds half of a ..."),
    bad(
        "a token id out of the vocabulary",
        Case(line(prompt_token_ids=[512])),
        "p.jsonl:1: prompt_token_ids: id 512 is outside the model's vocabulary, 0 to 511",
    ),
    bad(
        "a prompt that fills the context",
        Case(line(prompt_token_ids=[5] * 256)),
        "p.jsonl:1: the prompt fills the context: 256 tokens of 256; shorten it, or raise --max-model-len if the ...",
    ),
    bad(
        "an image",
        Case(line(messages=[{"role": "user", "content": [{"type": "image_url"}]}])),
        'p.jsonl:1: messages[0]: content[0] is of type "image_url"; only text can be sampled from, remove ...',
    ),
    bad(
        "an unknown role",
        Case(line(messages=[{"role": "alien", "content": "x"}])),
        "p.jsonl:1: the chat template refuses these messages: unknown role",
    ),
    bad("no turns", Case(line(messages=[])), "p.jsonl:1: messages must be a non-empty list of ..."),
    bad(
        "tools that the template does not use",
        Case(line(messages=[USER], tools=[TOOL])),
        "p.jsonl:1: the chat template does not use tools; remove the field, or give a template that does ...",
    ),
    bad(
        "tool calls that the template does not use",
        Case(line(messages=[{**USER, "tool_calls": [{"function": {"name": "f"}}]}])),
        "p.jsonl:1: the chat template does not use tool_calls; write them as text, or see --chat-template",
    ),
    bad(
        "an assistant turn that the template rewrites",
        Case(
            line(messages=[USER, {"role": "assistant", "content": "so"}]),
            template="{{ messages[-1].content | upper }}",
        ),
        "p.jsonl:1: the chat template does not write the last turn as it is, so it cannot be continued; end with ...",
    ),
    bad(
        "an argument of rollgen's",
        Case(line(messages=[USER], chat_template_kwargs={"add_generation_prompt": False})),
        "p.jsonl:1: chat_template_kwargs: add_generation_prompt is set by rollgen; remove it",
    ),
    bad("greedy", Case(line(prompt="a", temperature=0)), "p.jsonl:1: temperature must be a number above 0 (greedy ..."),
    bad("top_p without top_k", Case(line(prompt="a", top_k=0)), "p.jsonl:1: top_p and min_p need a top_k, which ..."),
    bad(
        "an OpenAI batch",
        Case(line(custom_id="a", body={"messages": [USER]})),
        "p.jsonl:1: an OpenAI batch request (body), not a prompt; move body.messages to messages and its ...",
    ),
]


@pytest.mark.parametrize(("case", "message"), BAD)
def test_bad_input(tmp_path, monkeypatch, stdin, model_info, case, message):
    """One line that names the place and the fix, before a model loads."""
    monkeypatch.chdir(tmp_path)
    stdin(A)
    with pytest.raises(UsageError) as failure:
        case.plan(model_info)
    start, dots, _ = message.partition("...")
    assert str(failure.value).startswith(start)
    assert str(failure.value) == message or dots
    assert "\n" not in str(failure.value)


def test_tables_are_complete():
    """At least twenty kinds of each."""
    assert min(len(AWKWARD), len(BAD)) >= 20


def test_the_command_takes_them_too(tmp_path, tiny_model):
    """Standard input, gzip and a directory in one dry run; a cut file exits 2 and says so in one line."""
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.jsonl").write_bytes(A)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(B + B))
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(B)[:-4])

    def dry_run(*names: str) -> subprocess.CompletedProcess[bytes]:
        command = [ROLLGEN, "generate", *names, "--model", tiny_model, "--max-tokens", "8", "--dry-run", "--json"]
        return subprocess.run(command, cwd=tmp_path, input=A * 3, capture_output=True, check=False)

    done = dry_run("-", "b.jsonl.gz", "d")
    assert (done.returncode, json.loads(done.stdout)["plan"]["prompts"]) == (0, 6)
    failed = dry_run("cut.jsonl.gz")
    assert (failed.returncode, failed.stdout) == (2, b"")
    assert failed.stderr.startswith(b"rollgen: error: cut.jsonl.gz: the gzip data end before they are complete")

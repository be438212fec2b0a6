"""Prompt files to a plan, end to end with a real tokenizer."""

import json
import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgen.config import RunConfig
from rollgen.errors import UsageError
from rollgen.prompts.messages import CHAT_KEYS
from rollgen.prompts.parameters import ROW_KEYS, RUN_ONLY_KEYS
from rollgen.prompts.planner import _groups, write_plan
from rollgen.prompts.rows import ID_KEYS, PROMPT_KEYS
from rollgen.prompts.sources import PromptFiles

USER = {"role": "user", "content": "Hi"}
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
EXAMPLES = Path(__file__).parents[2] / "examples" / "prompts.jsonl"

TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NOT_METADATA = {*ID_KEYS, *PROMPT_KEYS, *ROW_KEYS, *RUN_ONLY_KEYS, *CHAT_KEYS}
METADATA = st.dictionaries(st.text(max_size=6).filter(lambda key: key not in NOT_METADATA), JSON, max_size=3)
PROMPTS = st.one_of(
    st.fixed_dictionaries({"prompt": TEXT}),
    st.fixed_dictionaries({"messages": TEXT.map(lambda text: [{"role": "user", "content": text}])}),
    st.fixed_dictionaries({"prompt_token_ids": st.lists(st.integers(0, 511), min_size=1, max_size=9)}),
)


def text_of(model_info, prompt):
    return model_info.tokenizer.decode(prompt.token_ids)


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        pytest.param(b'{"prompt": "a"}\n{"prompt": "b"}\n', ["a", "b"], id="plain"),
        pytest.param(b'{"prompt": "a"}', ["a"], id="no last newline"),
        pytest.param(b'\xef\xbb\xbf{"prompt": "a"}\n', ["a"], id="byte order mark"),
        pytest.param(b'{"prompt": "a"}\r\n{"prompt": "b"}\r\n', ["a", "b"], id="CRLF"),
        pytest.param(b'\n\n{"prompt": "a"}\n \n\n{"prompt": "b"}\n\n', ["a", "b"], id="blank lines"),
        pytest.param(' {"prompt": "a\u2028b\u0085c"}'.encode(), ["a\u2028b\u0085c"], id="U+2028 and U+0085"),
        pytest.param(rb'{"prompt": "a\u2028\n\r"}', ["a\u2028\n\r"], id="escaped line breaks"),
        pytest.param(rb'{"prompt": "a\u0000b"}', ["a\x00b"], id="NUL"),
        pytest.param('{"prompt": "😀👩‍👩‍👧é"}'.encode(), ["😀👩‍👩‍👧é"], id="emoji"),
        pytest.param(rb'{"prompt": "\ud83d\ude00"}', ["😀"], id="emoji as a surrogate pair"),
        pytest.param(b'{"prompt": "a"}\n' * 3, ["a", "a", "a"], id="repeated prompts without ids"),
        pytest.param(b'{"id": 1, "prompt": "a"}\n{"id": "2", "prompt": "a"}\n', ["a", "a"], id="repeated with ids"),
        pytest.param(b'{"prompt": "a", "x": ' + b"7" * 70 + b"}", ["a"], id="70-digit integer"),
        pytest.param(b'{"prompt": "a", "x": ' + b"7" * 5000 + b"}", ["a"], id="5000-digit integer"),
        pytest.param(b'{"prompt": "a", "x": 1e400, "y": -0.0}', ["a"], id="float beyond doubles"),
        pytest.param(rb'{"prompt": "a", "x": "\ud800"}', ["a"], id="surrogate in metadata"),
        pytest.param(b'{"prompt": "a", "x": {"y": [[], {}, null]}}', ["a"], id="nested metadata"),
        pytest.param(b'{"prompt": "a", "messages": null, "id": null, "temperature": null}', ["a"], id="nulls"),
        pytest.param(b'{"x": ' + b"[" * 200 + b"]" * 200 + b', "prompt": "a"}', ["a"], id="200 levels of nesting"),
        pytest.param(b'{"prompt": " "}', [" "], id="a space"),
        pytest.param(b'{"\\u0070rompt": "a"}', ["a"], id="escaped key"),
        pytest.param(b'{"":1, "prompt": "a", "\\u0000": 2}', ["a"], id="empty key and NUL key"),
    ],
)
def test_awkward_input_survives(make_plan, model_info, content, texts):
    """Everything that is JSON Lines in some tool's eyes; ids are unique and text comes back to the character."""
    prompts = make_plan(content).prompts
    assert [prompt.prompt for prompt in prompts] == texts
    assert [text_of(model_info, prompt) for prompt in prompts] == ["<s>" + text for text in texts]
    assert len({prompt.prompt_id for prompt in prompts}) == len(texts)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"", r"p0\.jsonl: no prompts: the file is empty", id="empty file"),
        pytest.param(b"\n \r\n", r"p0\.jsonl: no prompts", id="only blank lines"),
        pytest.param(b'\n{"prompt": "a"', r"p0\.jsonl:2: broken JSON", id="broken JSON"),
        pytest.param(b"[1]", r"p0\.jsonl:1: a JSON array", id="array"),
        pytest.param(b'{"prompt": "\xe9"}', r"p0\.jsonl:1: not UTF-8 at byte 13", id="bad UTF-8"),
        pytest.param(b"\xff\xfe{\x00}\x00", r"p0\.jsonl:1: not UTF-8", id="UTF-16"),
        pytest.param(b'{"prompt": "a", "x": NaN}', r":1: NaN is not JSON", id="NaN"),
        pytest.param(b'{"prompt": "a", "prompt": "b"}', r':1: key "prompt" occurs twice', id="duplicate key"),
        pytest.param(
            b'{"id": 7, "prompt": "a"}\n\n{"id": "7", "prompt": "b"}',
            r"p0\.jsonl:3: id '7' is also at \S+p0\.jsonl:1",
            id="duplicate ids",
        ),
        pytest.param(b'{"x": 1}', r":1: no prompt", id="no prompt"),
        pytest.param(b'{"prompt": "a", "prompt_token_ids": [1]}', r":1: prompt and prompt_token_ids are two", id="two"),
        pytest.param(b'{"prompt": ""}', r":1: prompt is empty", id="empty prompt"),
        pytest.param(b'{"prompt": "\\ud800"}', r":1: prompt holds half of a surrogate", id="surrogate"),
        pytest.param(b'{"messages": [{"role": "user"}]}', r":1: messages\[0\]: content must be", id="malformed turn"),
        pytest.param(
            b'{"messages": [{"role": "alien", "content": "x"}]}',
            r":1: the chat template refuses .*unknown role",
            id="role",
        ),
        pytest.param(b'{"prompt_token_ids": [-1]}', r":1: prompt_token_ids: id -1 is outside", id="negative id"),
        pytest.param(
            b'{"prompt_token_ids": [512]}', r"id 512 is outside the model's vocabulary, 0 to 511", id="large id"
        ),
        pytest.param(b'{"prompt_token_ids": ["1"]}', r":1: prompt_token_ids must hold whole numbers", id="text id"),
        pytest.param(b'{"prompt": "a", "temperature": 0}', r":1: temperature must be a number above 0", id="greedy"),
        pytest.param(b'{"prompt": "a", "top_p": 1.1}', r":1: top_p must be", id="top_p"),
        pytest.param(b'{"prompt": "a", "n": 0}', r":1: n must be", id="n = 0"),
        pytest.param(b'{"prompt": "a", "max_tokens": -1}', r":1: max_tokens must be", id="max_tokens"),
        pytest.param(b'{"prompt": "a", "stop_token_ids": [512]}', r":1: stop_token_ids: id 512", id="stop id"),
        pytest.param(b'{"prompt": "a", "repetition_penalty": 1.2}', r":1: repetition_penalty is a", id="penalty"),
        pytest.param(
            b'{"prompt": "' + b"a " * 300 + b'"}', r":1: the prompt fills the context: 302 tokens of 256", id="long"
        ),
    ],
)
def test_bad_input_is_refused_or_skipped(make_plan, content, message):
    """`fail` names file and line; `skip` makes a tombstone of the row and plans the others."""
    with pytest.raises(UsageError, match=message) as failure:
        make_plan(content)
    assert "\n" not in str(failure.value)
    if not content.strip():
        return
    planned = make_plan(content + b'\n{"prompt": "fine", "id": "fine"}\n', on_bad_row="skip")
    *_, bad, fine = planned.prompts
    assert fine.error is None
    assert re.search(message.replace(r"\S+", ""), bad.error)
    assert (bad.token_ids.size, bad.n, bad.prompt, bad.metadata) == (0, 1, None, None)
    assert planned.summary.tombstones == 1
    assert len(planned.summary.problems) == 1


def test_all_bad_rows_are_reported_together(make_plan):
    """A line each, up to ten; duplicates among them."""
    rows = [{"id": "a", "prompt": "x"}, {"prompt": ""}, {"n": 0}, {"id": "a", "prompt": "y"}]
    with pytest.raises(UsageError) as failure:
        make_plan(rows)
    empty, two_problems, duplicate = str(failure.value).split("\n")
    assert "p0.jsonl:2: prompt is empty" in empty
    assert re.search(r"p0\.jsonl:3: no prompt.*; n must be", two_problems)
    assert re.search(r"p0\.jsonl:4: id 'a' is also at .*p0\.jsonl:1;", duplicate)
    with pytest.raises(UsageError) as failure:
        make_plan([{}] * 50)
    assert str(failure.value).count("no prompt") == 10
    assert "stopped after 10 bad rows; --on-bad-row skip" in str(failure.value)


def test_tombstones_keep_place_id_and_n(make_plan):
    """What is known of a bad row; a duplicate gets another id."""
    planned = make_plan(
        [
            {"prompt": "", "id": "mine", "n": 4},
            {"prompt": "a", "id": "b"},
            {"prompt": "c", "id": "b", "n": 2},
            [],
            [],
        ],
        on_bad_row="skip",
        n=3,
    )
    assert [prompt.n for prompt in planned.prompts] == [4, 3, 2, 3, 3]
    first, _, third, fourth, fifth = (prompt.prompt_id for prompt in planned.prompts)
    assert (first, third) == ("mine", "b#2")
    assert (fourth[-2:], fifth[-2:], fourth[:16]) == ("-0", "-1", fifth[:16])
    assert planned.plan.tombstone.tolist() == [True, False, True, True, True]
    assert (
        planned.prompts[2].error
        == "p0.jsonl:3: id 'b' is also at p0.jsonl:2; ids must be unique (7 and \"7\" are the same)"
    )
    assert (planned.summary.samples, planned.summary.tombstone_samples) == (15, 12)


def test_summary_figures(make_plan):
    """Lengths 1, 2, 3, 4 and 20 tokens; of the context of 256, 236 remain after 20."""
    rows = [{"prompt_token_ids": [5] * length} for length in (3, 1, 2, 4)]
    rows.append({"prompt_token_ids": [5] * 20, "max_tokens": 1000, "top_k": 0, "top_p": 1, "n": 2})
    planned = make_plan(rows)
    summary = planned.summary
    assert (summary.prompts, summary.samples, summary.prompt_tokens) == (5, 6, 30)
    assert (summary.shortest, summary.median, summary.p95, summary.longest) == (1, 3, 20, 20)
    assert (summary.clamped, planned.prompts[4].sampling.max_tokens) == (1, 236)
    assert (summary.truncated, summary.untruncated) == (4, 1)
    assert summary.first is not None
    assert summary.first.token_ids.tolist() == [5, 5, 5]


def test_max_tokens_below_min_tokens_is_a_bad_row(make_plan):
    """vLLM would refuse the request in the middle of the run; a clamp by the context counts as well."""
    rows = [{"prompt": "Hi", "max_tokens": 8}, {"prompt": "Hi", "max_tokens": 3}]
    with pytest.raises(UsageError, match=r"p0.jsonl:2: max_tokens is 3, less than --sampling-arg min_tokens=5"):
        make_plan(rows, sampling_arg={"min_tokens": 5})
    with pytest.raises(UsageError, match="min_tokens: must be a whole number, not 'x'"):
        make_plan(rows, sampling_arg={"min_tokens": "x"})


def test_spellings_of_flags_are_refused_in_rows(make_plan):
    """They would end up in the metadata and change nothing."""
    with pytest.raises(UsageError, match="num_samples: in a row this is called n"):
        make_plan([{"prompt": "Hi", "num_samples": 3}])


def test_rendered_prompts_are_counted(make_plan):
    """Texts that begin with a special token; two leading `<s>` only where they were given so."""
    rows = [{"prompt": "<s>Hi"}, {"prompt": "<|im_start|>user"}, {"prompt": "Hi"}, {"messages": [USER]}]
    summary = make_plan([*rows, {"prompt_token_ids": [0, 0]}, {"prompt": "<s><s>Hi"}]).summary
    assert (summary.templated, summary.double_bos) == (3, 2)


def test_the_range_of_top_k_is_that_of_truncated_prompts(make_plan):
    """The untruncated row and the tombstone do not count; a plan without any truncated prompt has 0."""
    off = {"prompt": "a", "top_k": 0, "top_p": 1}
    rows = [{"prompt": "a", "top_k": 7}, {"prompt": "a"}, {"prompt": "", "top_k": 3}, off]
    summary = make_plan(rows, top_k=20, on_bad_row="skip").summary
    assert (summary.smallest_top_k, summary.largest_top_k) == (7, 20)
    assert make_plan([off]).summary.largest_top_k == 0


def test_the_first_prompt_is_shown_as_the_model_sees_it(make_plan):
    """Bad rows are passed over."""
    summary = make_plan([{}, {"messages": [USER]}], on_bad_row="skip").summary
    assert summary.first_text == "<s><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert summary.first is not None
    assert summary.first.prompt_index == 1


def test_a_plan_of_tombstones_only(make_plan):
    """There is nothing to generate, and nothing to describe."""
    summary = make_plan([{}], on_bad_row="skip").summary
    assert (summary.first, summary.first_text, summary.longest, summary.truncated) == (None, None, 0, 0)


def test_several_files_and_a_limit(make_plan):
    """One plan in the order given; a limit that grows extends it, and ids stay."""
    files = ([{"prompt": "a"}, {"prompt": "b"}], [{"prompt": "a"}, {"prompt": "c"}])
    whole = make_plan(*files)
    assert [prompt.prompt for prompt in whole.prompts] == ["a", "b", "a", "c"]
    assert [source.name for source in whole.summary.sources] == ["p0.jsonl", "p1.jsonl"]
    limited = make_plan(*files, limit=3)
    assert [p.prompt_id for p in limited.prompts] == [p.prompt_id for p in whole.prompts[:3]]
    assert [source.name for source in make_plan(*files, limit=1).summary.sources] == ["p0.jsonl"]


def test_a_bad_row_beyond_the_limit_is_not_seen(make_plan):
    """`--limit 1` looks at one row."""
    assert make_plan(b'{"prompt": "a"}\nbroken\n', limit=1).summary.prompts == 1


def test_groups_are_bounded_by_rows_and_bytes(tmp_path):
    """A line is 15 bytes; the second reaches 16, the third and fourth again."""
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"".join(b'{"prompt": "%d"}\n' % index for index in range(5)))
    files = PromptFiles([path])
    assert [len(group) for group in _groups(files, max_rows=2)] == [2, 2, 1]
    assert [len(group) for group in _groups(files, max_bytes=16)] == [2, 2, 1]
    assert [line.number for group in _groups(files, max_bytes=1) for line in group] == [1, 2, 3, 4, 5]


def test_progress_counts_rows(tmp_path, model_info):
    """The last call is the number of rows."""
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n' * 5000)
    seen = []
    write_plan(PromptFiles([path]), RunConfig(), model_info, tmp_path / "plan.parquet", now=NOW, progress=seen.append)
    assert seen == [4096, 5000]


def test_a_file_that_changes_between_the_passes_is_noticed(tmp_path, model_info):
    """Ids and content would not belong together."""
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n' * 4096 + b'{"prompt": "b"}\n')

    def append(rows):
        if rows == 4096:
            path.write_bytes(b'{"prompt": "a"}\n' * 4096 + b'{"prompt": "c"}\n')

    with pytest.raises(UsageError, match="changed while being read"):
        write_plan(PromptFiles([path]), RunConfig(), model_info, tmp_path / "plan.parquet", now=NOW, progress=append)


def test_a_system_prompt_needs_a_chat(make_plan):
    """An option without effect is a mistake; with --chat it has one."""
    with pytest.raises(UsageError, match="--system-prompt: there is no chat"):
        make_plan([{"prompt": "Hi"}], system_prompt="S")
    text = make_plan([{"prompt": "Hi"}], system_prompt="S", chat=True).summary.first_text
    assert text.startswith("<s><|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>")


def test_chats_need_a_template(make_plan, model_info):
    """Not a row's fault: refused in either mode."""
    for mode in ("fail", "skip"):
        with pytest.raises(UsageError, match="give one with --chat-template"):
            make_plan([{"messages": [USER]}], model=replace(model_info, chat_template=None), on_bad_row=mode)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(PROMPTS, METADATA), min_size=1, max_size=5), st.booleans())
def test_any_rows_round_trip(make_plan, model_info, rows, ascii_only):
    """Prompt and metadata come back as given, whatever JSON they hold."""
    content = "\n".join(json.dumps(prompt | metadata, ensure_ascii=ascii_only) for prompt, metadata in rows)
    planned = make_plan(content.encode())
    for (given_prompt, metadata), prompt in zip(rows, planned.prompts, strict=True):
        assert json.loads(prompt.metadata or "{}") == metadata
        match given_prompt:
            case {"prompt": text}:
                assert prompt.prompt == text
                assert text_of(model_info, prompt) == "<s>" + text
            case {"messages": messages}:
                assert json.loads(prompt.prompt) == messages
                assert messages[0]["content"] in text_of(model_info, prompt)
            case {"prompt_token_ids": ids}:
                assert (prompt.prompt, prompt.token_ids.tolist()) == (None, ids)


def test_the_example_prompts_are_good(make_plan):
    """Every example row is usable, and ids are unique."""
    planned = make_plan(EXAMPLES.read_bytes())
    assert planned.summary.prompts == len({prompt.prompt_id for prompt in planned.prompts}) == 32
    answers = [json.loads(prompt.metadata).get("answer") for prompt in planned.prompts]
    assert sum(answer is not None for answer in answers) >= 20

"""One line of JSON to a row, or to all that is wrong with it."""

import json

import pytest

from rollgen.config import RunConfig
from rollgen.prompts.messages import Chat
from rollgen.prompts.rows import BadRow, Row, RowRules, hash64, parse_row

VOCAB = 100
USER = {"role": "user", "content": "Hi"}


def parse(row, **config):
    data = row if isinstance(row, bytes) else json.dumps(row).encode()
    return parse_row(data, RowRules.of(RunConfig(top_k=20, **config), VOCAB))


@pytest.mark.parametrize(
    ("row", "content", "prompt"),
    [
        pytest.param({"prompt": "Hi"}, "Hi", "Hi", id="raw text"),
        pytest.param({"prompt": " \n"}, " \n", " \n", id="white space is text"),
        pytest.param({"messages": [USER]}, Chat([USER]), '[{"role": "user", "content": "Hi"}]', id="chat"),
        pytest.param({"prompt_token_ids": [0, 99]}, [0, 99], None, id="token ids"),
        pytest.param({"messages": None, "prompt": "Hi", "n": None}, "Hi", "Hi", id="null is absent"),
    ],
)
def test_the_three_kinds_of_prompt(row, content, prompt):
    """Each in its own field; what was given is kept as text."""
    parsed = parse(row)
    assert isinstance(parsed, Row)
    assert (list(parsed.content) if prompt is None else parsed.content) == content
    assert parsed.prompt == prompt
    assert parsed.metadata is None


@pytest.mark.parametrize(
    ("row", "config", "content"),
    [
        pytest.param({"prompt": "Hi"}, {"chat": True}, Chat([USER]), id="--chat makes a user turn"),
        pytest.param(
            {"prompt": "Hi"},
            {"chat": True, "system_prompt": "S"},
            Chat([{"role": "system", "content": "S"}, USER]),
            id="--chat and --system-prompt",
        ),
        pytest.param({"prompt": "Hi"}, {"system_prompt": "S"}, "Hi", id="raw text has no system turn"),
        pytest.param(
            {"messages": [{"role": "system", "content": "own"}, USER]},
            {"system_prompt": "S"},
            Chat([{"role": "system", "content": "own"}, USER]),
            id="the row's system turn wins",
        ),
        pytest.param({"q": "Hi"}, {"prompt_column": "q"}, "Hi", id="--prompt-column with text"),
        pytest.param({"prompt": [USER]}, {"prompt_column": "prompt"}, Chat([USER]), id="--prompt-column with turns"),
    ],
)
def test_flags_shape_the_prompt(row, config, content):
    """What is tokenised."""
    assert parse(row, **config).content == content


def test_prompt_column_with_ids_keeps_the_usual_names_as_metadata():
    """The column decides; `prompt` is then a field like any other."""
    parsed = parse({"ids": [1, 2], "prompt": "the text"}, prompt_column="ids")
    assert parsed.content.tolist() == [1, 2]
    assert parsed.metadata == '{"prompt": "the text"}'


@pytest.mark.parametrize(
    ("row", "config", "prompt_id", "metadata"),
    [
        pytest.param({"id": "a"}, {}, "a", None, id="text"),
        pytest.param({"id": 7}, {}, "7", None, id="integer"),
        pytest.param({"id": 10**69}, {}, "1" + "0" * 69, None, id="70-digit integer"),
        pytest.param({"id": -0}, {}, "0", None, id="zero"),
        pytest.param({"prompt_id": "b"}, {}, "b", None, id="prompt_id"),
        pytest.param({"custom_id": "c"}, {}, "c", None, id="custom_id"),
        pytest.param({"custom_id": "c", "id": "a"}, {}, "a", '{"custom_id": "c"}', id="id comes first"),
        pytest.param({"key": "k", "id": "a"}, {"id_column": "key"}, "k", '{"id": "a"}', id="--id-column"),
        pytest.param({"id": None}, {}, None, None, id="null"),
        pytest.param({"id": " \u0000\n😀"}, {}, " \u0000\n😀", None, id="odd but fine"),
    ],
)
def test_ids(row, config, prompt_id, metadata):
    """Text or whole numbers; a missing one is left to the content hash."""
    parsed = parse({**row, "prompt": "Hi"}, **config)
    assert (parsed.prompt_id, parsed.metadata) == (prompt_id, metadata)


def test_metadata_is_source_text():
    """No value is read and written again."""
    row = rb'{"big":1234567890123456789012345678901234567890123456789012345678901234567890, "prompt": "Hi", "n": 2, '
    row += rb'"f": 0.10, "x":1e400, "s":"\ud800\u0000","nested":{"a" : [ ]}, "none": null}'
    assert parse(row).metadata == (
        '{"big": 1234567890123456789012345678901234567890123456789012345678901234567890, "f": 0.10, "x": 1e400, '
        r'"s": "\ud800\u0000", "nested": {"a" : [ ]}, "none": null}'
    )


def test_content_hash_is_of_the_prompt_alone():
    """Documented: SHA-256 over kind, newline and canonical JSON; spacing and other fields do not matter."""
    expected = hash64(b'messages\n[{"content":"Hi","role":"user"}]')
    assert parse(b'{"messages":[{"role":"user","content":"Hi"}],"n":3}').content_hash == expected
    assert parse(b'{"x": 1, "messages": [ {"content": "H\\u0069", "role": "user"} ]}').content_hash == expected
    assert parse({"prompt": "Hi"}).content_hash == hash64(b'prompt\n"Hi"')
    assert parse({"prompt_token_ids": [1, 2]}).content_hash == hash64(b"prompt_token_ids\n[1,2]")


def test_tools_and_template_variables_of_a_chat_are_part_of_its_identity():
    """They change what the model sees; empty ones, and those beside a raw text, do not."""
    plain, tools, variables = {"messages": [USER]}, {"tools": [{"name": "f"}]}, {"chat_template_kwargs": {"a": 1}}
    assert parse(plain | tools).content_hash == hash64(
        b'messages\n[{"content":"Hi","role":"user"}]\n{"tools":[{"name":"f"}]}'
    )
    assert len({parse(plain | extra).content_hash for extra in ({}, tools, variables, tools | variables)}) == 4
    assert parse(plain | {"tools": [], "chat_template_kwargs": None}).content_hash == parse(plain).content_hash
    assert parse({"prompt": "Hi"} | tools).content_hash == parse({"prompt": "Hi"}).content_hash
    assert parse({"prompt": "Hi"} | tools, chat=True).content.tools == tools["tools"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        pytest.param({}, "no prompt: give messages, prompt or prompt_token_ids", id="no prompt"),
        pytest.param({"question": "Hi"}, 'the row has fields ["question"]', id="another name"),
        pytest.param({"prompt": None}, "no prompt", id="null prompt"),
        pytest.param({"prompt": "a", "messages": [USER]}, "messages and prompt are two kinds", id="two kinds"),
        pytest.param({"custom_id": "a", "body": {"messages": [USER]}}, "an OpenAI batch request", id="OpenAI batch"),
        pytest.param({"prompt": ""}, "prompt is empty", id="empty prompt"),
        pytest.param({"prompt": 5}, "prompt must be text, got 5", id="number as prompt"),
        pytest.param({"prompt": [USER]}, "chat turns go in messages", id="turns as prompt"),
        pytest.param({"prompt": "\ud83d"}, "half of a surrogate pair", id="surrogate in prompt"),
        pytest.param({"messages": []}, "non-empty list", id="no messages"),
        pytest.param({"messages": "Hi"}, "non-empty list", id="messages as text"),
        pytest.param({"messages": ["Hi"]}, "messages[0]: must be an object", id="turn as text"),
        pytest.param({"messages": [{"content": "Hi"}]}, "messages[0]: role must be", id="no role"),
        pytest.param({"messages": [{"role": "", "content": "Hi"}]}, "role must be", id="empty role"),
        pytest.param(
            {"messages": [{"role": "user"}]},
            "content must be a string or a list of text parts, got null",
            id="no content",
        ),
        pytest.param({"messages": [{"role": "user", "content": ""}]}, "no text in any turn", id="empty turns"),
        pytest.param({"messages": [{"role": "user", "content": "\udc00"}]}, "surrogate", id="surrogate in a turn"),
        pytest.param({"prompt_token_ids": []}, "prompt_token_ids is empty", id="no token ids"),
        pytest.param({"prompt_token_ids": [-1]}, "id -1 is outside", id="negative token id"),
        pytest.param({"prompt_token_ids": [100]}, "id 100 is outside", id="token id of the vocabulary size"),
        pytest.param({"prompt_token_ids": [1.5]}, "whole numbers only, got 1.5", id="fractional token id"),
        pytest.param({"prompt_token_ids": "12"}, "must be a list of token ids", id="token ids as text"),
        pytest.param({"prompt": "a", "id": ""}, "id must be a non-empty string", id="empty id"),
        pytest.param({"prompt": "a", "id": 1.0}, "id must be a non-empty string or a whole number", id="float id"),
        pytest.param({"prompt": "a", "id": True}, "id must be", id="boolean id"),
        pytest.param({"prompt": "a", "id": "\ud800"}, "id holds half of a surrogate pair", id="surrogate in id"),
        pytest.param({"prompt": "a", "n": 0}, "n must be", id="a parameter"),
    ],
)
def test_bad_rows(row, message):
    """One problem, named with its fix."""
    parsed = parse(row)
    assert isinstance(parsed, BadRow)
    assert len(parsed.problems) == 1
    assert message in parsed.problems[0]


def test_columns_asked_for_must_be_there():
    """A typo in an option must not fall back to other fields."""
    assert 'no prompt in field "q"' in parse({"prompt": "a"}, prompt_column="q").problems[0]
    assert 'no id in field "key"' in parse({"prompt": "a", "id": "x"}, id_column="key").problems[0]


@pytest.mark.parametrize("depth", [*range(900, 1000, 7), 100_000])
def test_deep_nesting_is_a_problem_of_the_row(depth):
    """Python's recursion limit is met while reading, hashing or not at all, but never escapes."""
    nested = b'{"messages": [{"role": "user", "content": "Hi", "x": %b}]}' % (b"[" * depth + b"]" * depth)
    parsed = parse(nested)
    assert isinstance(parsed, Row) or "nested too deeply" in parsed.problems[0]
    assert isinstance(parsed, BadRow) or depth < 1000


def test_all_problems_of_a_row_are_reported():
    """Bad id, bad prompt, two bad parameters; n is still known."""
    parsed = parse({"id": "", "prompt": "", "n": 3, "top_p": 2, "logprobs": 5})
    assert len(parsed.problems) == 4
    assert parsed.parameters.n == 3


def test_a_bad_row_keeps_its_id():
    """So that the tombstone can be found again."""
    assert parse({"id": "mine", "prompt": ""}).prompt_id == "mine"
    assert parse(b'{"id": "mine", ').prompt_id is None

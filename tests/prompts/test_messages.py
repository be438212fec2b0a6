"""Chats of a row: turns, tools, template variables, parts, a last turn to be continued."""

import json
import re

import pytest

from rollgen.prompts.messages import Chat, read_chat, read_chat_extras

USER = {"role": "user", "content": "Hi"}
CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CALLED = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
ANSWER = {"role": "tool", "tool_call_id": "c0", "content": "2"}
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "image": None}]


def assistant(content, **fields):
    return {"role": "assistant", "content": content, **fields}


@pytest.mark.parametrize(
    ("turns", "chat"),
    [
        pytest.param([USER], Chat([USER]), id="plain"),
        pytest.param([{**USER, "name": "Ann", "x": [1]}], Chat([{**USER, "name": "Ann", "x": [1]}]), id="other fields"),
        pytest.param([{**USER, "name": None, "tool_calls": None}], Chat([USER]), id="null is absent"),
        pytest.param(
            [USER, assistant(None, tool_calls=[CALL]), ANSWER],
            Chat([USER, assistant("", tool_calls=[CALLED]), ANSWER]),
            id="no content beside tool calls, arguments as text",
        ),
        pytest.param(
            [USER, assistant("", tool_calls=[CALLED]), ANSWER],
            Chat([USER, assistant("", tool_calls=[CALLED]), ANSWER]),
            id="arguments as an object",
        ),
        pytest.param(
            [USER, assistant(None, tool_calls=[{"function": {"name": "now", "arguments": ""}}]), ANSWER],
            Chat([USER, assistant("", tool_calls=[{"function": {"name": "now", "arguments": {}}}]), ANSWER]),
            id="no arguments",
        ),
        pytest.param([{**USER, "tool_calls": []}], Chat([USER]), id="no tool calls"),
        pytest.param(
            [{"role": "user", "content": PARTS}],
            Chat([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]),
            id="parts",
        ),
        pytest.param([USER, assistant("So")], Chat([USER, assistant("So")], continues=True), id="continued"),
        pytest.param([USER, assistant("")], Chat([USER]), id="empty last turn"),
        pytest.param([USER, assistant(" \n")], Chat([USER]), id="blank last turn"),
        pytest.param([USER, assistant("So"), assistant("")], Chat([USER, assistant("So")]), id="a turn that is done"),
        pytest.param([assistant("Once")], Chat([assistant("Once")], continues=True), id="nothing but a beginning"),
    ],
)
def test_chats(turns, chat):
    """As the template gets them; what was read is left as it was."""
    before, problems = json.dumps(turns), []
    assert read_chat("messages", turns, problems) == chat
    assert (problems, json.dumps(turns)) == ([], before)


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        pytest.param({"role": "user", "content": 5}, "content must be a string or a list of text parts, got 5", id="5"),
        pytest.param(assistant(None), "content must be a string or a list of text parts, got null", id="no content"),
        pytest.param(
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            'content[0] is of type "image_url"; only text can be sampled from',
            id="image",
        ),
        pytest.param({"role": "user", "content": [PARTS[0], "b"]}, "content[1] must be {", id="bare string as part"),
        pytest.param({"role": "user", "content": [{"type": "text"}]}, "content[0] must be {", id="part without text"),
        pytest.param(assistant("", tool_calls={}), "tool_calls must be a list, got {}", id="one tool call"),
        pytest.param(assistant("", tool_calls=[{"name": "f"}]), 'tool_calls[0] must be {"type"', id="no function"),
        pytest.param(
            assistant("", tool_calls=[{"function": {"name": "f", "arguments": "{"}}]),
            "tool_calls[0]: arguments: broken JSON",
            id="broken arguments",
        ),
        pytest.param(
            assistant("", tool_calls=[{"function": {"name": "f", "arguments": "[1]"}}]),
            "tool_calls[0]: arguments: a JSON array, not an object",
            id="arguments as an array",
        ),
        pytest.param(
            assistant("", tool_calls=[{"function": {"name": "f", "arguments": [1]}}]),
            "tool_calls[0]: arguments must be an object, or the JSON text of one, got [1]",
            id="arguments as a list",
        ),
    ],
)
def test_bad_turns(turn, message):
    """Named by number, with the fix."""
    problems = []
    assert read_chat("messages", [USER, turn, USER], problems) is None
    assert problems == [problems[0]]
    assert problems[0].startswith(f"messages[1]: {message}")


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        pytest.param([assistant("")], "messages has no text in any turn", id="nothing at all"),
        pytest.param([USER, assistant("", tool_calls=[CALL])], "ends with tool calls", id="tool calls last"),
        pytest.param([USER, assistant("", reasoning_content="Hm")], "no content to continue", id="reasoning last"),
        pytest.param(
            [USER, assistant("", tool_calls=[{"function": {"name": "f", "arguments": r'{"a": "\ud800"}'}}]), ANSWER],
            "half of a surrogate pair",
            id="surrogate inside arguments",
        ),
    ],
)
def test_bad_chats(turns, message):
    """Each turn is fine, the whole is not."""
    problems = []
    assert read_chat("messages", turns, problems) is None
    assert message in problems[0]


@pytest.mark.parametrize(
    ("fields", "extras"),
    [
        pytest.param({"x": 1}, {}, id="none"),
        pytest.param({"tools": None, "chat_template_kwargs": None}, {}, id="null"),
        pytest.param({"tools": [], "chat_template_kwargs": {}}, {}, id="empty"),
        pytest.param({"tools": [CALLED], "x": 1}, {"tools": [CALLED]}, id="tools"),
        pytest.param({"chat_template_kwargs": {"a": 1}}, {"chat_template_kwargs": {"a": 1}}, id="variables"),
    ],
)
def test_extras(fields, extras):
    """They stay in the row's fields: metadata loses nothing."""
    before, problems = dict(fields), []
    assert read_chat_extras(fields, problems) == extras
    assert (fields, problems) == (before, [])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param({"tools": "add"}, 'tools must be a list of function schemas (objects), got "add"', id="text"),
        pytest.param({"tools": ["add"]}, "tools must be a list of function schemas", id="names"),
        pytest.param({"chat_template_kwargs": [1]}, "chat_template_kwargs must be an object, got [1]", id="list"),
        pytest.param({"chat_template_kwargs": {"tokenize": True}}, "tokenize is set by rollgen", id="own argument"),
        pytest.param({"chat_template_kwargs": {"a": "\ud800"}}, "half of a surrogate pair", id="surrogate"),
    ],
)
def test_bad_extras(fields, message):
    """One problem, with its fix."""
    problems = []
    read_chat_extras(fields, problems)
    assert len(problems) == 1
    assert re.search(re.escape(message), problems[0])


def test_parts_are_joined_by_newlines():
    """As vLLM joins them; for a template that loops over parts, only those of tools."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat = Chat([{"role": "user", "content": parts}, {"role": "tool", "content": parts}])
    assert [turn["content"] for turn in chat.with_joined_parts(only_of_tools=False).turns] == ["a\nb", "a\nb"]
    assert [turn["content"] for turn in chat.with_joined_parts(only_of_tools=True).turns] == [parts, "a\nb"]

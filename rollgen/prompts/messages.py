"""Chat turns: what a list of them must be, and how it reaches the chat template.

A turn has a `role`, a `content` and whatever else its template reads (`tool_calls`, `tool_call_id`, `name`,
`reasoning_content`, ...), which is handed on. What is made of them follows vLLM's chat API, so that both render the
same prompt: fields that are null are absent, no content is empty content, the `arguments` of tool calls become objects
where they are the JSON text of one (`vllm/renderers/chat_utils.py`, `_postprocess_messages`). Content may be a list of
parts `{"type": "text", "text": ...}`; other parts are refused, for their tokens are not text.

A last turn of the assistant is continued: the prompt ends with its text. One without text is no turn.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

from rollgen.prompts.parameters import check_encodable, show
from rollgen.prompts.readers import parse_object

Messages = list[dict[str, Any]]

OWN_ARGUMENTS = frozenset(
    "conversation messages chat_template tokenize add_generation_prompt continue_final_message return_dict "
    "return_tensors return_assistant_tokens_mask tokenizer_kwargs padding truncation max_length".split()
)
"""Arguments of `apply_chat_template` that are not for the template: rollgen's to set."""
CHAT_KEYS = ("tools", "chat_template_kwargs")
"""Fields of a row that a chat template is given beside the turns."""


@dataclass(frozen=True, slots=True)
class Chat:
    """What a chat template renders."""

    turns: Messages
    """Not empty. Content is a string, or a list of text parts."""
    tools: list[dict[str, Any]] | None = None
    """Function schemas of this row."""
    variables: dict[str, Any] = field(default_factory=dict)
    """Of this row; they come before the run's."""
    continues: bool = False
    """The last turn is the assistant's, to be continued."""

    def with_joined_parts(self, *, only_of_tools: bool) -> Chat:
        """Lists of parts joined by newlines: those of tools, which templates never loop over, or all of them."""
        return replace(
            self,
            turns=[_joined(turn) if turn["role"] == "tool" or not only_of_tools else turn for turn in self.turns],
        )


def read_chat(name: str, value: object, problems: list[str]) -> Chat | None:
    """The chat in a field called `name`; what is wrong with it goes to `problems`, and None is returned."""
    if not isinstance(value, list) or not value:
        problems.append(f'{name} must be a non-empty list of {{"role": ..., "content": ...}}, got {show(value)}')
        return None
    wrong = [f"{name}[{i}]: {problem}" for i, turn in enumerate(value) if (problem := _check_turn(turn))]
    if not wrong:
        turns = [_normal(turn) for turn in value]
        wrong = _check_turns(name, turns)
    problems += wrong
    if wrong:
        return None
    last = turns[-1]
    if last["role"] == "assistant" and not _text(last).strip():
        return Chat(turns[:-1])
    return Chat(turns, continues=last["role"] == "assistant")


def read_chat_extras(fields: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """`tools` and `chat_template_kwargs` of a row, where they hold something; what is wrong goes to `problems`."""
    extras = {key: fields[key] for key in CHAT_KEYS if fields.get(key) not in (None, [], {})}
    tools, variables = extras.get("tools", []), extras.get("chat_template_kwargs", {})
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        problems.append(f"tools must be a list of function schemas (objects), got {show(tools)}")
    if not isinstance(variables, dict):
        problems.append(f"chat_template_kwargs must be an object, got {show(variables)}")
    elif taken := sorted((OWN_ARGUMENTS | {"tools"}) & variables.keys()):
        problems.append(f"chat_template_kwargs: {', '.join(taken)} is set by rollgen; remove it")
    if problem := check_encodable("tools or chat_template_kwargs", json.dumps(extras, ensure_ascii=False)):
        problems.append(problem)
    return extras


def _check_turns(name: str, turns: Messages) -> list[str]:
    """What is wrong with turns that are each fine."""
    problems = []
    if not any(_text(turn) or "tool_calls" in turn for turn in turns):
        problems.append(f"{name} has no text in any turn; give it some or remove the row")
    last = turns[-1]
    if last["role"] == "assistant" and "tool_calls" in last:
        problems.append(f"{name} ends with tool calls, which cannot be continued; add the tools' answers")
    elif last["role"] == "assistant" and not _text(last).strip() and last.keys() - {"role", "content", "name"}:
        problems.append(f"{name} ends with an assistant turn that has no content to continue; give it text")
    if problem := check_encodable(name, json.dumps(turns, ensure_ascii=False)):
        problems.append(problem)
    return problems


def _check_turn(turn: object) -> str | None:
    if not isinstance(turn, dict):
        return f"must be an object with role and content, got {show(turn)}"
    if not isinstance(turn.get("role"), str) or not turn["role"]:
        return f"role must be a non-empty string, got {show(turn.get('role'))}"
    content, calls = turn.get("content"), turn.get("tool_calls")
    if isinstance(content, list):
        problem = next((problem for i, part in enumerate(content) if (problem := _check_part(i, part))), None)
        if problem:
            return problem
    elif not isinstance(content, str) and (content is not None or not calls):
        return f"content must be a string or a list of text parts, got {show(content)}"
    if calls is None:
        return None
    if not isinstance(calls, list):
        return f"tool_calls must be a list, got {show(calls)}"
    return next((problem for i, call in enumerate(calls) if (problem := _check_tool_call(i, call))), None)


def _check_part(index: int, part: object) -> str | None:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return None
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind != "text":
        return f"content[{index}] is of type {show(kind)}; only text can be sampled from, remove the part or the row"
    return f'content[{index}] must be {{"type": "text", "text": "..."}}, got {show(part)}'


def _check_tool_call(index: int, call: object) -> str | None:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return f'tool_calls[{index}] must be {{"type": "function", "function": {{"name": ..., "arguments": ...}}}}'
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments:
        try:
            parse_object(arguments.encode("utf-8", "surrogatepass"))
        except ValueError as error:
            return f"tool_calls[{index}]: arguments: {error}"
    elif not isinstance(arguments, dict) and arguments:
        return f"tool_calls[{index}]: arguments must be an object, or the JSON text of one, got {show(arguments)}"
    return None


def _normal(turn: dict[str, Any]) -> dict[str, Any]:
    """A checked turn as the template gets it."""
    kept = {key: value for key, value in turn.items() if value is not None}
    if isinstance(kept.setdefault("content", ""), list):
        kept["content"] = [{key: item for key, item in part.items() if item is not None} for part in kept["content"]]
    if calls := kept.pop("tool_calls", None):
        kept["tool_calls"] = [call | {"function": _with_arguments(call["function"])} for call in calls]
    return kept


def _with_arguments(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments") or {}
    return function | {"arguments": json.loads(arguments) if isinstance(arguments, str) else arguments}


def _text(turn: dict[str, Any]) -> str:
    return str(_joined(turn)["content"])


def _joined(turn: dict[str, Any]) -> dict[str, Any]:
    if isinstance(turn["content"], str):
        return turn
    return turn | {"content": "\n".join(part["text"] for part in turn["content"])}


def stored_messages(prompt: str | None) -> Messages | None:
    """The messages that a stored prompt is the JSON text of, each with a role; None for any other prompt.

    A row stores its prompt as it was given, raw text or messages as JSON text, and nothing says which: what can be read
    as messages may be text all the same.
    """
    if prompt is None or not prompt.lstrip().startswith("["):
        return None
    try:
        value = json.loads(prompt)
    except (ValueError, RecursionError):  # text that begins with a bracket
        return None
    is_chat = isinstance(value, list) and bool(value) and all(isinstance(turn, dict) for turn in value)
    return value if is_chat and all(isinstance(turn.get("role"), str) for turn in value) else None

"""One input row: a line of JSON becomes a `Row`, or a `BadRow` with everything that is wrong with it.

A row holds exactly one prompt, as `messages` (chat turns), `prompt` (raw text) or `prompt_token_ids`; optionally an id
(`id`, else `prompt_id`, else `custom_id`) and sampling parameters of its own (`parameters.ROW_KEYS`). In these fields
`null` means absent. All other fields are metadata: kept as their source text and never interpreted. `--prompt-column`
and `--id-column` name other fields; the type of the value then says which kind of prompt it is, and the usual names
become metadata. A chat (`messages`, or a text under `--chat`) may have `tools` and `chat_template_kwargs` of its own:
the chat template gets them, and they are metadata too, so that nothing is lost.

Ids are text; integers are written out, so 7 and "7" are the same id. A row without one is named by its content hash:
the first 8 bytes of the SHA-256 over the kind of prompt, a newline and the prompt as canonical JSON (ASCII, sorted
keys, no spaces), followed by a newline and an object of the chat's own `tools` and `chat_template_kwargs` where it has
any; the hash of a bad row is over `line`, a newline and the bytes of the line.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from rollgen.prompts.messages import Chat, read_chat, read_chat_extras
from rollgen.prompts.parameters import ROW_KEYS as PARAMETER_KEYS
from rollgen.prompts.parameters import (
    RUN_ONLY_KEYS,
    Parameters,
    check_encodable,
    check_token_ids,
    run_parameters,
    show,
    take_parameters,
)
from rollgen.prompts.readers import member_texts, parse_object

if TYPE_CHECKING:
    from rollgen.config import RunConfig
    from rollgen.rollouts import Int32Array

Kind = Literal["messages", "prompt", "prompt_token_ids"]

PROMPT_KEYS: tuple[Kind, ...] = ("messages", "prompt", "prompt_token_ids")
ID_KEYS = ("id", "prompt_id", "custom_id")
_NULLABLE_KEYS = frozenset({*PROMPT_KEYS, *ID_KEYS, *PARAMETER_KEYS, *RUN_ONLY_KEYS})
_SYSTEM_ROLES = ("system", "developer")


@dataclass(frozen=True, slots=True)
class RowRules:
    """What the run says about every row."""

    run: Parameters
    vocab_size: int
    """The model's: bound of token ids."""
    prompt_column: str | None = None
    id_column: str | None = None
    chat: bool = False
    system_prompt: str | None = None

    @classmethod
    def of(cls, config: RunConfig, vocab_size: int) -> RowRules:
        """The rules of a run. Raises UsageError when a flag does not fit the model."""
        return cls(
            run=run_parameters(config, vocab_size),
            vocab_size=vocab_size,
            prompt_column=config.prompt_column,
            id_column=config.id_column,
            chat=config.chat,
            system_prompt=config.system_prompt,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A valid row, not yet tokenised."""

    prompt_id: str | None
    """None: named by `content_hash`."""
    content_hash: int
    """64 bits."""
    content: str | Chat | Int32Array
    """Raw text, a chat (system prompt and `--chat` applied), or int32 [P] token ids."""
    prompt: str | None
    """As given: the text, or the source text of the messages; None for token ids."""
    parameters: Parameters
    """Effective, but for max_tokens, which the context may still clamp."""
    metadata: str | None
    """Source text of a JSON object; None when there are no other fields."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used, and as much of it as could be read."""

    prompt_id: str | None
    content_hash: int
    """64 bits, of the line's bytes."""
    parameters: Parameters
    """The run's where the row's cannot be read."""
    problems: tuple[str, ...]
    """Each says what is wrong and what to do; never empty."""


def parse_row(data: bytes, rules: RowRules) -> Row | BadRow:
    """Check one line against all rules. Every problem of the row is reported, not only the first."""
    try:
        return _parse(data, rules)
    except RecursionError:  # in whichever step met Python's limit first
        return _unreadable(data, rules, "JSON nested too deeply; flatten it or keep it as a string")


def hash64(data: bytes) -> int:
    """The first 8 bytes of the SHA-256, big endian."""
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big")


def _unreadable(data: bytes, rules: RowRules, problem: str) -> BadRow:
    return BadRow(None, _line_hash(data), rules.run, (problem,))


def _line_hash(data: bytes) -> int:
    return hash64(b"line\n" + data)


def _parse(data: bytes, rules: RowRules) -> Row | BadRow:
    try:
        fields, text = parse_object(data)
    except ValueError as error:
        return _unreadable(data, rules, str(error))
    fields = {name: value for name, value in fields.items() if value is not None or name not in _NULLABLE_KEYS}
    problems: list[str] = []
    prompt_id = _take_id(fields, rules.id_column, problems)
    prompt = _take_prompt(fields, rules, problems)
    parameters = take_parameters(fields, rules.run, rules.vocab_size, problems)
    if problems or prompt is None:
        return BadRow(prompt_id, _line_hash(data), parameters, tuple(problems))
    others = list(fields)
    fields.clear()  # values of a hostile row take 25 times its text: not while they are parsed again
    members = member_texts(text) if others or prompt.kind == "messages" else {}
    return Row(
        prompt_id=prompt_id,
        content_hash=_content_hash(prompt),
        content=_content(prompt, rules),
        prompt={"messages": members.get(prompt.name, ("", ""))[1], "prompt": prompt.value}.get(prompt.kind),
        parameters=parameters,
        metadata="{" + ", ".join(": ".join(members[key]) for key in others) + "}" if others else None,
    )


class _Given(NamedTuple):
    """A checked prompt as the row has it."""

    name: str
    """Of its field."""
    kind: Kind
    value: Any
    chat: Chat | None
    """Set for `messages`, and for `prompt` under `--chat`."""
    extras: dict[str, Any]
    """`tools` and `chat_template_kwargs` of a chat."""


def _content_hash(prompt: _Given) -> int:
    values = [prompt.value, prompt.extras] if prompt.extras else [prompt.value]
    texts = (json.dumps(value, sort_keys=True, separators=(",", ":")) for value in values)
    return hash64("\n".join([prompt.kind, *texts]).encode())


def _content(prompt: _Given, rules: RowRules) -> str | Chat | Int32Array:
    """What is tokenised: `--system-prompt` precedes chats that have no system turn."""
    if prompt.kind == "prompt_token_ids":
        return np.array(prompt.value, dtype=np.int32)
    if prompt.chat is None:
        return str(prompt.value)
    turns = prompt.chat.turns
    if rules.system_prompt is not None and not any(turn["role"] in _SYSTEM_ROLES for turn in turns):
        turns = [{"role": "system", "content": rules.system_prompt}, *turns]
    tools, variables = prompt.extras.get("tools"), prompt.extras.get("chat_template_kwargs", {})
    return replace(prompt.chat, turns=turns, tools=tools, variables=variables)


def _take_id(fields: dict[str, Any], column: str | None, problems: list[str]) -> str | None:
    """Remove the row's id from `fields`; None when there is none, or none that can be used."""
    name = column or next((key for key in ID_KEYS if key in fields), None)
    if name is None:
        return None
    value = fields.pop(name, None)
    if type(value) is int:
        return str(value)
    if value is None:
        problems.append(f"no id in field {show(name)} (--id-column); give every row one, or drop the option")
    elif not isinstance(value, str) or not value:
        problems.append(f"{name} must be a non-empty string or a whole number, got {show(value)}")
    elif problem := check_encodable(name, value):
        problems.append(problem)
    else:
        return value
    return None


def _take_prompt(fields: dict[str, Any], rules: RowRules, problems: list[str]) -> _Given | None:
    """Remove the row's prompt from `fields`; None, and `problems` grew, when there is none that can be used."""
    present = [key for key in PROMPT_KEYS if key in fields]
    if rules.prompt_column is None and len(present) != 1:
        problems.append(_not_one_prompt(present, fields))
        return None
    name = rules.prompt_column or present[0]
    value = fields.pop(name, None)
    if value is None:
        problems.append(f"no prompt in field {show(name)} (--prompt-column); it has {_names(fields)}")
        return None
    kind = present[0] if rules.prompt_column is None else _kind_of(value)
    before = len(problems)
    chat = _read_prompt(name, kind, value, rules, problems)
    extras = read_chat_extras(fields, problems) if kind == "messages" or chat is not None else {}
    return _Given(name, kind, value, chat, extras) if len(problems) == before else None


def _read_prompt(name: str, kind: Kind, value: Any, rules: RowRules, problems: list[str]) -> Chat | None:
    """Check a prompt; its chat, if it is one: `--chat` makes a text a user turn."""
    if kind == "messages":
        return read_chat(name, value, problems)
    problem = _check_text(name, value) if kind == "prompt" else _check_prompt_ids(name, value, rules.vocab_size)
    if problem:
        problems.append(problem)
        return None
    return Chat([{"role": "user", "content": value}]) if kind == "prompt" and rules.chat else None


def _kind_of(value: object) -> Kind:
    """The kind of prompt in a field named by `--prompt-column`."""
    if not isinstance(value, list):
        return "prompt"
    return "messages" if any(isinstance(item, dict) for item in value) else "prompt_token_ids"


def _not_one_prompt(present: list[Kind], fields: dict[str, Any]) -> str:
    if present:
        return f"{' and '.join(present)} are two kinds of prompt; keep one"
    if "body" in fields:
        return "an OpenAI batch request (body), not a prompt; move body.messages to messages and its parameters beside"
    return f"no prompt: give messages, prompt or prompt_token_ids, or --prompt-column; the row has {_names(fields)}"


def _names(fields: dict[str, Any]) -> str:
    return f"fields {show(list(fields))}" if fields else "no other field"


def _check_text(name: str, value: object) -> str | None:
    if not isinstance(value, str):
        return (
            f"{name} must be text, got {show(value)}; chat turns go in messages, token ids in prompt_token_ids "
            "(or use --prompt-column)"
        )
    return check_encodable(name, value) if value else f"{name} is empty; give it text or remove the row"


def _check_prompt_ids(name: str, value: object, vocab_size: int) -> str | None:
    return check_token_ids(name, value, vocab_size) if value != [] else f"{name} is empty; give ids or remove the row"

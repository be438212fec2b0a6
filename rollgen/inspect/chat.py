"""Prompts that were chats. A row stores its prompt as it was given, raw text or messages as JSON text, and nothing says
which: what can be read as messages may be text all the same.
"""

from __future__ import annotations

import json
from typing import Any


def turns_of(prompt: str) -> list[dict[str, Any]] | None:
    """The turns of a prompt that can be read as messages, each with a role; None for any other."""
    try:
        chat = json.loads(prompt)
    except (ValueError, RecursionError):
        return None
    is_chat = isinstance(chat, list) and bool(chat) and all(isinstance(turn, dict) for turn in chat)
    return chat if is_chat and all(isinstance(turn.get("role"), str) for turn in chat) else None


def text_of(turn: dict[str, Any]) -> str:
    """The text of a turn, and as JSON whatever else it has (tool calls, parts that are no text)."""
    content = turn.get("content")
    others = {name: value for name, value in turn.items() if name not in ("role", "content")}
    if content is not None and not isinstance(content, str):
        others["content"] = content
    texts = [content] if isinstance(content, str) else []
    return "\n".join([*texts, *([json.dumps(others, ensure_ascii=False)] if others else [])])

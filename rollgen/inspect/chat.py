"""The turns of a chat, as text."""

from __future__ import annotations

import json
from typing import Any


def text_of(turn: dict[str, Any]) -> str:
    """The text of a turn, and as JSON whatever else it has (tool calls, parts that are no text)."""
    content = turn.get("content")
    others = {name: value for name, value in turn.items() if name not in ("role", "content")}
    if content is not None and not isinstance(content, str):
        others["content"] = content
    texts = [content] if isinstance(content, str) else []
    return "\n".join([*texts, *([json.dumps(others, ensure_ascii=False)] if others else [])])

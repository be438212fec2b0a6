"""Rows to token ids: the chat template and the tokenizer, in batches, without a model.

Raw text gets the special tokens that the tokenizer adds; a rendered chat gets none, because its template writes them.
Special tokens spelled out in a text are recognised, as everywhere in this ecosystem: prompts are trusted input.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError, TemplateSyntaxError

from rollgen.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from rollgen.config import RunConfig
    from rollgen.prompts.model import ModelInfo
    from rollgen.prompts.rows import Messages, Row
    from rollgen.rollouts import Int32Array

_OWN_ARGUMENTS = frozenset(
    "conversation messages chat_template tokenize add_generation_prompt continue_final_message return_dict".split()
)
"""Arguments of `apply_chat_template` that are ours; all others go to the template."""
_RENDER_ERRORS = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)
"""What Jinja and the Python expressions inside a template raise for a chat they do not accept."""


class PromptEncoder:
    """The tokenizer and the chat template of one run."""

    def __init__(self, model: ModelInfo, config: RunConfig, now: datetime) -> None:
        """`now` is the time that a template which prints the date is told.

        Raises UsageError when `--chat-template-kwargs` names an argument that rollgen sets itself.
        """
        if taken := sorted(_OWN_ARGUMENTS & config.chat_template_kwargs.keys()):
            raise UsageError(f"--chat-template-kwargs: {', '.join(taken)} is set by rollgen; remove it")
        self._model = model
        self._variables: dict[str, Any] = {"strftime_now": now.strftime} | config.chat_template_kwargs

    def encode(self, rows: Sequence[Row]) -> list[Int32Array | str]:
        """For each row its token ids, int32 [P], or what is wrong with it. Raises UsageError for a broken template."""
        encoded: dict[int, Int32Array | str] = {}
        raw: dict[int, str] = {}
        chats: dict[int, str] = {}
        for index, row in enumerate(rows):
            if isinstance(row.content, np.ndarray):
                encoded[index] = row.content
            elif isinstance(row.content, str):
                raw[index] = row.content
            elif problem := self._render_into(chats, index, row.content):
                encoded[index] = problem
        encoded |= zip(raw, self._tokenize(list(raw.values()), add_special_tokens=True), strict=True)
        encoded |= zip(chats, self._tokenize(list(chats.values()), add_special_tokens=False), strict=True)
        return [self._check(encoded[index]) for index in range(len(rows))]

    def text(self, row: Row) -> str:
        """What the model is shown, as text: the rendered chat, the raw text, or the decoded ids."""
        if isinstance(row.content, np.ndarray):
            return str(self._model.tokenizer.decode(row.content.tolist()))
        return row.content if isinstance(row.content, str) else self._render(row.content)

    def is_double_bos(self, ids: Int32Array) -> bool:
        """Whether two beginning-of-sequence tokens lead: a template was applied to a text before it came here."""
        bos = self._model.tokenizer.bos_token_id
        return bos is not None and ids[:2].tolist() == [bos, bos]

    def _render_into(self, chats: dict[int, str], index: int, messages: Messages) -> str | None:
        """Put the rendered chat at `chats[index]`, or say what the template has against it."""
        if self._model.chat_template is None:
            raise UsageError(f"{self._model.name}: the tokenizer has no chat template; give one with --chat-template")
        try:
            chats[index] = self._render(messages)
        except TemplateSyntaxError as error:
            raise UsageError(f"chat template, line {error.lineno}: {error.message}; see --chat-template") from None
        except _RENDER_ERRORS as error:
            return f"the chat template refuses these messages: {' '.join(str(error).split())}"
        return None

    def _render(self, messages: Messages) -> str:
        return str(
            self._model.tokenizer.apply_chat_template(
                messages,
                chat_template=self._model.chat_template,
                tokenize=False,
                add_generation_prompt=True,
                **self._variables,
            )
        )

    def _tokenize(self, texts: list[str], *, add_special_tokens: bool) -> list[Int32Array]:
        if not texts:
            return []
        batch = self._model.tokenizer(
            texts, add_special_tokens=add_special_tokens, return_attention_mask=False, verbose=False
        )
        return [np.array(ids, dtype=np.int32) for ids in batch["input_ids"]]

    def _check(self, item: Int32Array | str) -> Int32Array | str:
        """Ids the model can take, with room for at least one more."""
        if isinstance(item, str):
            return item
        if not item.size:
            return "the prompt has no tokens; give it text or remove the row"
        if item.max() >= self._model.vocab_size:
            return (
                f"token id {item.max()} of the tokenizer is outside the model's vocabulary "
                f"({self._model.vocab_size}); use the model's own tokenizer"
            )
        if item.size >= self._model.context_length:
            return (
                f"the prompt fills the context: {item.size} tokens of {self._model.context_length}; "
                "shorten it, or raise --max-model-len if the model allows"
            )
        return item

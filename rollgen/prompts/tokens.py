"""Rows to token ids: the chat template and the tokenizer, in batches, without a model.

Raw text gets the special tokens that the tokenizer adds; a rendered chat gets none, because its template writes them.
Special tokens spelled out in a text are recognised, as everywhere in this ecosystem: prompts are trusted input.

A raw text may be a chat that was rendered before: it then begins with a special token. Such texts are counted, so that
a run says so, and keep their ids: one that begins with the beginning-of-sequence token does not get a second one. One
that begins with another special token (`<|im_start|>`) gets what the tokenizer adds to any text, as in vLLM's
`generate`: many strip the first token from a rendered chat so that it is added again.

A text of megabytes takes minutes. Whether a long one can fit the context at all is asked of its beginning first: where
that alone has twice the tokens, the rest cannot take them back.

A last turn of the assistant is continued as transformers does (`continue_final_message`): the prompt ends with its
text, trimmed where the template trims it, and no generation prompt follows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError, TemplateSyntaxError

from rollgen.errors import UsageError
from rollgen.prompts.messages import OWN_ARGUMENTS, Chat
from rollgen.prompts.templates import template_traits

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from rollgen.config import RunConfig
    from rollgen.prompts.model import ModelInfo
    from rollgen.prompts.rows import Row
    from rollgen.rollouts import Int32Array

_SHORT_TEXT = 1 << 16
"""Characters of a text that is tokenised as it is."""
_CHARACTERS_A_TOKEN = 8
"""Of the first beginning that is asked, for each token of the context; then it doubles."""
_RENDER_ERRORS = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)
"""What Jinja and the Python expressions inside a template raise for a chat they do not accept."""


class PromptEncoder:
    """The tokenizer and the chat template of one run."""

    def __init__(self, model: ModelInfo, config: RunConfig, now: datetime) -> None:
        """`now` is the time that a template which prints the date is told.

        Raises UsageError when `--chat-template-kwargs` names an argument that rollgen sets itself.
        """
        if taken := sorted(OWN_ARGUMENTS & config.chat_template_kwargs.keys()):
            raise UsageError(f"--chat-template-kwargs: {', '.join(taken)} is set by rollgen; remove it")
        self._model = model
        self._variables: dict[str, Any] = {"strftime_now": now.strftime} | config.chat_template_kwargs
        self._special_tokens = _special_tokens(model)

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
        for texts in (raw, chats):
            for index in [index for index, text in texts.items() if self._is_hopeless(text)]:
                del texts[index]
                encoded[index] = self._too_long(f"more than {2 * self._model.context_length}")
        encoded |= zip(raw, self._tokenize_raw(list(raw.values())), strict=True)
        encoded |= zip(chats, self._tokenize(list(chats.values()), add_special_tokens=False), strict=True)
        return [self._check(encoded[index]) for index in range(len(rows))]

    def text(self, row: Row) -> str:
        """What the model is shown, as text: the rendered chat, the raw text, or the decoded ids."""
        if isinstance(row.content, np.ndarray):
            return str(self._model.tokenizer.decode(row.content.tolist()))
        return row.content if isinstance(row.content, str) else self._render(row.content)

    def is_double_bos(self, ids: Int32Array) -> bool:
        """Whether two beginning-of-sequence tokens lead: a template was applied twice, or to ids that had one."""
        bos = self._model.tokenizer.bos_token_id
        return bos is not None and ids[:2].tolist() == [bos, bos]

    def is_templated(self, text: str) -> bool:
        """Whether a raw text begins with a special token, as rendered chats do."""
        return text.startswith(self._special_tokens)

    def _render_into(self, chats: dict[int, str], index: int, chat: Chat) -> str | None:
        """Put the rendered chat at `chats[index]`, or say what the template has against it."""
        if self._model.chat_template is None:
            raise UsageError(f"{self._model.name}: the tokenizer has no chat template; give one with --chat-template")
        try:
            if problem := _not_in_template(chat, self._model.chat_template):
                return problem
            chats[index] = self._render(chat)
        except TemplateSyntaxError as error:
            raise UsageError(f"chat template, line {error.lineno}: {error.message}; see --chat-template") from None
        except _RENDER_ERRORS as error:
            reason = " ".join(str(error).split())
            if chat.continues and reason.startswith("continue_final_message"):
                return (
                    "the chat template does not write the last turn as it is, so it cannot be continued; "
                    "end with a user turn, or see --chat-template"
                )
            return f"the chat template refuses these messages: {reason}"
        return None

    def _render(self, chat: Chat) -> str:
        template = self._model.chat_template or ""
        chat = chat.with_joined_parts(only_of_tools=template_traits(template).parts)
        variables = self._variables | chat.variables | ({} if chat.tools is None else {"tools": chat.tools})
        return str(
            self._model.tokenizer.apply_chat_template(
                chat.turns,
                chat_template=template,
                tokenize=False,
                add_generation_prompt=not chat.continues,
                continue_final_message=chat.continues,
                **variables,
            )
        )

    def _tokenize_raw(self, texts: list[str]) -> list[Int32Array]:
        """With what the tokenizer adds, except a second beginning-of-sequence token before one that is spelled out."""
        bos = self._model.tokenizer.bos_token
        encoded = self._tokenize(texts, add_special_tokens=True)
        return [
            ids[1:] if bos and text.startswith(bos) and self.is_double_bos(ids) else ids
            for text, ids in zip(texts, encoded, strict=True)
        ]

    def _is_hopeless(self, text: str) -> bool:
        """Whether a text is sure not to fit the context, said by as little of it as tells."""
        size = max(_SHORT_TEXT, _CHARACTERS_A_TOKEN * self._model.context_length)
        while size < len(text):
            (ids,) = self._tokenize([text[:size]], add_special_tokens=False)
            if ids.size > 2 * self._model.context_length:
                return True
            size *= 2
        return False

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
            return self._too_long(str(item.size))
        return item

    def _too_long(self, tokens: str) -> str:
        return (
            f"the prompt fills the context: {tokens} tokens of {self._model.context_length}; "
            "shorten it, or raise --max-model-len if the model allows"
        )


def _special_tokens(model: ModelInfo) -> tuple[str, ...]:
    """The texts of the tokenizer's special tokens, those that only chats use included."""
    added = model.tokenizer.added_tokens_decoder.values()
    return tuple({*model.tokenizer.all_special_tokens, *(token.content for token in added if token.special)} - {""})


def _not_in_template(chat: Chat, template: str) -> str | None:
    """What the template would leave out without a word."""
    traits = template_traits(template)
    if chat.tools is not None and not traits.tools:
        return "the chat template does not use tools; remove the field, or give a template that does (--chat-template)"
    if not traits.tool_calls and any("tool_calls" in turn for turn in chat.turns):
        return "the chat template does not use tool_calls; write them as text, or see --chat-template"
    return None

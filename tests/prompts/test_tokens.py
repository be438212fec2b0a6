"""Chat template and tokenizer."""

import copy
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pytest
from models.tiny import CHAT_TEMPLATE, CONTEXT_LENGTH, VOCAB_SIZE
from tokenizers import normalizers

from rollgen.config import RunConfig
from rollgen.errors import UsageError
from rollgen.prompts.messages import Chat
from rollgen.prompts.parameters import Parameters
from rollgen.prompts.rows import Row
from rollgen.prompts.tokens import PromptEncoder
from rollgen.rollouts import Sampling

USER = {"role": "user", "content": "Hi"}
BOS, START, END = 0, 1, 2
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def row(content, **chat):
    content = Chat(content, **chat) if isinstance(content, list) else content
    return Row(None, 0, content, None, Parameters(Sampling(), 1, 0), None)


def encode(model_info, *contents, **config):
    return PromptEncoder(model_info, RunConfig(**config), NOW).encode([row(content) for content in contents])


def test_a_template_that_prints_the_date_is_told_when_the_run_was_planned(model_info):
    """The same prompts today and on a resume tomorrow; `--chat-template-kwargs` still wins."""
    dated = replace(model_info, chat_template="{{ strftime_now('%d %b %Y') }}{{ messages[0].content }}")
    assert PromptEncoder(dated, RunConfig(), NOW).text(row([USER])) == "02 Jan 2026Hi"


def test_raw_text_gets_special_tokens_and_a_chat_brings_its_own(model_info):
    """One `<s>` in front of either, never two; order of rows is kept."""
    chat, text, ids = encode(model_info, [USER], "Hi", np.array([5, 6], np.int32))
    assert (text[0], (text == BOS).sum()) == (BOS, 1)
    assert (chat[:2].tolist(), (chat == BOS).sum(), (chat == END).sum()) == ([BOS, START], 1, 1)
    assert ids.tolist() == [5, 6]
    assert {item.dtype for item in (chat, text, ids)} == {np.dtype(np.int32)}


def test_the_chat_is_what_transformers_renders(model_info):
    """With the generation prompt."""
    encoder = PromptEncoder(model_info, RunConfig(), NOW)
    rendered = "<s><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert encoder.text(row([USER])) == rendered
    assert model_info.tokenizer.decode(encoder.encode([row([USER])])[0]) == rendered


def test_text_of_other_prompts(model_info):
    """Raw text as it is, ids decoded."""
    encoder = PromptEncoder(model_info, RunConfig(), NOW)
    assert encoder.text(row("Hi\x00 😀")) == "Hi\x00 😀"
    assert encoder.text(row(encoder.encode([row("Hi 😀")])[0])) == "<s>Hi 😀"


def test_variables_reach_the_template(model_info):
    """`think` is a variable of the tiny template."""
    encoder = PromptEncoder(model_info, RunConfig(chat_template_kwargs={"think": True}), NOW)
    assert encoder.text(row([USER])).endswith("Let me think.")
    with pytest.raises(UsageError, match=r"--chat-template-kwargs: tokenize is set by rollgen"):
        PromptEncoder(model_info, RunConfig(chat_template_kwargs={"tokenize": True}), NOW)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        pytest.param(CHAT_TEMPLATE, "unknown role", id="raise_exception"),
        pytest.param("{{ messages[0].a.b }}", "no attribute 'a'", id="undefined"),
        pytest.param("{{ messages[0].content + 1 }}", "can only concatenate", id="type error"),
        pytest.param("{{ 1 / 0 }}", "division by zero", id="arithmetic"),
        pytest.param("", "has no tokens", id="renders nothing"),
    ],
)
def test_a_template_may_refuse_a_row(model_info, template, reason):
    """It is that row's problem; its neighbours are encoded."""
    refused, text = encode(replace(model_info, chat_template=template), [{"role": "alien", "content": "x"}], "Hi")
    assert reason in refused
    assert text.size


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__init__.__globals__ }}",
        "{{ strftime_now.__self__.year }}",
        "{{ raise_exception.__globals__ }}{{ raise_exception.__globals__.os }}",
        "{% set _ = messages.append(1) %}",
    ],
    ids=["type of a text", "globals", "a function's object", "a function's globals", "a change of its input"],
)
def test_templates_run_in_a_sandbox(model_info, template):
    """What leads from a value to the interpreter is refused, and so is changing what was given."""
    [refused] = encode(replace(model_info, chat_template=template), [USER])
    assert "unsafe" in refused


def test_a_missing_or_broken_template_is_a_usage_error(model_info):
    """No row can help that."""
    with pytest.raises(UsageError, match="no chat template; give one with --chat-template"):
        encode(replace(model_info, chat_template=None), [USER])
    with pytest.raises(UsageError, match=r"chat template, line 2: .*--chat-template"):
        encode(replace(model_info, chat_template="ok\n{% if %}"), [USER])
    assert encode(replace(model_info, chat_template=None), "Hi")[0].size


def test_a_prompt_must_leave_room_for_a_token(model_info):
    """255 of 256 tokens fit, 256 do not."""
    longest, too_long = (np.zeros(size, np.int32) for size in (CONTEXT_LENGTH - 1, CONTEXT_LENGTH))
    fits, refused = encode(model_info, longest, too_long)
    assert fits.size == 255
    assert "fills the context: 256 tokens of 256" in refused


@pytest.mark.parametrize("text", ["a " * (1 << 19), "a" * (1 << 20), " " * (1 << 20)], ids=["words", "word", "spaces"])
@pytest.mark.parametrize("as_chat", [False, True], ids=["text", "chat"])
def test_a_text_of_megabytes_is_refused_by_its_beginning(model_info, text, as_chat):
    """Else the number would be that of all its tokens, which takes minutes where a text has many more characters."""
    long = Chat([{"role": "user", "content": text}]) if as_chat else text
    refused, fits = encode(model_info, long, "Hi")
    assert refused == (
        "the prompt fills the context: more than 512 tokens of 256; "
        "shorten it, or raise --max-model-len if the model allows"
    )
    assert fits.size


def test_a_long_text_of_few_tokens_fits(model_info):
    """However it begins, the whole text decides: here a normalizer drops all 100,000 spaces."""
    tokenizer = copy.deepcopy(model_info.tokenizer)
    tokenizer.backend_tokenizer.normalizer = normalizers.Strip()
    (ids,) = encode(replace(model_info, tokenizer=tokenizer), " " * 100_000 + "Hi")
    assert ids.tolist() == encode(model_info, "Hi")[0].tolist()


def test_a_foreign_tokenizer_is_noticed(model_info):
    """Ids the model does not have would index out of its embedding."""
    assert model_info.vocab_size == VOCAB_SIZE
    (refused,) = encode(replace(model_info, vocab_size=10), "Hi there")
    assert "outside the model's vocabulary (10); use the model's own tokenizer" in refused


@pytest.mark.parametrize(
    ("text", "tokens", "templated"),
    [
        pytest.param("Hi", "<s>Hi", False, id="raw"),
        pytest.param("<s>Hi", "<s>Hi", True, id="BOS spelled out is not doubled"),
        pytest.param("<s><s>Hi", "<s><s>Hi", True, id="twice stays twice"),
        pytest.param("<|im_start|>user\nHi", "<s><|im_start|>user\nHi", True, id="BOS was stripped, to be added"),
        pytest.param(" <s>Hi", "<s> <s>Hi", False, id="not in front"),
    ],
)
def test_rendered_texts_get_no_second_bos(model_info, text, tokens, templated):
    """The ids decode to exactly these tokens."""
    encoder = PromptEncoder(model_info, RunConfig(), NOW)
    (ids,) = encoder.encode([row(text)])
    assert model_info.tokenizer.decode(ids) == tokens
    assert encoder.is_templated(text) == templated
    assert encoder.is_double_bos(ids) == (text == "<s><s>Hi")


def test_a_rendered_chat_given_as_text_is_the_same_prompt(model_info):
    """Token for token."""
    encoder = PromptEncoder(model_info, RunConfig(), NOW)
    chat = row([USER])
    from_chat, from_text = encoder.encode([chat, row(encoder.text(chat))])
    assert from_chat.tolist() == from_text.tolist()

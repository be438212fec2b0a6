"""A tiny chat model made on the spot: a real tokenizer, a real safetensors checkpoint, nothing downloaded.

`make_tiny_model(directory)` writes a byte-level BPE tokenizer with a chat template and a randomly initialised Llama
(2 layers, hidden 128, 2 heads of 64, context 256) that transformers and vLLM load on a CPU in a second. The model's
vocabulary (512) exceeds the tokenizer's, as in most released models. Raw text gets one `<s>` in front; the chat
template starts with it too. Weights are the same on every call. The output layer is drawn with a standard deviation
of 0.2, so that logits spread by about 2.3: a dozen ids hold half of the probability, and top-k cuts something.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 512
"""Of the model; ids from the tokenizer's size up to it can be sampled but not decoded."""
CONTEXT_LENGTH = 256
SPECIAL_TOKENS = ("<s>", "<|im_start|>", "<|im_end|>")
"""Ids 0, 1, 2: beginning of text, start of a turn, end of a turn (also end of text and padding)."""
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('unknown role') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if think is defined and think %}Let me think.{% endif %}"
)
_CORPUS = (
    "What is the sum of seven and five? The sum of seven and five is twelve.",
    "Write one sentence about the sea. The sea is wide and the wind is strong.",
    "Give the answer as a number: how many legs do three spiders have?",
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
)


def make_tiny_model(directory: Path) -> Path:
    """Write tokenizer and model to `directory` (created if missing) and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    make_tiny_tokenizer().save_pretrained(directory)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(_config())
        torch.nn.init.normal_(model.lm_head.weight, std=0.2)
        model.to(torch.bfloat16).save_pretrained(directory)
    return directory


def make_tiny_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """The tokenizer alone; every text round-trips, because all 256 bytes are in its alphabet."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT_LENGTH,
    )


def _config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=2,
    )

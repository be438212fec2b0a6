"""A mixture of experts small enough for tests: two layers of four experts, of which each token takes two."""

from __future__ import annotations

from pathlib import Path

import torch
from models.tiny import CONTEXT_LENGTH, VOCAB_SIZE, make_tiny_tokenizer
from transformers import OlmoeConfig, OlmoeForCausalLM

LAYERS, EXPERTS, TOP_K = 2, 4, 2


def make_tiny_moe_model(directory: Path) -> Path:
    """Write tokenizer and model to `directory` (created if missing) and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    make_tiny_tokenizer().save_pretrained(directory)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = OlmoeForCausalLM(_config())
        torch.nn.init.normal_(model.lm_head.weight, std=0.2)
        for layer in model.model.layers:  # as drawn, all experts are nearly as likely for every token
            torch.nn.init.normal_(layer.mlp.gate.weight, std=0.5)
        model.to(torch.float32).save_pretrained(directory)
    return directory


def _config() -> OlmoeConfig:
    return OlmoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=2,
    )

"""Small random models and a tokenizer, created by the tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agentfly.policies.embedded.packed_attention import enable_packed_attention
from agentfly.policies.hf_tokenizer import HFTokenizer

VOCABULARY = 260  # as many as `hf_tokenizer` has tokens
KINDS = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 24}),
}


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


def random_model(
    kind: str = "llama", *, hidden: int = 64, layers: int = 2, tie: bool = False, rows: int = VOCABULARY
) -> PreTrainedModel:
    """A model with weights large enough that its logits tell tokens and prompts apart."""
    config, model_class, more = KINDS[kind]
    torch.manual_seed(0)
    model = model_class(
        config(
            vocab_size=rows,
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            tie_word_embeddings=tie,
            **more,
        )
    ).eval()
    for weights in model.parameters():
        torch.nn.init.normal_(weights, std=0.15)
    return model


@pytest.fixture
def make_model() -> Callable[..., PreTrainedModel]:
    return random_model


@pytest.fixture
def model() -> PreTrainedModel:
    """A random Llama, ready to run packed."""
    model = random_model()
    enable_packed_attention(model)
    return model


TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'tool' %}{{ raise_exception('no tools') }}"
    "{% endif %}<|start|>{{ message.role }}\n"
    "{% if message.tool_calls %}<tool_call>{% endif %}{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@pytest.fixture
def hf_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes as tokens, special tokens, and a `<tool_call>` that is added but not special, as in many tokenizers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={byte: index for index, byte in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|start|>"]})
    tokenizer.add_tokens(["<tool_call>", "    "])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture
def tokenizer(hf_tokenizer: PreTrainedTokenizerFast) -> HFTokenizer:
    return HFTokenizer(hf_tokenizer)

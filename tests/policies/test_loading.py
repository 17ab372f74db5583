"""Loading of models: device, precision and threads, and refusal of models that would be sampled wrongly."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from agentfly.core.errors import ConfigError, PrerequisiteError
from agentfly.core.installation import install_command
from agentfly.policies.embedded import loading
from agentfly.policies.embedded.loading import choose_device, choose_dtype, choose_threads, load_model
from agentfly.policies.load import load_policy
from agentfly.policies.policy import SamplingParams

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


async def test_a_saved_model_is_loaded_and_samples(
    make_model: Callable[..., PreTrainedModel], hf_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    make_model().save_pretrained(tmp_path)
    hf_tokenizer.save_pretrained(tmp_path)
    policy = load_policy(tmp_path, dtype="float32", threads=1)
    async with policy:
        generation = await policy.generate([1, 2], SamplingParams(max_tokens=4), rollout_id="a")
    assert (len(generation.ids), policy.context_length, policy.device) == (4, 1024, CPU)


def test_weights_in_a_pickle_are_not_read(make_model: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    model = make_model()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(PrerequisiteError, match=r"holds no causal language model.*safetensors"):
        load_model(tmp_path, CPU, torch.float32)


def test_a_directory_without_weights_is_told(tmp_path: Path) -> None:
    with pytest.raises(PrerequisiteError, match="holds no causal language model"):
        load_model(tmp_path, CPU, torch.float32)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (MistralForCausalLM(MistralConfig(**SIZES, sliding_window=8)), "sliding_window"),
        (GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=4.0)), "other log-probs packed than plain"),
    ],
    ids=["sliding window", "scaled output layer"],
)
def test_a_model_that_packed_rows_would_falsify_is_refused(model: PreTrainedModel, reason: str, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=reason):
        load_model(tmp_path, CPU, torch.float32)


@pytest.mark.parametrize(
    "model",
    [
        GemmaForCausalLM(GemmaConfig(**SIZES)),
        GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=64, n_layer=2, n_head=4, n_positions=128)),
    ],
    ids=["gemma", "gpt2"],
)
def test_other_families_with_plain_causal_attention_load(model: PreTrainedModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    assert type(load_model(tmp_path, CPU, torch.float32)) is type(model)


def test_the_precision_follows_the_device_and_no_feature_of_the_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path, *_: "flags : avx512_bf16 amx_bf16 bf16")  # /proc/cpuinfo
    assert choose_dtype("auto", CPU) == torch.float32
    assert choose_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert choose_dtype("bfloat16", CPU) == torch.bfloat16


def test_an_unknown_precision_or_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="'float31'"):
        choose_dtype("float31", CPU)
    with pytest.raises(ConfigError, match="'gpu'"):
        choose_device("gpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_told() -> None:
    with pytest.raises(PrerequisiteError, match="finds no GPU"):
        choose_device("cuda")


def test_threads_are_the_cores_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    monkeypatch.setattr(loading, "_core", lambda cpu: str(cpu // 2))  # two hyper-threads a core
    monkeypatch.setattr(loading, "_quota", lambda: None)
    assert choose_threads(100_000_000) == 2
    assert choose_threads(500_000) == 1
    monkeypatch.setattr(loading, "_quota", lambda: 1.5)
    assert choose_threads(100_000_000) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert choose_threads(500_000) == 7


def test_without_torch_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PrerequisiteError, match=re.escape(install_command("train"))):
        load_policy("tiny")

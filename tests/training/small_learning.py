"""A small random model, rows with its own log-probs, and a learner for it."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agentfly.policies.embedded.scoring import score_tokens
from agentfly.training.advantages import Advantages
from agentfly.training.config.train_config import TrainConfig
from agentfly.training.learning.learner import Learner
from agentfly.training.rows import Row

MASKS = [(0, 0, 1, 1, 1), (0, 0, 1, 0, 0, 1, 1, 1, 1), (0, 0, 0, 1), (0, 1, 1, 0, 0, 0, 1)]


def small_model(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).to(dtype).eval()  # type: ignore[arg-type]
    with torch.no_grad():  # sharper than at initialisation, so that the tokens differ in probability
        for weight in model.parameters():
            weight.mul_(4)
    return model


def own_logprobs(model: torch.nn.Module, ids: Sequence[int], mask: Sequence[int], temperature: float) -> list[float]:
    targets = [position for position, sampled in enumerate(mask) if sampled]
    with torch.no_grad():
        scores = score_tokens(model, [ids], [targets], temperature=temperature).logprobs.tolist()  # type: ignore[arg-type]
    values = iter(scores)
    return [next(values) if sampled else math.nan for sampled in mask]


def rows_of(model: torch.nn.Module, temperature: float = 1.0) -> list[Row]:
    """Return rows of two groups with the model's own log-probs."""
    draw = np.random.default_rng(3)
    rows = []
    for number, mask in enumerate(MASKS):
        ids = draw.integers(1, 40, len(mask)).tolist()
        rows.append(
            Row(
                ids=ids,
                loss_mask=mask,
                logprobs=own_logprobs(model, ids, mask, temperature),
                versions=[0 if sampled else -1 for sampled in mask],
                group_id=f"g{number // 2}",
                rollout_id=f"r{number}",
                reward=float(number % 2),
                truncated=False,
            )
        )
    return rows


def constant(rows: Sequence[Row], values: Sequence[float]) -> list[np.ndarray]:
    return [np.full(len(row.targets), value) for row, value in zip(rows, values, strict=True)]


def learner_of(
    model: torch.nn.Module, temperature: float = 1.0, *, needs_critic: bool = False, **settings: Any
) -> Learner:
    config = TrainConfig(**{"learning_rate": 1e-3, "algorithm": "gae" if needs_critic else "grpo", **settings})
    return Learner(model, config, temperature=temperature, needs_critic=needs_critic)  # type: ignore[arg-type]


def learn(
    learner: Learner, rows: Sequence[Row], values: Sequence[np.ndarray], stop: threading.Event | None = None
) -> dict[str, float]:
    return learner.learn(rows, Advantages(list(values)), learner.score(rows), stop)


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([weight.detach().flatten().float() for weight in model.parameters()])

"""The attention function under which a model runs packed: all tokens of many rows as one sequence without padding.

Linear layers, norms and embeddings do not care which row a token belongs to; only attention does. So a model is called
once with the tokens of all rows in one sequence of length T, and a *plan* tells the attention of each layer which
keys each token may see. Sampling plans read and write kept keys and values (`keyvalues`), scoring plans share the
prefixes of rows (`packing`). Without a plan the model behaves as it always does.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from agentfly.errors import ConfigError

PACKED_ATTENTION = "agentfly_packed"
"""Name of the attention function in transformers' registry."""

_UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias")
"""What some models ask of attention beyond a causal softmax."""


class AttentionPlan(Protocol):
    """Which keys each packed token sees."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """Attention of one layer.

        Args:
            layer: number of the layer, from 0.
            query: [T, heads, head_dim], rotated to the tokens' positions.
            key, value: [T, kv_heads, head_dim] of the same tokens.
            scaling: factor on the scores; None for ``head_dim ** -0.5``.

        Returns:
            [T, heads, head_dim].
        """
        ...


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    attention_plan: AttentionPlan | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls, with tensors of shape [1, heads, T, head_dim]."""
    if attention_plan is None:
        output: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return output
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ConfigError(
                f"The model's attention uses {name}, which the embedded policy does not run. "
                "Use a model with plain causal attention in every layer."
            )
    layer: int = module.layer_idx  # type: ignore[assignment]
    attended = attention_plan.attend(
        layer, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), scaling
    )
    return attended[None], None


def enable_packed_attention(model: PreTrainedModel) -> None:
    """Have the model's attention follow the plans it is called with. A second call changes nothing.

    Raises:
        ConfigError: the model's class does not let its attention function be chosen.
    """
    if model.config._attn_implementation == PACKED_ATTENTION:
        return
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)
    model.set_attn_implementation(PACKED_ATTENTION)
    if model.config._attn_implementation != PACKED_ATTENTION:
        raise ConfigError(
            f"{type(model).__name__} does not let its attention function be chosen, which the embedded policy needs. "
            "Use a model whose transformers class supports the attention interface (Llama, Qwen, SmolLM, ...)."
        )


def packed_hidden(
    model: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan
) -> torch.Tensor:
    """Last hidden states of packed tokens.

    Args:
        model: a causal language model with `enable_packed_attention`.
        ids: token ids, [T].
        positions: position of each token in its own row, [T].
        plan: which keys each token sees.

    Returns:
        [T, hidden], to be given to the model's output embeddings.
    """
    # A mask of four dimensions is passed through as it is, so that none is built; the plan takes its place.
    no_mask = torch.empty((1, 1, 1, 1), device=ids.device)
    decoder = model.get_decoder()  # type: ignore[no-untyped-call]
    output = decoder(
        input_ids=ids[None],
        position_ids=positions[None],
        attention_mask=no_mask,
        use_cache=False,
        attention_plan=plan,
    )
    hidden: torch.Tensor = output.last_hidden_state[0]
    return hidden

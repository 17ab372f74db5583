"""Packed attention: a model runs the tokens of many rows as one sequence. There is no padding, and prefixes are shared.

Linear layers, norms and embeddings do not depend on which row a token belongs to; only attention does. So the model is
called once with the tokens of all rows in one sequence of length T. An *attention plan* determines which keys each
token sees in each layer. Sampling plans read and write the KV cache (`kv_cache`). Scoring plans (`PackedAttention`)
compute common prefixes of rows once. Without a plan the model behaves as usual.

The attempts of a group share their prompt, and the tasks of a batch often share a system prompt and examples. Packed,
the rows form a tree of *segments*. A segment holds tokens that a set of rows has in common. It attends to its ancestors
and, causally, to itself. Segments of one parent are attended to in one call, as a *block*.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from agentfly.core.errors import ConfigError


def common_prefix(left: array[int], right: array[int]) -> int:
    """Return the length of the longest common prefix of two arrays of type ``'i'``."""
    length = min(len(left), len(right))
    if length == 0 or left[0] != right[0]:
        return 0
    different = np.flatnonzero(np.frombuffer(left, np.intc, length) != np.frombuffer(right, np.intc, length))
    return int(different[0]) if len(different) else length


MIN_SHARED = 16
"""A common prefix shorter than this is computed once per row, because a segment of its own would cost more."""


@dataclass(eq=False)
class PrefixSegment:
    """Tokens ``start`` to ``stop`` (exclusive) of a row, shared by the rows that pass through the segment.

    ``offset`` is the segment's first index in the packed sequence.
    """

    ids: Sequence[int]
    start: int
    parent: PrefixSegment | None
    offset: int = 0

    def __len__(self) -> int:
        return len(self.ids)

    def lineage(self) -> list[PrefixSegment]:
        """Return the segments from the root to this one. Together they hold the row's tokens up to its end."""
        return [*(self.parent.lineage() if self.parent else ()), self]

    def packed_indices(self) -> torch.Tensor:
        """Return the packed index of every token of the row up to the segment's end."""
        return torch.cat([torch.arange(part.offset, part.offset + len(part)) for part in self.lineage()])


@dataclass
class PackedRows:
    """Rows as one packed sequence.

    Attributes:
        ids: token ids, [T].
        positions: position of each token in its row, [T].
        row_indices: for each row, the index in the packed sequence of each of its tokens.
        plan: the attention over the packed sequence.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    row_indices: list[torch.Tensor]
    plan: PackedAttention


def pack_rows(
    rows: Sequence[Sequence[int]], *, share_prefixes: bool, device: torch.device, dtype: torch.dtype
) -> PackedRows:
    """Pack rows of token ids. No row may be empty."""
    segments: list[PrefixSegment] = []
    leaves: list[PrefixSegment] = [None] * len(rows)  # type: ignore[list-item]
    if share_prefixes:
        order = sorted(range(len(rows)), key=lambda index: tuple(rows[index]))
        ordered = [array("i", rows[index]) for index in order]
        common = [common_prefix(left, right) for left, right in itertools.pairwise(ordered)]
        _grow(_PrefixTreeBuilder(rows, order, common, segments, leaves), 0, len(rows), 0, None)
    else:
        for index, row in enumerate(rows):
            leaves[index] = PrefixSegment(row, 0, None)
        segments.extend(leaves)

    blocks = list(_blocks(segments))
    packed = [segment for block in blocks for segment in block]
    offset = 0
    for segment in packed:
        segment.offset = offset
        offset += len(segment)
    ids = torch.tensor([token for segment in packed for token in segment.ids], device=device)
    positions = torch.cat([torch.arange(segment.start, segment.start + len(segment)) for segment in packed])
    return PackedRows(
        ids=ids,
        positions=positions.to(device),
        row_indices=[leaf.packed_indices() for leaf in leaves],
        plan=PackedAttention([AttentionBlock.of(block, device, dtype) for block in blocks]),
    )


@dataclass
class _PrefixTreeBuilder:
    """The state of the recursion that builds the tree of segments from rows in sorted order."""

    rows: Sequence[Sequence[int]]
    order: list[int]
    common: list[int]  # common[i]: length of the common prefix of the sorted rows i and i + 1
    segments: list[PrefixSegment]
    leaves: list[PrefixSegment]


def _grow(tree: _PrefixTreeBuilder, first: int, last: int, start: int, parent: PrefixSegment | None) -> None:
    """Add the segments of the sorted rows ``first`` to ``last`` (exclusive), from position ``start`` on."""
    row = tree.rows[tree.order[first]]
    shared = min(tree.common[first : last - 1], default=len(row))
    if last - first == 1 or shared - start >= MIN_SHARED:
        if shared > start:
            parent = PrefixSegment(row[start:shared], start, parent)
            tree.segments.append(parent)
        while first < last and len(tree.rows[tree.order[first]]) == shared and parent is not None:
            tree.leaves[tree.order[first]] = parent  # the row ends here; sorted order puts such rows first
            first += 1
        start = shared
    while first < last:
        stop = first + 1
        while stop < last and tree.common[stop - 1] - start >= MIN_SHARED:
            stop += 1
        _grow(tree, first, stop, start, parent)
        first = stop


def _blocks(segments: list[PrefixSegment]) -> Iterator[list[PrefixSegment]]:
    """Yield blocks of segments with one parent, shortest first. A block ends where padding would double the work."""
    siblings: dict[int, list[PrefixSegment]] = {}
    for segment in segments:
        siblings.setdefault(id(segment.parent), []).append(segment)
    for family in siblings.values():
        block: list[PrefixSegment] = []
        for segment in sorted(family, key=len):
            if block and len(segment) > 2 * len(block[0]) + MIN_SHARED:
                yield block
                block = []
            block.append(segment)
        yield block


@dataclass
class AttentionBlock:
    """One attention call: n segments of one parent, padded to one length.

    Attributes:
        query_indices: packed index of each query, padded, [n * queries].
        key_indices: packed index of each key (ancestors, then own), padded, [n * keys].
        mask: added to the scores, [n, 1, queries, keys]; None if the segments have no ancestors and their attention is
            simply causal.
        valid: indices of the padded queries that are tokens, into n * queries; None if all are.
        count: n.
    """

    query_indices: torch.Tensor
    key_indices: torch.Tensor
    mask: torch.Tensor | None
    valid: torch.Tensor | None
    count: int

    @classmethod
    def of(cls, segments: list[PrefixSegment], device: torch.device, dtype: torch.dtype) -> AttentionBlock:
        """Create the call for segments of one parent."""
        count, queries = len(segments), max(map(len, segments))
        lengths = torch.tensor([len(segment) for segment in segments])
        offsets = torch.tensor([segment.offset for segment in segments])
        steps = torch.arange(queries)
        is_token = steps < lengths[:, None]
        # Padding repeats the segment's first token: causality keeps it from the tokens, and its output is dropped.
        query_indices = torch.where(is_token, offsets[:, None] + steps, offsets[:, None])
        parent = segments[0].parent
        key_indices, mask = query_indices, None
        if parent is not None:
            ancestors = parent.packed_indices()
            key_indices = torch.cat([ancestors.expand(count, -1), query_indices], dim=1)
            hidden = torch.zeros(queries, queries, dtype=dtype)
            hidden.masked_fill_(steps[None] > steps[:, None], float("-inf"))
            mask = torch.cat([torch.zeros(queries, len(ancestors), dtype=dtype), hidden], dim=1)[None, None].to(device)
        valid = None if bool(is_token.all()) else is_token.flatten().nonzero().flatten().to(device)
        return cls(query_indices.flatten().to(device), key_indices.flatten().to(device), mask, valid, count)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """Return the outputs of the block's tokens in packed order, [tokens, heads, head_dim]."""
        attended = scaled_dot_product_attention(
            self._gather(query, self.query_indices),
            self._gather(key, self.key_indices),
            self._gather(value, self.key_indices),
            attn_mask=self.mask,
            is_causal=self.mask is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        flat = attended.transpose(1, 2).flatten(0, 1)
        return flat if self.valid is None else flat.index_select(0, self.valid)

    def _gather(self, states: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        rows = states.index_select(0, indices)
        return rows.view(self.count, -1, *rows.shape[1:]).transpose(1, 2)


@dataclass
class PackedAttention:
    """The plan of a packed sequence: its blocks, in packed order."""

    blocks: list[AttentionBlock] = field(default_factory=list)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """See `AttentionPlan.attend`."""
        return torch.cat([block.attend(query, key, value, scaling) for block in self.blocks])


PACKED_ATTENTION = "agentfly_packed"
"""Name of the attention function in transformers' registry."""

_UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias")
"""Arguments with which some models request more than causal softmax attention."""


class AttentionPlan(Protocol):
    """Which keys each packed token sees."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """Compute the attention of one layer.

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
    """Compute attention by a plan. transformers calls this function with tensors of shape [1, heads, T, head_dim]."""
    if attention_plan is None:
        output: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return output
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ConfigError(
                f"The model's attention uses {name}, which the embedded policy does not support. "
                "Use a model with plain causal attention in every layer."
            )
    layer: int = module.layer_idx  # type: ignore[assignment]
    attended = attention_plan.attend(
        layer, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), scaling
    )
    return attended[None], None


def enable_packed_attention(model: PreTrainedModel) -> None:
    """Make a model's attention follow the plans that it is called with. A second call changes nothing.

    Raises:
        ConfigError: the attention function of the model's class cannot be replaced.
    """
    if model.config._attn_implementation == PACKED_ATTENTION:
        return
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)
    model.set_attn_implementation(PACKED_ATTENTION)
    if model.config._attn_implementation != PACKED_ATTENTION:
        raise ConfigError(
            f"The attention function of {type(model).__name__} cannot be replaced, which the embedded policy needs. "
            "Use a model whose transformers class supports the attention interface (Llama, Qwen, SmolLM, ...)."
        )


def packed_hidden(
    model: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan
) -> torch.Tensor:
    """Compute the last hidden states of packed tokens.

    Args:
        model: a causal language model with `enable_packed_attention`.
        ids: token ids, [T].
        positions: position of each token in its own row, [T].
        plan: which keys each token sees.

    Returns:
        [T, hidden], the input of the model's output layer.
    """
    # A mask of four dimensions is passed through unchanged, so transformers builds none. The plan replaces it.
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

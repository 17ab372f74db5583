"""Rows packed into one sequence, with what they have in common computed once.

The attempts of a group share their prompt, and the tasks of a batch often share a system prompt and examples. Packed,
the rows become a tree of *segments*: a segment holds tokens that a set of rows has in common, and attends to its
ancestors and, causally, to itself. Segments of one parent are attended to in one call, as a *block*.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention

from agentfly.policies.embedded.prefixes import common_prefix

MIN_SHARED = 16
"""A common prefix shorter than this is computed once per row: a segment of its own would cost more."""


@dataclass(eq=False)
class Segment:
    """Tokens ``start`` to ``stop`` (exclusive) of a row, shared by the rows that pass through the segment.

    ``offset`` is the segment's first index in the packed sequence.
    """

    ids: Sequence[int]
    start: int
    parent: Segment | None
    offset: int = 0

    def __len__(self) -> int:
        return len(self.ids)

    def lineage(self) -> list[Segment]:
        """The segments from the root to this one, which together hold the row's tokens up to its end."""
        return [*(self.parent.lineage() if self.parent else ()), self]

    def packed_indices(self) -> torch.Tensor:
        """Index in the packed sequence of every token of the row up to the segment's end."""
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
    segments: list[Segment] = []
    leaves: list[Segment] = [None] * len(rows)  # type: ignore[list-item]
    if share_prefixes:
        order = sorted(range(len(rows)), key=lambda index: tuple(rows[index]))
        ordered = [array("i", rows[index]) for index in order]
        common = [common_prefix(left, right) for left, right in itertools.pairwise(ordered)]
        _grow(_Growth(rows, order, common, segments, leaves), 0, len(rows), 0, None)
    else:
        for index, row in enumerate(rows):
            leaves[index] = Segment(row, 0, None)
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
class _Growth:
    """What the recursion that grows the tree of segments works on: rows in sorted order."""

    rows: Sequence[Sequence[int]]
    order: list[int]
    common: list[int]  # common[i]: length of the common prefix of the sorted rows i and i + 1
    segments: list[Segment]
    leaves: list[Segment]


def _grow(growth: _Growth, first: int, last: int, start: int, parent: Segment | None) -> None:
    """Add the segments of the sorted rows ``first`` to ``last`` (exclusive), from position ``start`` on."""
    row = growth.rows[growth.order[first]]
    shared = min(growth.common[first : last - 1], default=len(row))
    if last - first == 1 or shared - start >= MIN_SHARED:
        if shared > start:
            parent = Segment(row[start:shared], start, parent)
            growth.segments.append(parent)
        while first < last and len(growth.rows[growth.order[first]]) == shared and parent is not None:
            growth.leaves[growth.order[first]] = parent  # the row ends here; sorted order puts such rows first
            first += 1
        start = shared
    while first < last:
        stop = first + 1
        while stop < last and growth.common[stop - 1] - start >= MIN_SHARED:
            stop += 1
        _grow(growth, first, stop, start, parent)
        first = stop


def _blocks(segments: list[Segment]) -> Iterator[list[Segment]]:
    """Segments of one parent, shortest first, cut where padding would double the work."""
    siblings: dict[int, list[Segment]] = {}
    for segment in segments:
        siblings.setdefault(id(segment.parent), []).append(segment)
    for family in siblings.values():
        block: list[Segment] = []
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
        mask: added to the scores, [n, 1, queries, keys]; None where the segments have no ancestors, whose attention is
            plainly causal.
        valid: which of the padded queries are tokens, as indices into n * queries; None if all are.
        count: n.
    """

    query_indices: torch.Tensor
    key_indices: torch.Tensor
    mask: torch.Tensor | None
    valid: torch.Tensor | None
    count: int

    @classmethod
    def of(cls, segments: list[Segment], device: torch.device, dtype: torch.dtype) -> AttentionBlock:
        """The call for some segments of one parent."""
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
        """Outputs of the block's tokens, in packed order, [tokens, heads, head_dim]."""
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
        """See `attention.AttentionPlan.attend`."""
        return torch.cat([block.attend(query, key, value, scaling) for block in self.blocks])

"""KV cache: keys and values of cached sequences, and the attention that reads and writes them while sampling."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention

MIN_CAPACITY = 128
"""Minimum capacity of a cache row in tokens. Longer rows hold two, four, … times as many."""

Buffers = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one layer, each [rows, capacity, kv_heads, head_dim]."""


@dataclass(frozen=True, order=True)
class CacheRow:
    """Where a slot is stored: a row of the bucket of rows with ``capacity`` tokens."""

    capacity: int
    row: int


@dataclass(eq=False)
class _CapacityBucket:
    """Rows of one capacity, which are decoded in one attention call.

    Memory is zeroed, because attention multiplies the values beyond a sequence's end by 0.
    """

    capacity: int
    rows: int = 0
    layers: dict[int, Buffers] = field(default_factory=dict)

    def grow(self) -> None:
        """Add half as many rows. If there is no memory for them, the bucket stays unchanged."""
        rows = self.rows + max(1, self.rows // 2)
        grown: dict[int, Buffers] = {}
        for layer, (keys, values) in self.layers.items():
            grown[layer] = self._zeros(rows, keys), self._zeros(rows, values)
            for old, new in zip((keys, values), grown[layer], strict=True):
                new[: self.rows] = old
        self.rows, self.layers = rows, grown

    def buffers(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> Buffers:
        """Return the buffers of a layer. New ones are created like ``key`` and ``value``, [..., kv_heads, head_dim]."""
        if layer not in self.layers:
            self.layers[layer] = self._zeros(self.rows, key), self._zeros(self.rows, value)
        return self.layers[layer]

    def _zeros(self, rows: int, like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros((rows, self.capacity, *like.shape[-2:]))


class KVCache:
    """Keys and values of the sequences in the slots.

    A sequence is stored in a row with a capacity of up to twice its length, and at least `MIN_CAPACITY` tokens. It
    moves to a longer row as it grows, so one long sequence does not make all rows long. Shapes are taken from the first
    tensors of the model's layers.
    """

    def __init__(self) -> None:
        self._buckets: dict[int, _CapacityBucket] = {}
        self._rows: dict[int, CacheRow] = {}

    @property
    def tokens(self) -> int:
        """The number of tokens that the cache has room for."""
        return sum(bucket.rows * bucket.capacity for bucket in self._buckets.values())

    def row_of(self, slot: int) -> CacheRow:
        """Return the cache row of a slot. Only `reserve` changes it."""
        return self._rows[slot]

    def reserve(self, slot: int, length: int, kept: int, spare: Iterable[int] = ()) -> int | None:
        """Give a slot room for ``length`` tokens, and keep its first ``kept`` tokens.

        ``spare`` are slots that may be evicted before memory grows. Return the evicted one, if any. If there is not
        enough memory, all slots stay unchanged.
        """
        capacity = max(MIN_CAPACITY, 1 << (length - 1).bit_length())
        old = self._rows.get(slot)
        if old is not None and (old.capacity == capacity or (kept and old.capacity > capacity)):
            return None
        bucket = self._buckets.setdefault(capacity, _CapacityBucket(capacity))
        row, evicted = self._free_row(bucket), None
        if row is None:
            evicted = next((one for one in spare if self._rows[one].capacity == capacity), None)
            if evicted is None:
                row = bucket.rows
                bucket.grow()
            else:
                row = self._rows.pop(evicted).row
        new = CacheRow(capacity, row)
        if old is not None:
            self._copy(old, new, kept)
        self._rows[slot] = new
        return evicted

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` tokens of a slot to another, which has room for them."""
        self._copy(self._rows[source], self._rows[target], length)

    def clear(self) -> None:
        """Drop every sequence, and free the memory."""
        self._buckets.clear()
        self._rows.clear()

    def buffers(self, capacity: int, layer: int, key: torch.Tensor, value: torch.Tensor) -> Buffers:
        """Return a layer's buffers of one capacity. New ones are created like ``key`` and ``value``."""
        return self._buckets[capacity].buffers(layer, key, value)

    def _free_row(self, bucket: _CapacityBucket) -> int | None:
        taken = {one.row for one in self._rows.values() if one.capacity == bucket.capacity}
        return next((row for row in range(bucket.rows) if row not in taken), None)

    def _copy(self, source: CacheRow, target: CacheRow, length: int) -> None:
        if not length:
            return
        for layer, old in self._buckets[source.capacity].layers.items():
            new = self._buckets[target.capacity].buffers(layer, *old)
            for from_buffer, to_buffer in zip(old, new, strict=True):
                to_buffer[target.row, :length] = from_buffer[source.row, :length]


@dataclass(frozen=True)
class PrefillChunk:
    """The tokens of one sequence in one step: ``count`` tokens from position ``start`` on, in a slot."""

    slot: int
    start: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.count


@dataclass(frozen=True)
class _Write:
    """Tokens whose keys and values are written to the bucket of one capacity.

    Attributes:
        capacity: capacity of the bucket.
        tokens: packed indices of the tokens, [n]; None if these are all tokens of the step.
        targets: ``row * capacity + position`` of each token, [n].
    """

    capacity: int
    tokens: torch.Tensor | None
    targets: torch.Tensor


@dataclass(frozen=True)
class _DecodeCall:
    """Rows of one bucket that advance by one token each, attended to in one call.

    Attributes:
        capacity: capacity of the bucket.
        tokens: their packed indices, [n].
        rows: their rows in the bucket, [n], or a slice if they are adjacent, which avoids a copy.
        length: number of keys of the longest.
        mask: added to the scores, [n, 1, 1, length].
    """

    capacity: int
    tokens: torch.Tensor
    rows: torch.Tensor | slice
    length: int
    mask: torch.Tensor


@dataclass(frozen=True)
class _PrefillCall:
    """Several tokens of one row: packed tokens ``first`` to ``last`` (exclusive), and the mask [queries, keys]."""

    first: int
    last: int
    row: CacheRow
    mask: torch.Tensor


class KVCacheAttention:
    """The attention plan of one step. Each chunk is written to its slot, and sees the slot up to its own tokens."""

    def __init__(
        self, store: KVCache, chunks: Sequence[PrefillChunk], device: torch.device, dtype: torch.dtype
    ) -> None:
        """``chunks`` must be in packed order, and `KVCache.reserve` must have made room for them."""
        self._store = store
        self._device = device
        self._dtype = dtype
        self._prefills: list[_PrefillCall] = []
        written: dict[int, list[tuple[int, PrefillChunk]]] = {}
        decoding: dict[int, list[tuple[int, PrefillChunk]]] = {}
        offset = 0
        for chunk in chunks:
            row = store.row_of(chunk.slot)
            written.setdefault(row.capacity, []).append((offset, chunk))
            if chunk.count == 1:
                decoding.setdefault(row.capacity, []).append((offset, chunk))
            else:
                self._prefills.append(_PrefillCall(offset, offset + chunk.count, row, self._causal(chunk)))
            offset += chunk.count
        self._writes = [self._write(capacity, part, offset) for capacity, part in written.items()]
        self._decodes = [self._decode_call(capacity, part) for capacity, part in decoding.items()]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """See `packed_attention.AttentionPlan.attend`."""
        buckets: dict[int, Buffers] = {}
        for write in self._writes:
            buckets[write.capacity] = buffers = self._store.buffers(write.capacity, layer, key, value)
            for buffer, states in zip(buffers, (key, value), strict=True):
                kept = states if write.tokens is None else states.index_select(0, write.tokens)
                buffer.flatten(0, 1).index_copy_(0, write.targets, kept)
        grouped = query.shape[1] != key.shape[1]
        output = query.new_empty((*query.shape[:2], value.shape[-1]))
        for decode in self._decodes:
            keys, values = buckets[decode.capacity]
            attended = scaled_dot_product_attention(
                query.index_select(0, decode.tokens)[:, :, None],
                keys[:, : decode.length][decode.rows].transpose(1, 2),
                values[:, : decode.length][decode.rows].transpose(1, 2),
                attn_mask=decode.mask,
                scale=scaling,
                enable_gqa=grouped,
            )
            output.index_copy_(0, decode.tokens, attended[:, :, 0])
        for prefill in self._prefills:
            length = prefill.mask.shape[1]
            keys, values = buckets[prefill.row.capacity]
            attended = scaled_dot_product_attention(
                query[None, prefill.first : prefill.last].transpose(1, 2),
                keys[None, prefill.row.row, :length].transpose(1, 2),
                values[None, prefill.row.row, :length].transpose(1, 2),
                attn_mask=prefill.mask,
                scale=scaling,
                enable_gqa=grouped,
            )
            output[prefill.first : prefill.last] = attended[0].transpose(0, 1)
        return output

    def _causal(self, chunk: PrefillChunk) -> torch.Tensor:
        mask = torch.zeros(chunk.count, chunk.stop, dtype=self._dtype)
        later = torch.arange(chunk.stop)[None] > torch.arange(chunk.start, chunk.stop)[:, None]
        return mask.masked_fill_(later, float("-inf")).to(self._device)

    def _write(self, capacity: int, chunks: list[tuple[int, PrefillChunk]], count: int) -> _Write:
        tokens: list[int] = []
        targets: list[int] = []
        for offset, chunk in chunks:
            first = self._store.row_of(chunk.slot).row * capacity
            tokens.extend(range(offset, offset + chunk.count))
            targets.extend(range(first + chunk.start, first + chunk.stop))
        selected = None if len(tokens) == count else torch.tensor(tokens, device=self._device)
        return _Write(capacity, selected, torch.tensor(targets, device=self._device))

    def _decode_call(self, capacity: int, chunks: list[tuple[int, PrefillChunk]]) -> _DecodeCall:
        lengths = torch.tensor([chunk.stop for _, chunk in chunks])
        length = int(lengths.max())
        mask = torch.zeros(len(chunks), length, dtype=self._dtype)
        mask.masked_fill_(torch.arange(length)[None] >= lengths[:, None], float("-inf"))
        rows = [self._store.row_of(chunk.slot).row for _, chunk in chunks]
        adjacent = rows == list(range(rows[0], rows[0] + len(rows)))
        return _DecodeCall(
            capacity=capacity,
            tokens=torch.tensor([offset for offset, _ in chunks], device=self._device),
            rows=slice(rows[0], rows[0] + len(rows)) if adjacent else torch.tensor(rows, device=self._device),
            length=length,
            mask=mask[:, None, None].to(self._device),
        )

"""Keys and values of resident sequences, and the attention that reads and writes them while sampling."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention

MIN_CAPACITY = 128
"""Room that a sequence gets at least; a longer one gets its length rounded up to twice, four times, ... as much."""

Buffers = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one layer, each [rows, capacity, kv_heads, head_dim]."""


@dataclass(frozen=True, order=True)
class CacheRow:
    """Where a slot's sequence lies: a row of the shelf whose rows hold ``capacity`` tokens."""

    capacity: int
    row: int


@dataclass(eq=False)
class _CapacityBucket:
    """Rows of one capacity, which are decoded in one attention call.

    Memory is zeroed, since attention multiplies what lies beyond a sequence's end by 0.
    """

    capacity: int
    rows: int = 0
    layers: dict[int, Buffers] = field(default_factory=dict)

    def grow(self) -> None:
        """Make half as many rows more. The shelf stays as it was if there is no memory for them."""
        rows = self.rows + max(1, self.rows // 2)
        grown: dict[int, Buffers] = {}
        for layer, (keys, values) in self.layers.items():
            grown[layer] = self._zeros(rows, keys), self._zeros(rows, values)
            for old, new in zip((keys, values), grown[layer], strict=True):
                new[: self.rows] = old
        self.rows, self.layers = rows, grown

    def buffers(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> Buffers:
        """The buffers of a layer, made like ``key`` and ``value``, [..., kv_heads, head_dim], if they are new."""
        if layer not in self.layers:
            self.layers[layer] = self._zeros(self.rows, key), self._zeros(self.rows, value)
        return self.layers[layer]

    def _zeros(self, rows: int, like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros((rows, self.capacity, *like.shape[-2:]))


class KVCache:
    """Keys and values of the sequences in some slots.

    A sequence lies in a row that holds up to twice its length, at least `MIN_CAPACITY` tokens. It moves to a longer row
    as it grows, so that one long sequence costs its own length and not that of all others. Shapes are those that the
    model's layers hand in first.
    """

    def __init__(self) -> None:
        self._shelves: dict[int, _CapacityBucket] = {}
        self._places: dict[int, CacheRow] = {}

    @property
    def tokens(self) -> int:
        """The number of tokens that there is room for."""
        return sum(shelf.rows * shelf.capacity for shelf in self._shelves.values())

    def row_of(self, slot: int) -> CacheRow:
        """Where the slot's sequence lies. Changed by `reserve` only."""
        return self._places[slot]

    def reserve(self, slot: int, length: int, kept: int, spare: Iterable[int] = ()) -> int | None:
        """Give a slot room for ``length`` tokens, of which it keeps the first ``kept``.

        ``spare`` are slots that can be given up before more memory is taken; returns the one that was, if any. If there
        is no memory, every slot is left as it was.
        """
        capacity = max(MIN_CAPACITY, 1 << (length - 1).bit_length())
        old = self._places.get(slot)
        if old is not None and (old.capacity == capacity or (kept and old.capacity > capacity)):
            return None
        shelf = self._shelves.setdefault(capacity, _CapacityBucket(capacity))
        row, given_up = self._free_row(shelf), None
        if row is None:
            given_up = next((one for one in spare if self._places[one].capacity == capacity), None)
            if given_up is None:
                row = shelf.rows
                shelf.grow()
            else:
                row = self._places.pop(given_up).row
        new = CacheRow(capacity, row)
        if old is not None:
            self._copy(old, new, kept)
        self._places[slot] = new
        return given_up

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` tokens of a slot to another, which has room for them."""
        self._copy(self._places[source], self._places[target], length)

    def clear(self) -> None:
        """Forget every sequence, and free the memory."""
        self._shelves.clear()
        self._places.clear()

    def buffers(self, capacity: int, layer: int, key: torch.Tensor, value: torch.Tensor) -> Buffers:
        """What a layer keeps on the shelf of a capacity; made like ``key`` and ``value`` if there is nothing yet."""
        return self._shelves[capacity].buffers(layer, key, value)

    def _free_row(self, shelf: _CapacityBucket) -> int | None:
        taken = {place.row for place in self._places.values() if place.capacity == shelf.capacity}
        return next((row for row in range(shelf.rows) if row not in taken), None)

    def _copy(self, source: CacheRow, target: CacheRow, length: int) -> None:
        if not length:
            return
        for layer, old in self._shelves[source.capacity].layers.items():
            new = self._shelves[target.capacity].buffers(layer, *old)
            for from_buffer, to_buffer in zip(old, new, strict=True):
                to_buffer[target.row, :length] = from_buffer[source.row, :length]


@dataclass(frozen=True)
class PrefillChunk:
    """The tokens of one row in one step: ``count`` tokens from position ``start`` on, in a slot."""

    slot: int
    start: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.count


@dataclass(frozen=True)
class _Write:
    """Tokens whose keys and values go to the shelf of one capacity.

    Attributes:
        capacity: the shelf.
        tokens: their packed indices, [n]; None where these are all tokens.
        targets: ``row * capacity + position`` of each, [n].
    """

    capacity: int
    tokens: torch.Tensor | None
    targets: torch.Tensor


@dataclass(frozen=True)
class _DecodeCall:
    """Rows of one shelf that advance by one token each, attended to in one call.

    Attributes:
        capacity: the shelf.
        tokens: their packed indices, [n].
        rows: their rows on the shelf, [n], or a slice where these follow each other, so that nothing need be copied.
        length: keys of the longest.
        mask: added to the scores, [n, 1, 1, length].
    """

    capacity: int
    tokens: torch.Tensor
    rows: torch.Tensor | slice
    length: int
    mask: torch.Tensor


@dataclass(frozen=True)
class _PrefillCall:
    """Several tokens of one row: its packed tokens ``first`` to ``last``, and the mask [queries, keys]."""

    first: int
    last: int
    place: CacheRow
    mask: torch.Tensor


class KVCacheAttention:
    """The plan of one step: each chunk's tokens are written to its slot, and see all of the slot up to themselves."""

    def __init__(
        self, store: KVCache, chunks: Sequence[PrefillChunk], device: torch.device, dtype: torch.dtype
    ) -> None:
        """``chunks`` are in packed order; `KVCache.reserve` has made room for them."""
        self._store = store
        self._device = device
        self._dtype = dtype
        self._prefills: list[_PrefillCall] = []
        written: dict[int, list[tuple[int, PrefillChunk]]] = {}
        decoding: dict[int, list[tuple[int, PrefillChunk]]] = {}
        offset = 0
        for chunk in chunks:
            place = store.row_of(chunk.slot)
            written.setdefault(place.capacity, []).append((offset, chunk))
            if chunk.count == 1:
                decoding.setdefault(place.capacity, []).append((offset, chunk))
            else:
                self._prefills.append(_PrefillCall(offset, offset + chunk.count, place, self._causal(chunk)))
            offset += chunk.count
        self._writes = [self._write(capacity, part, offset) for capacity, part in written.items()]
        self._decodes = [self._decode_call(capacity, part) for capacity, part in decoding.items()]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """See `packed_attention.AttentionPlan.attend`."""
        shelves: dict[int, Buffers] = {}
        for write in self._writes:
            shelves[write.capacity] = buffers = self._store.buffers(write.capacity, layer, key, value)
            for buffer, states in zip(buffers, (key, value), strict=True):
                kept = states if write.tokens is None else states.index_select(0, write.tokens)
                buffer.flatten(0, 1).index_copy_(0, write.targets, kept)
        grouped = query.shape[1] != key.shape[1]
        output = query.new_empty((*query.shape[:2], value.shape[-1]))
        for decode in self._decodes:
            keys, values = shelves[decode.capacity]
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
            keys, values = shelves[prefill.place.capacity]
            attended = scaled_dot_product_attention(
                query[None, prefill.first : prefill.last].transpose(1, 2),
                keys[None, prefill.place.row, :length].transpose(1, 2),
                values[None, prefill.place.row, :length].transpose(1, 2),
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

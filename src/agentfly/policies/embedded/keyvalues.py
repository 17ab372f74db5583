"""Keys and values of resident sequences, and the attention that reads and writes them while sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

FIRST_SLOTS = 8
FIRST_CAPACITY = 256

SHORT = 256
"""Sequences up to this length are decoded in one attention call; longer ones with those of up to twice their length."""


class KeyValueStore:
    """Per layer, the keys and the values of some slots, each [slots, capacity, kv_heads, head_dim].

    A slot holds one sequence. Slots and capacity grow by doubling as they are needed; the shapes are those that the
    model's layers hand in first. Memory is zeroed, since attention multiplies what lies beyond a sequence's end by 0.
    """

    def __init__(self) -> None:
        self.slots = FIRST_SLOTS
        self.capacity = FIRST_CAPACITY
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def reserve(self, slots: int, length: int, used: Mapping[int, int]) -> None:
        """Make room for ``slots`` slots of ``length`` tokens; ``used`` tells the tokens to keep in each slot."""
        if slots <= self.slots and length <= self.capacity:
            return
        self.slots = max(self.slots, 1 << (slots - 1).bit_length())
        self.capacity = max(self.capacity, 1 << (length - 1).bit_length())
        for layer, buffers in self._layers.items():
            grown = tuple(old.new_zeros((self.slots, self.capacity, *old.shape[2:])) for old in buffers)
            for old, new in zip(buffers, grown, strict=True):
                for slot, kept in used.items():
                    if slot < len(old):  # a slot that is only being reserved holds nothing yet
                        new[slot, :kept] = old[slot, :kept]
            self._layers[layer] = (grown[0], grown[1])

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` tokens of a slot to another."""
        for buffers in self._layers.values():
            for buffer in buffers:
                buffer[target, :length] = buffer[source, :length]

    def write(
        self, layer: int, indices: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values [T, kv_heads, head_dim] at ``slot * capacity + position``, and return the buffers."""
        if layer not in self._layers:
            shape = (self.slots, self.capacity)
            self._layers[layer] = (key.new_zeros(*shape, *key.shape[1:]), value.new_zeros(*shape, *value.shape[1:]))
        keys, values = self._layers[layer]
        keys.flatten(0, 1).index_copy_(0, indices, key)
        values.flatten(0, 1).index_copy_(0, indices, value)
        return keys, values


@dataclass(frozen=True)
class Chunk:
    """The tokens of one row in one step: ``count`` tokens from position ``start`` on, in a slot."""

    slot: int
    start: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.count


@dataclass(frozen=True)
class _DecodeCall:
    """Rows that advance by one token each, attended to in one call.

    Attributes:
        tokens: their packed indices, [n].
        slots: their slots, [n], or a slice where these follow each other, so that nothing need be copied.
        length: keys of the longest.
        mask: added to the scores, [n, 1, 1, length].
    """

    tokens: torch.Tensor
    slots: torch.Tensor | slice
    length: int
    mask: torch.Tensor


@dataclass(frozen=True)
class _PrefillCall:
    """Several tokens of one row: its packed tokens ``first`` to ``last``, and the mask [queries, keys]."""

    first: int
    last: int
    slot: int
    mask: torch.Tensor


class CachedAttention:
    """The plan of one step: each chunk's tokens are written to its slot, and see all of the slot up to themselves."""

    def __init__(self, store: KeyValueStore, chunks: Sequence[Chunk], device: torch.device, dtype: torch.dtype) -> None:
        """``chunks`` are in packed order; `KeyValueStore.reserve` has made room for them."""
        self._store = store
        self._device = device
        self._dtype = dtype
        self._decodes: list[_DecodeCall] = []
        self._prefills: list[_PrefillCall] = []
        indices: list[int] = []
        decoding: dict[int, list[tuple[int, Chunk]]] = {}
        offset = 0
        for chunk in chunks:
            first = chunk.slot * store.capacity
            indices.extend(range(first + chunk.start, first + chunk.stop))
            if chunk.count == 1:
                decoding.setdefault((max(chunk.stop, SHORT) - 1).bit_length(), []).append((offset, chunk))
            else:
                mask = self._causal(chunk)
                self._prefills.append(_PrefillCall(offset, offset + chunk.count, chunk.slot, mask))
            offset += chunk.count
        self._indices = torch.tensor(indices, device=device)
        self._decodes.extend(self._decode_call(rows) for rows in decoding.values())

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """See `attention.AttentionPlan.attend`."""
        keys, values = self._store.write(layer, self._indices, key, value)
        grouped = query.shape[1] != key.shape[1]
        output = query.new_empty((*query.shape[:2], value.shape[-1]))
        for decode in self._decodes:
            attended = scaled_dot_product_attention(
                query.index_select(0, decode.tokens)[:, :, None],
                keys[:, : decode.length][decode.slots].transpose(1, 2),
                values[:, : decode.length][decode.slots].transpose(1, 2),
                attn_mask=decode.mask,
                scale=scaling,
                enable_gqa=grouped,
            )
            output.index_copy_(0, decode.tokens, attended[:, :, 0])
        for prefill in self._prefills:
            length = prefill.mask.shape[1]
            attended = scaled_dot_product_attention(
                query[None, prefill.first : prefill.last].transpose(1, 2),
                keys[None, prefill.slot, :length].transpose(1, 2),
                values[None, prefill.slot, :length].transpose(1, 2),
                attn_mask=prefill.mask,
                scale=scaling,
                enable_gqa=grouped,
            )
            output[prefill.first : prefill.last] = attended[0].transpose(0, 1)
        return output

    def _causal(self, chunk: Chunk) -> torch.Tensor:
        mask = torch.zeros(chunk.count, chunk.stop, dtype=self._dtype)
        later = torch.arange(chunk.stop)[None] > torch.arange(chunk.start, chunk.stop)[:, None]
        return mask.masked_fill_(later, float("-inf")).to(self._device)

    def _decode_call(self, rows: list[tuple[int, Chunk]]) -> _DecodeCall:
        lengths = torch.tensor([chunk.stop for _, chunk in rows])
        length = int(lengths.max())
        mask = torch.zeros(len(rows), length, dtype=self._dtype)
        mask.masked_fill_(torch.arange(length)[None] >= lengths[:, None], float("-inf"))
        slots = [chunk.slot for _, chunk in rows]
        adjacent = slots == list(range(slots[0], slots[0] + len(slots)))
        return _DecodeCall(
            tokens=torch.tensor([offset for offset, _ in rows], device=self._device),
            slots=slice(slots[0], slots[0] + len(slots)) if adjacent else torch.tensor(slots, device=self._device),
            length=length,
            mask=mask[:, None, None].to(self._device),
        )

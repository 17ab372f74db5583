"""SlotTable: decides which slot a new request gets, and which cached prefix it reuses. It does not touch the cache.

Slots of running sequences are never taken. An idle slot keeps the earlier turns of a rollout until the slot is needed.
Slots of finished rollouts are taken first, then the least recently used ones.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from agentfly.policies.embedded.packed_attention import common_prefix

MIN_COPIED_PREFIX = 8
"""A common prefix shorter than this is computed again rather than copied from another slot."""

MIN_AWAITED_PREFIX = 16
"""A request waits for a running prefill that makes at least this many more of its tokens available."""


@dataclass(eq=False)
class CachedSequence:
    """A sequence in a slot.

    Attributes:
        slot: the slot.
        rollout_id: the sequence's rollout; None once the rollout is forgotten.
        ids: its token ids. They include the whole prompt while the sequence runs.
        computed: number of ids whose keys and values are in the slot.
        running: whether a generation is using it.
        used: when it last ran, by the table's own counter.
    """

    slot: int
    rollout_id: str | None
    ids: array[int]
    computed: int = 0
    running: bool = True
    used: int = 0


@dataclass(frozen=True)
class SlotAssignment:
    """The slot of a prompt. Its first ``resident.computed`` tokens are there already or must be copied.

    ``copy_from`` is the slot to copy them from, or None.
    """

    resident: CachedSequence
    copy_from: int | None


@dataclass
class SlotTable:
    """The sequences in up to ``limit`` slots."""

    limit: int
    residents: dict[int, CachedSequence] = field(default_factory=dict)
    _clock: int = 0

    def assign(self, rollout_id: str, prompt: array[int]) -> SlotAssignment | None:
        """Give a prompt a slot and mark it as running.

        The prompt keeps the slot of its rollout's last turn if that is idle, and reuses the longest prefix that any
        cached sequence has. Return None if the request must wait, because all slots are busy or a running prefill is
        computing a shared prefix.
        """
        best, usable, coming = self._longest_prefix(prompt)
        if coming - usable >= MIN_AWAITED_PREFIX:
            return None
        own = self._own(rollout_id)
        if best is not None and not best.running and best.rollout_id == rollout_id:
            own = best
        slot = own.slot if own is not None else self._free_slot(keep=best)
        if slot is None:
            return None
        in_place = best is not None and best.slot == slot
        if best is None or (not in_place and usable < MIN_COPIED_PREFIX):
            best, usable = None, 0
        resident = CachedSequence(slot, rollout_id, array("i", prompt), usable, used=self._tick())
        self.residents[slot] = resident
        return SlotAssignment(resident, None if best is None or in_place else best.slot)

    def release(self, resident: CachedSequence) -> None:
        """End the generation on a sequence. Its keys and values stay until the slot is needed."""
        del resident.ids[resident.computed :]
        resident.running = False
        resident.used = self._tick()

    def forget(self, rollout_id: str) -> None:
        """Give up the slots of a rollout. Until they are needed, others may still copy prefixes from them."""
        for kept in self.residents.values():
            if kept.rollout_id == rollout_id:
                kept.rollout_id = None

    def evictable_slots(self) -> list[int]:
        """Return the idle slots of forgotten rollouts, least recently used first."""
        return [kept.slot for kept in self._idle() if kept.rollout_id is None]

    def drop(self, slot: int) -> None:
        """Free an idle slot, because its keys and values are gone."""
        del self.residents[slot]

    def clear(self) -> None:
        """Free every idle slot, because its keys and values are out of date."""
        self.residents = {slot: kept for slot, kept in self.residents.items() if kept.running}

    def _longest_prefix(self, prompt: array[int]) -> tuple[CachedSequence | None, int, int]:
        """Return the sequence with the longest computed prefix of the prompt, its length, and the longest in prefill.

        The last token of the prompt is always computed: its hidden state is needed for the first sampled token.
        """
        best, usable, coming = None, 0, 0
        for resident in self.residents.values():
            common = min(common_prefix(prompt, resident.ids), len(prompt) - 1)
            coming = max(coming, common)
            if min(common, resident.computed) > usable:
                best, usable = resident, min(common, resident.computed)
        return best, usable, coming

    def _own(self, rollout_id: str) -> CachedSequence | None:
        """Return the idle sequence of a rollout's last turn."""
        own = [kept for kept in self.residents.values() if not kept.running and kept.rollout_id == rollout_id]
        return max(own, key=lambda kept: kept.used, default=None)

    def _free_slot(self, keep: CachedSequence | None) -> int | None:
        """Return a slot: a forgotten one, else an empty one, else the least recently used idle one; ``keep`` last."""
        kept_slot = None if keep is None else keep.slot
        if forgotten := [slot for slot in self.evictable_slots() if slot != kept_slot]:
            return forgotten[0]
        if len(self.residents) < self.limit:
            return next(slot for slot in range(self.limit) if slot not in self.residents)
        return next((kept.slot for kept in sorted(self._idle(), key=lambda kept: kept is keep)), None)

    def _idle(self) -> list[CachedSequence]:
        return sorted((kept for kept in self.residents.values() if not kept.running), key=lambda kept: kept.used)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

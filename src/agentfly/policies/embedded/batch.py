"""RunningBatch: the rows that are being sampled, stepped one token at a time, joined and left between any two steps."""

from __future__ import annotations

import math
import random
from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

import torch
from transformers import PreTrainedModel

from agentfly.errors import PolicyError
from agentfly.policies.embedded.attention import packed_hidden
from agentfly.policies.embedded.keyvalues import CachedAttention, Chunk, KeyValueStore
from agentfly.policies.embedded.output_layer import OutputLayer
from agentfly.policies.embedded.sampling import sample
from agentfly.policies.embedded.slots import Placement, Resident, SlotTable
from agentfly.policies.policy import SamplingParams

PREFILL_TOKENS = 512
"""The most prompt tokens that one step computes, so that long prompts do not hold up the rows that are sampling."""


@dataclass(eq=False)
class Request:
    """One generation: what was asked, and what has been sampled so far.

    Attributes:
        rollout_id: the rollout it belongs to.
        prompt: the prompt's token ids.
        sampling: how to sample.
        noise: where the request's uniform numbers come from, so that they do not depend on other requests.
        ids, logprobs, raw_logprobs: the sampled tokens.
        version: version of the weights that sample it, known once it has joined the batch.
        finish: why it ended; None while it runs.
        cancelled: set, from any thread, when nobody waits for the result any more.
    """

    rollout_id: str
    prompt: array[int]
    sampling: SamplingParams
    noise: random.Random
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    version: int = 0
    finish: Literal["stop", "length"] | None = None
    cancelled: bool = False


@dataclass(eq=False)
class _Row:
    """A request that is in the batch."""

    request: Request
    resident: Resident

    def chunk(self, limit: int) -> Chunk:
        """The row's next tokens, at most ``limit``: the next of its prompt, or the one that was sampled last."""
        resident = self.resident
        return Chunk(resident.slot, resident.computed, min(len(resident.ids) - resident.computed, limit))


class RunningBatch:
    """Requests that wait and rows that run, on one model. Not thread-safe: one thread owns it."""

    def __init__(
        self, model: PreTrainedModel, *, max_concurrent: int, max_resident: int, context_length: int, version: int = 0
    ) -> None:
        """``max_resident`` is at least ``max_concurrent``, so that a running row always has a slot."""
        self.waiting: deque[Request] = deque()  # those of higher priority first
        self._model = model
        self._head = OutputLayer(model)
        self._max_concurrent = max_concurrent
        self._context_length = context_length
        self._version = version
        self._rows: list[_Row] = []
        self._table = SlotTable(max_resident)
        self._store = KeyValueStore()

    @property
    def running(self) -> int:
        """The number of rows that are being sampled."""
        return len(self._rows)

    def ask(self, request: Request) -> None:
        """Let a request wait, behind those of its own priority and before those of a lower one."""
        place = len(self.waiting)
        while place and self.waiting[place - 1].sampling.priority < request.sampling.priority:
            place -= 1
        self.waiting.insert(place, request)

    def forget(self, rollout_id: str) -> None:
        """Give up what is kept of a rollout's earlier turns."""
        self._table.forget(rollout_id)

    def renew(self, version: int) -> None:
        """The weights have changed: what is kept of earlier ones is dropped. No row may be running."""
        self._version = version
        self._drop_everything()

    def step(self, *, admit: bool = True) -> list[Request]:
        """Let waiting requests join if ``admit``, and compute the next tokens of every row.

        Returns the requests that ended.

        Raises:
            PolicyError: the model's output is not a distribution.
        """
        self._leave([row for row in self._rows if row.request.cancelled])
        if admit:
            self._admit()
        if not self._rows:
            return []
        rows, chunks = self._next_chunks()
        hidden = self._forward(rows, chunks)
        ready: list[_Row] = []
        last: list[int] = []
        offset = 0
        for row, chunk in zip(rows, chunks, strict=True):
            offset += chunk.count
            row.resident.computed = chunk.stop
            if chunk.stop == len(row.resident.ids):
                ready.append(row)
                last.append(offset - 1)
        if ready:
            self._sample(ready, hidden[last])
        ended = [row for row in ready if row.request.finish is not None]
        self._leave(ended)
        return [row.request for row in ended]

    def abort(self) -> list[Request]:
        """Take every row out of the batch after a failed step, and free all memory; returns the rows' requests."""
        requests = [row.request for row in self._rows]
        self._leave(list(self._rows))
        self._drop_everything()
        return requests

    def _drop_everything(self) -> None:
        """Keep nothing of earlier turns. No row may be running."""
        self._table.clear()
        self._store.clear()

    def _admit(self) -> None:
        """Let waiting requests join, in their order, as far as there is room."""
        for request in [request for request in self.waiting if request.cancelled]:
            self.waiting.remove(request)
        held_back: list[Request] = []
        try:
            while self.waiting and len(self._rows) < self._max_concurrent:
                request = self.waiting.popleft()
                placement = self._table.place(request.rollout_id, request.prompt)
                if placement is None:
                    held_back.append(request)
                else:
                    self._join(request, placement)
        finally:
            self.waiting.extendleft(reversed(held_back))

    def _join(self, request: Request, placement: Placement) -> None:
        resident, source = placement.resident, placement.copy_from
        request.version = self._version
        self._rows.append(_Row(request, resident))
        self._reserve(resident, len(request.prompt), kept=resident.computed if source is None else 0, needed=source)
        if source is not None:
            self._store.copy(source, resident.slot, resident.computed)

    def _reserve(self, resident: Resident, length: int, *, kept: int, needed: int | None = None) -> None:
        """Make room for a resident; forgotten ones, except in the slot ``needed``, go before more memory is taken."""
        spare = (slot for slot in self._table.forgotten() if slot != needed)
        if (given_up := self._store.reserve(resident.slot, length, kept, spare)) is not None:
            self._table.drop(given_up)

    def _next_chunks(self) -> tuple[list[_Row], list[Chunk]]:
        """The rows of this step in packed order, those that sample first and by place, and the tokens of each."""
        budget = PREFILL_TOKENS
        single: list[tuple[_Row, Chunk]] = []
        several: list[tuple[_Row, Chunk]] = []
        for row in self._rows:
            chunk = row.chunk(max(budget, 1))
            self._reserve(row.resident, chunk.stop, kept=row.resident.computed)
            if chunk.count == 1:
                single.append((row, chunk))
            else:
                several.append((row, chunk))
                budget -= chunk.count
        single.sort(key=lambda pair: self._store.place(pair[1].slot))
        pairs = single + several
        return [row for row, _ in pairs], [chunk for _, chunk in pairs]

    def _forward(self, rows: list[_Row], chunks: list[Chunk]) -> torch.Tensor:
        """Last hidden states of the step's tokens, in packed order."""
        device = self._model.device
        ids = array("i")
        for row, chunk in zip(rows, chunks, strict=True):
            ids.extend(row.resident.ids[chunk.start : chunk.stop])
        positions = torch.tensor([at for chunk in chunks for at in range(chunk.start, chunk.stop)], device=device)
        plan = CachedAttention(self._store, chunks, device, self._model.dtype)
        return packed_hidden(self._model, torch.tensor(ids, device=device), positions, plan)

    def _sample(self, rows: list[_Row], hidden: torch.Tensor) -> None:
        """Draw the next token of each row from its hidden state."""
        requests = [row.request for row in rows]
        ids, logprobs, raw_logprobs = sample(
            self._head(hidden),
            [request.sampling for request in requests],
            [request.noise.random() for request in requests],
        )
        drawn = list(zip(rows, ids.tolist(), logprobs.tolist(), raw_logprobs.tolist(), strict=True))
        if not all(math.isfinite(logprob) for _, _, logprob, _ in drawn):
            raise PolicyError(
                "The model's output is not a distribution (NaN or infinite logits). If it is being trained, its "
                "weights have diverged: go back to an earlier checkpoint, and lower the learning rate."
            )
        for row, token, logprob, raw_logprob in drawn:
            request = row.request
            request.ids.append(token)
            request.logprobs.append(logprob)
            request.raw_logprobs.append(raw_logprob)
            row.resident.ids.append(token)
            if token in request.sampling.stop_ids:
                request.finish = "stop"
            elif len(request.ids) >= request.sampling.max_tokens or len(row.resident.ids) >= self._context_length:
                request.finish = "length"

    def _leave(self, rows: list[_Row]) -> None:
        for row in rows:
            self._rows.remove(row)
            self._table.rest(row.resident)

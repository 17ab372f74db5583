"""Continuous batching: sequences join and leave the running batch between any two steps, on a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import random
import threading
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from transformers import PreTrainedModel

from agentfly.core.errors import PolicyError, describe_error
from agentfly.core.threads.pool import run_in_thread
from agentfly.policies.embedded.kv_cache import KVCache, KVCacheAttention, PrefillChunk
from agentfly.policies.embedded.kv_slots import CachedSequence, SlotAssignment, SlotTable
from agentfly.policies.embedded.packed_attention import packed_hidden
from agentfly.policies.embedded.sampling import OutputLayer, sample
from agentfly.policies.policy import SamplingParams

PREFILL_TOKENS = 512
"""The most prompt tokens that one step computes, so that long prompts do not hold up the rows that are sampling."""


@dataclass(eq=False)
class GenerationRequest:
    """One generation: what was asked, and what has been sampled so far.

    Attributes:
        rollout_id: the rollout it belongs to.
        prompt: the prompt's token ids.
        sampling: how to sample.
        noise: where the request's uniform numbers come from, so that they do not depend on other requests.
        ids, logprobs, raw_logprobs: the sampled tokens.
        version: version of the weights that sample it, known once it has joined the batch.
        finish_reason: why it ended; None while it runs.
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
    finish_reason: Literal["stop", "length"] | None = None
    cancelled: bool = False


@dataclass(eq=False)
class _RunningSequence:
    """A request that is in the batch."""

    request: GenerationRequest
    resident: CachedSequence

    def chunk(self, limit: int) -> PrefillChunk:
        """The row's next tokens, at most ``limit``: the next of its prompt, or the one that was sampled last."""
        resident = self.resident
        return PrefillChunk(resident.slot, resident.computed, min(len(resident.ids) - resident.computed, limit))


class ContinuousBatch:
    """Requests that wait and rows that run, on one model. Not thread-safe: one thread owns it."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_concurrent: int,
        max_cached_sequences: int,
        context_length: int,
        version: int = 0,
    ) -> None:
        """``max_cached_sequences`` is at least ``max_concurrent``, so that a running row always has a slot."""
        self.waiting: deque[GenerationRequest] = deque()  # those of higher priority first
        self._model = model
        self._head = OutputLayer(model)
        self._max_concurrent = max_concurrent
        self._context_length = context_length
        self._version = version
        self._rows: list[_RunningSequence] = []
        self._table = SlotTable(max_cached_sequences)
        self._store = KVCache()

    @property
    def running(self) -> int:
        """The number of rows that are being sampled."""
        return len(self._rows)

    def enqueue(self, request: GenerationRequest) -> None:
        """Let a request wait, behind those of its own priority and before those of a lower one."""
        place = len(self.waiting)
        while place and self.waiting[place - 1].sampling.priority < request.sampling.priority:
            place -= 1
        self.waiting.insert(place, request)

    def forget(self, rollout_id: str) -> None:
        """Give up what is kept of a rollout's earlier turns."""
        self._table.forget(rollout_id)

    def invalidate_cache(self, version: int) -> None:
        """The weights have changed: what is kept of earlier ones is dropped. No row may be running."""
        self._version = version
        self._drop_everything()

    def step(self, *, admit: bool = True) -> list[GenerationRequest]:
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
        ready: list[_RunningSequence] = []
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
        ended = [row for row in ready if row.request.finish_reason is not None]
        self._leave(ended)
        return [row.request for row in ended]

    def abort(self) -> list[GenerationRequest]:
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
        held_back: list[GenerationRequest] = []
        try:
            while self.waiting and len(self._rows) < self._max_concurrent:
                request = self.waiting.popleft()
                placement = self._table.assign(request.rollout_id, request.prompt)
                if placement is None:
                    held_back.append(request)
                else:
                    self._join(request, placement)
        finally:
            self.waiting.extendleft(reversed(held_back))

    def _join(self, request: GenerationRequest, placement: SlotAssignment) -> None:
        resident, source = placement.resident, placement.copy_from
        request.version = self._version
        self._rows.append(_RunningSequence(request, resident))
        self._reserve(resident, len(request.prompt), kept=resident.computed if source is None else 0, needed=source)
        if source is not None:
            self._store.copy(source, resident.slot, resident.computed)

    def _reserve(self, resident: CachedSequence, length: int, *, kept: int, needed: int | None = None) -> None:
        """Make room for a resident; forgotten ones, except in the slot ``needed``, go before more memory is taken."""
        spare = (slot for slot in self._table.evictable_slots() if slot != needed)
        if (given_up := self._store.reserve(resident.slot, length, kept, spare)) is not None:
            self._table.drop(given_up)

    def _next_chunks(self) -> tuple[list[_RunningSequence], list[PrefillChunk]]:
        """The rows of this step in packed order, those that sample first and by place, and the tokens of each."""
        budget = PREFILL_TOKENS
        single: list[tuple[_RunningSequence, PrefillChunk]] = []
        several: list[tuple[_RunningSequence, PrefillChunk]] = []
        for row in self._rows:
            chunk = row.chunk(max(budget, 1))
            self._reserve(row.resident, chunk.stop, kept=row.resident.computed)
            if chunk.count == 1:
                single.append((row, chunk))
            else:
                several.append((row, chunk))
                budget -= chunk.count
        single.sort(key=lambda pair: self._store.row_of(pair[1].slot))
        pairs = single + several
        return [row for row, _ in pairs], [chunk for _, chunk in pairs]

    def _forward(self, rows: list[_RunningSequence], chunks: list[PrefillChunk]) -> torch.Tensor:
        """Last hidden states of the step's tokens, in packed order."""
        device = self._model.device
        ids = array("i")
        for row, chunk in zip(rows, chunks, strict=True):
            ids.extend(row.resident.ids[chunk.start : chunk.stop])
        positions = torch.tensor([at for chunk in chunks for at in range(chunk.start, chunk.stop)], device=device)
        plan = KVCacheAttention(self._store, chunks, device, self._model.dtype)
        return packed_hidden(self._model, torch.tensor(ids, device=device), positions, plan)

    def _sample(self, rows: list[_RunningSequence], hidden: torch.Tensor) -> None:
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
                request.finish_reason = "stop"
            elif len(request.ids) >= request.sampling.max_tokens or len(row.resident.ids) >= self._context_length:
                request.finish_reason = "length"

    def _leave(self, rows: list[_RunningSequence]) -> None:
        for row in rows:
            self._rows.remove(row)
            self._table.release(row.resident)


logger = logging.getLogger(__name__)


class SamplerThread:
    """Steps a `ContinuousBatch` in a thread of its own while there is something to sample.

    All methods are called from one event loop. The batch is touched by the thread alone: what the loop wants of it is
    queued and done between two steps.
    """

    def __init__(self, batch: ContinuousBatch) -> None:
        self._batch = batch
        self._loop = asyncio.get_running_loop()
        self._wake = threading.Condition()
        self._orders: list[Callable[[ContinuousBatch], None]] = []
        self._futures: dict[GenerationRequest, asyncio.Future[None]] = {}
        self._held: asyncio.Event | None = None  # while held; set once nothing runs
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="agentfly-sampler", daemon=True)
        self._thread.start()

    async def generate(self, request: GenerationRequest) -> None:
        """Have the request sampled to its end. Cancelling takes it out of the batch at the next step."""
        if self._closing:
            raise PolicyError("The policy is closed. Generate inside its `async with` block.")
        future = self._loop.create_future()
        self._futures[request] = future
        self.enqueue(lambda batch: batch.enqueue(request))
        try:
            await future
        finally:
            request.cancelled = request.finish_reason is None
            del self._futures[request]

    def enqueue(self, action: Callable[[ContinuousBatch], None]) -> None:
        """Have the thread do something to the batch between two steps, in the order of the calls."""
        with self._wake:
            self._orders.append(action)
            self._wake.notify()

    async def pause(self) -> None:
        """Admit no request until `resume`, and wait until those that run have ended."""
        quiet = asyncio.Event()
        with self._wake:
            self._held = quiet
            self._wake.notify()
        await quiet.wait()

    def resume(self) -> None:
        """Admit requests again."""
        with self._wake:
            self._held = None
            self._wake.notify()

    async def close(self) -> None:
        """Fail what is still being sampled, and end the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        await run_in_thread(self._thread.join)
        error = PolicyError("The policy was closed while a generation was running.")
        self._finish([(request, error) for request in self._futures])

    def _run(self) -> None:
        # Not inference mode: tensors that modules make and keep on the way must be usable in training.
        with torch.no_grad():
            while self._next_orders():
                ended: list[tuple[GenerationRequest, PolicyError | None]] = []
                try:
                    ended = [(request, None) for request in self._batch.step(admit=self._held is None)]
                except Exception as error:
                    if not isinstance(error, PolicyError):
                        logger.exception("A sampling step failed. Its generations fail; sampling goes on.")
                    ended = [(request, _as_policy_error(error)) for request in self._batch.abort()]
                if ended:
                    self._tell(functools.partial(self._finish, ended))

    def _next_orders(self) -> bool:
        """Do what was ordered, and wait for work; False when the sampler is closing."""
        with self._wake:
            while True:
                orders, self._orders = self._orders, []
                for order in orders:
                    order(self._batch)
                if self._closing:
                    return False
                if self._batch.running or (self._batch.waiting and self._held is None):
                    return True
                if self._held is not None:
                    self._tell(self._held.set)
                self._wake.wait()

    def _tell(self, action: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody is left to tell
            self._loop.call_soon_threadsafe(action)

    def _finish(self, ended: list[tuple[GenerationRequest, PolicyError | None]]) -> None:
        for request, error in ended:
            future = self._futures.get(request)
            if future is None or future.done():
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)


def _as_policy_error(error: Exception) -> PolicyError:
    """An error of its own for each generation of a failed step."""
    message = str(error)
    if not isinstance(error, PolicyError):
        message = f"The model failed: {describe_error(error)}"
        if isinstance(error, torch.OutOfMemoryError) or "not enough memory" in message:  # on a GPU, on a processor
            message += " Lower max_concurrent_generations or max_context_tokens, which bound the memory of sampling."
    failure = PolicyError(message)
    failure.__cause__ = error
    return failure

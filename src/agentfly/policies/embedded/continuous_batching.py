"""Continuous batching: sequences join and leave the running batch between any two steps, on a dedicated thread."""

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
"""Maximum number of prompt tokens per step, so that long prompts do not delay the sequences that are sampling."""


@dataclass(eq=False)
class GenerationRequest:
    """One generation: the request, and the tokens sampled so far.

    Attributes:
        rollout_id: the rollout it belongs to.
        prompt: the prompt's token ids.
        sampling: how to sample.
        noise: the request's own random generator, so that its tokens do not depend on other requests.
        ids, logprobs, raw_logprobs: the sampled tokens.
        version: version of the weights that sample it, known once it has joined the batch.
        finish_reason: why it ended; None while it runs.
        cancelled: set from any thread when the result is no longer needed.
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
        """Return at most ``limit`` next tokens to compute: of the prompt, or the token that was sampled last."""
        resident = self.resident
        return PrefillChunk(resident.slot, resident.computed, min(len(resident.ids) - resident.computed, limit))


class ContinuousBatch:
    """Waiting requests and running sequences of one model. It is not thread-safe: one thread owns it."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_concurrent: int,
        max_cached_sequences: int,
        context_length: int,
        version: int = 0,
    ) -> None:
        """``max_cached_sequences`` must be at least ``max_concurrent``, so that every running sequence has a slot."""
        self.waiting: deque[GenerationRequest] = deque()  # higher priority first
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
        """The number of sequences in the batch."""
        return len(self._rows)

    def enqueue(self, request: GenerationRequest) -> None:
        """Add a request to the queue, behind those of its own priority and before those of a lower one."""
        index = len(self.waiting)
        while index and self.waiting[index - 1].sampling.priority < request.sampling.priority:
            index -= 1
        self.waiting.insert(index, request)

    def forget(self, rollout_id: str) -> None:
        """Let the cached turns of a rollout be evicted."""
        self._table.forget(rollout_id)

    def invalidate_cache(self, version: int) -> None:
        """Drop the cache after the weights have changed to ``version``. No sequence may be running."""
        self._version = version
        self._drop_cache()

    def step(self, *, admit: bool = True) -> list[GenerationRequest]:
        """Let waiting requests join if ``admit``, and compute the next tokens of every sequence.

        Return the requests that ended.

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
        """Remove all sequences after a failed step, and free the cache. Return their requests."""
        requests = [row.request for row in self._rows]
        self._leave(list(self._rows))
        self._drop_cache()
        return requests

    def _drop_cache(self) -> None:
        """Drop all cached sequences. No sequence may be running."""
        self._table.clear()
        self._store.clear()

    def _admit(self) -> None:
        """Let waiting requests join in order, as far as there is room."""
        for request in [request for request in self.waiting if request.cancelled]:
            self.waiting.remove(request)
        delayed: list[GenerationRequest] = []
        try:
            while self.waiting and len(self._rows) < self._max_concurrent:
                request = self.waiting.popleft()
                placement = self._table.assign(request.rollout_id, request.prompt)
                if placement is None:
                    delayed.append(request)
                else:
                    self._join(request, placement)
        finally:
            self.waiting.extendleft(reversed(delayed))

    def _join(self, request: GenerationRequest, placement: SlotAssignment) -> None:
        resident, source = placement.resident, placement.copy_from
        request.version = self._version
        self._rows.append(_RunningSequence(request, resident))
        self._reserve(resident, len(request.prompt), kept=resident.computed if source is None else 0, needed=source)
        if source is not None:
            self._store.copy(source, resident.slot, resident.computed)

    def _reserve(self, resident: CachedSequence, length: int, *, kept: int, needed: int | None = None) -> None:
        """Make room for a sequence. Forgotten ones, except in the slot ``needed``, are evicted before memory grows."""
        spare = (slot for slot in self._table.evictable_slots() if slot != needed)
        if (given_up := self._store.reserve(resident.slot, length, kept, spare)) is not None:
            self._table.drop(given_up)

    def _next_chunks(self) -> tuple[list[_RunningSequence], list[PrefillChunk]]:
        """Return the sequences of this step in packed order, and the tokens of each.

        Sequences with one token come first, in the order of their cache rows.
        """
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
        """Compute the last hidden states of the step's tokens, in packed order."""
        device = self._model.device
        ids = array("i")
        for row, chunk in zip(rows, chunks, strict=True):
            ids.extend(row.resident.ids[chunk.start : chunk.stop])
        positions = torch.tensor([at for chunk in chunks for at in range(chunk.start, chunk.stop)], device=device)
        plan = KVCacheAttention(self._store, chunks, device, self._model.dtype)
        return packed_hidden(self._model, torch.tensor(ids, device=device), positions, plan)

    def _sample(self, rows: list[_RunningSequence], hidden: torch.Tensor) -> None:
        """Sample the next token of each sequence from its hidden state."""
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
                "weights have diverged: return to an earlier checkpoint, and lower the learning rate."
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
    """Runs the steps of a `ContinuousBatch` on a dedicated thread while there is something to sample.

    All methods are called from one event loop. Only the thread uses the batch: actions of the loop are queued and run
    between two steps.
    """

    def __init__(self, batch: ContinuousBatch) -> None:
        self._batch = batch
        self._loop = asyncio.get_running_loop()
        self._wake = threading.Condition()
        self._actions: list[Callable[[ContinuousBatch], None]] = []
        self._futures: dict[GenerationRequest, asyncio.Future[None]] = {}
        self._paused: asyncio.Event | None = None  # while paused; set once nothing runs
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="agentfly-sampler", daemon=True)
        self._thread.start()

    async def generate(self, request: GenerationRequest) -> None:
        """Sample a request to its end. A cancellation removes it from the batch at the next step."""
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
        """Queue an action on the batch. Actions run between two steps, in order."""
        with self._wake:
            self._actions.append(action)
            self._wake.notify()

    async def pause(self) -> None:
        """Admit no requests until `resume`, and wait until the running ones have ended."""
        quiet = asyncio.Event()
        with self._wake:
            self._paused = quiet
            self._wake.notify()
        await quiet.wait()

    def resume(self) -> None:
        """Admit requests again."""
        with self._wake:
            self._paused = None
            self._wake.notify()

    async def close(self) -> None:
        """End the thread. Generations that are still running fail."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        await run_in_thread(self._thread.join)
        error = PolicyError("The policy was closed while a generation was running.")
        self._finish([(request, error) for request in self._futures])

    def _run(self) -> None:
        # Not inference mode: tensors that modules create and keep must be usable in training.
        with torch.no_grad():
            while self._run_actions():
                ended: list[tuple[GenerationRequest, PolicyError | None]] = []
                try:
                    ended = [(request, None) for request in self._batch.step(admit=self._paused is None)]
                except Exception as error:
                    if not isinstance(error, PolicyError):
                        logger.exception("A sampling step failed. Its generations fail; sampling continues.")
                    ended = [(request, _as_policy_error(error)) for request in self._batch.abort()]
                if ended:
                    self._call_in_loop(functools.partial(self._finish, ended))

    def _run_actions(self) -> bool:
        """Run the queued actions, and wait for work. Return False when the sampler is closing."""
        with self._wake:
            while True:
                actions, self._actions = self._actions, []
                for action in actions:
                    action(self._batch)
                if self._closing:
                    return False
                if self._batch.running or (self._batch.waiting and self._paused is None):
                    return True
                if self._paused is not None:
                    self._call_in_loop(self._paused.set)
                self._wake.wait()

    def _call_in_loop(self, action: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
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
    """Return a new error for one generation of a failed step."""
    message = str(error)
    if not isinstance(error, PolicyError):
        message = f"The model failed: {describe_error(error)}"
        if isinstance(error, torch.OutOfMemoryError) or "not enough memory" in message:  # on a GPU, on a processor
            message += " Lower max_concurrent_generations or max_context_tokens, which bound the memory of sampling."
    failure = PolicyError(message)
    failure.__cause__ = error
    return failure

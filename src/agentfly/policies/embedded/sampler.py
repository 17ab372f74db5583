"""Sampler: the thread that steps the running batch, and how the event loop speaks to it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
from collections.abc import Callable

import torch

from agentfly.errors import PolicyError, say
from agentfly.policies.embedded.batch import Request, RunningBatch
from agentfly.threads.pool import on_thread

logger = logging.getLogger(__name__)


class Sampler:
    """Steps a `RunningBatch` in a thread of its own while there is something to sample.

    All methods are called from one event loop. The batch is touched by the thread alone: what the loop wants of it is
    queued and done between two steps.
    """

    def __init__(self, batch: RunningBatch) -> None:
        self._batch = batch
        self._loop = asyncio.get_running_loop()
        self._wake = threading.Condition()
        self._orders: list[Callable[[RunningBatch], None]] = []
        self._futures: dict[Request, asyncio.Future[None]] = {}
        self._held: asyncio.Event | None = None  # while held; set once nothing runs
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="agentfly-sampler", daemon=True)
        self._thread.start()

    async def complete(self, request: Request) -> None:
        """Have the request sampled to its end. Cancelling takes it out of the batch at the next step."""
        if self._closing:
            raise PolicyError("The policy is closed. Generate inside its `async with` block.")
        future = self._loop.create_future()
        self._futures[request] = future
        self.order(lambda batch: batch.ask(request))
        try:
            await future
        finally:
            request.cancelled = request.finish is None
            del self._futures[request]

    def order(self, action: Callable[[RunningBatch], None]) -> None:
        """Have the thread do something to the batch between two steps, in the order of the calls."""
        with self._wake:
            self._orders.append(action)
            self._wake.notify()

    async def hold(self) -> None:
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
        await on_thread(self._thread.join)
        error = PolicyError("The policy was closed while a generation was running.")
        self._finish([(request, error) for request in self._futures])

    def _run(self) -> None:
        # Not inference mode: tensors that modules make and keep on the way must be usable in training.
        with torch.no_grad():
            while self._next_orders():
                ended: list[tuple[Request, PolicyError | None]] = []
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

    def _finish(self, ended: list[tuple[Request, PolicyError | None]]) -> None:
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
        message = f"The model failed: {say(error)}"
        if isinstance(error, torch.OutOfMemoryError) or "not enough memory" in message:  # on a GPU, on a processor
            message += " Lower max_concurrent_generations or max_context_tokens, which bound the memory of sampling."
    failure = PolicyError(message)
    failure.__cause__ = error
    return failure

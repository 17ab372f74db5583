"""Server fleet: the vLLM servers of one policy. All serve the same weights, or none is used."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Literal, TypeVar

from agentfly.core.errors import (
    AgentFlyError,
    APIUnavailable,
    PolicyError,
    PolicyUnavailable,
    PrerequisiteError,
    ResourceError,
    WeightUpdateError,
    describe_error,
    error_message,
)
from agentfly.core.signals import should_propagate
from agentfly.policies.vllm.servers import PolicyServer
from agentfly.policies.vllm.weight_sync import TrainerLogprobs, WeightCheck, compute_logprobs, mean_abs_difference
from agentfly.resources.model_server.token_server import LOAD_WEIGHTS, TokenSample


class StickyRouter:
    """Sends all generations of a rollout to one server, whose cache holds the rollout's earlier turns.

    A new rollout goes to the server with the fewest rollouts. Ties are broken by the highest hash of server and rollout
    (rendezvous hashing), which does not depend on the process or the order of the servers. When a server is lost, only
    its own rollouts move.
    """

    def __init__(self) -> None:
        self._places: dict[str, str] = {}
        self._loads: Counter[str] = Counter()

    def route(self, rollout_id: str, servers: Collection[str]) -> str:
        """Return the name of the server of a rollout.

        Args:
            rollout_id: the rollout.
            servers: names of the usable servers, at least one.
        """
        at = self._places.get(rollout_id)
        if at is not None:
            if at in servers:
                return at
            self.release_rollout(rollout_id)
        chosen = min(servers, key=lambda server: (self._loads[server], -_weight(server, rollout_id)))
        self._places[rollout_id] = chosen
        self._loads[chosen] += 1
        return chosen

    def release_rollout(self, rollout_id: str) -> None:
        """Remove a rollout that has ended."""
        if (at := self._places.pop(rollout_id, None)) is not None:
            self._loads[at] -= 1

    @property
    def loads(self) -> dict[str, int]:
        """Number of rollouts of each server."""
        return {server: load for server, load in self._loads.items() if load}


def _weight(server: str, rollout_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{server}\0{rollout_id}".encode(), digest_size=8).digest())


logger = logging.getLogger(__name__)

T = TypeVar("T")

ADAPTER = "policy"
"""The name under which a policy's LoRA adapter is loaded."""

_AS_STARTED = "default"  # vLLM's own label of the weights that a server started with
_FIRST_RETRY_S, _LAST_RETRY_S = 0.1, 15.0


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """The weights that the servers must serve.

    Attributes:
        directory: directory of safetensors files that replace the model's own; None for its own.
        adapter: directory of the LoRA adapter on top, if there is one.
        version: their version in trajectories.
        serial: number of the update attempt, which may fail; 0 for the first weights.
        expected: log-probs of the probe by the reference; None if nothing was checked yet.
    """

    directory: Path | None = None
    adapter: Path | None = None
    version: int = 0
    serial: int = 0
    expected: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """An update of the weights that was checked on every server.

    Attributes:
        version: the version of the weights from now on.
        logprob_gap: mean absolute difference between served and reference log-probs of the probe, in nats per token:
            the largest of all servers.
        previous_logprob_gap: the same difference for the weights that were served before the update.
        paused_s: seconds in which nothing could be sampled.
    """

    version: int
    logprob_gap: float
    previous_logprob_gap: float
    paused_s: float


@dataclass
class ServerFleet:
    """The servers of a policy.

    Args:
        members: the servers.
        proof: checks that a server serves the weights that it was given.
        running: what an update does with running generations: it waits for their end, or keeps them, so that they
            continue with the new weights.
        load_method: the worker's method that loads weights.
        drain_timeout_s: maximum number of seconds that an update waits for running generations.
        server_wait_timeout_s: maximum number of seconds that a generation waits for a server, or for an update.
    """

    members: Sequence[PolicyServer]
    proof: WeightCheck
    running: Literal["wait", "keep"] = "wait"
    load_method: str = LOAD_WEIGHTS
    drain_timeout_s: float = 600.0
    server_wait_timeout_s: float = 600.0
    weights: ServedWeights = field(default_factory=ServedWeights)
    routes: StickyRouter = field(default_factory=StickyRouter)

    def __post_init__(self) -> None:
        self._id = f"agentfly-{uuid.uuid4().hex[:8]}"
        self._serials = count(1)
        self._proved = {self.weights.serial: self.weights.version}
        self._unusable: str | None = None
        self._updating = False
        self._lock = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._reviving: dict[str, asyncio.Task[None]] = {}
        self._why: dict[str, str] = {}  # why servers cannot be used, by their names

    # --- lifecycle --------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect to all servers. Raises the errors of `PolicyServer.connect`."""
        await _all([self._admit_server(member) for member in self.members])

    async def close(self) -> None:
        """Release all servers."""
        for task in self._reviving.values():
            task.cancel()
        await asyncio.gather(*self._reviving.values(), return_exceptions=True)
        await asyncio.gather(*(member.close() for member in self.members), return_exceptions=True)

    # --- using it ---------------------------------------------------------------------------------------------------

    async def server_for(self, rollout_id: str) -> PolicyServer:
        """Return the server of a rollout. Wait until one is usable.

        Raises:
            WeightUpdateError: the last update failed.
            PolicyUnavailable: no server was usable, or an update did not end, within ``server_wait_timeout_s``.
        """
        await self._wait_until_usable()
        by_name = {member.name: member for member in self.members if member.usable}
        return by_name[self.routes.route(rollout_id, by_name.keys())]

    async def versions(self, sample: TokenSample) -> int | tuple[int, ...] | None:
        """Return the version of a sample's weights, or one version per id if they differ; None if not the policy's.

        A sample made with new weights is accepted once these have been checked.

        Raises:
            WeightUpdateError: the check of the weights failed.
        """
        prefix = f"{self._id}:"
        if not sample.weight_versions or not all(span.version.startswith(prefix) for span in sample.weight_versions):
            return None
        spans = [(int(span.version.removeprefix(prefix)), span.stop - span.start) for span in sample.weight_versions]
        if any(serial not in self._proved for serial, _ in spans):
            await self._wait_until_usable()
        if any(serial not in self._proved for serial, _ in spans):
            raise WeightUpdateError("A sample was made with weights that failed their check, and is refused.")
        if len(spans) == 1:
            return self._proved[spans[0][0]]
        return tuple(self._proved[serial] for serial, length in spans for _ in range(length))

    def mark_unavailable(self, member: PolicyServer, why: str) -> None:
        """Stop using a server that does not answer or has other weights, and try to recover it."""
        if member.usable:
            logger.warning("%s is left out: %s", member.name, why)
            member.usable = False
            self._why[member.name] = why
        if member.name not in self._reviving:
            task = asyncio.create_task(self._reconnect(member), name=f"revive {member.name}")
            self._reviving[member.name] = task

    async def _wait_until_usable(self) -> None:
        """Wait until no update is running and a server is usable.

        Raises:
            WeightUpdateError: the last update failed.
            PolicyUnavailable: the wait took longer than ``server_wait_timeout_s``.
        """
        if not self._is_settled():
            try:
                async with asyncio.timeout(self.server_wait_timeout_s), self._changed:
                    await self._changed.wait_for(self._is_settled)
            except TimeoutError:
                reasons = "; ".join(
                    f"{member.name} ({self._why.get(member.name, 'an update of its weights did not end')})"
                    for member in self.members
                )
                raise PolicyUnavailable(
                    f"No server could be used for {self.server_wait_timeout_s:g} s: {reasons}."
                ) from None
        if self._unusable is not None:
            raise WeightUpdateError(self._unusable)

    def _is_settled(self) -> bool:
        return not self._updating and (self._unusable is not None or any(member.usable for member in self.members))

    # --- weights ----------------------------------------------------------------------------------------------------

    async def update(self, weights: ServedWeights, reference: TrainerLogprobs) -> WeightUpdate:
        """Load other weights into all servers, and check that they serve them.

        Raises:
            PolicyUnavailable: no server is usable, or generations did not end in time; the weights are unchanged.
            WeightUpdateError: a server could not be updated. Nothing is sampled until an update succeeds.
            WeightMismatch: a server does not serve the new weights, by the check. The consequence is the same.
        """
        async with self._lock:
            expected = await compute_logprobs(reference, self.proof.ids)
            members = [member for member in self.members if member.usable]
            if not members:
                raise PolicyUnavailable("No server can be used, so none can be updated.")
            was_served = await self._on_all(members, lambda member: self._score(member, self.weights))
            before = max(mean_abs_difference(served, expected) for served in was_served)
            weights = replace(weights, serial=next(self._serials), expected=expected)
            began = time.monotonic()
            self._updating = True
            try:
                distances = await self._change(members, weights, was_served)
                self.weights, self._unusable = weights, None
                self._proved[weights.serial] = weights.version
            finally:
                self._updating = False
                await asyncio.shield(self._tell())
            return WeightUpdate(weights.version, max(distances), before, time.monotonic() - began)

    async def _change(
        self, members: Sequence[PolicyServer], weights: ServedWeights, was_served: Sequence[tuple[float, ...]]
    ) -> list[float]:
        async def pause(member: PolicyServer) -> None:
            await member.server.pause(self.running, call_timeout_s=self.drain_timeout_s / 2)  # it is tried twice

        async def prove(member: PolicyServer) -> float:
            served, was = await self._score(member, weights), was_served[members.index(member)]
            known = None if self.weights.expected is None else (was, self.weights.expected)
            assert weights.expected is not None
            return self.proof.check(member.name, served, weights.expected, known)

        try:
            try:
                await self._on_all(members, pause)
            except WeightUpdateError as error:
                raise PolicyUnavailable(f"The weights are unchanged: {error}") from error
            self._unusable = "An update of the weights was interrupted. Update them again."
            await self._on_all(members, lambda member: self._load_weights(member, weights))
            await self._on_all(members, lambda member: member.server.resume())
            return await self._on_all(members, prove)
        except BaseException as error:
            if self._unusable is not None and isinstance(error, AgentFlyError):
                self._unusable = f"The last update of the weights failed: {error_message(error)}"
            await asyncio.shield(
                asyncio.gather(*(member.server.resume() for member in members), return_exceptions=True)
            )
            raise

    async def _load_weights(self, member: PolicyServer, weights: ServedWeights) -> None:
        server = member.server
        if weights.directory is not None:
            await server.load_weights(weights.directory, by=self.load_method)
        if weights.adapter is not None:
            await server.load_adapter(ADAPTER, weights.adapter)
        await server.reset_prefix_cache(running=self.running == "keep")
        await server.set_weight_version(self._label(weights))

    async def _score(self, member: PolicyServer, weights: ServedWeights) -> tuple[float, ...]:
        adapter = ADAPTER if weights.adapter is not None else None
        return await member.server.sampled_logprobs(self.proof.ids, adapter=adapter)

    async def _on_all(self, members: Sequence[PolicyServer], do: Callable[[PolicyServer], Awaitable[T]]) -> list[T]:
        """Call ``do`` for all servers concurrently, and a second time if no answer comes. It must be repeatable.

        Raises:
            WeightUpdateError: it failed for a server; the message names it.
        """

        async def named(member: PolicyServer) -> T:
            try:
                try:
                    return await do(member)
                except APIUnavailable:  # an idle connection may just have been closed
                    return await do(member)
            except ResourceError as error:
                raise WeightUpdateError(f"{member.name} could not be updated: {error_message(error)}") from error

        return await _all([named(member) for member in members])

    def _label(self, weights: ServedWeights) -> str:
        return f"{self._id}:{weights.serial}"

    # --- recovery of servers ------------------------------------------------------------------------------------------

    async def _reconnect(self, member: PolicyServer) -> None:
        """Try until a server is usable again: it answers, and serves the policy's weights by the check."""
        async with self._lock:
            pass  # an update that has lost the server ends first, because the server may be paused
        wait_s, task = _FIRST_RETRY_S, asyncio.current_task()
        while not member.usable:
            try:
                await self._admit_server(member)
            except BaseException as error:  # whatever it is: nothing else would try again
                if should_propagate(error, task) or task is None or task.cancelling():
                    raise
                self._why[member.name] = (
                    error_message(error) if isinstance(error, AgentFlyError) else describe_error(error)
                )
                trace = None if isinstance(error, AgentFlyError) else error
                logger.warning("%s cannot be used yet: %s", member.name, self._why[member.name], exc_info=trace)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _LAST_RETRY_S)
        del self._reviving[member.name]
        await self._tell()

    async def _admit_server(self, member: PolicyServer) -> None:
        """Connect to a server, load the policy's weights unless it has them, and mark it as usable."""
        await member.connect()
        async with self._lock:
            weights, label = self.weights, await member.server.weight_version()
            if label != self._label(weights):
                if weights.directory is None and label != _AS_STARTED:
                    await self._restore_own_weights(member)
                await self._load_weights(member, weights)
                if weights.expected is not None:
                    self.proof.check(member.name, await self._score(member, weights), weights.expected)
            member.usable = True

    async def _restore_own_weights(self, member: PolicyServer) -> None:
        """Load the original weights of a server that another policy has used."""
        if self.load_method != LOAD_WEIGHTS:
            raise PrerequisiteError(
                f"{member.name} serves weights of another policy, and only {LOAD_WEIGHTS} restores its own reliably. "
                "Restart the server."
            )
        await member.server.load_weights(None)

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()


async def _all(calls: Sequence[Awaitable[T]]) -> list[T]:
    """Return the results of concurrent calls, or raise the first error once all have ended."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    failed = [result for result in results if isinstance(result, BaseException)]
    if failed:
        raise next((one for one in failed if isinstance(one, PolicyError)), failed[0])
    return [result for result in results if not isinstance(result, BaseException)]

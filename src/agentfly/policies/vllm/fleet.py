"""Server fleet: the servers of a policy as one. All serve the same weights, or none is used."""

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
    """Sends all generations of a rollout to one server, where the keys and values of its earlier turns are.

    A new rollout goes to the server with the fewest rollouts; among equals to the one with the highest hash of server
    and rollout (rendezvous hashing), which is the same in every process and however the servers are listed. When a
    server goes, only its own rollouts move.
    """

    def __init__(self) -> None:
        self._places: dict[str, str] = {}
        self._loads: Counter[str] = Counter()

    def route(self, rollout_id: str, servers: Collection[str]) -> str:
        """The server of a rollout.

        Args:
            rollout_id: the rollout.
            servers: names of those that can be used, at least one.
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
        """The rollout has ended."""
        if (at := self._places.pop(rollout_id, None)) is not None:
            self._loads[at] -= 1

    @property
    def loads(self) -> dict[str, int]:
        """How many rollouts each server has."""
        return {server: load for server, load in self._loads.items() if load}


def _weight(server: str, rollout_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{server}\0{rollout_id}".encode(), digest_size=8).digest())


logger = logging.getLogger(__name__)

T = TypeVar("T")

ADAPTER = "policy"
"""The name under which a policy's LoRA adapter is loaded."""

_AS_STARTED = "default"  # the label of vLLM's weights that nobody has given one
_FIRST_RETRY_S, _LAST_RETRY_S = 0.1, 15.0


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """What the servers are to serve.

    Attributes:
        directory: safetensors files in the place of the model's own; None for its own.
        adapter: directory of the LoRA adapter on top, if there is one.
        version: what they are called in trajectories.
        serial: the number of the attempt to put them into the servers, of which one may fail; the first ones have 0.
        expected: log-probs of the probe by the reference; None where nothing has been proved yet.
    """

    directory: Path | None = None
    adapter: Path | None = None
    version: int = 0
    serial: int = 0
    expected: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """An update that every server was proved to have made.

    Attributes:
        version: the version of the weights from now on.
        logprob_gap: mean absolute difference of the probe's log-probs, served and by the reference, in nats a token:
            the largest of all servers.
        previous_logprob_gap: the same distance of what was served before the update.
        paused_s: seconds for which nothing could be sampled.
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
        proof: shows that a server serves what it was given.
        running: what becomes of generations that an update finds: it waits for them, or they are kept and go on
            with the new weights.
        load_method: the worker's method that loads weights.
        drain_timeout_s: seconds that an update waits for generations to end.
        server_wait_timeout_s: seconds that a generation waits for a server, or for the end of an update.
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
        self._why: dict[str, str] = {}  # servers cannot be used, or could not when they were tried last

    # --- lifecycle --------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect to all servers. Errors are those of `PolicyServer.connect`."""
        await _all([self._admit_server(member) for member in self.members])

    async def close(self) -> None:
        """Give all servers back."""
        for task in self._reviving.values():
            task.cancel()
        await asyncio.gather(*self._reviving.values(), return_exceptions=True)
        await asyncio.gather(*(member.close() for member in self.members), return_exceptions=True)

    # --- using it ---------------------------------------------------------------------------------------------------

    async def server_for(self, rollout_id: str) -> PolicyServer:
        """The server of a rollout, once there is one that can be used.

        Raises:
            WeightUpdateError: the last update failed.
            PolicyUnavailable: all servers are gone, or an update does not end, for ``server_wait_timeout_s``.
        """
        await self._wait_until_usable()
        by_name = {member.name: member for member in self.members if member.usable}
        return by_name[self.routes.route(rollout_id, by_name.keys())]

    async def versions(self, sample: TokenSample) -> int | tuple[int, ...] | None:
        """The version of the weights that a sample came from, one for each id if they differ; None if foreign.

        A sample that new weights had a part in is good once they have been proved.

        Raises:
            WeightUpdateError: they were not.
        """
        prefix = f"{self._id}:"
        if not sample.weight_versions or not all(span.version.startswith(prefix) for span in sample.weight_versions):
            return None
        spans = [(int(span.version.removeprefix(prefix)), span.stop - span.start) for span in sample.weight_versions]
        if any(serial not in self._proved for serial, _ in spans):
            await self._wait_until_usable()
        if any(serial not in self._proved for serial, _ in spans):
            raise WeightUpdateError("A sample was made with weights that were not proved, and is refused.")
        if len(spans) == 1:
            return self._proved[spans[0][0]]
        return tuple(self._proved[serial] for serial, length in spans for _ in range(length))

    def mark_unavailable(self, member: PolicyServer, why: str) -> None:
        """A server does not answer, or does not hold the policy's weights: it is not used until both is mended."""
        if member.usable:
            logger.warning("%s is left out: %s", member.name, why)
            member.usable = False
            self._why[member.name] = why
        if member.name not in self._reviving:
            task = asyncio.create_task(self._reconnect(member), name=f"revive {member.name}")
            self._reviving[member.name] = task

    async def _wait_until_usable(self) -> None:
        """Wait until no update is under way and there is a server to use, or none may be used."""
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
        """Have all servers serve other weights, and prove that they do. Then the policy's version is theirs.

        Raises:
            PolicyUnavailable: no server can be used, or generations did not end in time; the weights are the old ones.
            WeightUpdateError: a server could not make it. Nothing is sampled until an update succeeds.
            WeightMismatch: the same, found by the proof.
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
                raise PolicyUnavailable(f"The weights are the old ones: {error}") from error
            self._unusable = "An update of the weights was cut short. Update them again."
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
        """Do something with each server at once, and once more where no answer comes, since all of it can be repeated.

        Raises:
            WeightUpdateError: it failed with one; the message says with which.
        """

        async def named(member: PolicyServer) -> T:
            try:
                try:
                    return await do(member)
                except APIUnavailable:  # a connection that was idle may have been closed just then
                    return await do(member)
            except ResourceError as error:
                raise WeightUpdateError(f"{member.name} could not be updated: {error_message(error)}") from error

        return await _all([named(member) for member in members])

    def _label(self, weights: ServedWeights) -> str:
        return f"{self._id}:{weights.serial}"

    # --- servers that went away ---------------------------------------------------------------------------------------

    async def _reconnect(self, member: PolicyServer) -> None:
        """Try until a server can be used again: it answers, and is proved to serve the policy's weights."""
        async with self._lock:
            pass  # an update that lost it ends first: it may be paused
        wait_s, task = _FIRST_RETRY_S, asyncio.current_task()
        while not member.usable:
            try:
                await self._admit_server(member)
            except BaseException as error:  # nobody else would try again, whatever it is
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
        """Have a server, give it the policy's weights unless it holds them, and use it."""
        await member.connect()
        async with self._lock:
            weights, label = self.weights, await member.server.weight_version()
            if label != self._label(weights):
                if weights.directory is None and label != _AS_STARTED:
                    await self._give_its_own(member)
                await self._load_weights(member, weights)
                if weights.expected is not None:
                    self.proof.check(member.name, await self._score(member, weights), weights.expected)
            member.usable = True

    async def _give_its_own(self, member: PolicyServer) -> None:
        """Have a server that another policy has used go back to the weights that it started with."""
        if self.load_method != LOAD_WEIGHTS:
            raise PrerequisiteError(
                f"{member.name} serves weights that another policy put there, and only {LOAD_WEIGHTS} is sure to bring "
                "back its own. Start the server again."
            )
        await member.server.load_weights(None)

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()


async def _all(calls: Sequence[Awaitable[T]]) -> list[T]:
    """The results of calls made at once; the first error, once all have ended."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    failed = [result for result in results if isinstance(result, BaseException)]
    if failed:
        raise next((one for one in failed if isinstance(one, PolicyError)), failed[0])
    return [result for result in results if not isinstance(result, BaseException)]

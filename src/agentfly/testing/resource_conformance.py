"""The conformance suite of resources: checks the contract that the engine relies on.

::

    async def test_my_resource_keeps_the_contract():
        await check_resource(
            MySpec(),
            dirty=lambda resource: resource.write("secret"),
            is_clean=lambda resource: resource.read() == "",
        )

It starts and removes about thirty real instances of the spec. Optional features of a kind are detected and checked,
too: freezing, preparation, removal by traces.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import json
import tempfile
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import cloudpickle

from agentfly.core.errors import ConfigError, PrerequisiteError
from agentfly.resources.engine import orphans
from agentfly.resources.engine.engine import ResourceEngine
from agentfly.resources.kind import import_object
from agentfly.resources.resource import Resource, Scope, Status
from agentfly.resources.spec import ResourceSpec, create_resource, kind_of, prepare

R = TypeVar("R", bound=Resource)

Act = Callable[[R], Awaitable[object] | object]
Ask = Callable[[R], Awaitable[bool] | bool]

CUTS = (0.0, 0.001, 0.01, 0.1, 0.5)
"""Seconds after which a start is cancelled, from before its first step on."""


async def check_resource(
    spec: ResourceSpec[R],
    *,
    dirty: Act[R] | None = None,
    is_clean: Ask[R] | None = None,
    use: Callable[[R], Awaitable[object]] | None = None,
) -> None:
    """Check every clause of the contract in `agentfly.resources.resource.Resource` for a kind of resource.

    Args:
        spec: the spec of the instances to start.
        dirty: leaves something in an instance, as an owner would; a sync or async function.
        is_clean: returns whether an instance shows nothing of that; a sync or async function.
        use: a call of an owner that takes a minute or more, such as a command that sleeps.

    Raises:
        AssertionError: a clause is violated; the message gives the clause and the observation.
    """
    suite = _ConformanceSuite(spec, dirty, is_clean, use)
    suite.spec_is_a_key_and_travels()
    await suite.is_prepared_for()
    await suite.lives_and_goes()
    await suite.is_clean_after_a_reset()
    await suite.shares_nothing()
    await suite.is_released_whatever_came_of_the_start()
    await suite.is_released_while_it_is_used()
    await suite.is_released_though_the_release_was_cut_off()
    await suite.stands_still_while_it_is_frozen()
    await suite.is_removed_by_its_traces()
    await suite.is_replaced_by_the_engine_once_it_is_gone()


class _ConformanceSuite(Generic[R]):
    def __init__(
        self,
        spec: ResourceSpec[R],
        dirty: Act[R] | None,
        is_clean: Ask[R] | None,
        use: Callable[[R], Awaitable[object]] | None,
    ) -> None:
        self.spec = spec
        self.dirty = dirty
        self.is_clean = is_clean
        self.use = use
        self.freezes = False

    def spec_is_a_key_and_travels(self) -> None:
        again = type(self.spec)(
            **{field.name: getattr(self.spec, field.name) for field in dataclasses.fields(self.spec)}
        )
        _require(again == self.spec and hash(again) == hash(self.spec), "Equal specs are equal and have one hash")
        frozen = False
        try:
            self.spec.capacity = self.spec.capacity  # type: ignore[misc]
        except AttributeError:
            frozen = True
        _require(frozen, "A spec is frozen: write @dataclass(frozen=True, kw_only=True)")
        travelled = cloudpickle.loads(cloudpickle.dumps(self.spec))
        _require(type(travelled).__name__ == type(self.spec).__name__, "A spec can be pickled by cloudpickle")

    async def is_prepared_for(self) -> None:
        key = self.spec.preparation_key
        if key is None:
            return
        hash(key)
        preparing = asyncio.ensure_future(prepare(self.spec))
        await asyncio.sleep(0.01)
        preparing.cancel()
        await asyncio.wait({preparing}, timeout=self.spec.prepare_timeout_s)
        for clause in ("prepare() succeeds after one that was cancelled", "prepare() succeeds where all is there"):
            await self._within(prepare(self.spec), self.spec.prepare_timeout_s, clause)

    async def lives_and_goes(self) -> None:
        resource = self._make()
        self._check_traces(resource, "before start()")
        async with self._started(resource):
            self._check_traces(resource, "after start()")
            await self._expect(resource, Status.HEALTHY, "after start()")
            statuses = await asyncio.gather(*(resource.status() for _ in range(3)))
            _require(set(statuses) == {Status.HEALTHY}, "status() may be called by several at once", statuses)
        await self._expect(resource, Status.BROKEN, "after release()")
        again = asyncio.gather(*(resource.release() for _ in range(3)))
        await self._within(again, self.spec.release_timeout_s * 2, "release() may be called again, by several at once")

    async def is_clean_after_a_reset(self) -> None:
        resource = self._make()
        async with self._started(resource):
            await self._expect_clean(resource, "after start()")
            for _ in range(2):
                await self._dirty(resource)
                await self._within(resource.reset(), self.spec.reset_timeout_s, "reset() succeeds on a used instance")
                await self._expect(resource, Status.HEALTHY, "after reset()")
                await self._expect_clean(resource, "after reset()")

    async def shares_nothing(self) -> None:
        if self.spec.capacity < 2:
            return
        one, other = self._make(), self._make()
        async with self._started(one), self._started(other):
            await self._dirty(one)
            await self._expect_clean(other, "while another instance of the spec is used")
            await one.release()
            await self._expect(other, Status.HEALTHY, "after another instance of the spec was released")

    async def is_released_whatever_came_of_the_start(self) -> None:
        never_started = self._make()
        await self._within(
            never_started.release(), self.spec.release_timeout_s * 2, "release() copes with a start() never called"
        )
        for cut in CUTS:
            resource = self._make()
            starting = asyncio.create_task(resource.start())
            await asyncio.sleep(cut)
            starting.cancel()
            await asyncio.sleep(0)
            starting.cancel()  # who gives up may be given up
            await asyncio.wait({starting}, timeout=self.spec.start_timeout_s)
            _require(starting.done(), f"start() ends when it is cancelled ({cut} s after it began)")
            await self._within(
                resource.release(),
                self.spec.release_timeout_s * 2,
                f"release() copes with a start() that was cancelled after {cut} s",
            )
            await self._expect(resource, Status.BROKEN, f"when start() was cancelled after {cut} s and it was released")

    async def is_released_while_it_is_used(self) -> None:
        if self.use is None:
            return
        resource = self._make()
        async with self._started(resource):
            using = asyncio.ensure_future(self.use(resource))
            await asyncio.wait({using}, timeout=0.2)
            _require(not using.done(), "use() takes a while", using)
            await self._expect(resource, Status.HEALTHY, "while it is used")
            await self._within(resource.release(), self.spec.release_timeout_s * 2, "release() while it is used")
            await asyncio.wait({using}, timeout=self.spec.release_timeout_s)
            _require(using.done(), "What an owner had called ends when the instance is released")
            with contextlib.suppress(Exception, asyncio.CancelledError):
                using.result()
        await self._expect(resource, Status.BROKEN, "after a release() while it was used")

    async def is_released_though_the_release_was_cut_off(self) -> None:
        for cut in CUTS[:3]:
            resource = self._make()
            async with self._started(resource):
                releasing = asyncio.create_task(resource.release())
                await asyncio.sleep(cut)
                releasing.cancel()
                await asyncio.wait({releasing}, timeout=self.spec.release_timeout_s * 2)
                _require(releasing.done(), f"release() ends when it is cancelled ({cut} s after it began)")
            await self._expect(resource, Status.BROKEN, "after a release() that was cancelled and called again")

    async def stands_still_while_it_is_frozen(self) -> None:
        try:
            spec = dataclasses.replace(self.spec, idle="freeze")
        except ConfigError:
            return  # such a spec is refused at once
        resource = create_resource(spec, f"conformance-{uuid.uuid4().hex[:12]}")
        if not resource.can_freeze:
            return
        try:
            await resource.start()
        except PrerequisiteError:
            await resource.release()
            return  # not on this machine
        self.freezes = True
        async with self._released(resource):
            await self._within(resource.thaw(), spec.reset_timeout_s, "thaw() is fine where nothing is frozen")
            for _ in range(2):
                for _ in range(2):
                    await self._within(resource.freeze(), spec.reset_timeout_s, "freeze() succeeds, and again")
                await self._expect(resource, Status.HEALTHY, "while it is frozen")
                for _ in range(2):
                    await self._within(resource.thaw(), spec.reset_timeout_s, "thaw() succeeds, and again")
                await self._expect_clean(resource, "after it was frozen and thawed")
            for cut in CUTS[:3]:
                freezing = asyncio.create_task(resource.freeze())
                await asyncio.sleep(cut)
                freezing.cancel()
                await asyncio.wait({freezing}, timeout=spec.reset_timeout_s)
                _require(freezing.done(), f"freeze() ends when it is cancelled ({cut} s after it began)")
                await self._within(resource.thaw(), spec.reset_timeout_s, "thaw() succeeds after a freeze() cut off")
            await self._dirty(resource)
            await self._within(resource.reset(), spec.reset_timeout_s, "reset() succeeds after a thaw()")
            await self._expect_clean(resource, "after it was frozen, thawed and reset")
            await self._within(resource.freeze(), spec.reset_timeout_s, "freeze() succeeds after a reset")
        await self._expect(resource, Status.BROKEN, "when it was released while it was frozen")

    async def is_removed_by_its_traces(self) -> None:
        address = kind_of(self.spec).reap_address
        if address is None:
            return
        reap = import_object(address)
        resource = self._make()
        before = _through_json(resource.traces)
        async with self._started(resource):
            traces = _through_json(resource.traces)
            if not traces:
                return  # it lives within this process and ends with it
            if self.freezes:
                await self._within(resource.freeze(), self.spec.reset_timeout_s, "freeze() succeeds")
            await orphans.run_reap(reap, traces)
            await self._expect(resource, Status.BROKEN, "when reap() had removed it by its traces")
        for when, left in (("after it is gone", traces), ("with the traces from before a start()", before)):
            try:
                await orphans.run_reap(reap, left)
            except Exception as error:
                raise AssertionError(f"reap() must do nothing {when}, but it raised {error!r}.") from error

    async def is_replaced_by_the_engine_once_it_is_gone(self) -> None:
        with tempfile.TemporaryDirectory() as directory:
            async with ResourceEngine(ledger=Path(directory)) as engine:
                first = await engine.acquire(self.spec, "first owner")
                if self.spec.preparation_key is not None:
                    engine.prefetch([self.spec])
                await self._dirty(first.resource)
                await first.resource.release()
                _require(await engine.check(first) is Status.BROKEN, "status() reports an instance that is gone")
                await engine.release(first)
                second = await engine.acquire(self.spec, "second owner", scope=Scope.CALL)
                _require(second.instance != first.instance, "An instance that is gone is not given out again")
                await self._expect_clean(second.resource, "for its first owner")
            _require(_is_empty(directory), "Nothing is left in the ledger when the engine is closed")

    def _make(self) -> R:
        return create_resource(self.spec, f"conformance-{uuid.uuid4().hex[:12]}")

    @contextlib.asynccontextmanager
    async def _started(self, resource: R) -> AsyncIterator[None]:
        async with self._released(resource):
            await self._within(resource.start(), self.spec.start_timeout_s, "start() succeeds")
            yield

    @contextlib.asynccontextmanager
    async def _released(self, resource: R) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await self._within(resource.release(), self.spec.release_timeout_s * 2, "release() succeeds")

    async def _within(self, work: Awaitable[object], limit_s: float, clause: str) -> None:
        try:
            async with asyncio.timeout(limit_s):
                await work
        except Exception as error:
            raise AssertionError(f"{clause}, within {limit_s:g} s: {type(error).__name__}: {error}") from error

    async def _expect(self, resource: R, expected: Status, when: str) -> None:
        try:
            async with asyncio.timeout(self.spec.reset_timeout_s):
                status = await resource.status()
        except Exception as error:
            raise AssertionError(f"status() never raises nor hangs, {when}: {error!r}") from error
        _require(status is expected, f"status() is {expected.value} {when}", status)
        if expected is Status.HEALTHY:
            _require(resource.quick_status() is expected, f"quick_status() is healthy {when}, at once")

    async def _dirty(self, resource: R) -> None:
        if self.dirty is not None:
            await _await(self.dirty(resource))
            if self.is_clean is not None:
                _require(not await _await(self.is_clean(resource)), "is_clean() sees what dirty() leaves behind")

    async def _expect_clean(self, resource: R, when: str) -> None:
        if self.is_clean is not None:
            _require(bool(await _await(self.is_clean(resource))), f"An instance is clean {when}")

    def _check_traces(self, resource: R, when: str) -> None:
        try:
            same = _through_json(resource.traces) == resource.traces
        except (TypeError, ValueError) as error:
            raise AssertionError(f"traces are JSON-able {when}: {error}") from error
        _require(same, f"traces come back from JSON as they were {when}", resource.traces)


def _is_empty(directory: str) -> bool:
    return not any(Path(directory).iterdir())


def _through_json(traces: dict[str, Any]) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(json.dumps(traces))
    return loaded


async def _await(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _require(holds: bool, clause: str, found: object = None) -> None:
    if not holds:
        raise AssertionError(clause + ("." if found is None else f", but it was {found!r}."))

"""Lease: the right of an owner to use a resource for a while, and the handle that it gives.

The same live resource is passed from owner to owner. An owner therefore gets a `Handle`, which stops working when the
lease ends. With the resource itself, a reference that outlives its rollout, for instance in a thread, could reach into
the next owner's work.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import _AsyncGeneratorContextManager, _GeneratorContextManager, aclosing, closing
from dataclasses import dataclass, field
from types import AsyncGeneratorType, CoroutineType, FunctionType, GeneratorType, MethodType
from typing import Any, Generic, TypeVar, cast

from agentfly.core.errors import AgentFlyError, LeaseExpired, UnknownAttribute, UsageError, nearest_name
from agentfly.resources.engine.usage import LeaseUsage
from agentfly.resources.resource import Resource, Scope
from agentfly.resources.spec import ResourceSpec

R = TypeVar("R", bound=Resource)


@dataclass(frozen=True, slots=True)
class Lease(Generic[R]):
    """The right of an owner to use a resource; returned by `ResourceEngine.acquire`.

    Another request of the same owner, spec and scope gets the same lease, and the first release ends it for all. With
    scope ``call`` each request gets its own lease.

    Attributes:
        resource: a handle of the live resource. Using it after the lease has ended raises `LeaseExpired`.
        owner: the owner.
        spec: the spec of the resource.
        scope: how long the lease lasts.
        instance: the instance's name.
        id: the lease's number in its engine.
    """

    resource: R = field(compare=False)
    owner: str
    spec: ResourceSpec[R]
    scope: Scope
    instance: str
    id: int = field(repr=False)


def create_handle(resource: R, owner: str, use: LeaseUsage) -> R:
    """Create a proxy for a resource, with its attributes and methods and its class.

    ``use`` counts the calls through it. A coroutine method begins once the instance is thawed.
    """
    return cast(R, _handle_type(type(resource))(resource, owner, use))


def revoke(handle: Resource) -> float:
    """End a lease. Every later use of its handle, and of methods obtained from it, raises `LeaseExpired`.

    Returns:
        The seconds for which calls of the owner were running.
    """
    state = _state_of(handle)
    state.resource = None
    state.use.close()
    return state.use.busy.seconds


@dataclass(slots=True)
class _HandleState:
    """The lease behind a handle. ``resource`` is None once the lease has ended."""

    resource: Resource | None
    instance: str
    owner: str
    use: LeaseUsage

    def live_resource(self) -> Resource:
        """Return the resource.

        Raises:
            LeaseExpired: the lease has ended.
        """
        if self.resource is None:
            raise LeaseExpired(
                f"The lease of {self.instance} by {self.owner} is over: it was released, or the instance died. Another "
                "owner may have the instance by now. Acquire again, and use the new lease."
            )
        return self.resource


class Handle:
    """A proxy for a leased resource. It forwards attribute access and method calls while the lease is active.

    Afterwards every use raises `LeaseExpired`. Its only attribute is private, so all other names are the resource's.
    """

    __slots__ = ("__state", "__weakref__")

    def __init__(self, resource: Resource, owner: str, use: LeaseUsage) -> None:
        _set_state(self, _HandleState(resource, resource.instance, owner, use))

    def __getattr__(self, name: str) -> Any:
        resource = _resource_of(self)
        if name in _ENGINE_METHODS and resource.can_freeze:
            raise UsageError(
                f"Only the engine calls {name}() of {resource.instance}, because it must know which instances are "
                "frozen. Write idle='freeze' in the spec: the instance is then frozen while no call uses it."
            )
        try:
            value = getattr(resource, name)
        except AttributeError as error:
            if name.startswith("_") or error.obj is not resource or error.name != name:
                raise  # probed by a protocol, or raised inside a property
            raise _no_such(resource, name) from None
        return _wrap_method(self, value) if isinstance(value, MethodType | FunctionType) else value

    def __setattr__(self, name: str, value: object) -> None:
        setattr(_resource_of(self), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(_resource_of(self), name)

    def __repr__(self) -> str:
        state = self.__state
        if state.resource is None:
            return f"<{state.instance}, whose lease by {state.owner} is over>"
        return repr(state.resource)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"{self!r} is a live resource of one owner and can be neither copied nor pickled.")


NOT_AWAITED = " (await is missing)"
"""Part of the repr of a handle's coroutine, so that the text of one that was not awaited is recognised."""

# The slot is read and set through its descriptor, because a handle forwards every other attribute to its resource.
_state_slot: Any = vars(Handle)["_Handle__state"]
_state_of: Callable[[Any], _HandleState] = _state_slot.__get__
_set_state: Callable[[Handle, _HandleState], None] = _state_slot.__set__


def _no_such(resource: Resource, name: str) -> UnknownAttribute:
    common = dir(Resource)
    offered = [one for one in dir(resource) if one[0] != "_" and one not in common]
    nearest = nearest_name(name, offered)
    guess = f" Did you mean {nearest!r}?" if nearest else ""
    return UnknownAttribute(f"{resource.instance} has no {name!r}.{guess} It has {', '.join(offered)}.")


def _resource_of(handle: Any) -> Resource:
    return _state_of(handle).live_resource()


def _wrap_method(handle: Handle, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method so that it works only while the lease lasts."""

    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            return await _call_coroutine(handle, method, args, kwargs)

        call_async.__qualname__ += NOT_AWAITED
        return call_async

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        state = _state_of(handle)
        resource, busy = state.live_resource(), state.use.busy
        busy.begin()
        try:
            result = method(*args, **kwargs)
        finally:
            busy.end()
        return _guard_result(handle, resource, result)

    return call


async def _call_coroutine(
    handle: Handle, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    state = _state_of(handle)
    state.live_resource()
    async with state.use:
        resource = state.live_resource()
        result = await method(*args, **kwargs)
    return _guard_result(handle, resource, result)


def _guard_result(handle: Handle, resource: Resource, result: Any) -> Any:
    """Guard a result, so that coroutines and generators of the resource stop working when the lease ends.

    If a method returns the resource itself, as with ``return self``, the owner gets the handle.
    """
    if result is resource:
        return handle
    guard = _GUARDS.get(type(result))
    return result if guard is None else guard(handle, result)


async def _coroutine(handle: Handle, work: Coroutine[Any, Any, Any]) -> Any:
    try:
        state = _state_of(handle)
        state.live_resource()
        async with state.use:
            resource = state.live_resource()
            result = await work
        return _guard_result(handle, resource, result)
    finally:
        work.close()  # if it was never started


def _generator(handle: Handle, items: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    step = functools.partial(items.send, None)
    state = _state_of(handle)
    busy = state.use.busy
    with closing(items):
        while True:
            resource = state.live_resource()
            busy.begin()
            try:
                item = step()
            except StopIteration as end:
                return end.value
            finally:
                busy.end()
            try:
                sent = yield _guard_result(handle, resource, item)
            except GeneratorExit:
                raise
            except BaseException as error:
                step = functools.partial(items.throw, error)
            else:
                step = functools.partial(items.send, sent)


async def _async_generator(handle: Handle, items: AsyncGenerator[Any, Any]) -> AsyncGenerator[Any, Any]:
    """Wrap an async generator. The instance stays thawed and busy from the first item to the end."""
    step = functools.partial(items.asend, None)
    state = _state_of(handle)
    state.live_resource()
    async with state.use, aclosing(items):
        while True:
            resource = state.live_resource()
            try:
                item = await step()
            except StopAsyncIteration:
                return
            try:
                sent = yield _guard_result(handle, resource, item)
            except GeneratorExit:
                raise
            except BaseException as error:
                step = functools.partial(items.athrow, error)
            else:
                step = functools.partial(items.asend, sent)


def _context_manager(handle: Handle, context: Any) -> Any:
    """Wrap a context manager that `contextlib` made from a generator function."""
    context.gen = _guard_result(handle, _resource_of(handle), context.gen)
    return context


_GUARDS: dict[type, Callable[[Handle, Any], Any]] = {
    CoroutineType: _coroutine,
    GeneratorType: _generator,
    AsyncGeneratorType: _async_generator,
    _GeneratorContextManager: _context_manager,
    _AsyncGeneratorContextManager: _context_manager,
}


@functools.cache
def _handle_type(kind: type[Resource]) -> type[Handle]:
    """Return the handle class of a resource class.

    It forwards special methods, because Python looks them up on the class only.

    Coroutine methods are wrapped once per class, because nearly every use is a call of one.
    """
    special = {
        name: _forward(name)
        for name in dir(kind)
        if name[:2] == name[-2:] == "__" and name not in _OWN_METHODS and isinstance(getattr(kind, name), FunctionType)
    }
    is_a = property(lambda handle: kind)
    methods = {
        name: _CoroutineMethod(name, method)
        for name in dir(kind)
        if name not in _ENGINE_METHODS and name[:2] != "__"
        if inspect.iscoroutinefunction(method := inspect.getattr_static(kind, name))
    }
    return type(f"HandleOf{kind.__name__}", (Handle,), {"__slots__": (), "__class__": is_a, **special, **methods})


_ENGINE_METHODS = frozenset({"freeze", "thaw"})
_OWN_METHODS = frozenset({*dir(Handle), "__del__"})


class _CoroutineMethod:
    """A coroutine method wrapped once per handle class, equivalent to `_wrap_method` at each use."""

    def __init__(self, name: str, method: Callable[..., Any]) -> None:
        @functools.wraps(method)
        async def call_async(handle: Handle, *args: Any, **kwargs: Any) -> Any:
            return await _call_coroutine(handle, getattr(_resource_of(handle), name), args, kwargs)

        call_async.__qualname__ += NOT_AWAITED
        self._name = name
        self._call = call_async

    def __get__(self, handle: Handle, _: type[Handle]) -> Any:
        attributes = getattr(_resource_of(handle), "__dict__", {})
        if attributes.get(self._name) is not None:  # an instance attribute hides the method
            return Handle.__getattr__(handle, self._name)
        return MethodType(self._call, handle)


def _forward(name: str) -> Callable[..., Any]:
    def method(handle: Handle, *args: Any, **kwargs: Any) -> Any:
        return _wrap_method(handle, getattr(_resource_of(handle), name))(*args, **kwargs)

    return method


class PendingAcquire:
    """The pending result of an acquire: a lease for each spec, or an error.

    Args:
        specs: the requested specs; no two are equal.
        loop: the event loop of the waiter.

    Attributes:
        received: the leases so far.
    """

    def __init__(self, specs: tuple[ResourceSpec[Any], ...], loop: asyncio.AbstractEventLoop) -> None:
        self._specs = specs
        self.received: list[Lease[Any]] = []
        self._complete: asyncio.Future[None] = loop.create_future()

    async def leases(self) -> tuple[Lease[Any], ...]:
        """Wait for all leases, in the order of the specs.

        Raises:
            AgentFlyError: the request was rejected.
        """
        await self._complete
        if len(self._specs) == 1:
            return (self.received[0],)
        by_spec = {lease.spec: lease for lease in self.received}
        return tuple(by_spec[spec] for spec in self._specs)

    @property
    def is_settled(self) -> bool:
        """Whether it is complete, failed or cancelled."""
        return self._complete.done()

    def add(self, lease: Lease[Any]) -> bool:
        """Add a lease. Returns False if no one waits for it any more."""
        if self.is_settled:
            return False
        self.received.append(lease)
        if len(self.received) == len(self._specs):
            self._complete.set_result(None)
        return True

    def fail(self, error: AgentFlyError) -> None:
        """Set an error, unless it is settled."""
        if not self.is_settled:
            self._complete.set_exception(error)

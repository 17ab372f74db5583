"""Handle: what an owner has of a resource. It stands for the resource while the lease lasts, and then for nothing.

The same live resource goes from owner to owner. Were they given the resource itself, a reference that one of them
kept, in a thread that outlived its rollout for instance, would reach into what the next one does with it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, TypeVar, cast

from agentfly.errors import LeaseOver
from agentfly.resources.resource import Resource

R = TypeVar("R", bound=Resource)


def hand_out(resource: R, owner: str) -> R:
    """A handle of a resource: it has the resource's attributes and methods and passes for an instance of its class."""
    return cast(R, _handle_type(type(resource))(resource, owner))


def void(handle: Resource) -> None:
    """A lease is over: every use of its handle, and of methods taken from it, raises `LeaseOver` from now on."""
    object.__setattr__(handle, "_Handle__resource", None)


class Handle:
    """See the module. What it has of its own is hidden, so that every other name is the resource's."""

    __slots__ = ("__instance", "__owner", "__resource", "__weakref__")

    def __init__(self, resource: Resource, owner: str) -> None:
        object.__setattr__(self, "_Handle__resource", resource)
        object.__setattr__(self, "_Handle__instance", resource.instance)
        object.__setattr__(self, "_Handle__owner", owner)

    def __getattr__(self, name: str) -> Any:
        value = getattr(_live(self), name)
        return _guarded(self, value) if isinstance(value, MethodType | FunctionType) else value

    def __setattr__(self, name: str, value: object) -> None:
        setattr(_live(self), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(_live(self), name)

    def __repr__(self) -> str:
        resource = self.__resource
        return f"<{self.__instance}, whose lease by {self.__owner} is over>" if resource is None else repr(resource)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"{self!r} is a live resource of one owner and can be neither copied nor pickled.")


def _live(handle: Any) -> Resource:
    """The resource that a handle stands for.

    Raises:
        LeaseOver: it stands for none any more.
    """
    resource: Resource | None = handle._Handle__resource
    if resource is None:
        instance, owner = handle._Handle__instance, handle._Handle__owner
        raise LeaseOver(
            f"The lease of {instance} by {owner} is over: it was given back, or the instance died. Somebody else may "
            "have the instance by now. Acquire again, and use what that returns."
        )
    return resource


def _guarded(handle: Handle, method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that can be called as long as the lease lasts, whenever it was taken from the handle."""

    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            _live(handle)
            return await method(*args, **kwargs)

        return call_async

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        _live(handle)
        return method(*args, **kwargs)

    return call


@functools.cache
def _handle_type(kind: type[Resource]) -> type[Handle]:
    """The class of handles of one kind. It passes special methods on too, which Python looks up on classes alone."""
    special = {
        name: _passed_on(name)
        for name in dir(kind)
        if name[:2] == name[-2:] == "__" and name not in _OWN and isinstance(getattr(kind, name), FunctionType)
    }
    is_a = property(lambda handle: kind)
    return type(f"HandleOf{kind.__name__}", (Handle,), {"__slots__": (), "__class__": is_a, **special})


_OWN = frozenset({*dir(Handle), "__del__"})


def _passed_on(name: str) -> Callable[..., Any]:
    def method(handle: Handle, *args: Any, **kwargs: Any) -> Any:
        return getattr(_live(handle), name)(*args, **kwargs)

    return method

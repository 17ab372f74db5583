"""ResourceKind: the resource that a spec describes, and the function that removes its orphans.

A kind consists of a spec class, a resource class, a name, and a function that removes what a dead process has left.
Each may be given as an object or as ``"module:Name"``, which is imported when it is first needed.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from agentfly.core.errors import ConfigError, UsageError
from agentfly.resources.resource import Resource
from agentfly.resources.spec import ResourceSpec

R = TypeVar("R", bound=Resource)

ReapFunction = Callable[[dict[str, Any]], Any]
"""Removes an orphan by the traces that its resource gave; sync (called on a thread) or async."""


@dataclass(frozen=True)
class ResourceKind:
    """A kind of resource, as `register` got it.

    Attributes:
        name: what the ledger and listings call it.
        resource_type: makes an instance of (spec, instance name), or its address.
        reap: removes an orphan by its traces, or its address; None when nothing outlives the process.
    """

    name: str
    resource_type: Callable[[Any, str], Resource] | str
    reap: ReapFunction | str | None

    @property
    def reap_address(self) -> str | None:
        """`reap` as ``module:name``, by which a later process finds it."""
        return None if self.reap is None else _address(self.reap)

    @property
    def resource_address(self) -> str:
        """`resource_type` as ``module:name``. A class that is defined again, as in a notebook, keeps its address."""
        return _address(self.resource_type) or repr(self.resource_type)


def _address(found: Callable[..., Any] | str) -> str | None:
    if isinstance(found, str):
        return found
    module, name = (getattr(found, part, None) for part in ("__module__", "__qualname__"))
    return f"{module}:{name}" if module and name else None


_kinds: dict[type[ResourceSpec[Any]], ResourceKind] = {}


def register(
    spec_type: type[ResourceSpec[Any]],
    resource_type: Callable[[Any, str], Resource] | str,
    *,
    kind: str,
    reap: ReapFunction | str | None = None,
) -> None:
    """Pair a spec class with its resource class. Subclasses of the spec share the pairing.

    Args:
        spec_type: the spec class.
        resource_type: the resource class, called with a spec and an instance name, or ``"module:Name"``.
        kind: name of the kind in the ledger and in listings.
        reap: removes the rest of an instance whose process died, given its ``traces``; or ``"module:name"``. It must
            live in a module, so that a later process can import it. The traces may date from before the start. What
            they name may be gone, and a process id may have been reused.

    Raises:
        ConfigError: ``spec_type`` is not a spec class, or is paired with another resource already; or ``reap`` cannot
            be imported by another process.
    """
    if not (isinstance(spec_type, type) and issubclass(spec_type, ResourceSpec)):
        raise ConfigError(
            f"register({getattr(spec_type, '__name__', repr(spec_type))}, …): the first argument is a subclass of "
            "ResourceSpec, the second its resource."
        )
    registered = ResourceKind(kind, resource_type, reap)
    taken = _kinds.get(spec_type)
    if taken is not None and taken.resource_address != registered.resource_address:
        raise ConfigError(
            f"register({spec_type.__name__}, {registered.resource_address}): it is paired with "
            f"{taken.resource_address} already, whose users would be given another resource. Make a spec of your own: "
            f"class MySpec({spec_type.__name__}), and register that."
        )
    if reap is not None and not _can_be_imported(reap, registered.reap_address or ""):
        raise ConfigError(
            f"register({spec_type.__name__}, kind={kind!r}): reap is {registered.reap_address or reap!r}, which a "
            "later process cannot import. Give a function at the top level of a module, and not of the program that "
            "is run (__main__)."
        )
    _kinds[spec_type] = registered


def _can_be_imported(reap: ReapFunction | str, address: str) -> bool:
    """Whether another process can import this function by its address, as far as this process can tell."""
    module, _, name = address.partition(":")
    if not module or module in ("__main__", "__mp_main__"):
        return False
    if isinstance(reap, str):
        return True  # it is imported when it is needed
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return bool(found == reap)


def kind_of(spec: ResourceSpec[Any]) -> ResourceKind:
    """The kind of a spec.

    Raises:
        UsageError: no kind is registered for the spec's class.
    """
    for ancestor in type(spec).__mro__:
        if (kind := _kinds.get(ancestor)) is not None:
            return kind
    name = type(spec).__name__
    known = ", ".join(sorted(known.__name__ for known in _kinds)) or "none"
    raise UsageError(
        f"{name} is no registered kind of resource (registered: {known}). Write a Resource for it and call "
        f"agentfly.resources.kind.register({name}, ItsResource, kind='…') where {name} is defined."
    )


def validate_spec(spec: ResourceSpec[Any]) -> None:
    """Check that instances of ``spec`` can be requested, as far as that is known before there is one.

    Raises:
        UsageError: it is not a spec, has no registered kind, or cannot be hashed.
        ConfigError: it requests a feature that its kind does not have.
    """
    if not isinstance(spec, ResourceSpec):
        got = f"the class {spec.__name__}: make one, {spec.__name__}(…)" if isinstance(spec, type) else _shown(spec)
        raise UsageError(f"acquire() takes a ResourceSpec, for instance ContainerSpec(memory='1GiB'), and got {got}.")
    kind_of(spec)
    if spec.idle == "freeze":
        _require_freezable(spec)
    try:
        hash(spec)
    except TypeError as error:
        raise UsageError(
            f"{type(spec).__name__} cannot be hashed ({error}), but the whole spec is the key of its pool. Give a "
            "tuple for a list and pairs for a dict."
        ) from error


def _shown(found: object) -> str:
    return f"{'an' if type(found).__name__[0] in 'aeiou' else 'a'} {type(found).__name__}, {found!r:.200}"


def _require_freezable(spec: ResourceSpec[Any]) -> None:
    resource_type = _resource_type(spec)
    if isinstance(resource_type, type) and issubclass(resource_type, Resource) and not resource_type.can_freeze:
        raise freeze_not_supported(spec)


def freeze_not_supported(spec: ResourceSpec[Any]) -> ConfigError:
    """The error of a spec that asks for what its kind does not offer."""
    return ConfigError(
        f"{type(spec).__name__}(idle='freeze'): a {kind_of(spec).name} cannot be frozen. Write idle='run', the "
        "default; or, if the kind is your own, give its resource can_freeze = True and the methods freeze() and thaw()."
    )


def create_resource(spec: ResourceSpec[R], instance: str) -> R:
    """A handle of a new instance of ``spec``, not started.

    Raises:
        UsageError: no kind is registered for the spec's class, or its resource cannot be imported.
    """
    return cast(R, _resource_type(spec)(spec, instance))


async def prepare(spec: ResourceSpec[Any]) -> None:
    """Bring to this machine what instances of ``spec`` need before they can start.

    Raises:
        UsageError: no kind is registered for the spec's class, or its resource has no ``prepare``.
        Exception: what the resource's ``prepare`` raises.
    """
    resource_type = _resource_type(spec)
    function = getattr(resource_type, "prepare", None)
    if function is None:
        raise UsageError(
            f"{type(spec).__name__} names a preparation, but {resource_type!r} has no prepare(spec). Register the "
            "resource's class, or give the function such an attribute."
        )
    await function(spec)


def _resource_type(spec: ResourceSpec[Any]) -> Callable[[Any, str], Resource]:
    """Return the resource class of a spec."""
    resource_type = kind_of(spec).resource_type
    return (
        cast(Callable[[Any, str], Resource], import_object(resource_type))
        if isinstance(resource_type, str)
        else resource_type
    )


def import_object(address: str) -> Any:
    """Return the object that ``module:name`` names.

    Raises:
        UsageError: there is no such module or name.
    """
    module, _, name = address.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"{address!r} could not be imported: {error}") from error
    return found

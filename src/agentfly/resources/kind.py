"""ResourceKind: the resource class that implements a spec class, and the function that removes its orphans.

A spec class names its kind in the class attribute ``kind``. There is no registry: importing a module registers nothing.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from agentfly.core.errors import ConfigError, UsageError
from agentfly.resources.resource import Resource

ReapFunction = Callable[[dict[str, Any]], Any]
"""Removes an orphan, given the traces of its resource. It is async, or sync and called on a thread."""


@dataclass(frozen=True)
class ResourceKind:
    """A kind of resource, for the class attribute ``kind`` of a spec class. Subclasses of the spec class inherit it.

    A class or function is given as an object or as ``"module:name"``, which is imported when it is first needed.

    Attributes:
        name: the name of the kind in the ledger and in listings.
        resource_type: the resource class. It is called with a spec and an instance name.
        reap: removes what is left of an instance whose process died, given its ``traces``; None if nothing outlives the
            process. A later process must be able to import it. The traces may date from before the start: what they
            name may be gone, and a process id may have been reused.

    Raises:
        ConfigError: another process cannot import ``reap``.
    """

    name: str
    resource_type: Callable[[Any, str], Resource] | str
    reap: ReapFunction | str | None = None

    def __post_init__(self) -> None:
        if self.reap is not None and not _is_importable(self.reap, self.reap_address or ""):
            raise ConfigError(
                f"ResourceKind({self.name!r}, …): reap is {self.reap_address or self.reap!r}, which a later process "
                "cannot import. Give a function at the top level of a module other than the main program (__main__)."
            )

    @property
    def reap_address(self) -> str | None:
        """`reap` as ``module:name``, for later processes."""
        return None if self.reap is None else _address(self.reap)

    def load_resource_type(self) -> Callable[[Any, str], Resource]:
        """Return the resource class.

        Raises:
            UsageError: it cannot be imported.
        """
        if isinstance(self.resource_type, str):
            return cast(Callable[[Any, str], Resource], import_object(self.resource_type))
        return self.resource_type


def _address(target: Callable[..., Any] | str) -> str | None:
    if isinstance(target, str):
        return target
    module, name = (getattr(target, attribute, None) for attribute in ("__module__", "__qualname__"))
    return f"{module}:{name}" if module and name else None


def _is_importable(reap: ReapFunction | str, address: str) -> bool:
    """Return whether another process can import this function by its address, as far as this process can tell."""
    module, _, name = address.partition(":")
    if not module or module in ("__main__", "__mp_main__"):
        return False
    if isinstance(reap, str):
        return True  # it is imported when it is needed
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return bool(found == reap)


def import_object(address: str) -> Any:
    """Return the object at the address ``module:name``.

    Raises:
        UsageError: the module or the name does not exist.
    """
    module, _, name = address.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"{address!r} could not be imported: {error}") from error
    return found

"""The user's simulator object: how it is created, called and closed in its host."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from agentfly.core.errors import ConfigError, UsageError, nearest_name, suggest_name


def make(factory: Callable[..., Any] | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call the factory; an async factory gives an awaitable.

    Raises:
        ConfigError: the factory is given by a name that leads to nothing.
    """
    return (named(factory) if isinstance(factory, str) else factory)(*args, **kwargs)


def call(simulator: Any, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a public method of the user's object; an async method gives an awaitable.

    Raises:
        UsageError: the object has no such method.
    """
    function = None if method.startswith("_") else getattr(simulator, method, None)
    if not callable(function):
        public = sorted(name for name in dir(simulator) if not name.startswith("_"))
        raise UsageError(
            f"The environment {type(simulator).__name__} has no method {method!r}. {suggest_name(method, public)}"
        )
    return function(*args, **kwargs)


async def as_coroutine(result: Awaitable[Any]) -> Any:
    """Wrap an awaitable of any type into a coroutine that an event loop can run."""
    return await result


def as_exception(error: BaseException) -> Exception:
    """Convert what the user's code raised into an error that ends neither the loop, nor the thread, nor the process.

    An exit, which would end it, and a `StopIteration`, which no future can carry, become a `RuntimeError`.
    """
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    told = repr(error)
    if isinstance(error, SystemExit):
        told = (
            f"sys.exit({error.code!r}) was called. A simulator ends when it is released; let it raise an error instead."
        )
    raised = RuntimeError(told)
    raised.__cause__ = error
    return raised.with_traceback(error.__traceback__)


def require_made(made: Any, factory: Callable[..., Any] | str) -> None:
    """Refuse what is no simulator.

    Raises:
        ConfigError: the factory gave None.
    """
    if made is None:
        name = factory if isinstance(factory, str) else getattr(factory, "__name__", repr(factory))
        raise ConfigError(f"The factory {name} gave None. Let it return the environment that it makes.")


def require_thread_safe(made: Any, label: str) -> None:
    """Refuse what says that two of it in one process disturb each other.

    Args:
        made: a simulator or what makes it.
        label: what it is called in the message.

    Raises:
        ConfigError: its ``thread_safe`` is False.
    """
    if getattr(made, "thread_safe", True) is False:
        raise ConfigError(
            f"{label} says that it is not thread-safe (thread_safe = False), so that no two of it may live in one "
            "process. Write EnvironmentSpec(runs='process'), which gives each a process of its own."
        )


def has_argless_reset(simulator: Any) -> bool:
    """Whether the object has a ``reset`` that can be called without arguments."""
    import inspect  # here, because an object without `reset` starts faster without it

    reset = getattr(simulator, "reset", None)
    if not callable(reset):
        return False
    try:
        inspect.signature(reset).bind()
    except TypeError:
        return False
    except ValueError:  # a built-in that does not tell its signature
        return True
    return True


def named(name: str) -> Callable[..., Any]:
    """The factory that is called ``module:name``.

    Raises:
        ConfigError: there is none.
    """
    module_name, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"The factory {name!r} cannot be imported: {error}. Install the package, or put its folder on PYTHONPATH."
        ) from error
    for part in path.split("."):
        if not hasattr(found, part):
            near = nearest_name(part, dir(found))
            raise ConfigError(f"The factory {name!r} has no {part!r}" + (f"; is it {near!r}?" if near else "."))
        found = getattr(found, part)
    made: Callable[..., Any] = found
    return made

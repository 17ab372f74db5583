"""Functions that create, check and call the user's simulator object, in any host."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from agentfly.core.errors import ConfigError, UsageError, nearest_name, suggest_name


def make(factory: Callable[..., Any] | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call the factory. An async factory returns an awaitable.

    Raises:
        ConfigError: the factory is given by name, and the name cannot be found.
    """
    return (named(factory) if isinstance(factory, str) else factory)(*args, **kwargs)


def call(simulator: Any, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a public method of the user's object. An async method returns an awaitable.

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
    """Convert an exception of the user's code into one that ends neither the loop, nor the thread, nor the process.

    An exit, and a `StopIteration`, which no future can hold, become a `RuntimeError`.
    """
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    message = repr(error)
    if isinstance(error, SystemExit):
        message = f"sys.exit({error.code!r}) was called. A simulator ends when it is released; raise an error instead."
    raised = RuntimeError(message)
    raised.__cause__ = error
    return raised.with_traceback(error.__traceback__)


def require_made(made: Any, factory: Callable[..., Any] | str) -> None:
    """Check the result of the factory.

    Raises:
        ConfigError: the factory returned None.
    """
    if made is None:
        name = factory if isinstance(factory, str) else getattr(factory, "__name__", repr(factory))
        raise ConfigError(f"The factory {name} returned None. Return the environment that it creates.")


def require_thread_safe(made: Any, label: str) -> None:
    """Check that a simulator may share a process with others.

    Args:
        made: a simulator or its factory.
        label: its name in the message.

    Raises:
        ConfigError: its ``thread_safe`` is False.
    """
    if getattr(made, "thread_safe", True) is False:
        raise ConfigError(
            f"{label} is declared as not thread-safe (thread_safe = False), so two instances may not live in one "
            "process. Write EnvironmentSpec(runs='process'), which gives each a process of its own."
        )


def has_argless_reset(simulator: Any) -> bool:
    """Return whether the object has a ``reset`` that can be called without arguments."""
    import inspect  # lazy, because an object without `reset` starts faster without it

    reset = getattr(simulator, "reset", None)
    if not callable(reset):
        return False
    try:
        inspect.signature(reset).bind()
    except TypeError:
        return False
    except ValueError:  # a built-in function without a signature
        return True
    return True


def named(name: str) -> Callable[..., Any]:
    """Return the factory with the address ``module:name``.

    Raises:
        ConfigError: it does not exist.
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

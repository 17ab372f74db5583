"""EnvironmentSpec: a simulator as a resource, described by the factory that creates it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from agentfly.core.errors import ConfigError, type_of
from agentfly.resources.environments import simulator
from agentfly.resources.environments.pickling import dumps
from agentfly.resources.environments.wire_types import DeclaredTypes
from agentfly.resources.kind import ResourceKind
from agentfly.resources.spec import EnvironmentVariables, ResourceSpec, normalize_env

if TYPE_CHECKING:
    from agentfly.resources.environments.environment import Environment  # noqa: F401  (in the base's brackets)


@dataclass(frozen=True, kw_only=True)
class EnvironmentSpec(ResourceSpec["Environment"]):
    """A simulator that tools act in: any Python object that a factory creates; ``runs`` says where it lives.

    The object needs no base class. By convention it has:

    * ``reset``: if it can be called without arguments, it is called after construction and between two owners, so that
      each owner gets a fresh simulator. Without such a method the object is created again for each owner.
    * ``close``: called before the object is dropped, if it exists.
    * other public methods, sync or async, usually ``step``: ``await environment.step(action)`` calls it.

    Args:
        factory: creates the object: a class, a function, or its name as ``"package.module:name"``. It is part of the
            pool's key and compared by identity, so define it once, at the top of a module, not in a tool.
        args: positional arguments of the factory; hashable.
        kwargs: keyword arguments of the factory, as a mapping or as pairs; hashable values.
        runs: where the object lives. ``loop``: calls run in the event loop. This suits code that answers within a
            millisecond or is async. ``thread``: calls run on a thread of their own. This suits blocking calls that wait
            (a socket, a database). A thread cannot be stopped, so a hanging call keeps it. ``process``: calls run in a
            separate process. This suits code that computes, hangs, crashes, leaks, or keeps state in modules.
        reuse: for a ``process``, ``recreate`` by default: each owner gets a new process, without module state,
            variables, files or processes of an earlier owner. ``reset`` relies on the object's own ``reset``. This
            suits objects that are slow to create. In the loop and on threads it is the only choice.
        starts: how a ``process`` starts. ``fork``: the factory's module is imported once, in a process that does
            nothing else, and each simulator is a fork of it. A fork takes milliseconds, however long the import takes.
            Forks cannot share threads, open files or child processes. If the import makes some, each simulator imports
            for itself, with a warning. ``spawn``: each simulator starts a new interpreter. This suits libraries that
            cannot be forked.
        env: environment variables of a ``process``, as a mapping or as pairs. It inherits only the variables that
            programs need to run (`agentfly.resources.process.child.INHERITED_VARIABLES`), and so no secrets. The spec's
            repr hides their values.
        workdir: the working directory of a ``process``; by default a new, empty one that is removed at its end.
            Temporary files are always in a directory of the process.
        result_types: dataclasses, named tuples, enums, pydantic models, classes of attrs and exceptions that a
            ``process`` may return. They arrive with their fields unchanged, and none of their code runs for it. All
            other results are plain data: numbers, texts, bytes, lists, tuples, dicts, sets, times, paths, images
            (`agentfly.Image`) and NumPy arrays.
        allow_pickle: whether a ``process`` may return any object, as a pickle. Reading a pickle runs code that the
            pickle names. So this gives the simulator's process, and anyone who controls its results, all rights of this
            process.
        call_timeout_s: time limit of one call in seconds. After that the instance counts as lost. A sync call in the
            loop cannot be interrupted.

    ``memory`` limits a ``process`` and all processes that it starts together: by a control group if this process may
    create one, otherwise by measurement. In the loop and on threads it only counts in the engine's budget.

    A simulator with module state, so that two in one process would interfere, sets the attribute ``thread_safe =
    False`` on its class or factory. It is then accepted only in a process of its own.

    Raises:
        ConfigError: an argument is not hashable or has the wrong form, the factory's name is malformed, or the
            simulator is not thread-safe and does not run in a process.
        UsageError: ``runs="process"``, and the factory or an argument cannot be pickled.
    """

    kind = ResourceKind(
        "environment",
        "agentfly.resources.environments.environment:Environment",
        reap="agentfly.resources.environments.worker_process:reap",
    )

    factory: Callable[..., Any] | str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | tuple[tuple[str, Any], ...] = ()
    runs: Literal["loop", "thread", "process"] = "loop"
    starts: Literal["fork", "spawn"] = "fork"
    env: EnvironmentVariables = ()
    workdir: str | None = None
    result_types: tuple[type, ...] = ()
    allow_pickle: bool = False
    call_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_one_of("runs", "loop", "thread", "process")
        self._require_one_of("starts", "fork", "spawn")
        self._require_seconds("call_timeout_s")
        normalize_env(self)
        self._check_combinations()
        self._check_factory()
        self._check_results()
        self._check_workdir()
        self._normalize_arguments()
        self._require_hashable()
        if self.runs == "process":
            self.pickled_factory()

    @property
    def is_single_use(self) -> bool:
        """Whether each owner gets a new instance: by default only in a process; see ``reuse``."""
        return self.reuse == "recreate" or (self.reuse is None and self.runs == "process")

    @property
    def label(self) -> str:
        """``environment`` and the factory's name."""
        factory = self.factory
        name = factory.partition(":")[2] if isinstance(factory, str) else getattr(factory, "__name__", repr(factory))
        return f"environment:{name}"

    @property
    def start_weight(self) -> int:
        """4 for a start with a new interpreter, which loads a processor; 1 otherwise."""
        return 4 if self.starts == "spawn" else 1

    def timeout_message(self, method: str) -> str:
        """Return the message for a call that took longer than ``call_timeout_s``."""
        return f"{method}() did not end within call_timeout_s={self.call_timeout_s:g}"

    @property
    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of the factory as a mapping."""
        return dict(self.kwargs)

    @property
    def preparation_key(self) -> str | None:
        """Control groups, if a simulator has a memory limit."""
        return "control groups" if self.runs == "process" and self.memory_bytes else None

    def pickled_factory(self) -> bytes:
        """Pickle the factory, its arguments and the declared types, for another process of this machine.

        Raises:
            UsageError: a part cannot be pickled; the message names it.
        """
        parts = (self.factory, self.args, self.keywords, self.result_types)
        return dumps(parts, ("factory", "args", "kwargs", "result_types"))

    def _check_combinations(self) -> None:
        if self.starts == "spawn" and self.runs != "process":
            raise ConfigError(
                f"EnvironmentSpec(starts='spawn', runs={self.runs!r}): only a process can be spawned. Write "
                "runs='process', or leave out starts."
            )
        if self.idle == "freeze" and self.runs != "process":
            raise ConfigError(
                f"EnvironmentSpec(idle='freeze', runs={self.runs!r}): only a process can be frozen. Write "
                "runs='process', or leave out idle."
            )
        for name in ("env", "workdir", "result_types", "allow_pickle"):
            if getattr(self, name) and self.runs != "process":
                raise ConfigError(
                    f"EnvironmentSpec({name}=…, runs={self.runs!r}): it applies only to a simulator in a process of "
                    f"its own. Write runs='process', or leave out {name}."
                )

    def _check_results(self) -> None:
        self._normalize_tuple("result_types")
        try:
            DeclaredTypes(self.result_types)
        except TypeError as error:
            raise ConfigError(
                f"EnvironmentSpec(result_types=…): {error}. Give the types of results; for other objects, let the "
                "simulator return the needed parts."
            ) from None
        if not isinstance(self.allow_pickle, bool):
            raise self._field_error("allow_pickle", "write True or False")

    def _check_workdir(self) -> None:
        if self.workdir is None:
            return
        if not isinstance(self.workdir, str | os.PathLike) or not self.workdir:
            raise self._field_error("workdir", "write the path of a directory, or None for a new one")
        object.__setattr__(self, "workdir", os.path.abspath(self.workdir))  # noqa: PTH100  (links stay as they are)

    def _check_factory(self) -> None:
        if isinstance(self.factory, str):
            module, colon, name = self.factory.partition(":")
            if not (module and colon and name):
                raise ConfigError(
                    f"EnvironmentSpec(factory={self.factory!r}): write the name of a factory as 'module:name'."
                )
        elif not callable(self.factory):
            raise ConfigError(
                f"EnvironmentSpec(factory={self.factory!r}): a factory is a class, a function, or 'module:name'. "
                "Give the factory of the environment, not an environment."
            )
        if self.runs != "process":
            simulator.require_thread_safe(self.factory, self.label)

    def _normalize_arguments(self) -> None:
        """Convert the arguments to their canonical form, so that equivalent specs are equal."""
        self._normalize_tuple("args")
        try:
            keywords = dict(self.kwargs)
        except (TypeError, ValueError):
            keywords = None
        if keywords is None or not all(isinstance(name, str) for name in keywords):
            raise ConfigError(
                f"EnvironmentSpec(kwargs={self.kwargs!r}): write the keyword arguments of the factory as a mapping, "
                "for instance {'level': 3}, or as pairs, (('level', 3),)."
            )
        object.__setattr__(self, "kwargs", tuple(sorted(keywords.items())))

    def _require_hashable(self) -> None:
        named = [(f"args[{index}]", value) for index, value in enumerate(self.args)]
        named += [(f"kwargs[{name!r}]", value) for name, value in self.keywords.items()]
        for name, value in named:
            try:
                hash(value)
            except TypeError:
                raise ConfigError(
                    f"EnvironmentSpec: {name} is {type_of(value)} and cannot be hashed, but the whole spec is the key "
                    "of its pool. Use a tuple instead of a list, pairs instead of a dict, or the path of a file."
                ) from None

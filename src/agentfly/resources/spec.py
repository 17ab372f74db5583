"""ResourceSpec: a frozen, typed description of something that a tool or reward needs.

Two specs are the same if their fields have equal values of equal types, at any depth.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from datetime import datetime, time
from decimal import Decimal
from numbers import Integral
from typing import Any, ClassVar, Generic, Literal, Self, TypeAlias, TypeVar, cast

from agentfly.core.errors import ConfigError, UsageError, suggest_name, type_of
from agentfly.core.numbers import is_duration, is_finite_number, parse_byte_size
from agentfly.resources.kind import ResourceKind
from agentfly.resources.resource import Resource

_BY_REPR = (float, complex, Decimal, datetime, time)
"""Types with different values that are equal, such as -0.0 and 0.0, or the same moment in two time zones."""


def typed_key(value: Any) -> Hashable:
    """Return a key that is equal for two values only if their types are equal too.

    ``1``, ``1.0`` and ``True`` are equal in Python, and so are tuples of them. A factory may treat them as three
    different arguments. Values within tuples, frozen sets and dataclasses are distinguished as well. For other objects,
    the type and their own equality count. A value that cannot be hashed gives a key that cannot be hashed.
    """
    kind = type(value)
    if isinstance(value, tuple):
        return (kind, *map(typed_key, value))
    if isinstance(value, frozenset):
        return (kind, frozenset(map(typed_key, value)))
    if kind in _BY_REPR:
        return (kind, repr(value))
    params = None if isinstance(value, type) else getattr(value, "__dataclass_params__", None)
    if params is not None and params.eq:
        return (kind, value, *_typed_fields(value))
    return (kind, value)


def _typed_fields(value: Any) -> Iterator[Hashable]:
    """Yield the keys of the fields that count for equality, without fields that cannot be hashed."""
    for field in fields(value):
        key = typed_key(getattr(value, field.name)) if field.compare else None
        try:
            hash(key)
        except TypeError:
            continue
        yield key


EnvironmentVariables: TypeAlias = Mapping[str, str] | tuple[tuple[str, str], ...]
"""A mapping, or pairs, of names and values. A spec stores them as pairs, sorted by name."""

R = TypeVar("R", bound=Resource)
R_co = TypeVar("R_co", bound=Resource, covariant=True)


@dataclass(frozen=True, kw_only=True)
class ResourceSpec(Generic[R_co]):
    """A frozen, hashable, picklable description of a resource. The whole spec is the key of its pool.

    Two specs that differ in any field never share an instance. Values of different types differ: ``1``, ``1.0`` and
    ``True`` are three arguments. A new kind of resource needs a subclass of this class, whose attribute
    ``kind`` names a subclass of `Resource`.

    Args:
        capacity: maximum number of instances alive at once, including those that start, reset or stop.
        warm: number of idle instances to keep ready.
        cpus: processor cores that an instance uses of the host's budget.
        memory: bytes, or a text such as ``"512MiB"``, that an instance may use of the host's budget.
        gpus: graphics processors that an instance uses of the host's budget.
        replicas: maximum number of instances that serve ``global`` owners at a time. A new owner gets the instance with
            the fewest owners. Another instance starts when all have ``max_concurrency`` owners. Without that limit it
            starts as soon as each has an owner, and no owner waits for it.
        max_concurrency: maximum number of owners of one ``global`` instance at a time; None for no limit.
        reuse: ``reset`` gives an instance to the next owner after a reset; ``recreate`` replaces it after each owner.
            By default ``reset``, unless the kind has another default.
        max_uses: an instance is replaced after this many owners; None for never.
        idle: state of an instance while no call uses it, even if it is leased, for instance while the model generates.
            ``run`` lets it continue. ``freeze`` stops its processes until the next use, so that they take no processor
            time.
        prepare_timeout_s: maximum number of seconds for preparation, such as fetching an image.
        start_timeout_s: maximum number of seconds for a start before it counts as failed.
        reset_timeout_s: maximum number of seconds for a reset or health check before the instance is replaced.
        release_timeout_s: maximum number of seconds for an orderly release. After that it is forced, which may take as
            long again.
        idle_timeout_s: number of idle seconds after which an instance is released; None for never. ``warm`` instances
            stay until the spec was not requested for this long.
        check_interval_s: seconds between two health checks of an idle or leased instance; None for a check only after a
            reset.

    Attributes:
        kind: the resource class that implements the spec class, and the function that removes its orphans.

    Raises:
        ConfigError: a field has an invalid value.
    """

    kind: ClassVar[ResourceKind]

    capacity: int = 8
    warm: int = 0
    cpus: float = 0.0
    memory: int | str = 0
    gpus: float = 0.0
    replicas: int = 1
    max_concurrency: int | None = None
    reuse: Literal["reset", "recreate"] | None = None
    max_uses: int | None = None
    idle: Literal["run", "freeze"] = "run"
    prepare_timeout_s: float = 1800.0
    start_timeout_s: float = 60.0
    reset_timeout_s: float = 30.0
    release_timeout_s: float = 10.0
    idle_timeout_s: float | None = 300.0
    check_interval_s: float | None = 30.0

    def __new__(cls, *values: object, **named: object) -> Self:
        """Reject unknown fields with a message that suggests the nearest one. A dataclass's own error does not."""
        known = [field.name for field in fields(cls)]
        if values:
            raise ConfigError(
                f"{cls.__name__}({values[0]!r}): write each field by its name; it has {', '.join(known)}."
            )
        for name in named:
            if name not in known:
                raise ConfigError(f"{cls.__name__} has no field {name!r}. {suggest_name(name, known)}")
        if missing := [name for name in cls._required() if name not in named]:
            written = ", ".join(f"{name}=…" for name in missing)
            raise ConfigError(f"{cls.__name__} needs {' and '.join(missing)}. Write {cls.__name__}({written}).")
        return super().__new__(cls)

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Set the equality and repr of this class on the specs of a kind.

        `dataclass` would write an equality that ignores types, and a repr that shows the values of environment
        variables.
        """
        super().__init_subclass__(**arguments)
        if "__repr__" not in vars(cls):
            cls.__repr__ = ResourceSpec.__repr__  # type: ignore[method-assign]
        if not {"__eq__", "__hash__"} & vars(cls).keys():
            cls.__eq__ = ResourceSpec.__eq__  # type: ignore[method-assign]
            cls.__hash__ = ResourceSpec.__hash__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        return repr_without_env_values(self)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return self._key == other._key if type(self) is type(other) and isinstance(other, ResourceSpec) else False

    def __hash__(self) -> int:
        found: int | None = self.__dict__.get("_hash")
        if found is None:
            found = hash(self._key)
            object.__setattr__(self, "_hash", found)
        return found

    @property
    def _key(self) -> tuple[Hashable, ...]:
        """The values of all fields with their types. It is cached, because every request looks up its pool by it."""
        key: tuple[Hashable, ...] | None = self.__dict__.get("_typed")
        if key is None:
            key = tuple(typed_key(getattr(self, field.name)) for field in fields(self) if field.compare)
            object.__setattr__(self, "_typed", key)
        return key

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_hash", "_typed")}

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, object]]:
        """Return the arguments for `__new__` when a spec is copied or unpickled."""
        return (), {name: getattr(self, name) for name in self._required()}

    @classmethod
    def _required(cls) -> list[str]:
        return [one.name for one in fields(cls) if one.init and one.default is one.default_factory is MISSING]

    def __post_init__(self) -> None:
        self._require_int("capacity", least=1)
        self._require_int("warm", least=0)
        if self.warm > self.capacity:
            raise self._field_error("warm", f"it cannot exceed the capacity of {self.capacity}")
        self._require_int("replicas", least=1)
        if self.replicas > self.capacity:
            raise self._field_error("replicas", f"it cannot exceed the capacity of {self.capacity}")
        for name in ("max_concurrency", "max_uses"):
            if getattr(self, name) is not None:
                self._require_int(name, least=1, otherwise=", or None for no limit")
        for name in ("cpus", "gpus"):
            if not (is_finite_number(value := getattr(self, name)) and value >= 0):
                raise self._field_error(name, "write a number of at least 0, without quotes")
        for name in ("prepare_timeout_s", "start_timeout_s", "reset_timeout_s", "release_timeout_s"):
            self._require_seconds(name)
        for name in ("idle_timeout_s", "check_interval_s"):
            if getattr(self, name) is not None:
                self._require_seconds(name, otherwise=", or None for never")
        if self.reuse is not None:
            self._require_one_of("reuse", "reset", "recreate")
        self._require_one_of("idle", "run", "freeze")
        self._require_size("memory")

    def _require_int(self, name: str, *, least: int, otherwise: str = "") -> None:
        value = getattr(self, name)
        if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
            raise self._field_error(name, f"write a whole number of at least {least}, without quotes{otherwise}")

    def _require_seconds(self, name: str, *, otherwise: str = "") -> None:
        if not is_duration(getattr(self, name)):
            raise self._field_error(name, f"write a number of seconds above 0, without quotes{otherwise}")

    def _require_size(self, name: str) -> int:
        """Bytes of a field that is a size."""
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, Integral | str):
            raise self._field_error(name, "write a text such as '512MiB', or a whole number of bytes without quotes")
        try:
            return parse_byte_size(value if isinstance(value, str) else int(value))
        except ConfigError as error:
            raise self._field_error(name, f"that {str(error).removeprefix(repr(value)).strip(' .')}") from None

    def _require_str(self, name: str) -> None:
        if not isinstance(getattr(self, name), str):
            raise self._field_error(name, "write a text, in quotes")

    def _require_one_of(self, name: str, *choices: str) -> None:
        if getattr(self, name) not in choices:
            *others, last = map(repr, choices)
            raise self._field_error(name, f"write {', '.join(others)} or {last}")

    def _normalize_tuple(self, name: str) -> None:
        """Convert a field to a tuple, which can be hashed."""
        given = getattr(self, name)
        if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
            raise self._field_error(name, f"write a tuple; for a single one, {name}=({given!r},)")
        object.__setattr__(self, name, tuple(given))

    def _field_error(self, name: str, cure: str) -> ConfigError:
        return ConfigError(f"{type(self).__name__}({name}={getattr(self, name)!r}): {cure}.")

    @property
    def label(self) -> str:
        """A short name of the spec for people: events, errors, listings."""
        return type(self).__name__.removesuffix("Spec").lower()

    @property
    def preparation_key(self) -> Hashable | None:
        """Name of a prerequisite for starts on this machine, such as an image; None for none.

        Specs of one kind with the same key share one preparation, done by the resource's ``prepare``.
        """
        return None

    @property
    def is_single_use(self) -> bool:
        """Whether each owner gets a new instance. Shared instances are exempt."""
        return self.reuse == "recreate"

    @property
    def start_weight(self) -> int:
        """Number of the engine's start slots that one start takes; more if it loads a processor or a daemon.

        An engine with an explicit ``max_concurrent_starts`` counts each start as one.
        """
        return 1

    @property
    def max_owners(self) -> int | None:
        """Maximum number of owners of one ``global`` instance: `max_concurrency`, unless the kind overrides it."""
        return self.max_concurrency

    @property
    def memory_bytes(self) -> int:
        """`memory` in bytes."""
        return parse_byte_size(self.memory)


def kind_of(spec: ResourceSpec[Any]) -> ResourceKind:
    """Return the kind of a spec.

    Raises:
        UsageError: its class names none.
    """
    kind = getattr(type(spec), "kind", None)
    if isinstance(kind, ResourceKind):
        return kind
    name = type(spec).__name__
    raise UsageError(
        f"{name} names no resource. Write a subclass of Resource, and its address in the class attribute `kind` of "
        f"{name}: kind = ResourceKind('my kind', 'my_module:MyResource')."
    )


def create_resource(spec: ResourceSpec[R], instance: str) -> R:
    """Create an instance of ``spec``, without starting it.

    Raises:
        UsageError: the spec's class names no kind, or its resource class cannot be imported.
    """
    return cast(R, kind_of(spec).load_resource_type()(spec, instance))


async def prepare(spec: ResourceSpec[Any]) -> None:
    """Bring the prerequisites of instances of ``spec`` to this machine.

    Raises:
        UsageError: the spec's class names no kind, or its resource class has no ``prepare``.
        Exception: any error of the resource class's ``prepare``.
    """
    resource_type = kind_of(spec).load_resource_type()
    function = getattr(resource_type, "prepare", None)
    if function is None:
        raise UsageError(
            f"{type(spec).__name__} has a preparation_key, but {resource_type!r} has no prepare(spec). Name the "
            "resource class in `kind`, or add such an attribute to the function."
        )
    await function(spec)


def validate_spec(spec: ResourceSpec[Any]) -> None:
    """Check that instances of ``spec`` can be requested, as far as this is known before a start.

    Raises:
        UsageError: it is not a spec, its class names no kind, or it cannot be hashed.
        ConfigError: it requests a feature that its kind does not have.
    """
    if not isinstance(spec, ResourceSpec):
        got = f"the class {spec.__name__}: create one, {spec.__name__}(…)" if isinstance(spec, type) else _shown(spec)
        raise UsageError(f"acquire() takes a ResourceSpec, for instance ContainerSpec(memory='1GiB'), and got {got}.")
    kind = kind_of(spec)
    if spec.idle == "freeze":
        resource_type = kind.load_resource_type()
        if isinstance(resource_type, type) and issubclass(resource_type, Resource) and not resource_type.can_freeze:
            raise freeze_not_supported(spec)
    try:
        hash(spec)
    except TypeError as error:
        raise UsageError(
            f"{type(spec).__name__} cannot be hashed ({error}), but the whole spec is the key of its pool. Use a "
            "tuple instead of a list, and pairs instead of a dict."
        ) from error


def _shown(value: object) -> str:
    return f"{'an' if type(value).__name__[0] in 'aeiou' else 'a'} {type(value).__name__}, {value!r:.200}"


def freeze_not_supported(spec: ResourceSpec[Any]) -> ConfigError:
    """Return the error for a spec with ``idle="freeze"`` whose kind cannot freeze."""
    return ConfigError(
        f"{type(spec).__name__}(idle='freeze'): a {kind_of(spec).name} cannot be frozen. Write idle='run', the "
        "default. For a kind of your own, set can_freeze = True in its resource class and write freeze() and thaw()."
    )


def normalize_env(spec: Any) -> None:
    """Convert a spec's ``env`` to its canonical form, so that equivalent specs are equal.

    Raises:
        ConfigError: an item is not an environment variable. No message contains a value, which may be a secret.
    """
    given, where = spec.env, f"{type(spec).__name__}(env=…)"
    pairs = given.items() if isinstance(given, Mapping) else given
    if isinstance(pairs, str | bytes) or not isinstance(pairs, Iterable):
        raise ConfigError(f"{where} is {type_of(given)}: write a mapping, for instance {{'THREADS': '1'}}.")
    variables: dict[str, str] = {}
    for number, pair in enumerate(pairs):
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and all(isinstance(word, str) for word in pair)):
            raise ConfigError(
                f"{where}: its item {number} is not a pair of texts. Write a name and a value, for instance "
                "{'THREADS': '1'}. Numbers must be texts, too."
            )
        name, value = pair
        if not name or "=" in name or "\0" in name:
            raise ConfigError(f"{where}: {name!r} cannot be the name of an environment variable.")
        if "\0" in value:
            raise ConfigError(f"{where}: the value of {name} contains a NUL character, which is not allowed.")
        variables[name] = value
    object.__setattr__(spec, "env", tuple(sorted(variables.items())))


def repr_without_env_values(spec: Any) -> str:
    """Return a spec as text. The values of environment variables are left out, because they may be secrets."""
    shown = {field.name: repr(getattr(spec, field.name)) for field in fields(spec) if field.repr}
    if "env" in shown:
        try:
            names = [*dict(spec.env)]
        except (TypeError, ValueError):  # of a kind that uses another form
            shown["env"] = "…"
        else:
            shown["env"] = "{" + ", ".join(f"{name!r}: …" for name in names) + "}"
    return f"{type(spec).__qualname__}({', '.join(f'{name}={value}' for name, value in shown.items())})"

"""Variables: the environment variables that a spec asks for, in one form, and hidden where the spec is shown."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeAlias

from agentfly.core.errors import ConfigError, type_of

EnvironmentVariables: TypeAlias = Mapping[str, str] | tuple[tuple[str, str], ...]
"""A mapping, or pairs, of names and values. A spec keeps them as pairs, in the order of their names."""


def normalize_env(spec: Any) -> None:
    """Give a spec's ``env`` its one form, so that specs that mean the same are equal.

    Raises:
        ConfigError: something in it is no environment variable. No message has a value, which may be a secret.
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
                "{'THREADS': '1'}: numbers too are text there."
            )
        name, value = pair
        if not name or "=" in name or "\0" in name:
            raise ConfigError(f"{where}: {name!r} cannot be the name of an environment variable.")
        if "\0" in value:
            raise ConfigError(f"{where}: the value of {name} holds a NUL, which no variable can.")
        variables[name] = value
    object.__setattr__(spec, "env", tuple(sorted(variables.items())))


INHERITED_VARIABLES = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TZ", "LANG", "LANGUAGE"),
        *("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH"),
        *("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONHASHSEED", "PYTHONUNBUFFERED", "PYTHONUTF8"),
    }
)
"""What programs and interpreters need in order to be found and to start; further ``LC_…``, for the locale."""


def minimal_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What a process is given of this one's environment that is not to have the secrets in it."""
    return {name: value for name, value in environment.items() if name in INHERITED_VARIABLES or name.startswith("LC_")}


def repr_without_env_values(spec: Any) -> str:
    """A spec as text, with the names of its variables and without their values, which may be secrets."""
    shown = {field.name: repr(getattr(spec, field.name)) for field in fields(spec) if field.repr}
    if "env" in shown:
        try:
            names = [*dict(spec.env)]
        except (TypeError, ValueError):  # a kind's own, of another form
            shown["env"] = "…"
        else:
            shown["env"] = "{" + ", ".join(f"{name!r}: …" for name in names) + "}"
    return f"{type(spec).__qualname__}({', '.join(f'{name}={value}' for name, value in shown.items())})"

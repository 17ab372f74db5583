"""ModelAPISpec: a model that somebody else serves, described by where it is and how much of it may be used."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentfly.errors import ConfigError
from agentfly.resources.apis.endpoint import parse_base_url
from agentfly.resources.apis.limits import Limits
from agentfly.resources.registry import register
from agentfly.resources.spec import ResourceSpec

if TYPE_CHECKING:
    from agentfly.resources.apis.api import ModelAPI  # noqa: F401  (in the base's brackets)

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")  # a token (RFC 9110, section 5.6.2)
_THE_PROTOCOLS = (
    "accept",
    "accept-encoding",
    "connection",
    "content-length",
    "content-type",
    "host",
    "transfer-encoding",
)
_THE_CALLS = {"messages", "prompt", "model", "stream"}
_LONG = 24  # a name in lower case that is longer is rather a key


NOT_SENT = {"call_timeout_s", "wait_timeout_s", "retries", "connect_timeout_s", "read_timeout_s", "extra_body"}
"""Fields of the spec that are easily taken for parameters of a call."""


@dataclass(frozen=True, kw_only=True)
class ModelAPISpec(ResourceSpec["ModelAPI"]):
    """A model behind an OpenAI-compatible API: a judge, a simulated user, a teacher.

    The limits hold for everybody on this host together who calls the same model at the same address with the same key:
    all rollouts, all pools and engines, all processes.

    Args:
        base_url: the base of the endpoint, such as ``https://api.host/v1``.
        model: the model's name there.
        api_key_env: the environment variable that holds the key, sent as ``Authorization: Bearer …``; None for none.
            The key is read when the resource starts, and is shown nowhere.
        headers_env: further secret headers: a mapping, or pairs, of a header's name and the environment variable that
            holds its value.
        requests_per_minute: requests in any minute; None for no limit.
        tokens_per_minute: tokens of prompts and answers in any minute; None for no limit. A call reserves what it may
            take, which is its prompt and ``max_tokens``, and gives back what it did not.
        max_concurrency: calls at a time; None for no limit. When the far side asks for less it is halved, and grows
            again with the calls that go well. Any number of owners share one ``global`` instance.
        call_timeout_s: seconds that a call may take from its first sending, with all further tries.
        wait_timeout_s: seconds that a call may wait for its turn under the limits.
        retries: further tries of a call that failed in a way that may pass.
        connect_timeout_s: seconds that a connection may take to be made.
        read_timeout_s: seconds that may pass without a byte from the far side, which sends the first one when the
            whole answer is generated.
        extra_body: what goes into every request, such as ``{"temperature": 0}``; a call's own parameters win.

    Raises:
        ConfigError: a field has a value that cannot be, for instance an address that was never filled in.
    """

    base_url: str
    model: str
    api_key_env: str | None = None
    headers_env: Mapping[str, str] | tuple[tuple[str, str], ...] = ()
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrency: int | None = 16
    call_timeout_s: float = 300.0
    wait_timeout_s: float = 600.0
    retries: int = 5
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 120.0
    extra_body: Mapping[str, Any] | str = "{}"
    capacity: int = 1024  # an instance is a few connections

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "base_url", parse_base_url(self.base_url))
        if not isinstance(self.model, str) or not self.model.strip():
            raise self._wrong("model", "write the name under which the endpoint serves the model")
        for name in ("requests_per_minute", "tokens_per_minute"):
            if getattr(self, name) is not None:
                self._require_whole(name, least=1, otherwise=", or None for no limit")
        self._require_whole("retries", least=0)
        for name in ("call_timeout_s", "wait_timeout_s", "connect_timeout_s", "read_timeout_s"):
            self._require_seconds(name)
        self._settle_credentials()
        self._settle_extra_body()

    @property
    def label(self) -> str:
        """``api`` and the model's name."""
        return f"api:{self.model}"

    @property
    def owners_at_once(self) -> None:
        """Any number of owners share one ``global`` instance: what is limited is its calls, and not who has it."""
        return

    @property
    def limits(self) -> Limits:
        """What may be used of the endpoint."""
        most = 10**9 if self.max_concurrency is None else self.max_concurrency
        return Limits(most, self.requests_per_minute, self.tokens_per_minute)

    @property
    def parameters(self) -> dict[str, Any]:
        """`extra_body` as a mapping."""
        parsed: dict[str, Any] = json.loads(str(self.extra_body))
        return parsed

    def _settle_credentials(self) -> None:
        """Give the headers one form, and see that what should name a variable is not what it should hold."""
        given = self.headers_env
        pairs = [*(given.items() if isinstance(given, Mapping) else given)] if isinstance(given, Iterable) else [None]
        if not all(isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs):
            raise ConfigError(
                f"{type(self).__name__}(headers_env=…): write a mapping from the name of a header to the name of the "
                "environment variable that holds its value, for instance {'api-key': 'MY_KEY'}."
            )
        headers = tuple(sorted(((header, variable) for header, variable in pairs), key=lambda pair: pair[0].lower()))
        self._require_headers([header.lower() for header, _ in headers])
        object.__setattr__(self, "headers_env", headers)
        named = [] if self.api_key_env is None else [("api_key_env", self.api_key_env)]
        for where, variable in [*named, *((f"headers_env[{header!r}]", variable) for header, variable in headers)]:
            if not _is_variable(variable):
                raise ConfigError(  # what was given is not shown, because it may be the secret itself
                    f"{type(self).__name__}({where}=…): write the name of an environment variable, for instance "
                    "'JUDGE_KEY', and not what is in it."
                )

    def _require_headers(self, names: list[str]) -> None:
        taken = [*_THE_PROTOCOLS, *(["authorization"] if self.api_key_env else [])]
        for name in names:
            if not _HEADER.fullmatch(name) or name in taken or names.count(name) > 1:
                raise ConfigError(
                    f"{type(self).__name__}(headers_env={{{name!r}: …}}): write each header once, by a name such as "
                    f"'api-key', and none of {', '.join(taken)}, which are set otherwise."
                )

    def _settle_extra_body(self) -> None:
        """Keep the extra body as JSON text, which can be hashed."""
        given = self.extra_body
        try:
            value = json.loads(given) if isinstance(given, str) else dict(given)
            text = json.dumps(value, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise self._wrong("extra_body", f"write a mapping of plain values, as in a JSON object ({error})") from None
        if not isinstance(value, dict) or (_THE_CALLS | NOT_SENT) & value.keys():
            left_out = ", ".join(sorted(_THE_CALLS | NOT_SENT))
            raise self._wrong("extra_body", f"write a mapping, without any of {left_out}")
        object.__setattr__(self, "extra_body", text)


def _is_variable(name: object) -> bool:
    if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
        return False
    return name.isupper() or len(name) < _LONG


register(ModelAPISpec, "agentfly.resources.apis.api:ModelAPI", kind="api")

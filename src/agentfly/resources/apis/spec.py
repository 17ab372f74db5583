"""ModelAPISpec: a model that somebody else serves, described by where it is and how much of it may be used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentfly.resources.apis.endpoint import parse_base_url
from agentfly.resources.apis.limits import Limits
from agentfly.resources.credentials import settle_credentials
from agentfly.resources.registry import register
from agentfly.resources.spec import ResourceSpec

if TYPE_CHECKING:
    from agentfly.resources.apis.api import ModelAPI  # noqa: F401  (in the base's brackets)

_THE_CALLS = {"messages", "prompt", "model", "stream"}


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
        settle_credentials(self)
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


register(ModelAPISpec, "agentfly.resources.apis.api:ModelAPI", kind="api")

"""Credentials: authentication headers for a server, read from the environment and never shown."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn
from urllib.parse import quote

from agentfly.core.errors import ConfigError, PrerequisiteError

REDACTED = b"[secret]"

MIN_SECRET_LENGTH = 8
"""Characters of the shortest text that is taken for a secret. Servers that want no key get one such as ``EMPTY``, which
may stand in any text."""

WIRE_LOGGERS = (
    *("httpx", "httpcore.connection", "httpcore.http11", "httpcore.http2", "httpcore.proxy", "httpcore.socks"),
    *("httpx2", "httpcore2.connection", "httpcore2.http11", "httpcore2.http2", "httpcore2.proxy", "httpcore2.socks"),
    "mcp.client.streamable_http",
)
"""The loggers that log HTTP traffic. A server may return the request's headers in its own."""


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")  # a token (RFC 9110, section 5.6.2)
_RESERVED_HEADERS = (
    "accept",
    "accept-encoding",
    "connection",
    "content-length",
    "content-type",
    "host",
    "transfer-encoding",
)
_MAX_LOWERCASE_NAME = 24  # a name in lower case that is longer is rather a key


class Credentials:
    """Header values that go out with every call and appear nowhere else.

    They have no repr, cannot be pickled, and `redact` removes them from the answers of a server.
    """

    __slots__ = ("_headers", "_secrets")

    def __init__(self, headers: Mapping[str, str] | None = None, secrets: Iterable[str] = ()) -> None:
        """Use `from_environment` for what a user configures.

        Args:
            headers: names and values of the headers.
            secrets: the parts of the values to remove from texts; by default the whole values.
        """
        self._headers = dict(headers or {})
        hidden = {*secrets} or {*self._headers.values()}
        forms = {form for secret in hidden if len(secret) >= MIN_SECRET_LENGTH for form in _encodings_of(secret)}
        self._secrets = sorted((form.encode() for form in forms), key=len, reverse=True)

    @classmethod
    def from_environment(cls, api_key_env: str | None, headers_env: Iterable[tuple[str, str]] = ()) -> Credentials:
        """Read credentials from environment variables.

        Args:
            api_key_env: the variable that holds the key sent as ``Authorization: Bearer …``; None for no key.
            headers_env: pairs of a header's name and the variable that holds its value.

        Raises:
            PrerequisiteError: a variable is not set, empty, or holds what cannot go into a header. The message names
                the variable, and never its value.
        """
        headers: dict[str, str] = {}
        secrets: list[str] = []
        named = [("Authorization", api_key_env)] if api_key_env else []
        for header, variable in [*named, *headers_env]:
            secret = _read(variable, header)
            secrets.append(secret)
            headers[header] = f"Bearer {secret}" if variable is api_key_env and header == "Authorization" else secret
        return cls(headers, secrets)

    def headers(self) -> dict[str, str]:
        """The headers with their secret values. Set them on a request, and do not store them."""
        return dict(self._headers)

    def redact(self, text: str) -> str:
        """A text without the secrets, whether they stand in it as they are or as JSON or a URL writes them."""
        return self.redact_bytes(text.encode("utf-8", errors="surrogateescape")).decode(errors="surrogateescape")

    def redact_bytes(self, data: bytes) -> bytes:
        """The same for bytes."""
        for secret in self._secrets:
            data = data.replace(secret, REDACTED)
        return data

    def unfinished(self, data: bytes) -> int:
        """Return the number of bytes at the end of some data that may be the start of a secret."""
        for secret in self._secrets:  # the longest first
            for length in range(min(len(secret) - 1, len(data)), 0, -1):
                if secret.startswith(data[-length:]):
                    return length
        return 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Remove the secrets from a log record. This is a filter of loggers."""
        message = record.getMessage()
        if (redacted := self.redact(message)) != message:
            record.msg, record.args = redacted, ()
        if record.exc_info and not record.exc_text:  # the formatted message, unless it is formatted already
            record.exc_text = self.redact(logging.Formatter().formatException(record.exc_info))
        return True

    @contextmanager
    def out_of_logs(self) -> Iterator[None]:
        """Remove the secrets from the logs of HTTP traffic within the block."""
        own = partial(self.filter)  # of this call alone: another one may begin and end meanwhile
        for name in WIRE_LOGGERS:
            logging.getLogger(name).addFilter(own)
        try:
            yield
        finally:
            for name in WIRE_LOGGERS:
                logging.getLogger(name).removeFilter(own)

    def fingerprint(self, salt: bytes) -> str:
        """Return a hash that distinguishes these credentials. They cannot be derived from it without the salt."""
        digest = hashlib.blake2b(key=salt[:64], digest_size=16)
        digest.update(json.dumps(sorted(self._headers.items())).encode())
        return digest.hexdigest()

    def __repr__(self) -> str:
        return f"<credentials in {', '.join(self._headers)}>" if self._headers else "<no credentials>"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("Credentials are not pickled. They are read from the environment where they are used.")


def _read(variable: str, header: str) -> str:
    secret = os.environ.get(variable, "").strip()
    if not secret:
        raise PrerequisiteError(
            f"The environment variable {variable}, which holds the value of the header {header}, is not set. Set it in "
            f"the environment of the program, for instance with: export {variable}=…"
        )
    if not (secret.isascii() and secret.isprintable()):
        raise PrerequisiteError(
            f"The environment variable {variable} holds characters that cannot go into the header {header}. Set it to "
            "the key alone, on one line."
        )
    return secret


def _encodings_of(secret: str) -> set[str]:
    """Return the forms in which a secret may appear in an answer."""
    return {secret, quote(secret, safe=""), quote(secret), json.dumps(secret)[1:-1]}


def normalize_credentials(spec: Any) -> None:
    """Give a spec's ``headers_env`` one form, and see that what should name a variable is not what it should hold.

    The spec has a field ``api_key_env`` too.

    Raises:
        ConfigError: a header or a variable cannot be. No message has what may be a secret.
    """
    where, given = type(spec).__name__, spec.headers_env
    pairs: list[Any] = (
        [*(given.items() if isinstance(given, Mapping) else given)] if isinstance(given, Iterable) else [None]
    )
    if not all(isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs):
        raise ConfigError(
            f"{where}(headers_env=…): write a mapping from the name of a header to the name of the environment "
            "variable that holds its value, for instance {'api-key': 'MY_KEY'}."
        )
    headers = tuple(sorted(((header, variable) for header, variable in pairs), key=lambda pair: pair[0].lower()))
    _require_headers(where, [header.lower() for header, _ in headers], has_key=bool(spec.api_key_env))
    object.__setattr__(spec, "headers_env", headers)
    named = [] if spec.api_key_env is None else [("api_key_env", spec.api_key_env)]
    for field, variable in [*named, *((f"headers_env[{header!r}]", variable) for header, variable in headers)]:
        if not _is_variable(variable):
            raise ConfigError(  # the value is not shown, because it may be the secret itself
                f"{where}({field}=…): write the name of an environment variable, for instance 'JUDGE_KEY', and not "
                "what is in it."
            )


def _require_headers(where: str, names: list[str], *, has_key: bool) -> None:
    taken = [*_RESERVED_HEADERS, *(["authorization"] if has_key else [])]
    for name in names:
        if not _HEADER.fullmatch(name) or name in taken or names.count(name) > 1:
            raise ConfigError(
                f"{where}(headers_env={{{name!r}: …}}): write each header once, by a name such as 'api-key', and none "
                f"of {', '.join(taken)}, which are set otherwise."
            )


def _is_variable(name: object) -> bool:
    if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
        return False
    return name.isupper() or len(name) < _MAX_LOWERCASE_NAME

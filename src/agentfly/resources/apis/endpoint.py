"""Endpoint: where a model answers over HTTP, checked when it is written down rather than when it is first called."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

from agentfly.errors import ConfigError

_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?")
_PLACEHOLDER = re.compile(r"your[-_.]|(.*\.)?(example|invalid)$|(.*\.)?example\.(com|net|org)$", re.IGNORECASE)
_SECRET_PARTS = re.compile(r"(?<=//).*(?=@)|^(?!\w+://).*(?=@)|(?<=[?#]).*", re.DOTALL)
_METHOD_PATHS = ("/chat/completions", "/completions", "/models")


def parse_base_url(base_url: str) -> str:
    """An endpoint's base in its one form, without a slash at its end: ``https://api.host/v1``.

    Raises:
        ConfigError: it is no URL that can be called, a placeholder that was never filled in (names reserved for
            examples by RFC 2606 count as that), or holds what does not belong there, such as a password.
    """
    if not isinstance(base_url, str):
        raise ConfigError(f"base_url={base_url!r}: write the endpoint's address as a text, such as {_SUCH_AS}.")
    text = base_url.strip()
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"base_url={_shown(text)!r} is no URL: {error}. Write one such as {_SUCH_AS}.") from error
    if parts.username is not None or parts.password is not None:
        raise ConfigError(
            f"base_url for host {host!r} holds a user or a password, which would be seen wherever the spec is. Put the "
            "credential in an environment variable and name it in api_key_env or headers_env."
        )
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigError(
            f"base_url={_shown(text)!r} is no address that can be called. Write the whole of it, with http:// or "
            f"https://, such as {_SUCH_AS}."
        )
    if not (_is_address(host) or _HOST.fullmatch(host)) or _PLACEHOLDER.match(host):
        raise ConfigError(f"base_url={_shown(text)!r} is a placeholder: fill in the host of your endpoint.")
    if parts.query or parts.fragment:
        raise ConfigError(
            f"base_url for host {host!r} has something after a '?' or '#'. Give the base alone, such as {_SUCH_AS}; "
            "what is secret goes into an environment variable that headers_env names."
        )
    path = parts.path.rstrip("/")
    for method in _METHOD_PATHS:
        if path.endswith(method):
            raise ConfigError(
                f"base_url={base_url!r} is the address of one method. Leave out {method!r} at its end: the methods "
                "are found from the base."
            )
    return f"{parts.scheme}://{parts.netloc.lower()}{path}"


def is_loopback(base_url: str) -> bool:
    """Whether an endpoint is on this machine, so that no proxy can lead to it."""
    host = urlsplit(base_url).hostname or ""
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _shown(text: str) -> str:
    """An address without what may be secret in it: a user, a password, a query."""
    return _SECRET_PARTS.sub("…", text)


_SUCH_AS = "'http://localhost:8000/v1'"

"""Authentication of gateway calls: keys, and the hosts and origins that requests name.

There are two kinds of keys. The harness, which runs the programs, has the gateway's key. It opens, reads and finishes
rollouts. Each program has the key of its own rollout, which only allows model calls in that rollout. So no program can
set its own reward or access another rollout.

A web page open in a browser on this machine must not reach the gateway either. Requests from pages (by their
``Origin``) are refused. So are host names (``Host``) that the gateway does not know, because a page may have had such a
name resolve to this machine (DNS rebinding).
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from collections.abc import Iterable, Sequence

from agentfly.gateway.limits import RequestError

HARNESS_KEY_REQUIRED = "Only the harness may do this, by the gateway's own key: Authorization: Bearer KEY."


def new_key() -> str:
    """Return a random key of 256 bits."""
    return secrets.token_urlsafe(32)


def is_key(text: str) -> bool:
    """Return whether a text can be sent as a key: one or more visible ASCII characters."""
    return bool(text) and all("!" <= character <= "~" for character in text)


def bearer_token(authorization: Sequence[str]) -> str:
    """Return the key in a request's ``Authorization`` headers; empty if there is none."""
    scheme, _, key = authorization[0].partition(" ") if len(authorization) == 1 else ("", "", "")
    return key.strip() if scheme.lower() == "bearer" else ""


def is_same_key(presented: str, key: str) -> bool:
    """Return whether two keys are equal, in a time that does not depend on where they differ."""
    return hmac.compare_digest(presented.encode(errors="replace"), key.encode())


def require_known_host(hosts: Sequence[str], known: Iterable[str]) -> None:
    """Check the ``Host`` headers of a request: an address, this machine, or one of the ``known`` names.

    Raises:
        RequestError: the host is another one, or there is not exactly one header.
    """
    if len(hosts) != 1:
        raise RequestError("The request needs exactly one Host header.", status=403, code="unknown_host")
    name = host_name(hosts[0])
    if not (_is_address(name) or name == "localhost" or name.endswith(".localhost") or name in known):
        raise RequestError(
            f"The gateway is not known by the name {name[:200]!r}. Call it by its address, or name the host in "
            "Gateway(allowed_hosts=…), or --allowed-host.",
            status=403,
            code="unknown_host",
        )


def require_no_foreign_origin(origins: Sequence[str], hosts: Sequence[str]) -> None:
    """Check that a request does not come from a web page of another origin.

    Raises:
        RequestError: it does.
    """
    for origin in origins:
        _, _, host = origin.partition("://")
        if not host or host.lower() != hosts[0].lower():
            raise RequestError(
                f"Web pages may not call the gateway; this request is one of {origin[:200]!r}.",
                status=403,
                code="foreign_origin",
            )


def host_name(host: str) -> str:
    """Return the name in a ``Host`` header, without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].rstrip(".").lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True

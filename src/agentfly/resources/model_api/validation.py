"""Validation of endpoint addresses and of the parameter names of a call.

Addresses are checked when they are written down, not at the first call. Many endpoints silently ignore a parameter
with a misspelled name.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from difflib import get_close_matches
from urllib.parse import SplitResult, parse_qsl, urlsplit

from agentfly.core.errors import ConfigError, UsageError

_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?")
_PLACEHOLDER = re.compile(r"your[-_.]|(.*\.)?(example|invalid)$|(.*\.)?example\.(com|net|org)$", re.IGNORECASE)
_SECRET_PARTS = re.compile(r"(?<=//).*(?=@)|^(?!\w+://).*(?=@)|(?<=[?#]).*", re.DOTALL)
_SECRET_PARAMETER = re.compile(
    r"key$|token$|secret$|passw(or)?d$|pwd$|^auth(?!or)|authorization$|^sig$|signature$|credentials?$", re.IGNORECASE
)
_METHOD_PATHS = ("/chat/completions", "/completions", "/models")


def parse_address(setting: str, address: str, such_as: str) -> SplitResult:
    """A server's address in its one form: the host is in lower case and, if it is international, in punycode.

    Args:
        setting: the name of the setting, for messages.
        address: the address as written by the user.
        such_as: an address as it should be, for messages.

    Raises:
        ConfigError: it is not a valid address, or it contains a credential, which would be visible wherever the spec
            is.
    """
    if not isinstance(address, str):
        raise ConfigError(f"{setting}={address!r}: write the address as a text, such as {such_as}.")
    text = address.strip()
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"{setting}={_shown(text)!r} is no URL: {error}. Write one such as {such_as}.") from error
    if parts.username is not None or parts.password is not None:
        raise ConfigError(
            f"{setting} for host {host!r} holds a user or a password, which would be seen wherever the spec is. Put "
            "the credential in an environment variable and name it in api_key_env or headers_env."
        )
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigError(
            f"{setting}={_shown(text)!r} is no address that can be called. Write the whole of it, with http:// or "
            f"https://, such as {such_as}."
        )
    for name, _ in parse_qsl(parts.query, keep_blank_values=True):
        if _SECRET_PARAMETER.search(name):
            raise ConfigError(
                f"{setting} for host {host!r} holds a credential in the parameter {name[:40]!r}, which would be seen "
                "wherever the spec is. Leave it out, put its value in an environment variable and name that in "
                "api_key_env or headers_env."
            )
    try:
        host = f"[{host}]" if ":" in host else _ascii(host)
    except ValueError:
        raise ConfigError(
            f"{setting}={_shown(text)!r}: {host!r} is no name of a host. Write the host where it is a placeholder; an "
            f"address is such as {such_as}."
        ) from None
    return parts._replace(netloc=host if port is None else f"{host}:{port}")


def _ascii(host: str) -> str:
    """Return a host in its canonical form.

    Raises:
        ValueError: nothing can have this name.
    """
    if not host.isascii():
        import httpx  # here, because few hosts need it

        try:
            host = httpx.URL(scheme="https", host=host).raw_host.decode()
        except httpx.InvalidURL as error:
            raise ValueError(host) from error
    if not _HOST.fullmatch(host):
        raise ValueError(host)
    return host


def parse_base_url(base_url: str) -> str:
    """Return an endpoint's base URL in its canonical form, without a slash at its end: ``https://api.host/v1``.

    Raises:
        ConfigError: it is not a callable URL, is a placeholder (names reserved for examples by RFC 2606 count), or
            holds something that does not belong there, such as a password.
    """
    parts = parse_address("base_url", base_url, _SUCH_AS)
    host = parts.hostname or ""
    if _PLACEHOLDER.match(host):
        raise ConfigError(f"base_url for host {host!r} is a placeholder: fill in the host of your endpoint.")
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
    return f"{parts.scheme}://{parts.netloc}{path}"


def is_loopback(base_url: str) -> bool:
    """Return whether an endpoint is on this machine, so that no proxy is used for it."""
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


_KNOWN = """
    add_generation_prompt add_special_tokens allowed_token_ids audio bad_words best_of cache_salt chat_template
    chat_template_kwargs continue_final_message documents echo frequency_penalty function_call functions
    guided_choice guided_grammar guided_json guided_regex ignore_eos include_stop_str_in_output length_penalty
    logit_bias logprobs max_completion_tokens max_tokens messages metadata min_p min_tokens mm_processor_kwargs
    modalities model models n parallel_tool_calls prediction presence_penalty priority prompt prompt_cache_key
    prompt_logprobs reasoning_effort repetition_penalty request_id response_format return_token_ids
    return_tokens_as_token_ids safety_identifier seed service_tier skip_special_tokens
    spaces_between_special_tokens stop stop_token_ids store stream stream_options structured_outputs suffix
    temperature tool_choice tools top_k top_logprobs top_p truncate_prompt_tokens use_beam_search user verbosity
    vllm_xargs web_search_options
"""
"""Parameter names of OpenAI's API and vLLM. Others are sent, too, because an endpoint may have its own."""

_ALIKE = 0.85  # max_token and max_tokens are more alike than that, top_k and top_p are not


def check_parameter_names(names: Iterable[str], otherwise: str = "") -> None:
    """Check parameter names for likely typing errors.

    Args:
        names: the names.
        otherwise: advice for an endpoint that does have such a parameter.

    Raises:
        UsageError: one is; the message names the nearest.
    """
    known = _KNOWN.split()
    for name in names:
        if name not in known and (nearest := get_close_matches(name, known, 1, _ALIKE)):
            raise UsageError(f"{name} is no parameter of a call. Did you mean {nearest[0]!r}?{otherwise}")

"""The way this copy of AgentFly was installed, and checks for its optional packages."""

from __future__ import annotations

import importlib.util
import json
import shlex
from importlib import metadata
from pathlib import Path

from agentfly.core.errors import PrerequisiteError

_DISTRIBUTION = "agentfly-rl"


def install_command(extra: str) -> str:
    """Return the command that adds an extra, such as ``train``, to this copy of AgentFly.

    It names the checkout or wheel of this copy, because the package name alone would refer to the package index.
    """
    source = _install_source()
    if source is None:
        return f"pip install '{_DISTRIBUTION}[{extra}]'"
    if source.startswith("file:") or "://" in source:
        return f"pip install '{_DISTRIBUTION}[{extra}] @ {source}'"
    return f"pip install --editable {shlex.quote(f'{source}[{extra}]')}"


def _install_source() -> str | None:
    """Return the directory of an editable checkout, or the URL of a wheel or repository; None for the package index."""
    try:
        recorded = metadata.distribution(_DISTRIBUTION).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        recorded = None
    try:
        direct = json.loads(recorded) if recorded else {}
        url = str(direct["url"])
    except (ValueError, KeyError, TypeError):
        return _checkout()
    if "dir_info" in direct:
        return _checkout() or url
    if "vcs_info" in direct:
        return f"{direct['vcs_info'].get('vcs', 'git')}+{url}"
    return url


def _checkout() -> str | None:
    """Return the checkout that contains this module; None if it is among installed packages."""
    root = Path(__file__).resolve().parents[3]
    return str(root) if (root / "pyproject.toml").is_file() else None


def require_training_packages() -> None:
    """Check that the packages for running and training models are installed, without importing them.

    Raises:
        PrerequisiteError: a package is missing; the message says how to install it.
    """
    require_packages("Running a model in this process", "torch", "transformers", "safetensors")


def require_packages(what: str, *names: str) -> None:
    """Check that packages of the extra ``train`` are installed, without importing them.

    Args:
        what: the feature that needs the packages, as the beginning of the message.
        names: the packages.

    Raises:
        PrerequisiteError: a package is missing; the message says how to install it.
    """
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise PrerequisiteError(
            f"{what} needs {' and '.join(missing)}, not installed here. "
            f"Get what is needed with: {install_command('train')}"
        )

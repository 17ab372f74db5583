"""What the package's extras bring: whether it is installed."""

from __future__ import annotations

import importlib.util

from agentfly.errors import PrerequisiteError
from agentfly.installation import install_command


def require_training_packages() -> None:
    """Check that what runs and trains models is installed, without importing it.

    Raises:
        PrerequisiteError: names what is missing and how to get it.
    """
    require_packages("Running a model in this process", "torch", "transformers", "safetensors")


def require_packages(what: str, *names: str) -> None:
    """Check that packages of the extra ``train`` are installed, without importing them.

    Args:
        what: what needs them, to begin the message with.
        names: the packages.

    Raises:
        PrerequisiteError: names what is missing and how to get it.
    """
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise PrerequisiteError(
            f"{what} needs {' and '.join(missing)}, not installed here. "
            f"Get what is needed with: {install_command('train')}"
        )

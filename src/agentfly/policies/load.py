"""load_policy: the embedded policy by a model's name, with torch imported only then."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentfly.errors import PrerequisiteError

if TYPE_CHECKING:
    from agentfly.policies.embedded.policy import EmbeddedPolicy


def load_policy(model: str | Path, **settings: Any) -> EmbeddedPolicy:
    """Load a model as a policy in this process; ``settings`` are those of `EmbeddedPolicy.load`.

    Raises:
        PrerequisiteError: torch or transformers is not installed, or the model cannot be had.
        ConfigError: a setting is out of its range.
    """
    require_training_packages()
    from agentfly.policies.embedded.policy import EmbeddedPolicy

    return EmbeddedPolicy.load(model, **settings)


def require_training_packages() -> None:
    """Check that what runs and trains models is installed, without importing it.

    Raises:
        PrerequisiteError: names what is missing and how to get it.
    """
    missing = [name for name in ("torch", "transformers", "safetensors") if importlib.util.find_spec(name) is None]
    if missing:
        raise PrerequisiteError(
            f"Running a model in this process needs {' and '.join(missing)}, not installed here. "
            "Get what is needed with: pip install 'agentfly-rl[train]'"
        )

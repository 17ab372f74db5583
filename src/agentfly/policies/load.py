"""load_policy: the embedded policy by a model's name, with torch imported only then."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentfly.core.installation import require_training_packages

if TYPE_CHECKING:
    from agentfly.policies.embedded.policy import EmbeddedPolicy


def load_policy(model: str | Path, **settings: Any) -> EmbeddedPolicy:
    """Load a model as a policy in this process. ``settings`` are the arguments of `EmbeddedPolicy.load`.

    Raises:
        PrerequisiteError: torch or transformers is not installed, or the model cannot be fetched.
        ConfigError: a setting is out of its range.
    """
    require_training_packages()
    limit_openmp_spinning()
    from agentfly.policies.embedded.policy import EmbeddedPolicy

    return EmbeddedPolicy.load(model, **settings)


def limit_openmp_spinning() -> None:
    """Let torch's idle threads spin for only about 0.1 ms before they sleep. Call it before torch is imported.

    The OpenMP runtime of torch's Linux wheels (libgomp) otherwise spins for milliseconds. This takes the core from
    tools, sandboxes and the event loop. With one other process on each of two cores, it costs a factor of four or more.
    Gaps within a step are shorter than 0.1 ms, so nothing is lost there. Values of the user in ``GOMP_SPINCOUNT`` or
    ``OMP_WAIT_POLICY`` are kept.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")

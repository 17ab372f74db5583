"""Bubblewrap: the embedded backend. Its program comes with a wheel, and an ordinary user may start it."""

from __future__ import annotations

from typing import Any

from agentfly.resources.containers import images
from agentfly.resources.containers.backend import Backend
from agentfly.resources.containers.bubblewrap import tiers
from agentfly.resources.containers.bubblewrap.launcher import Launcher
from agentfly.resources.containers.bubblewrap.reaping import reap
from agentfly.resources.containers.bubblewrap.sandbox import BubblewrapSandbox
from agentfly.resources.containers.bubblewrap.scratch import traces
from agentfly.resources.containers.capabilities import Capabilities
from agentfly.resources.containers.spec import ContainerSpec


class Bubblewrap(Backend):
    """Sandboxes of bubblewrap.

    Args:
        launcher: what starts them; by default the launcher of this process.
    """

    name = "bubblewrap"

    def __init__(self, launcher: Launcher | None = None) -> None:
        self._launcher = launcher

    def probe(self) -> Capabilities:
        """See `Backend.probe`."""
        return self._launcher.capabilities if self._launcher is not None else tiers.probe()

    async def prepare(self, spec: ContainerSpec) -> None:
        """Unpack the image, if it is an archive."""
        if spec.image_kind == "path":
            await images.prepare(spec)

    def sandbox(self, spec: ContainerSpec, instance: str) -> BubblewrapSandbox:
        """See `Backend.sandbox`."""
        return BubblewrapSandbox(self._launcher or tiers.launcher(), spec, instance)

    def traces(self, spec: ContainerSpec, instance: str) -> dict[str, Any]:
        """See `Backend.traces`."""
        return traces(instance)

    def reap(self, traces: dict[str, Any]) -> None:
        """See `Backend.reap`."""
        reap(traces)

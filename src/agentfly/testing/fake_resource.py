"""A fake resource that fails, hangs, delays or dies on request, for tests of code that uses resources.

>>> world = FakeBackend()
>>> spec = FakeSpec(world=world, capacity=2)

``world.alive`` then holds the instances that exist, independent of the engine's state.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from agentfly.resources.kind import ResourceKind
from agentfly.resources.resource import Resource, Status
from agentfly.resources.spec import ResourceSpec

FaultHook = Callable[[str, str], Awaitable[None]]
"""Called with an operation (``start``, ``reset``, ``status``, ``release``, ``freeze``, ``thaw``, ``use``) and an
instance's name, or with ``prepare`` and an image, while the operation runs. It may be slow, raise, or never
return."""


async def no_faults(operation: str, instance: str) -> None:
    """Let every operation succeed at once."""


class FakeBackend:
    """The backend in which fake instances exist.

    As with real backends, an instance exists before its ``start`` has succeeded, and until a ``release`` succeeds.

    Attributes:
        hook: implements the operations; may be replaced at any time.
        alive: the instances that exist.
        dead: existing instances that have died and are not released yet.
        frozen: existing instances that are frozen.
        history: every started operation with its instance, in order.
    """

    def __init__(self, behave: FaultHook = no_faults) -> None:
        self.hook = behave
        self.alive: set[str] = set()
        self.dead: set[str] = set()
        self.frozen: set[str] = set()
        self.history: list[tuple[str, str]] = []

    def kill(self, instance: str) -> None:
        """Have an instance die."""
        self.dead.add(instance)

    def count(self, operation: str) -> int:
        """Return how often an operation was started."""
        return sum(begun == operation for begun, _ in self.history)


@dataclass(frozen=True, kw_only=True)
class FakeSpec(ResourceSpec["FakeResource"]):
    """A fake resource; ``name`` distinguishes specs of one backend. An ``image`` must be prepared first."""

    kind = ResourceKind("fake", "agentfly.testing.fake_resource:FakeResource")

    world: FakeBackend = field(default_factory=FakeBackend)
    name: str = "fake"
    image: str | None = None

    @property
    def label(self) -> str:
        """The spec's name."""
        return self.name

    @property
    def preparation_key(self) -> str | None:
        """The image."""
        return self.image


class FakeResource(Resource):
    """An instance in a `FakeBackend`.

    Attributes:
        contents: the data that owners left in it; a reset clears it.
    """

    spec: FakeSpec
    can_freeze = True

    def __init__(self, spec: FakeSpec, instance: str) -> None:
        super().__init__(spec, instance)
        self.world = spec.world
        self.contents: list[str] = []

    async def start(self) -> None:
        """Create the instance, then call the hook."""
        self.world.alive.add(self.instance)
        await self._behave("start")

    async def reset(self) -> None:
        """Call the hook, then clear the contents."""
        await self._behave("reset")
        self.contents.clear()

    async def status(self) -> Status:
        """Call the hook, then return whether the instance is alive."""
        await self._behave("status")
        lives = self.instance in self.world.alive and self.instance not in self.world.dead
        return Status.HEALTHY if lives else Status.BROKEN

    def quick_status(self) -> Status:
        """Return whether the instance is alive."""
        return Status.BROKEN if self.instance in self.world.dead else Status.HEALTHY

    async def release(self) -> None:
        """Call the hook, then remove the instance."""
        await self._behave("release")
        self.world.alive.discard(self.instance)
        self.world.frozen.discard(self.instance)

    async def freeze(self) -> None:
        """Freeze the instance, then call the hook, so that a failed or cancelled freeze may have frozen it."""
        self.world.frozen.add(self.instance)
        await self._behave("freeze")

    async def thaw(self) -> None:
        """Call the hook, then continue the instance."""
        await self._behave("thaw")
        self.world.frozen.discard(self.instance)

    async def use(self) -> None:
        """Call the hook.

        Raises:
            AssertionError: it is frozen, before or after, where a real instance would hang.
        """
        assert self.instance not in self.world.frozen, f"{self.instance} is used while it is frozen"
        await self._behave("use")
        assert self.instance not in self.world.frozen, f"{self.instance} was frozen while it was used"

    @classmethod
    async def prepare(cls, spec: FakeSpec) -> None:
        """Call the hook for an image."""
        assert spec.image is not None
        spec.world.history.append(("prepare", spec.image))
        await spec.world.hook("prepare", spec.image)

    async def _behave(self, operation: str) -> None:
        self.world.history.append((operation, self.instance))
        await self.world.hook(operation, self.instance)

"""GPUAllocator: assigns GPUs of this machine to servers, so that no two servers get the same one.

The engine's budget only counts GPUs. Claims on devices are in a file that all processes of the user on this machine
share; claims of dead processes do not count. Nodes of a cluster often share the directory, but never the file, because
device ``0`` of one node is not device ``0`` of another.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from agentfly.core.errors import ResourceError, ResourceStartError
from agentfly.core.shared_file import FileLocked, LockedFile, lock_file
from agentfly.resources.process.procfs import ProcessIdentity

VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEVICE = re.compile(r"nvidia\d+")
_WHOLE = 1000  # thousandths, so that sums stay exact
_PATIENCE_S = 1.0  # the file is held for microseconds


@dataclass(frozen=True)
class Claim:
    """The devices that an instance has.

    Attributes:
        process: the process that the instance belongs to.
        devices: their names.
        share: the part of each device that it uses, in thousandths.
    """

    process: ProcessIdentity
    devices: tuple[str, ...]
    share: int


GPUClaims = dict[str, Claim]
"""The claims by instance."""


class GPUAllocator:
    """The graphics processors that this process may use.

    Args:
        directory: the directory of claims, in one file for each boot of each machine.
        devices: their names, as in ``CUDA_VISIBLE_DEVICES``.
    """

    def __init__(self, directory: Path, devices: tuple[str, ...]) -> None:
        self._process = ProcessIdentity.current()
        self._directory = directory
        self._file = directory / self._process.boot  # which all containers of a machine have in common
        self._devices = devices

    async def allocate(self, instance: str, count: int, gpus: float) -> tuple[str, ...]:
        """Claim devices until `free`. Of those with enough capacity left, the most used ones are chosen.

        Args:
            instance: the instance that uses them.
            count: the number of devices.
            gpus: the capacity of all of them together, in GPUs; below ``count`` they are shared with others.

        Raises:
            ResourceStartError: there are not enough; the message names the holders.
            ResourceError: the file cannot be used.
        """
        share = min(_WHOLE, round(_WHOLE * gpus / count))
        async with self._claims() as claims:
            taken = dict.fromkeys(self._devices, 0)
            for claim in claims.values():
                for device in claim.devices:
                    taken[device] = taken.get(device, 0) + claim.share
            room = [device for device in self._devices if taken[device] + share <= _WHOLE]
            if len(room) < count:
                raise ResourceStartError(self._shortage(instance, count, share, claims))
            chosen = tuple(sorted(room, key=lambda device: -taken[device])[:count])
            claims[instance] = Claim(self._process, chosen, share)
        return chosen

    async def release(self, instance: str) -> None:
        """Release the devices of an instance, if it has any.

        Raises:
            ResourceError: the file cannot be used. The devices are then free once this process has ended.
        """
        async with self._claims() as claims:
            claims.pop(instance, None)

    @asynccontextmanager
    async def _claims(self) -> AsyncIterator[GPUClaims]:
        """Yield the claims of live processes, to be changed without waiting in between."""
        deadline = time.monotonic() + _PATIENCE_S
        with contextlib.ExitStack() as locked:
            try:
                while (held := self._hold(locked)) is None:
                    if time.monotonic() > deadline:
                        raise OSError(f"another process has held it for {_PATIENCE_S:g} s")
                    await asyncio.sleep(0.005)
                living = _living(held.read())
                yield living
                held.write(json.dumps({name: asdict(claim) for name, claim in living.items()}).encode())
            except (OSError, ValueError) as error:
                raise ResourceError(
                    f"{self._file}, in which model servers write down who has which GPU, cannot be used: {error}. Make "
                    "room there, remove it while no server runs, or set AGENTFLY_STATE_DIR."
                ) from error

    def _hold(self, locked: contextlib.ExitStack) -> LockedFile | None:
        """The file, until the stack is closed; None if another process has it."""
        with contextlib.suppress(FileLocked):
            new = not self._file.exists()
            held = locked.enter_context(lock_file(self._file))
            if new:
                self._remove_unused()
            return held
        return None

    def _remove_unused(self) -> None:
        """Remove files of earlier boots, and files of other machines without claims."""
        for path in self._directory.iterdir():
            with contextlib.suppress(OSError, ValueError, FileLocked):
                if path != self._file:
                    with lock_file(path) as held:
                        if not _living(held.read()):
                            path.unlink()

    def _shortage(self, instance: str, count: int, share: int, claims: GPUClaims) -> str:
        holders = [
            f"{name} ({_described(claim.process, self._process)}) has {claim.share / _WHOLE:g} of "
            f"{', '.join(claim.devices)}"
            for name, claim in claims.items()
        ]
        there = f"There are {len(self._devices)}, {', '.join(self._devices)}: {'; '.join(holders) or 'none is taken'}."
        unseen = any(claim.process.namespace != self._process.namespace for claim in claims.values())
        return (
            f"{instance} needs {share / _WHOLE:g} of each of {count} GPUs. {there} Ask for fewer, or have the engine "
            f"wait for them to come free: ResourceEngine(budget=Budget(gpus={len(self._devices)}))."
            + (f" If a container named here is gone, remove {self._file} while no server runs." if unseen else "")
        )


def visible_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> tuple[str, ...]:
    """Return the names of the NVIDIA devices that a process with this environment may use; empty if unknown."""
    if (named := environment.get(VISIBLE)) is not None:
        return tuple(name.strip() for name in named.split(",") if name.strip())
    # A container may have the third device of its host alone, and its number is zero there.
    return tuple(map(str, range(sum(_DEVICE.fullmatch(path.name) is not None for path in devices.iterdir()))))


def _living(text: bytes) -> GPUClaims:
    """Return the claims in a file, without those of dead processes.

    Raises:
        ValueError: the file holds something else.
    """
    claims: GPUClaims = {}
    try:
        for name, saved in json.loads(text or b"{}").items():
            claim = Claim(ProcessIdentity.from_json(saved["process"]), tuple(saved["devices"]), int(saved["share"]))
            if not claim.process.is_dead():
                claims[name] = claim
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it holds what is no claim: {error!r}") from error
    return claims


def _described(process: ProcessIdentity, here: ProcessIdentity) -> str:
    if process.namespace == here.namespace:
        return f"process {process.pid}"
    return f"process {process.pid} in the container {process.machine}"

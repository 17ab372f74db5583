"""GPUs: which of a machine's graphics processors a server gets, so that no two servers are sent to the same one.

The engine's budget counts how many are taken. Who has which ones is written down in a file that all processes of the
user share; what a dead process had is free.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from agentfly.errors import ResourceError, ResourceStartError
from agentfly.resources.identity import start_time
from agentfly.resources.shared_file import Busy, Held, hold

VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEVICE = re.compile(r"nvidia\d+")
_WHOLE = 1000  # thousandths, so that sums stay exact
_PATIENCE_S = 1.0  # the file is held for microseconds

Claims = dict[str, dict[str, Any]]
"""By instance: the process that it belongs to, the devices, and the thousandths of each that it takes."""


class GPUs:
    """The graphics processors that this process may use.

    Args:
        file: where it is written down who has which.
        devices: their names, as in ``CUDA_VISIBLE_DEVICES``.
    """

    def __init__(self, file: Path, devices: tuple[str, ...]) -> None:
        self._file = file
        self._devices = devices

    async def claim(self, instance: str, count: int, gpus: float) -> tuple[str, ...]:
        """Take devices, those that are used most among those with enough left, until `free`.

        Args:
            instance: who they are for.
            count: how many devices.
            gpus: how many graphics processors' worth of work all of them are; below ``count``, they are shared.

        Raises:
            ResourceStartError: there are not enough; the message says who has them.
            ResourceError: the file cannot be used.
        """
        share = min(_WHOLE, round(_WHOLE * gpus / count))
        async with self._claims() as claims:
            taken = dict.fromkeys(self._devices, 0)
            for claim in claims.values():
                for device in claim["devices"]:
                    taken[device] = taken.get(device, 0) + claim["share"]
            room = [device for device in self._devices if taken[device] + share <= _WHOLE]
            if len(room) < count:
                raise ResourceStartError(_shortage(instance, count, share, self._devices, claims))
            chosen = tuple(sorted(room, key=lambda device: -taken[device])[:count])
            pid = os.getpid()
            claims[instance] = {"pid": pid, "started": start_time(pid), "devices": chosen, "share": share}
        return chosen

    async def free(self, instance: str) -> None:
        """Give back what an instance has, if it has anything.

        Raises:
            ResourceError: the file cannot be used. What the instance has is free when this process has ended.
        """
        async with self._claims() as claims:
            claims.pop(instance, None)

    @asynccontextmanager
    async def _claims(self) -> AsyncIterator[Claims]:
        """What is claimed by the living, to be changed without waiting for anything in between."""
        deadline = time.monotonic() + _PATIENCE_S
        with contextlib.ExitStack() as locked:
            try:
                while (held := self._hold(locked)) is None:
                    if time.monotonic() > deadline:
                        raise OSError(f"another process has held it for {_PATIENCE_S:g} s")
                    await asyncio.sleep(0.005)
                claims: Claims = json.loads(held.read() or b"{}")
                living = {name: claim for name, claim in claims.items() if _lives(claim)}
                yield living
                held.write(json.dumps(living).encode())
            except (OSError, ValueError) as error:
                raise ResourceError(
                    f"{self._file}, in which model servers write down who has which GPU, cannot be used: {error}. Make "
                    "room there, remove it while no server runs, or set AGENTFLY_STATE_DIR."
                ) from error

    def _hold(self, locked: contextlib.ExitStack) -> Held | None:
        """The file, until the stack is closed; None if another process has it."""
        with contextlib.suppress(Busy):
            return locked.enter_context(hold(self._file))
        return None


def visible(environment: Mapping[str, str], devices: Path = Path("/dev")) -> tuple[str, ...]:
    """The names of the NVIDIA devices that a process with this environment may use; none if it cannot be told."""
    if (named := environment.get(VISIBLE)) is not None:
        return tuple(name.strip() for name in named.split(",") if name.strip())
    # A container may have the third device of its host alone, and its number is zero there.
    return tuple(map(str, range(sum(_DEVICE.fullmatch(path.name) is not None for path in devices.iterdir()))))


def _lives(claim: Mapping[str, Any]) -> bool:
    started: int | None = claim["started"]
    return started is not None and start_time(claim["pid"]) == started


def _shortage(instance: str, count: int, share: int, devices: tuple[str, ...], claims: Claims) -> str:
    holders = [
        f"{name} (process {claim['pid']}) has {claim['share'] / _WHOLE:g} of {', '.join(claim['devices'])}"
        for name, claim in claims.items()
    ]
    return (
        f"{instance} needs {share / _WHOLE:g} of each of {count} GPUs. There are {len(devices)}, "
        f"{', '.join(devices)}: {'; '.join(holders) or 'none is taken'}. Ask for fewer, or have the "
        f"engine wait for them to come free: ResourceEngine(budget=Budget(gpus={len(devices)}))."
    )

"""Sandboxes pass the conformance suite of resources."""

from __future__ import annotations

import pytest

from agentfly.resources.containers.bubblewrap.backend import probe
from agentfly.resources.containers.container import Container
from agentfly.resources.containers.spec import ContainerSpec
from agentfly.testing.resource_conformance import check_resource

pytestmark = pytest.mark.skipif(probe().tier == "none", reason=" ".join(probe().missing))


async def leave_something(box: Container) -> None:
    await box.run("touch /workspace/something; sleep 600 &")


async def is_empty(box: Container) -> bool:
    return (await box.run("ls -A /workspace; pgrep sleep")).stdout == ""


async def sleep(box: Container) -> object:
    return await box.run("sleep 600", timeout=600)


@pytest.mark.slow
async def test_a_sandbox_keeps_the_contract() -> None:
    spec = ContainerSpec(memory="128MiB", pids=64, capacity=2)
    await check_resource(spec, dirty=leave_something, is_clean=is_empty, use=sleep)

"""Model servers: start, operation and end, also if they misbehave; with a fake server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

import agentfly as af
from agentfly.core.errors import (
    APIMalformed,
    APIRefused,
    APIUnavailable,
    PrerequisiteError,
    ResourceDied,
    ResourceStartError,
    UsageError,
)
from agentfly.resources.engine.engine import ResourceEngine
from agentfly.resources.engine.orphans import reap_orphans
from agentfly.resources.model_server.server import ModelServer
from agentfly.resources.model_server.spec import ModelServerSpec
from agentfly.resources.model_server.token_server import WeightVersionSpan
from agentfly.resources.process.supervised import SupervisedProgram, processes_of_directory, reap
from agentfly.resources.process.supervisor import ProgramSpec, RotatingLog, log_tail
from agentfly.resources.resource import Status
from agentfly.testing.resource_conformance import check_resource

STAND_IN = str(Path(__file__).with_name("stand_in_model_server.py"))


def stand_in(*how: str, **fields: Any) -> ModelServerSpec:
    """A spec of the stand-in that misbehaves as its own text says."""
    given = {"start_timeout_s": 20, "health_timeout_s": 2, "release_timeout_s": 5, "call_timeout_s": 20, **fields}
    return ModelServerSpec(
        model="/models/stand-in", engine=STAND_IN, python=sys.executable, env=(("STAND_IN", ",".join(how)),), **given
    )


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory of the test's own."""
    monkeypatch.setenv("AGENTFLY_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


@contextlib.asynccontextmanager
async def started(*how: str, name: str = "server", **fields: Any) -> AsyncIterator[ModelServer]:
    server = ModelServer(stand_in(*how, **fields), name)
    try:
        await server.start()
        yield server
    finally:
        await server.release()


async def pid_of(server: ModelServer) -> int:
    """The process that answers."""
    return int((await server.complete("who?")).text.split()[1])


async def eventually(holds: Any) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def leave_an_adapter(server: ModelServer) -> None:
    await server.load_adapter("left-behind", "/adapters/one")


async def has_no_adapter(server: ModelServer) -> bool:
    headers = {"Authorization": f"Bearer {server.api_key}"}
    async with httpx.AsyncClient(headers=headers) as client:
        listed = (await client.get(f"{server.base_url}/models")).json()["data"]
    return [one["id"] for one in listed] == ["stand-in"]


@pytest.mark.slow
async def test_model_servers_keep_the_contract_of_resources() -> None:
    spec = stand_in("has children", adapters=1, capacity=2, call_timeout_s=120)
    await check_resource(
        spec, dirty=leave_an_adapter, is_clean=has_no_adapter, use=lambda server: server.complete("hang")
    )


async def test_a_server_answers_prompts_of_text_and_of_ids() -> None:
    async with started() as server:
        sample = await server.sample([5, 6, 7], max_tokens=3)
        assert sample.ids == (8, 9, 10)
        assert len(sample.logprobs) == 3
        assert sample.finish_reason == "length"
        assert (await server.complete("hello")).text.startswith("pid ")
        assert server.model == "stand-in"


async def test_a_server_can_be_a_judge() -> None:
    spec = stand_in()

    @af.reward
    async def judged(response: str, answer: str, context: af.Context) -> float:
        server = await context.acquire(spec, scope="global")
        return await server.score(response, answer)

    agent, policy = af.Agent(model="scripted"), af.ScriptedPolicy(["It is 42."])
    result = await af.run(agent, [{"prompt": "6*7?", "answer": "42"}], reward=judged, attempts=3, policy=policy)
    assert result.rewards == [0.75, 0.75, 0.75]


async def test_a_sample_that_lost_ids_on_its_way_is_refused() -> None:
    async with started("loses ids") as server:
        with pytest.raises(APIMalformed, match="counts 3 sampled tokens and sends 2 ids"):
            await server.sample([1], max_tokens=3)


async def test_nobody_without_the_key_is_answered() -> None:
    async with started() as server, httpx.AsyncClient() as stranger:
        assert (await stranger.get(f"{server.base_url}/models")).status_code == 401
        key = {"Authorization": f"Bearer {server.api_key}"}
        assert (await stranger.get(f"{server.base_url}/models", headers=key)).status_code == 200


async def test_the_key_is_neither_in_the_log_nor_on_a_command_line() -> None:
    async with started() as server:
        await eventually(lambda: "the key is [secret]" in server.log())
        lines = [
            " ".join(psutil.Process(pid).cmdline()) for pid in processes_of_directory(Path(server.traces["directory"]))
        ]
        assert any(STAND_IN in line for line in lines)
        assert not any(server.api_key in line for line in lines)


@pytest.mark.slow
async def test_servers_at_the_same_time_have_ports_of_their_own() -> None:
    async with contextlib.AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(started(name=f"server-{number}")) for number in range(3)]
        assert len({server.base_url for server in servers}) == 3
        assert len({await pid_of(server) for server in servers}) == 3


@pytest.mark.slow
async def test_nobody_else_can_take_the_port_while_a_dead_server_is_started_again() -> None:
    async with started() as server:
        host, port = server.base_url.removeprefix("http://").removesuffix("/v1").split(":")
        before = await pid_of(server)
        os.kill(before, signal.SIGKILL)
        with pytest.raises(OSError, match="in use"):
            socket.create_server((host, int(port)))
        assert await pid_of(server) != before
        assert server.base_url.endswith(f":{port}/v1")


async def test_entries_of_the_search_path_that_python_skips_do_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])
    async with started("runs") as server:
        assert await server.status() is Status.HEALTHY


async def test_a_call_is_not_given_what_is_a_matter_of_the_spec() -> None:
    server = ModelServer(stand_in("runs"), "server")
    with pytest.raises(UsageError, match=r"Write ModelServerSpec\(call_timeout_s=…\)"):
        await server.chat([{"role": "user", "content": "hello"}], call_timeout_s=1)


async def test_a_server_that_dies_at_once_is_told_at_once_with_the_end_of_its_log() -> None:
    server = ModelServer(stand_in("dies at once", start_timeout_s=3600), "server")
    with pytest.raises(ResourceStartError, match=r"exited with status 3(.|\n)*ValueError: no such model"):
        await asyncio.wait_for(server.start(), 60)
    await server.release()


@pytest.mark.slow
async def test_a_server_that_is_never_healthy_fails_in_time_with_the_end_of_its_log(state: Path) -> None:
    async with ResourceEngine(ledger=state) as engine:
        with pytest.raises(ResourceStartError, match=r"not ready within(.|\n)*options: --model"):
            await engine.acquire(stand_in("never healthy", start_timeout_s=3), "owner")


@pytest.mark.slow
async def test_servers_that_are_never_healthy_hold_up_nobody_else(state: Path) -> None:
    async with ResourceEngine(ledger=state) as engine:
        stuck = asyncio.create_task(engine.acquire(stand_in("never healthy", "floods", start_timeout_s=15), "stuck"))
        leases = await asyncio.gather(*(engine.acquire(stand_in(capacity=3), f"owner {number}") for number in range(3)))
        assert not stuck.done()
        assert len({lease.resource.base_url for lease in leases}) == 3
        stuck.cancel()
        await asyncio.wait({stuck})
    assert not list((state / "model-servers").iterdir())


@pytest.mark.slow
async def test_a_server_that_floods_its_output_neither_blocks_nor_fills_the_disk() -> None:
    async with started("floods", max_log_bytes=8192) as server:
        assert await server.status() is Status.HEALTHY
        await eventually(lambda: server.log().endswith("the last line"))
        directory = server.traces["directory"]
        assert sum(entry.stat().st_size for entry in os.scandir(directory) if entry.name.startswith("log")) <= 8192


async def test_a_server_that_ignores_the_request_to_end_is_killed_with_its_children() -> None:
    async with started("ignores TERM", "has children", release_timeout_s=0.4) as server:
        await eventually(lambda: "child" in server.log())
        child = int(re.findall(r"child (\d+)", server.log())[0])
        pids = [await pid_of(server), child, server.traces["pid"]]
        assert all(map(psutil.pid_exists, pids))
    assert not any(map(psutil.pid_exists, pids))


@pytest.mark.slow
async def test_a_request_under_way_when_the_server_dies_is_sent_once_more_after_its_restart() -> None:
    async with started() as server:
        before = await pid_of(server)
        answer = await server.complete("die once")
        assert answer.text != f"pid {before}"
        assert await server.status() is Status.HEALTHY


@pytest.mark.slow
async def test_a_request_that_kills_the_server_twice_fails_as_infrastructure() -> None:
    async with started(restarts=5) as server:
        with pytest.raises(APIUnavailable):
            await server.complete("die")
        assert (await server.complete("who?")).text


@pytest.mark.slow
async def test_a_server_that_hangs_is_killed_and_started_again() -> None:
    async with started(health_timeout_s=0.3) as server:
        before = await pid_of(server)
        os.kill(before, signal.SIGSTOP)
        assert await server.status() is Status.HEALTHY, "because it is being started again"
        assert await pid_of(server) != before
        assert not psutil.pid_exists(before)


async def test_weights_and_adapters_are_there_again_after_a_restart_under_their_label() -> None:
    async with started(adapters=2) as server:
        await server.load_adapter("mine", "/adapters/mine")
        await server.load_weights("/weights/7")
        await server.set_weight_version("seven")
        os.kill(before := await pid_of(server), signal.SIGKILL)
        assert await pid_of(server) != before
        assert await server.request("GET", "/weight_info") == {"weight_version": "seven", "weights": "/weights/7"}
        assert not await has_no_adapter(server)
        assert (await server.sample([1], max_tokens=2)).weight_versions == (WeightVersionSpan("seven", 0, 2),)
        await server.reset()
        assert (await server.request("GET", "/weight_info"))["weights"] is None
        assert await has_no_adapter(server)


async def test_weights_that_the_server_cannot_load_are_refused_with_its_words() -> None:
    async with started() as server:
        with pytest.raises(APIRefused, match="FileNotFoundError: it is not there"):
            await server.load_weights("/not/there")
        assert await server.status() is Status.HEALTHY


async def test_a_server_that_dies_too_often_is_given_up_with_the_reason() -> None:
    async with started(restarts=1) as server:
        with pytest.raises((APIUnavailable, ResourceDied)):
            await server.complete("die")
        with pytest.raises(ResourceDied, match=r"ended 2 times within 600 s \(restarts=1\)"):
            await server.complete("who?")
        assert await server.status() is Status.BROKEN


@pytest.mark.slow
async def test_a_server_that_does_not_come_up_again_is_given_up_with_its_log() -> None:
    async with started("dies later", restarts=2) as server:
        os.kill(await pid_of(server), signal.SIGKILL)
        with pytest.raises(ResourceDied, match=r"did not start again(.|\n)*no such model"):
            await server.complete("who?")


async def test_what_asks_when_the_server_is_released_is_told_so() -> None:
    async with started() as server:
        asking = asyncio.create_task(server.complete("hang"))
        await asyncio.sleep(0.2)
        await server.release()
        with pytest.raises(ResourceDied, match="released"):
            await asyncio.wait_for(asking, 10)
        with pytest.raises(ResourceDied, match="released"):
            _ = server.base_url


@pytest.mark.parametrize("cut_s", [0.0, 0.02, 0.1, 0.3])
async def test_a_start_that_is_cancelled_leaves_nothing(cut_s: float, state: Path) -> None:
    server = ModelServer(stand_in("never healthy", "has children"), "server")
    starting = asyncio.create_task(server.start())
    await asyncio.sleep(cut_s)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await server.release()
    assert not processes_of_directory(state / "model-servers" / "server")
    assert not (state / "model-servers" / "server").exists()


async def test_a_release_ends_a_start_under_way(state: Path) -> None:
    server = ModelServer(stand_in("never healthy"), "server")
    starting = asyncio.create_task(server.start())
    await eventually(lambda: processes_of_directory(state / "model-servers" / "server"))
    await server.release()
    with pytest.raises(ResourceDied, match="released"):
        await starting
    assert not processes_of_directory(state / "model-servers" / "server")


async def test_what_is_missing_is_told_before_anything_is_started(tmp_path: Path) -> None:
    missing = ModelServerSpec(model="m", engine=STAND_IN, python=str(tmp_path / "python"))
    with pytest.raises(PrerequisiteError, match="AGENTFLY_VLLM_PYTHON"):
        await ModelServer(missing, "one").start()
    with pytest.raises(PrerequisiteError, match="there is no such file"):
        await ModelServer(ModelServerSpec(model="m", engine=str(tmp_path / "serve.py")), "two").start()


async def test_adapters_must_be_asked_for() -> None:
    async with started() as server:
        with pytest.raises(UsageError, match="adapters=1"):
            await server.load_adapter("a", "/a")


def test_a_name_cannot_lead_out_of_the_state_directory() -> None:
    with pytest.raises(UsageError, match="name of a server"):
        ModelServer(stand_in(), "../elsewhere")


OWNER = """
    import asyncio, sys
    from agentfly.resources.engine.engine import ResourceEngine
    sys.path.insert(0, {tests!r})
    from agentfly.resources.model_server.spec import ModelServerSpec

    async def main():
        async with ResourceEngine() as engine:
            lease = await engine.acquire(ModelServerSpec(
                model="/m", engine={engine!r}, python=sys.executable, env=(("STAND_IN", "has children,ignores TERM"),)
            ), "owner")
            print(lease.resource.traces["pid"], (await lease.resource.complete("who?")).text.split()[1], flush=True)
            await asyncio.sleep(3600)

    asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("keeper_too", [False, True])
async def test_a_killed_process_leaves_no_server(state: Path, keeper_too: bool) -> None:
    program = textwrap.dedent(OWNER.format(tests=str(Path(__file__).parent), engine=STAND_IN))
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220
    assert owner.stdout is not None
    keeper, server = map(int, (await asyncio.to_thread(owner.stdout.readline)).split())
    if keeper_too:
        os.kill(keeper, signal.SIGSTOP)  # so that only what comes later can end the server
    owner.kill()
    owner.wait()
    owner.stdout.close()
    if keeper_too:
        os.kill(keeper, signal.SIGKILL)
    else:
        await eventually(lambda: not psutil.pid_exists(server) and not psutil.pid_exists(keeper))
    removed = await reap_orphans()
    assert [entry.kind for entry in removed] == ["model server"]
    assert not psutil.pid_exists(server) or psutil.Process(server).status() == psutil.STATUS_ZOMBIE
    assert not list((state / "model-servers").iterdir())


async def test_a_reused_process_id_is_left_alone(tmp_path: Path) -> None:
    bystander = subprocess.Popen(["sleep", "60"])  # noqa: ASYNC220
    reap({"directory": str(tmp_path / "gone"), "pid": bystander.pid, "start_time": 1})
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


def test_a_log_keeps_its_end_within_its_size_and_no_secret(tmp_path: Path) -> None:
    log = RotatingLog(tmp_path / "log", 4096, ["s3cr3t-key"])
    for number in range(1000):
        log.write(f"{number} s3cr".encode())
        log.write(b"3t-key\n")
    log.write(b"an end without a break: s3cr3t-key")
    log.close()
    kept = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert len(kept) <= 4096
    assert b"s3cr3t-key" not in kept
    assert log_tail(tmp_path / "log", 100).endswith("999 [secret]\nan end without a break: [secret]")
    assert len(log_tail(tmp_path / "log", 100)) <= 100


KEY = "-----BEGIN PRIVATE KEY-----\nMIGHAgEAMBMGByqGSM49AgEG\nCCqGSM49AwEHBG0wawIBAQQg\n-----END PRIVATE KEY-----\n"


@pytest.mark.parametrize("size", [1, 7, 30, 1000])
@pytest.mark.parametrize(
    "written", [KEY, KEY.replace("\n", "\r\n"), KEY.replace("\n", "\n    "), repr(KEY), "x" * 2**17 + "s3cr3t-key"]
)
def test_a_secret_is_in_no_log_however_it_comes_in_parts(tmp_path: Path, written: str, size: int) -> None:
    log = RotatingLog(tmp_path / "log", 2**20, [KEY, "s3cr3t-key"])
    data = f"before s3cr{written}s3cr after\n".encode()
    for start in range(0, len(data), size if len(data) < 2**16 else 2**16):
        log.write(data[start : start + size if len(data) < 2**16 else start + 2**16])
    log.close()
    kept = (tmp_path / "log").read_text()
    assert kept.startswith("before s3cr")
    assert kept.endswith("s3cr after\n")
    assert not any(secret in kept for secret in ("s3cr3t-key", "MIGHAgEAMBMGByqGSM49AgEG", "CCqGSM49AwEHBG0wawIBAQQg"))


def test_the_beginning_of_what_might_be_a_secret_is_written_once_it_is_none(tmp_path: Path) -> None:
    log = RotatingLog(tmp_path / "log", 4096, ["s3cr3t-key"])
    log.write(b"s3cr3t")
    assert (tmp_path / "log").read_bytes() == b""
    log.write(b" agent")
    assert (tmp_path / "log").read_bytes() == b"s3cr3t agent"
    log.close()


async def test_the_earliest_of_several_ends_of_a_program_counts_and_it_is_told_how_it_ended(tmp_path: Path) -> None:
    program = SupervisedProgram()
    job = ProgramSpec(
        command=["sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.05; done"],
        env=dict(os.environ),
        directory=str(tmp_path),
        log=str(tmp_path / "log"),
        max_log_bytes=4096,
        secrets=[],
    )
    await program.start(job)
    async with asyncio.timeout(60):
        while not log_tail(tmp_path / "log", 100):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        given_up = asyncio.create_task(program.stop(0.05))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.gather(program.stop(600), program.stop(600))
        assert await program.wait_exit() == "it was asked to end"


def test_a_log_that_is_not_there_has_no_end(tmp_path: Path) -> None:
    assert log_tail(tmp_path / "log", 100) == ""

"""Limits of model APIs: waiting, pauses, retries, and limits shared by processes."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentfly.core.errors import AcquireTimeout, APIMalformed, APIRateLimited, APIRefused, APIUnavailable, UsageError
from agentfly.resources.credentials import Credentials
from agentfly.resources.model_api import shared_usage
from agentfly.resources.model_api.client import ModelClient
from agentfly.resources.model_api.rate_limiter import RateLimiter
from agentfly.resources.model_api.responses import ChatCompletion, Usage
from agentfly.resources.model_api.retry import MAX_RETRY_AFTER_S, RetryingCaller, RetryPolicy
from agentfly.resources.model_api.shared_usage import HostUsageRegistry, SharedUsage
from agentfly.resources.model_api.usage_window import InFlightCall, RateLimits, UsageWindow
from agentfly.testing.fake_openai_server import FakeOpenAIServer, delayed_reply, text_reply
from tests.support.virtual_time import run_in_virtual_time

ROOMY = RateLimits(max_concurrency=100)
RETRIES = RetryPolicy(max_retries=3, call_timeout_s=100.0, wait_s=1000.0)
HELLO = [{"role": "user", "content": "hello"}]


def said(tokens: int = 5) -> ChatCompletion:
    return ChatCompletion("hello", (), "stop", Usage(tokens, 0), "m", {})


def gate_of(limits: RateLimits, account: SharedUsage | None = None) -> RateLimiter:
    """A gate on the loop's own clock."""
    return RateLimiter(account or SharedUsage(None, "boot"), limits, "m", clock=asyncio.get_running_loop().time)


class Far:
    """A far side in this process: answers are taken from a script; what is not in it goes well."""

    def __init__(self, *script: Exception, takes_s: float = 0.0) -> None:
        self.script = list(script)
        self.takes_s = takes_s
        self.sent: list[float] = []
        self.open = self.most_open = 0

    async def send(self, left: float) -> ChatCompletion:
        self.sent.append(asyncio.get_running_loop().time())
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            await asyncio.sleep(self.takes_s)
            if self.script:
                raise self.script.pop(0)
            return said()
        finally:
            self.open -= 1


def busy(retry_after_s: float | None = None) -> APIRateLimited:
    return APIRateLimited("busy", status=429, retry_after_s=retry_after_s)


# --- further tries --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [busy(), APIUnavailable("down", status=500), APIMalformed("not JSON")])
def test_what_may_pass_is_tried_again_after_pauses_that_double(failure):
    far = Far(failure, failure, failure)

    async def main() -> None:
        caller = RetryingCaller(gate_of(ROOMY), RETRIES, chance=lambda: 1.0)
        assert (await caller.call(far.send, 10)).text == "hello"

    run_in_virtual_time(main())
    assert [b - a for a, b in itertools.pairwise(far.sent)] == pytest.approx([0.5, 1.0, 2.0])


def test_tries_end_with_their_number_and_the_error_says_how_many_there_were():
    far = Far(*[APIUnavailable("down", status=500)] * 9)

    async def main() -> None:
        with pytest.raises(APIUnavailable, match=r"down.*Tries: 4") as failed:
            await RetryingCaller(gate_of(ROOMY), RETRIES).call(far.send, 10)
        assert failed.value.status == 500

    run_in_virtual_time(main())
    assert len(far.sent) == 4


def test_a_further_try_is_told_with_what_failed_once_for_all_calls_that_fail_together(caplog):
    fars = [Far(*[APIUnavailable("down", status=500)] * 2) for _ in range(5)]

    async def main() -> None:
        caller = RetryingCaller(gate_of(ROOMY), RETRIES, chance=lambda: 1.0)
        await asyncio.gather(*(caller.call(far.send, 10) for far in fars))

    run_in_virtual_time(main())
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "down (Try 1 of 4; the next in 0.5 s.)",
        "The call failed in the same way again. (Try 2 of 4; the next in 1.0 s.)",
    ]


def test_once_a_call_has_gone_well_the_next_failure_is_told_anew(caplog):
    far = Far(APIUnavailable("down", status=500))

    async def main() -> None:
        caller = RetryingCaller(gate_of(ROOMY), RETRIES, chance=lambda: 1.0)
        await caller.call(far.send, 10)
        await caller.call(Far(APIUnavailable("down again", status=500)).send, 10)

    run_in_virtual_time(main())
    assert [record.getMessage()[:10] for record in caplog.records] == ["down (Try ", "down again"]


def test_tries_end_before_the_deadline_would_pass():
    far = Far(*[APIUnavailable("down")] * 99)

    async def main() -> float:
        with pytest.raises(APIUnavailable):
            await RetryingCaller(
                gate_of(ROOMY), RetryPolicy(max_retries=50, call_timeout_s=10.0, wait_s=1.0), chance=lambda: 1.0
            ).call(far.send, 10)
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(main()) <= 10.0
    assert len(far.sent) == 5  # after 0.5, 1, 2 and 4 s; 8 s more would be too late


@pytest.mark.parametrize("failure", [APIRefused("no such model", status=404), UsageError("NaN")])
def test_what_will_not_pass_is_tried_once(failure):
    far = Far(failure)

    async def main() -> None:
        with pytest.raises(type(failure)):
            await RetryingCaller(gate_of(ROOMY), RETRIES).call(far.send, 10)

    run_in_virtual_time(main())
    assert len(far.sent) == 1


def test_pauses_differ_by_chance_within_half_of_their_length():
    pauses = [RETRIES.pause_s(tries, chance) for tries in (1, 2, 3, 10, 10**6) for chance in (0.0, 0.5, 1.0)]
    assert pauses == [0.25, 0.375, 0.5, 0.5, 0.75, 1.0, 1.0, 1.5, 2.0, 10.0, 15.0, 20.0, 10.0, 15.0, 20.0]


def test_a_pause_that_one_call_is_told_is_kept_by_all():
    far = Far(busy(30.0), takes_s=1.0)

    async def main() -> None:
        gate = gate_of(RateLimits(max_concurrency=2))
        caller = RetryingCaller(gate, RETRIES)
        await asyncio.gather(*(caller.call(far.send, 10) for _ in range(10)))

    run_in_virtual_time(main())
    assert far.sent[:2] == [0.0, 0.0]
    assert len(far.sent) == 11
    assert min(far.sent[2:]) == pytest.approx(31.0, abs=0.01)


def test_a_pause_beyond_the_deadline_fails_at_once_and_is_kept_by_the_others():
    far = Far(busy(500.0))

    async def main() -> None:
        loop, gate = asyncio.get_running_loop(), gate_of(ROOMY)
        with pytest.raises(APIRateLimited) as failed:
            await RetryingCaller(gate, RETRIES).call(far.send, 10)
        assert (failed.value.retry_after_s, loop.time()) == (500.0, 0.0)
        await RetryingCaller(gate, RETRIES).call(far.send, 10)

    run_in_virtual_time(main())
    assert far.sent == pytest.approx([0.0, 500.0], abs=0.01)


def test_a_pause_of_years_is_not_believed():
    far = Far(busy(1e9))

    async def main() -> None:
        gate = gate_of(ROOMY)
        with pytest.raises(APIRateLimited):
            await RetryingCaller(gate, RETRIES).call(far.send, 10)
        assert gate.usage().paused_s == MAX_RETRY_AFTER_S

    run_in_virtual_time(main())


def test_the_far_side_gets_as_many_calls_at_a_time_as_it_bears():
    far = Far(takes_s=1.0)

    async def bears_four(left: float) -> ChatCompletion:
        if far.open >= 4:
            far.script.append(busy())
        return await far.send(left)

    async def main() -> None:
        gate = gate_of(RateLimits(max_concurrency=64))
        caller = RetryingCaller(gate, RetryPolicy(max_retries=100, call_timeout_s=1e6, wait_s=1e6), chance=lambda: 0.5)
        assert gate.usage().allowed_calls == 64
        await asyncio.gather(*(caller.call(bears_four, 10) for _ in range(300)))
        assert 2 <= gate.usage().allowed_calls <= 8

    run_in_virtual_time(main())


def test_a_call_that_is_made_again_goes_before_those_that_are_new():
    far = Far(APIUnavailable("down"), APIUnavailable("down"), takes_s=1.0)

    async def main() -> None:
        retries = RetryPolicy(max_retries=3, call_timeout_s=15.0, wait_s=1000.0)
        caller = RetryingCaller(gate_of(RateLimits(max_concurrency=1)), retries)
        await asyncio.gather(*(caller.call(far.send, 10) for _ in range(100)))

    run_in_virtual_time(main())
    assert len(far.sent) == 102


# --- turns ----------------------------------------------------------------------------------------------------------


def test_calls_are_let_through_in_the_order_they_came():
    order: list[int] = []

    async def one(gate: RateLimiter, number: int) -> None:
        async with gate.permit(1, wait_s=100, call_s=10):
            order.append(number)
            await asyncio.sleep(1)

    async def main() -> None:
        gate = gate_of(RateLimits(max_concurrency=3))
        await asyncio.gather(*(one(gate, number) for number in range(12)))

    run_in_virtual_time(main())
    assert order == list(range(12))


def test_whoever_is_cancelled_gives_back_what_was_reserved_for_him():
    async def main() -> None:
        limits = RateLimits(max_concurrency=2, requests=3, tokens=100)
        gate, far = gate_of(limits), Far(takes_s=5.0)
        caller = RetryingCaller(gate, RETRIES)
        calls = [asyncio.create_task(caller.call(far.send, 30)) for _ in range(20)]
        await asyncio.sleep(1)
        for call in calls[1:]:
            call.cancel()
        await asyncio.wait(calls[1:])
        # The second one was sent, and may count; the others wait no more, and nothing is kept for them.
        use = gate.usage()
        assert (use.open_calls, use.requests, use.tokens, use.waiting) == (1, 2, 60, 0)
        await calls[0]
        assert gate.usage().tokens == 35
        async with gate.permit(65, wait_s=0.1, call_s=1):
            assert gate.usage().open_calls == 1

    run_in_virtual_time(main())


FATES = st.tuples(
    st.floats(0, 30),  # when it is made
    st.one_of(st.none(), st.floats(0, 60)),  # how long after that it is cancelled
    st.sampled_from([None, busy(), busy(3.0), APIUnavailable("down"), APIRefused("no"), APIMalformed("?")]),
    st.integers(1, 60),  # what it reserves
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(fates=st.lists(FATES, min_size=1, max_size=25))
def test_whatever_becomes_of_calls_no_place_is_lost_and_none_is_taken_twice(fates):
    limits = RateLimits(max_concurrency=3, requests=8, tokens=200, window_s=10.0)

    async def main() -> None:
        loop, gate = asyncio.get_running_loop(), gate_of(limits)
        caller = RetryingCaller(gate, RetryPolicy(max_retries=2, call_timeout_s=20.0, wait_s=500.0))
        far = Far(takes_s=1.0)

        async def one(made_at: float, failure: Exception | None, tokens: int) -> None:
            await asyncio.sleep(made_at)
            failures = [] if failure is None else [failure]

            async def send(left: float) -> ChatCompletion:
                assert far.open < limits.max_concurrency
                far.script += [failures.pop()] if failures else []
                return await far.send(left)

            await caller.call(send, tokens)

        calls = [asyncio.create_task(one(made_at, failure, tokens)) for made_at, _, failure, tokens in fates]
        for call, (made_at, cancelled_after, _, _) in zip(calls, fates, strict=True):
            if cancelled_after is not None:
                loop.call_later(made_at + cancelled_after, call.cancel)
        await asyncio.wait(calls)
        assert not [call for call in calls if not call.cancelled() and isinstance(call.exception(), AssertionError)]
        use = gate.usage()
        assert (use.open_calls, use.waiting, far.open) == (0, 0, 0)
        async with gate.permit(200, wait_s=100, call_s=1):  # all of it can be had again
            assert gate.usage().open_calls == 1

    run_in_virtual_time(main())


def test_what_was_never_sent_does_not_count():
    async def main() -> None:
        gate = gate_of(RateLimits(max_concurrency=2, requests=1, tokens=10))
        for _ in range(3):
            with pytest.raises(UsageError):
                await RetryingCaller(gate, RETRIES).call(Far(UsageError("NaN")).send, 10)
        assert gate.usage().requests == 0

    run_in_virtual_time(main())


def test_a_turn_that_does_not_come_says_why():
    async def main() -> None:
        gate = gate_of(RateLimits(max_concurrency=2))
        async with gate.permit(1, wait_s=1, call_s=10), gate.permit(1, wait_s=1, call_s=10):
            with pytest.raises(AcquireTimeout, match=r"waited 3 s.*2 calls are open of the 2 allowed.*wait_timeout_s"):
                async with gate.permit(1, wait_s=3, call_s=10):
                    pass
        async with gate.permit(1, wait_s=3, call_s=10):
            pass

    run_in_virtual_time(main())


def test_a_call_that_can_never_fit_is_refused_at_once():
    async def main() -> None:
        with pytest.raises(APIRefused, match=r"101 tokens.*tokens_per_minute is 100"):
            async with gate_of(RateLimits(max_concurrency=2, tokens=100)).permit(101, wait_s=3, call_s=10):
                pass

    run_in_virtual_time(main())


# --- accounts -------------------------------------------------------------------------------------------------------


def test_one_endpoint_model_and_key_have_one_account_in_all_loops_and_threads(monkeypatch, tmp_path):
    monkeypatch.setenv("AGENTFLY_STATE_DIR", str(tmp_path))
    host, key = HostUsageRegistry(), Credentials({"Authorization": "Bearer one-key-of-mine"})
    account = host.account("http://a/v1", "m", key)
    assert host.account("http://a/v1", "m", Credentials({"Authorization": "Bearer one-key-of-mine"})) is account
    others = [
        host.account("http://b/v1", "m", key),
        host.account("http://a/v1", "n", key),
        host.account("http://a/v1", "m", Credentials()),
    ]
    assert len({account, *others}) == 4

    order: list[str] = []

    async def take_turns(name: str, ready: threading.Barrier) -> None:
        gate = RateLimiter(host.account("http://a/v1", "m", key), RateLimits(max_concurrency=1), "m")
        ready.wait(10)
        for _ in range(10):
            async with gate.permit(1, wait_s=30, call_s=10):
                order.append(name)
                await asyncio.sleep(0.005)
                order.append(name)

    ready = threading.Barrier(2)
    threads = [threading.Thread(target=lambda name=name: asyncio.run(take_turns(name, ready))) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(order) == 40
    assert order[::2] == order[1::2]  # never both at a time


@pytest.mark.parametrize("spare", [True, False])
def test_a_directory_that_cannot_be_written_has_a_spare_and_then_the_process_counts_alone(
    spare, monkeypatch, tmp_path, caplog
):
    blocked = tmp_path / "file"
    blocked.write_text("a file where a directory belongs")
    monkeypatch.setenv("AGENTFLY_STATE_DIR", str(blocked))
    spares = [blocked / "nowhere", *([tmp_path / "spare"] if spare else [])]
    monkeypatch.setattr("agentfly.core.user_directories.fallback_state_directories", lambda: spares)

    async def main() -> None:
        host = HostUsageRegistry()
        one, other = (
            RateLimiter(host.account("http://a/v1", "m", Credentials()), RateLimits(1), "m") for _ in range(2)
        )
        async with one.permit(1, wait_s=1, call_s=1):
            assert other.usage().open_calls == 1
        assert other.usage().open_calls == 0

    asyncio.run(main())
    assert len(list(tmp_path.glob("spare/apis/*.traffic"))) == spare
    assert [record.levelname for record in caplog.records] == ([] if spare else ["WARNING"])
    assert spare or "AGENTFLY_STATE_DIR" in caplog.text


async def test_a_disk_that_fails_later_costs_no_call_and_forgets_nothing(tmp_path, caplog):
    account = SharedUsage(tmp_path / "x.traffic", "boot")
    gate = RateLimiter(account, RateLimits(2, requests=5), "m")
    async with gate.permit(1, wait_s=1, call_s=1):
        (tmp_path / "x.traffic").unlink()
        (tmp_path / "x.traffic").mkdir()
        assert gate.usage().open_calls == 1
    assert gate.usage().requests == 1
    assert "for itself" in caplog.text


async def test_a_stopped_process_that_holds_the_file_is_not_waited_for(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("agentfly.resources.model_api.shared_usage.LOCK_TIMEOUT_S", 0.1)
    path = tmp_path / "x.traffic"
    program = (
        "import sys, pathlib, signal, os\n"
        "from agentfly.core.shared_file import lock_file\n"
        "with lock_file(pathlib.Path(sys.argv[1])):\n"
        "    print('held', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    holder = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, str(path), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        assert await holder.stdout.readline() == b"held\n"
        gate = RateLimiter(SharedUsage(path, "boot"), RateLimits(2), "m")
        async with gate.permit(1, wait_s=10, call_s=1):
            assert gate.usage().open_calls == 1
    finally:
        holder.kill()
        await holder.wait()
    assert "another process has held it" in caplog.text


@pytest.mark.parametrize("spoilt", [b"", b"\0" * 100, b"{}" * 10_000])
def test_a_file_that_is_not_whole_is_begun_anew(tmp_path, spoilt):
    path = tmp_path / "x.traffic"
    path.write_bytes(spoilt)
    account = SharedUsage(path, "boot")
    account.change(lambda traffic: setattr(traffic, "allowance", 3))
    assert SharedUsage(path, "boot").change(lambda traffic: traffic.allowance) == 3
    assert SharedUsage(path, "another boot").change(lambda traffic: traffic.allowance) is None


# --- over HTTP, and between processes -------------------------------------------------------------------------------

CALLS = """
import asyncio, pathlib, sys
from agentfly.resources.model_api import shared_usage
from agentfly.resources.model_api.client import ModelClient
from agentfly.resources.model_api.rate_limiter import RateLimiter
from agentfly.resources.model_api.retry import RetryPolicy, RetryingCaller
from agentfly.resources.model_api.shared_usage import SharedUsage
from agentfly.resources.model_api.usage_window import InFlightCall, RateLimits, UsageWindow

async def main(url, path, calls):
    limits = RateLimits(max_concurrency=3, requests=6, tokens=40, window_s=0.5)
    limiter = RateLimiter(SharedUsage(pathlib.Path(path), "boot"), limits, "m")
    caller = RetryingCaller(limiter, RetryPolicy(3, 60.0, 60.0))
    async with ModelClient(url, model="m") as client:
        send = lambda left: client.chat([{"role": "user", "content": "hello"}], call_timeout_s=left)
        await asyncio.gather(*(caller.call(send, 10) for _ in range(calls)))

asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""


def most_in_a_window(far_side: FakeOpenAIServer, window_s: float) -> int:
    times = [request.at for request in far_side.requests]
    return max(sum(1 for at in times if start <= at < start + window_s) for start in times)


@pytest.mark.slow
async def test_processes_share_what_one_of_them_may_use(tmp_path):
    async with FakeOpenAIServer() as far_side:
        programs = [
            await asyncio.create_subprocess_exec(
                sys.executable, "-c", CALLS, far_side.url, str(tmp_path / "x.traffic"), "12"
            )
            for _ in range(2)
        ]
        assert [await program.wait() for program in programs] == [0, 0]
    assert len(far_side.requests) == 24
    assert far_side.max_open <= 3
    assert most_in_a_window(far_side, 0.5) <= 6


async def test_whose_turn_it_is_in_another_process_is_woken_up(tmp_path, monkeypatch):
    monkeypatch.setattr("agentfly.resources.model_api.rate_limiter.POLL_S", 60.0)
    monkeypatch.setattr("agentfly.resources.model_api.rate_limiter.MAX_POLL_S", 60.0)
    one, other = (RateLimiter(SharedUsage(tmp_path / "x.traffic", "boot"), RateLimits(1), "m") for _ in range(2))
    order: list[str] = []

    async def take_turns(gate: RateLimiter) -> None:
        for _ in range(5):
            async with gate.permit(1, wait_s=30, call_s=1):
                order.append(gate.limiter_id)
                await asyncio.sleep(0)

    async with asyncio.timeout(30):
        await asyncio.gather(*(take_turns(gate) for gate in (one, other) for _ in range(2)))
    assert order[2:-2].count(one.limiter_id) == order[2:-2].count(other.limiter_id)  # turn by turn


@pytest.mark.slow
async def test_what_a_killed_process_had_under_way_is_given_back(tmp_path):
    path = tmp_path / "x.traffic"
    never = asyncio.Event()
    async with FakeOpenAIServer() as far_side:
        far_side.default_reply = delayed_reply(never, text_reply("too late"))
        program = await asyncio.create_subprocess_exec(sys.executable, "-c", CALLS, far_side.url, str(path), "3")
        await far_side.wait_until(lambda: far_side.open == 3)
        gate = RateLimiter(SharedUsage(path, "boot"), RateLimits(3), "m")
        assert gate.usage().open_calls == 3
        program.kill()
        await program.wait()
        async with gate.permit(1, wait_s=20, call_s=1):
            assert gate.usage().open_calls == 1


async def test_the_server_sees_no_more_calls_at_a_time_than_allowed():
    async with FakeOpenAIServer() as far_side, ModelClient(far_side.url, model="m") as client:
        gate = asyncio.Event()
        far_side.default_reply = delayed_reply(gate, text_reply("hello"))
        caller = RetryingCaller(RateLimiter(SharedUsage(None, "boot"), RateLimits(max_concurrency=5), "m"), RETRIES)
        calls = [
            asyncio.create_task(caller.call(lambda left: client.chat(HELLO, call_timeout_s=left), 10))
            for _ in range(40)
        ]
        await far_side.wait_until(lambda: far_side.open == 5)
        gate.set()
        await asyncio.gather(*calls)
        assert far_side.max_open == 5


@pytest.mark.slow
async def test_the_server_counts_no_more_in_a_window_than_allowed():
    async with FakeOpenAIServer() as far_side, ModelClient(far_side.url, model="m") as client:
        limits = RateLimits(max_concurrency=50, requests=5, window_s=0.4)
        caller = RetryingCaller(RateLimiter(SharedUsage(None, "boot"), limits, "m"), RETRIES)
        await asyncio.gather(
            *(caller.call(lambda left: client.chat(HELLO, call_timeout_s=left), 10) for _ in range(17))
        )
        assert most_in_a_window(far_side, 0.4) <= 5


@pytest.mark.slow
async def test_the_server_counts_no_more_tokens_in_a_window_than_allowed():
    usages = itertools.cycle([(7, 13), (1, 1), (20, 10), (5, 0)])
    spent: list[tuple[float, int]] = []

    async def answers(request: Any, writer: asyncio.StreamWriter) -> None:
        usage = next(usages)
        spent.append((request.at, sum(usage)))
        await text_reply("hello", usage)(request, writer)

    async with FakeOpenAIServer() as far_side, ModelClient(far_side.url, model="m") as client:
        far_side.default_reply = answers
        caller = RetryingCaller(
            RateLimiter(SharedUsage(None, "boot"), RateLimits(50, tokens=60, window_s=0.3), "m"), RETRIES
        )
        await asyncio.gather(
            *(caller.call(lambda left: client.chat(HELLO, call_timeout_s=left), 30) for _ in range(16))
        )
    assert max(sum(used for at, used in spent if start <= at < start + 0.3) for start, _ in spent) <= 60


async def test_the_files_of_endpoints_that_nobody_calls_any_more_are_removed(monkeypatch, tmp_path):
    monkeypatch.setenv("AGENTFLY_STATE_DIR", str(tmp_path))

    def file_of(model: str) -> tuple[SharedUsage, Path]:
        before = set(tmp_path.rglob("*.traffic"))
        account = HostUsageRegistry().account("http://host/v1", model, Credentials())
        account.change(lambda traffic: None)
        (path,) = set(tmp_path.rglob("*.traffic")) - before
        return account, path

    (forgotten, old), (_, recent) = file_of("a"), file_of("b")
    os.utime(old, (1, 1))
    file_of("c")
    assert not old.exists()
    assert recent.exists()
    forgotten.change(lambda traffic: None)  # whoever had it makes it again
    assert old.exists()


def test_an_account_of_ten_thousand_calls_is_still_that_of_the_whole_host(tmp_path: Path) -> None:
    one, other = SharedUsage(tmp_path / "traffic", "boot"), SharedUsage(tmp_path / "traffic", "boot")
    limits = RateLimits(max_concurrency=20_000)

    def many(traffic: UsageWindow) -> None:
        for number in range(12_000):
            traffic.open[f"{number:032x}"] = InFlightCall("0123456789abcdef", 1000, 1e6 + number / 3, 2e6)

    one.change(many)
    assert other.change(lambda traffic: traffic.admit(limits, "gate", "call", 10, 1.0, 2.0)) is None
    assert one.change(lambda traffic: len(traffic.open)) == 12_001


def test_an_account_whose_file_takes_long_to_find_holds_up_no_other_and_is_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AGENTFLY_STATE_DIR", str(tmp_path))
    host, found, asked = HostUsageRegistry(), threading.Event(), threading.Barrier(3)
    path_of = shared_usage._path

    def find(base_url: str, model: str, credentials: Credentials) -> Path | None:
        if model == "slow":
            asked.wait(20)
            assert found.wait(20)
        return path_of(base_url, model, credentials)

    monkeypatch.setattr(shared_usage, "_path", find)
    with ThreadPoolExecutor(2) as threads:
        slow = [threads.submit(host.account, "http://a/v1", "slow", Credentials()) for _ in range(2)]
        asked.wait(20)
        quick = host.account("http://a/v1", "quick", Credentials())
        assert host.account("http://a/v1", "quick", Credentials()) is quick
        found.set()
        first, second = (one.result() for one in slow)
    assert first is second

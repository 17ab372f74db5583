"""Signals that end a program: its work is cancelled and cleaned up once, and the exit status names the signal."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
from typing import Any

import pytest

from agentfly.core import signals


@pytest.fixture(autouse=True)
def handlers():
    """The handlers of the test run, as Python sets them and not as a background job inherits them."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in signals.TERMINATING:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number, times=1):
    for _ in range(times):
        os.kill(os.getpid(), number)


async def cleans_up(done, number, times=1):
    try:
        asyncio.get_running_loop().call_soon(send, number, times)
        await asyncio.Event().wait()
    finally:
        for _ in range(3):
            await asyncio.sleep(0.01)
            send(number, times - 1)
        done.append("cleaned up")


@pytest.mark.parametrize(
    ("number", "raised"),
    [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit), (signal.SIGHUP, SystemExit)],
)
@pytest.mark.parametrize("times", [1, 5])
def test_a_signal_cancels_what_runs_once_and_the_program_ends_as_it_says(number, raised, times):
    done: list[Any] = []
    with pytest.raises(raised) as ended:
        signals.run_until_signal(cleans_up(done, number, times))
    assert done == ["cleaned up"]
    if raised is SystemExit:
        assert ended.value.code == 128 + number


def test_after_a_run_that_was_interrupted_another_can_be_run_and_interrupted():
    done: list[Any] = []
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            signals.run_until_signal(cleans_up(done, signal.SIGINT))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert done == ["cleaned up"] * 2


def test_without_a_signal_everything_is_as_it_was():
    async def answer():
        assert isinstance(signal.getsignal(signal.SIGTERM), signals.SignalHandler)
        return 42

    assert signals.run_until_signal(answer()) == 42
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    async def cancelled():
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        signals.run_until_signal(cancelled())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_program_ends_at_once_while_it_runs_no_loop(number, code):
    def main():
        with signals.signals_end_program():
            signals.run_until_signal(asyncio.sleep(0))
            send(number)

    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code


def test_a_loop_that_is_blocked_is_broken_out_of_by_another_signal(monkeypatch):
    monkeypatch.setattr(signals, "LOOP_BLOCKED_AFTER_S", 0.0)

    async def block():
        send(signal.SIGINT)
        while True:
            send(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        signals.run_until_signal(block())


def test_a_clean_up_that_takes_too_long_is_broken_off_by_another_signal(monkeypatch):
    async def never_ends():
        asyncio.get_running_loop().call_soon(send, signal.SIGINT)
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                monkeypatch.setattr(signals, "FORCE_EXIT_AFTER_S", 0.0)
                asyncio.get_running_loop().call_soon(send, signal.SIGINT)
                await asyncio.sleep(0.01)
                raise AssertionError("unreachable") from None

    with pytest.raises(KeyboardInterrupt):
        signals.run_until_signal(never_ends())


async def test_a_signal_that_somebody_takes_already_is_left_to_them():
    taken = []
    signal.signal(signal.SIGTERM, lambda *_: taken.append("theirs"))
    with signals.cancel_on_sigterm():
        send(signal.SIGTERM)
        await asyncio.sleep(0.01)
    assert taken == ["theirs"]


async def test_of_two_runs_side_by_side_each_is_cancelled_whichever_ends_first():
    done = []

    async def side(patience):
        with signals.cancel_on_sigterm():
            try:
                await asyncio.sleep(patience)
            except asyncio.CancelledError:
                done.append("cancelled")
                raise

    short, long = asyncio.create_task(side(0.01)), asyncio.create_task(side(60))
    await short
    assert isinstance(signal.getsignal(signal.SIGTERM), signals.SignalHandler)
    long.cancel()
    await asyncio.wait({long})
    assert done == ["cancelled"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_off_the_main_thread_no_handler_is_set():
    results = []
    thread = threading.Thread(target=lambda: results.append(signals.run_until_signal(asyncio.sleep(0, "fine"))))
    thread.start()
    thread.join()
    assert results == ["fine"]


def test_ctrl_c_that_is_held_back_comes_after_the_clean_up():
    done = []

    async def clean_up():
        with signals.defer_sigint(), signals.defer_sigint():
            send(signal.SIGINT, 3)
            await asyncio.sleep(0.01)
            done.append("cleaned up")
        await asyncio.sleep(1)
        done.append("went on")

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(clean_up())
    assert done == ["cleaned up"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_fork_of_a_program_ends_by_the_signal_as_if_nothing_were_set():
    program = """
        import asyncio, os, signal
        from agentfly.core.signals import run_until_signal

        async def main():
            if (child := os.fork()) == 0:
                os.kill(os.getpid(), signal.SIGTERM)
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM

        run_until_signal(main())
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)

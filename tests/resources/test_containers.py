"""Sandboxes: their shell's commands, and the state after a reset or release."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agentfly.core.errors import ToolError, UsageError
from agentfly.resources.containers.bubblewrap.backend import probe
from agentfly.resources.containers.container import Container
from agentfly.resources.containers.spec import ContainerSpec

pytestmark = pytest.mark.skipif(probe().tier == "none", reason=" ".join(probe().missing))

SPEC = ContainerSpec(memory="256MiB", pids=64)


# --- the session ------------------------------------------------------------------------------------------------------


async def test_directory_variables_and_functions_last_from_one_command_to_the_next(box: Container) -> None:
    await box.run("mkdir -p /tmp/deep && cd /tmp/deep; X=5; export Y=6; f() { echo from f; }")
    result = await box.run("pwd; echo $X; sh -c 'echo $Y'; f")
    assert result.stdout == "/tmp/deep\n5\n6\nfrom f\n"
    assert result.exit_code == 0


async def test_a_command_begins_in_the_workdir(name: Callable[[], str]) -> None:
    box = Container(ContainerSpec(workdir="/srv/job"), name())
    try:
        await box.start()
        assert (await box.run("pwd; touch here; ls")).stdout == "/srv/job\nhere\n"
    finally:
        await box.release()


async def test_stdout_stderr_and_exit_code_are_told_apart(box: Container) -> None:
    result = await box.run("echo out; echo err >&2; (exit 7)")
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 7)
    assert str(result) == "out\nerr\n[exit code 7]"


async def test_a_result_reads_as_a_terminal_shows_it_unless_it_is_to_be_raw(box: Container) -> None:
    bar = r"for i in 1 2 3; do printf '\r\033[32m%d of 3\033[0m' $i; done; echo; printf 'one\r\n' >&2"
    printed = "".join(f"\r\x1b[32m{i} of 3\x1b[0m" for i in (1, 2, 3)) + "\n"
    result = await box.run(bar)
    assert (result.stdout, result.stderr) == (printed, "one\r\n")
    assert str(result) == "3 of 3\none"
    assert str(await box.run(bar, raw=True)) == f"{printed.rstrip()}\none\r"


async def test_exit_ends_the_command_and_not_the_container(box: Container) -> None:
    await box.run("cd /tmp; X='a \"quoted\" value'; f() { echo kept; }")
    result = await box.run("exit 3")
    assert (result.exit_code, result.note) == (3, "")
    assert (await box.run('pwd; echo "$X"; f')).stdout == '/tmp\na "quoted" value\nkept\n'


@pytest.mark.parametrize(
    "command",
    [
        "echo 'never closed",
        "cat <<END\nnever closed",
        "if true; then",
        ")",
        "set -e; false",
        "set -eu; echo $NO_SUCH_VARIABLE",
        "exec true",
        "exec >/dev/null 2>&1 </dev/null",
        "kill -9 $BASHPID",
        "kill -9 -1",
        "trap '' TERM INT; exit 1",
        "readonly printf=1; printf() { :; }; read() { :; }",
        "unset PATH HOME IFS",
        "set -x; true",
        "return 4",
        "while read line; do echo $line; done",
        "\x01\x02\x1b",
        "",
    ],
)
async def test_no_command_can_wedge_the_session(box: Container, command: str) -> None:
    await box.run(command, timeout=20)
    result = await box.run("echo alive", timeout=20)
    assert (result.exit_code, result.stdout) == (0, "alive\n")
    assert await box.read_file("/etc/passwd")


@pytest.mark.parametrize("command", ["exec 242<&- 243>&- 244>&-", "ulimit -n 64", "ulimit -n 3"])
async def test_a_session_without_its_files_is_replaced_and_the_next_command_is_not_taken_for_run(
    box: Container, command: str
) -> None:
    await box.run(command)
    result = await box.run("touch ran; echo alive")
    assert (result.exit_code, result.stdout) in ((0, "alive\n"), (126, ""))
    assert (await box.run("ls")).stdout == ("ran\n" if result.stdout else "")


@pytest.mark.slow
async def test_files_are_within_reach_again_after_a_command_that_stopped_every_process(box: Container) -> None:
    await box.run("kill -STOP -1", timeout=1)
    box._sandbox.shell._shell_processes.spawner = None  # type: ignore[attr-defined]  # as when that comes before it has said that it is ready
    await box.run("true", timeout=0.5, new_process=True)
    await box.write_file("file", "content")
    assert await box.read_file("file") == b"content"


@pytest.mark.parametrize(
    "command",
    [
        "kill 0",
        "kill -9 0",
        "kill -9 $PPID",
        "kill -9 $$",
        "trap 'kill 0' EXIT; sleep 60 & exit",
        "sh -c 'kill 0'",
        "kill -INT 0; kill -HUP 0",
    ],
)
async def test_a_command_that_kills_its_own_kind_ends_itself_and_not_the_container(
    box: Container, command: str
) -> None:
    for beside in (False, True):
        result = await box.run(command, timeout=2, new_process=beside)
        assert result.exit_code or "$$" in command
        assert (await box.run("echo alive", timeout=20)).stdout == "alive\n"
        assert (await box.run("echo beside", timeout=20, new_process=True)).stdout == "beside\n"


async def test_a_command_beside_the_session_that_kills_its_group_costs_the_session_nothing(box: Container) -> None:
    await box.run("KEPT=5")
    assert (await box.run("kill -9 0", timeout=20, new_process=True)).killed_by == "SIGKILL"
    assert (await box.run("echo $KEPT")).stdout == "5\n"


async def test_programs_can_be_interrupted(box: Container) -> None:
    assert (await box.run("timeout -s INT 0.1 sleep 60; echo $?", timeout=20)).stdout == "124\n"


@pytest.mark.parametrize(
    ("arguments", "cure"),
    [
        ({"command": ["echo", "a"]}, r"command=…\) was given a list: .*shlex.join"),
        ({"timeout": "5"}, r"timeout=…\) was given a str: .*without quotes"),
        ({"timeout": None}, "a number of seconds"),
        ({"max_output": "5"}, "a number of bytes"),
        ({"cwd": 5}, "a directory inside, as a text"),
        ({"stdin": ["a"]}, "a text or bytes"),
        ({"env": {"A": 1}}, "values as texts"),
        ({"env": [("A", "b")]}, "a mapping"),
        ({"env": {1: "b"}}, "cannot be the name"),
    ],
)
async def test_an_argument_of_a_wrong_type_is_refused_with_the_cure(
    box: Container, arguments: dict[str, Any], cure: str
) -> None:
    with pytest.raises(UsageError, match=cure):
        await box.run(**{"command": "true"} | arguments)


async def test_who_kills_itself_is_not_called_out_of_memory(box: Container) -> None:
    assert str(await box.run("kill -9 $BASHPID", new_process=True)) == "[killed by SIGKILL; exit code 137]"


@pytest.mark.slow
async def test_a_session_that_stops_reading_is_replaced(box: Container) -> None:
    first = await box.run("cd /tmp; set -n", timeout=1)
    second = await box.run("echo alive", timeout=1)
    third = await box.run("echo alive")
    assert first.timed_out or second.timed_out
    assert third.stdout == "alive\n"


async def test_a_syntax_error_says_where_in_the_command_it_is(box: Container) -> None:
    result = await box.run("echo one\necho two )")
    assert result.stderr.startswith("bash: line 2: syntax error")


async def test_exec_gives_the_exit_code_of_what_took_the_shell_over_and_says_what_is_lost(box: Container) -> None:
    await box.run("X=5")
    result = await box.run("exec sh -c 'echo other; exit 9'")
    assert (result.exit_code, result.stdout) == (9, "other\n")
    assert "variables and functions are lost" in str(result)


async def test_a_command_that_waits_for_input_finds_its_end(box: Container) -> None:
    assert (await box.run("cat; read line; echo read $?", timeout=20)).stdout == "read 1\n"


async def test_stdin_is_given_to_the_command_whatever_its_size(box: Container) -> None:
    given = "line\n" * 100_000
    assert (await box.run("wc -c", stdin=given)).stdout.strip() == str(len(given))


async def test_cwd_and_env_are_for_one_command_alone(box: Container) -> None:
    result = await box.run("pwd; echo $A", cwd="/tmp", env={"A": "it's $HOME"})
    assert result.stdout == "/tmp\nit's $HOME\n"
    assert (await box.run("pwd; echo $A")).stdout == "/workspace\n\n"
    assert (await box.run("true", cwd="/no/such")).exit_code == 1
    with pytest.raises(UsageError, match="name of a shell variable"):
        await box.run("true", env={"A; rm": "x"})


async def test_a_new_process_knows_nothing_of_the_session_and_does_not_wait_for_it(box: Container) -> None:
    await box.run("X=5; cd /tmp; ls() { echo fooled; }")
    running = asyncio.create_task(box.run("read < <(sleep 60)", timeout=60))
    result = await box.run("echo [$X]; pwd; ls /usr/bin/env; exit 4", new_process=True, timeout=20)
    assert (result.stdout, result.exit_code) == ("[]\n/workspace\n/usr/bin/env\n", 4)
    assert not running.done()
    running.cancel()


async def test_many_commands_at_once_each_get_their_own_output(box: Container) -> None:
    new = [box.run(f"echo new {n}; echo err {n} >&2", new_process=True) for n in range(12)]
    old = [box.run(f"echo old {n}") for n in range(12)]
    results = await asyncio.gather(*new, *old)
    assert [r.stdout for r in results] == [f"new {n}\n" for n in range(12)] + [f"old {n}\n" for n in range(12)]


# --- processes left behind, timeouts, cancellation ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "output"),
    [("sleep 7301 & echo done", "done\n"), ("setsid sleep 7301 >/dev/null & echo hi", "hi\n")],
)
async def test_a_child_left_behind_holds_no_call_open_and_is_gone_at_release(
    box: Container,
    command: str,
    output: str,
    processes_with: Callable[[str], list[int]],
    eventually: Callable[[Callable[[], bool]], Awaitable[None]],
) -> None:
    result = await box.run(command, timeout=30)
    assert (result.stdout, result.timed_out) == (output, False)
    await eventually(lambda: processes_with("7301") != [])
    await box.release()
    assert processes_with("7301") == []


@pytest.mark.slow
async def test_what_a_child_left_behind_prints_later_is_in_nobodys_output_and_does_not_break_it(box: Container) -> None:
    await box.run("(sleep 0.2; echo late; echo late >&2; echo survived > /tmp/mark) & echo now")
    result = await box.run("sleep 0.6; echo mine; cat /tmp/mark")
    assert (result.stdout, result.stderr) == ("mine\nsurvived\n", "")


@pytest.mark.slow
async def test_a_timeout_kills_all_that_the_command_started_and_keeps_the_session(
    box: Container,
    processes_with: Callable[[str], list[int]],
    eventually: Callable[[Callable[[], bool]], Awaitable[None]],
) -> None:
    await box.run("cd /tmp; X=5; sleep 7302 & disown")
    result = await box.run("Y=6; sleep 7303 & (setsid sleep 7303 &); sleep 7303; touch /tmp/went-on", timeout=0.5)
    assert (result.timed_out, result.exit_code, result.killed_by) == (True, 124, "timeout")
    assert "killed after 0.5 s" in str(result)
    await eventually(lambda: processes_with("7303") == [])
    assert processes_with("7302") != []
    assert (await box.run("pwd; echo $X $Y; ls /tmp")).stdout == "/tmp\n5 6\n"


@pytest.mark.slow
@pytest.mark.parametrize("command", ["while :; do :; done", "trap '' TERM; while :; do sleep 0.01; done"])
async def test_a_timeout_ends_what_the_shell_itself_does(box: Container, command: str) -> None:
    await box.run("cd /tmp")
    result = await box.run(command, timeout=0.5)
    assert result.timed_out
    assert (await box.run("pwd")).stdout == "/tmp\n"


@pytest.mark.slow
async def test_a_timeout_ends_a_command_with_a_process_of_its_own(
    box: Container,
    processes_with: Callable[[str], list[int]],
    eventually: Callable[[Callable[[], bool]], Awaitable[None]],
) -> None:
    result = await box.run("sleep 7304 & sleep 7304", timeout=0.5, new_process=True)
    assert result.timed_out
    await eventually(lambda: processes_with("7304") == [])


@pytest.mark.slow
async def test_output_before_a_timeout_is_kept(box: Container) -> None:
    result = await box.run("echo early; sleep 7305", timeout=0.5)
    assert result.stdout == "early\n"


@pytest.mark.slow
@pytest.mark.parametrize("new_process", [False, True])
async def test_cancelling_a_call_ends_its_command(
    box: Container,
    new_process: bool,
    processes_with: Callable[[str], list[int]],
    eventually: Callable[[Callable[[], bool]], Awaitable[None]],
) -> None:
    await box.run("X=5")
    call = asyncio.create_task(box.run("sleep 7306", new_process=new_process))
    await eventually(lambda: processes_with("7306") != [])
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (await box.run("echo $X")).stdout == "5\n"
    assert processes_with("7306") == []


# --- output ---------------------------------------------------------------------------------------------------------


async def test_huge_output_keeps_both_ends_and_counts_what_was_left_out(box: Container) -> None:
    result = await box.run("echo first; head -c 5000000 /dev/zero | tr '\\0' x; echo; echo last", max_output=1000)
    assert result.truncated
    assert result.stdout.startswith("first\nxxx")
    assert result.stdout.endswith("xxx\nlast\n")
    assert result.omitted == 5_000_000 + len("first\n\nlast\n") - 1000
    assert f"{result.omitted} bytes left out" in result.stdout
    assert len(result.stdout) < 1100


@pytest.mark.slow
async def test_endless_output_is_bounded_and_the_command_ends_in_time(box: Container) -> None:
    result = await box.run("yes", timeout=1)
    assert result.timed_out
    assert result.truncated
    assert len(result.stdout) < 70_000


async def test_binary_output_is_replaced_and_never_raised(box: Container) -> None:
    result = await box.run(r"printf 'a\xff\xfeb\0c\n'")
    assert result.stdout == "a\ufffd\ufffdb\0c\n"


async def test_text_is_never_cut_inside_a_character(box: Container) -> None:
    result = await box.run("for i in $(seq 3000); do printf 'äöü€'; done", max_output=999)
    assert "\ufffd" not in result.stdout


async def test_no_output_is_said(box: Container) -> None:
    assert str(await box.run("true")) == "[no output]"


# --- files ----------------------------------------------------------------------------------------------------------


async def test_files_are_read_back_as_written(box: Container) -> None:
    content = bytes(range(256)) * 4000
    await box.write_file("deep/down/it's here.bin", content)
    assert await box.read_file("/workspace/deep/down/it's here.bin") == content
    await box.write_file("text", "grüße")
    assert (await box.run("cat text")).stdout == "grüße"


async def test_files_can_be_read_while_the_session_is_busy(box: Container) -> None:
    busy = asyncio.create_task(box.run("sleep 60"))
    await box.write_file("a", b"b")
    assert await box.read_file("a") == b"b"
    busy.cancel()


@pytest.mark.parametrize(("path", "reason"), [("none", "No such file"), ("/tmp", "directory")])
async def test_a_file_that_cannot_be_read_is_a_matter_for_the_model(box: Container, path: str, reason: str) -> None:
    with pytest.raises(ToolError, match=reason):
        await box.read_file(path)


async def test_a_file_that_never_ends_is_refused(box: Container) -> None:
    with pytest.raises(ToolError, match="longer than"):
        await box.read_file("/dev/zero")


# --- what the session keeps for itself ------------------------------------------------------------------------------


async def test_descriptors_that_a_command_opens_last_and_are_not_the_sessions(box: Container) -> None:
    await box.run("exec 200>/tmp/lock 9>/tmp/nine; flock -n 200; echo to nine >&9; exec 1>/tmp/hidden 0</dev/zero")
    result = await box.run("flock -n /tmp/lock true || echo locked; cat /tmp/nine; read -r -n 1 -t 1; echo $?")
    assert result.stdout == "locked\nto nine\n1\n"


async def test_a_command_has_only_its_input_and_outputs_open(box: Container) -> None:
    for new_process in (False, True):
        result = await box.run("ls /proc/self/fd | tr '\\n' ' '", new_process=new_process)
        assert result.stdout == "0 1 2 3 "  # the last is the directory that is listed


@pytest.mark.parametrize("trap", ["trap 'printf .' DEBUG", "trap 'printf x; echo y' DEBUG ERR", "trap 'echo z' CHLD"])
async def test_traps_that_print_between_commands_do_not_reach_the_reports(box: Container, trap: str) -> None:
    await box.run(trap)
    result = await box.run("sleep 0.01; echo alive; (exit 3)", timeout=20)
    assert "alive\n" in result.stdout
    assert (result.exit_code, result.timed_out) == (3, False)


async def test_what_a_short_lived_child_prints_between_two_commands_is_in_nobodys_output(box: Container) -> None:
    await box.run("(sleep 0.05; echo late; echo late >&2) &")
    await asyncio.sleep(0.3)
    result = await box.run("echo mine")
    assert (result.stdout, result.stderr) == ("mine\n", "")


async def test_a_command_asked_of_a_session_that_is_just_killed_is_run_by_the_next_or_said_to_be_killed(
    box: Container,
) -> None:
    await box.run("echo >/tmp/count")
    ran = 0
    for _ in range(10):
        assert box._sandbox is not None
        shell = box._sandbox.shell  # type: ignore[attr-defined]
        assert shell is not None
        assert shell._shell_processes.session is not None
        os.kill(shell._shell_processes.session, 9)
        result = await box.run("echo once >>/tmp/count; echo done", timeout=20)
        assert (result.exit_code, result.stdout) in ((0, "done\n"), (137, ""))
        ran += result.exit_code == 0
    assert ran > 0
    assert (await box.run("grep -c once /tmp/count")).stdout == f"{ran}\n"


async def test_inputs_follow_their_commands(box: Container) -> None:
    assert (await box.run("cat", stdin="one")).stdout == "one"
    assert (await box.run("cat")).stdout == ""
    assert (await box.run("cat", stdin="two")).stdout == "two"
    assert (await box.run("cat; cat", stdin="three", new_process=True)).stdout == "three"


async def test_a_script_that_is_longer_than_the_one_before_and_one_that_is_shorter_run_whole(box: Container) -> None:
    for lines in (1, 3000, 30_000, 2):
        result = await box.run("X=0\n" + "X=$((X + 1))\n" * lines + "echo $X")
        assert result.stdout == f"{lines}\n"


async def test_a_byte_that_a_dying_starter_takes_of_the_next_request_is_not_missed(
    box: Container, eventually: Callable[[Callable[[], bool]], Awaitable[None]]
) -> None:
    await box.run("true", new_process=True)
    shell = box._sandbox.shell  # type: ignore[attr-defined]
    os.kill(shell._shell_processes.spawner, signal.SIGSTOP)
    status = Path(f"/proc/{shell._shell_processes.spawner}/status")
    await eventually(lambda: "State:\tT" in status.read_text())
    call = asyncio.create_task(box.run("echo whole", timeout=20, new_process=True))
    async with asyncio.timeout(10):
        while True:
            try:
                os.read(shell._spawn_pipe, 1)
                break
            except BlockingIOError:
                await asyncio.sleep(0.01)
    os.kill(shell._shell_processes.spawner, signal.SIGCONT)
    assert (await call).stdout == "whole\n"

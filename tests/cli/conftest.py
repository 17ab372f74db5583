"""Fixtures that call the command line."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from agentfly.cli import main as cli


@pytest.fixture
def agentfly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Calls a command; gives its exit status, and what it wrote to standard output and then to standard error."""

    def call(*words: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["agentfly", *map(str, words)])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as left:
            cli.main()
        captured = capsys.readouterr()
        return int(left.value.code or 0), captured.out + captured.err

    return call

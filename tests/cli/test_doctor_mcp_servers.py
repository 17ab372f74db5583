"""``agentfly doctor`` on MCP servers."""

from __future__ import annotations

import importlib.metadata

import pytest

from agentfly.cli.doctor import CheckStatus, mcp_servers
from agentfly.core.installation import install_command


def version(name: str) -> str:
    if name == "mcp":
        raise importlib.metadata.PackageNotFoundError(name)
    return "1"


def test_doctor_reports_how_to_install_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", version)
    finding = mcp_servers()
    assert (finding.verdict, finding.found) == (CheckStatus.NOTE, "without mcp")
    assert install_command("mcp") in finding.remedy


def test_the_doctor_tells_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.3.0")
    assert mcp_servers().found == "mcp 2.3.0"

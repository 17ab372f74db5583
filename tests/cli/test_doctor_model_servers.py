"""``agentfly doctor`` names the vLLM that model servers use, or how to install one."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentfly.cli.doctor import CheckStatus, model_servers


def interpreter(directory: Path, answer: str) -> str:
    """A program that answers as a Python would."""
    program = directory / "python"
    program.write_text(f"#!/bin/sh\n{answer}\n")
    program.chmod(0o755)
    return str(program)


def test_doctor_reports_the_version_and_the_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = interpreter(tmp_path, "echo 9.8.7")
    monkeypatch.setenv("AGENTFLY_VLLM_PYTHON", python)
    finding = model_servers()
    assert finding.verdict is CheckStatus.OK
    assert "9.8.7" in finding.found
    assert python in finding.found


def test_missing_vllm_is_reported_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTFLY_VLLM_PYTHON", interpreter(tmp_path, "exit 3"))
    finding = model_servers()
    assert finding.verdict is CheckStatus.NOTE
    assert "has no vLLM" in finding.found
    assert "pip install vllm" in finding.remedy

"""Messages about missing packages name a command that works for this copy."""

from __future__ import annotations

import json
import shlex
from importlib import metadata
from pathlib import Path

import pytest

from agentfly.core.installation import install_command


class Recorded:
    def __init__(self, text):
        self.text = text

    def read_text(self, name):
        assert name == "direct_url.json"
        return self.text


@pytest.mark.parametrize(
    ("recorded", "command"),
    [
        (
            {"url": "file:///tmp/agentfly_rl-0.1.0-py3-none-any.whl", "archive_info": {}},
            "pip install 'agentfly-rl[mcp] @ file:///tmp/agentfly_rl-0.1.0-py3-none-any.whl'",
        ),
        (
            {"url": "https://example.org/agentfly.git", "vcs_info": {"vcs": "git", "commit_id": "1"}},
            "pip install 'agentfly-rl[mcp] @ git+https://example.org/agentfly.git'",
        ),
    ],
)
def test_a_copy_from_a_wheel_or_a_repository_is_extended_from_there(monkeypatch, recorded, command):
    monkeypatch.setattr(metadata, "distribution", lambda name: Recorded(json.dumps(recorded)))
    assert install_command("mcp") == command


@pytest.mark.parametrize("recorded", ['{"url": "file:///elsewhere", "dir_info": {"editable": true}}', None, "no JSON"])
def test_a_checkout_is_extended_by_its_path(monkeypatch, recorded):
    monkeypatch.setattr(metadata, "distribution", lambda name: Recorded(recorded))
    checkout = Path(__file__).parents[2]
    assert shlex.split(install_command("mcp")) == ["pip", "install", "--editable", f"{checkout}[mcp]"]


def test_a_copy_from_the_index_is_extended_by_its_name(monkeypatch, tmp_path):
    monkeypatch.setattr(metadata, "distribution", lambda name: Recorded(None))
    monkeypatch.setattr(
        "agentfly.core.installation.__file__", str(tmp_path / "site-packages" / "agentfly" / "core" / "x.py")
    )
    assert install_command("mcp") == "pip install 'agentfly-rl[mcp]'"

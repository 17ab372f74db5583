"""The guide's new kind of resource: as short as stated, and removed after its program was killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "new-resource.md"
USE = """
import asyncio, sys
from sites import SiteSpec
from agentfly.resources.engine.engine import ResourceEngine

async def main():
    async with ResourceEngine() as engine:
        leases = [await engine.acquire(SiteSpec(), f"owner {number}") for number in range(2)]
        print(*(lease.resource.directory for lease in leases), flush=True)
        await asyncio.sleep(60 * float(sys.argv[1]))

asyncio.run(main())
"""


def module() -> str:
    found = re.search(r"^<!-- file: sites\.py -->\n```python\n(.*?)^```$", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


def test_a_new_kind_takes_fewer_than_sixty_lines():
    assert sum(1 for line in module().splitlines() if line.strip()) < 60


@pytest.mark.slow
def test_the_next_program_removes_exactly_the_remains_of_a_killed_one(tmp_path):
    (tmp_path / "sites.py").write_text(module())
    settings = {
        "cwd": tmp_path,
        "env": {**os.environ, "AGENTFLY_STATE_DIR": str(tmp_path / "state"), "TMPDIR": str(tmp_path)},
        "text": True,
    }
    run = [sys.executable, "-c", USE]
    with (
        subprocess.Popen([*run, "1"], stdout=subprocess.PIPE, **settings) as killed,
        subprocess.Popen([*run, "1"], stdout=subprocess.PIPE, **settings) as living,
    ):
        try:
            orphans, others = ([Path(name) for name in use.stdout.readline().split()] for use in (killed, living))
            assert len(orphans) == len(others) == 2
            killed.send_signal(signal.SIGKILL)
            killed.wait()
            assert all(site.is_dir() for site in orphans)
            assert subprocess.run([*run, "0"], check=True, stdout=subprocess.DEVNULL, timeout=60, **settings)
            assert not any(site.exists() for site in orphans)
            assert all((site / "index.html").exists() for site in others)
        finally:
            living.send_signal(signal.SIGTERM)
            living.wait(30)
            subprocess.run([*run, "0"], check=True, stdout=subprocess.DEVNULL, timeout=60, **settings)
    assert not list(tmp_path.glob("site-*"))

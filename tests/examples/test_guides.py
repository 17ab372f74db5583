"""The Python code of the guides and of the README runs, from top to bottom.

``<!-- not run: why -->`` on the line above a block leaves the block out.
``<!-- file: name.py -->`` writes a block to a module next to the program.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
MODULE = re.compile(r"^<!-- file: (\w+\.py) -->\n```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LEFT_OUT = re.compile(r"^<!-- not run: .+ -->\n```python\n.*?^```$", re.DOTALL | re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_of_a_page_runs_in_order(page: Path, tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name, module in MODULE.findall(text):
        (tmp_path / name).write_text(module, encoding="utf-8")
    for not_here in (MODULE, LEFT_OUT):
        text = not_here.sub(lambda block: "\n" * block[0].count("\n"), text)
    blocks = list(BLOCK.finditer(text))
    assert len(blocks) == text.count("```python"), "a block that is not closed"
    # Every line keeps its number, so that a traceback points into the page.
    script = [""] * (text.count("\n") + 1)
    for block in blocks:
        first = text.count("\n", 0, block.start(1))
        lines = block[1].splitlines()
        script[first : first + len(lines)] = lines
    program = tmp_path / f"{page.stem}.py"
    program.write_text("\n".join(script), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=tmp_path,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "AGENTFLY_STATE_DIR": str(tmp_path / "state"),
            "PYTHONPATH": str(ROOT),  # for studies, which are run in the repository
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr

"""The guide's tables of metrics list exactly the metrics that the code emits."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guides" / "metrics.md"
SOURCES = [
    *(ROOT / "src" / "agentfly" / "training").rglob("*.py"),
    *(ROOT / "src" / "agentfly" / "rollouts").glob("*.py"),
    *(ROOT / "src" / "agentfly" / "evaluation").glob("*.py"),
]
NAME = re.compile(r"[a-z_]+(/[a-z_0-9<>]+)+")


def documented() -> set[str]:
    """The names in the first column of the tables, with ``<>`` for what varies."""
    rows = re.findall(r"^\| (`.+?) \|", GUIDE.read_text(encoding="utf-8").split("## Every metric")[1], re.MULTILINE)
    return {re.sub(r"<\w+>", "<>", name) for row in rows for name in re.findall(r"`(.+?)`", row)}


def texts(source: Path) -> set[str]:
    """All string constants of a module, with ``<>`` for what an f-string fills in."""
    found = set()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
        if isinstance(node, ast.JoinedStr):
            parts = (str(part.value) if isinstance(part, ast.Constant) else "<>" for part in node.values)
            found.add("".join(parts))
    return found


def fits(name: str, pattern: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace("<>", r"[\w<>/]+"), name) is not None


def stands_for(name: str, one: str) -> bool:
    """Return whether a row of the table describes a metric, possibly with a placeholder."""
    return fits(name, one) or fits(one, name) or one == f"{name}/<>"


def test_every_metric_that_the_code_emits_is_in_the_guide() -> None:
    known = documented()
    families = {name.split("/")[0] for name in known}
    emitted = {
        text for source in SOURCES for text in texts(source) if NAME.fullmatch(text) and text.split("/")[0] in families
    }
    assert len(emitted) > 50
    missing = {name for name in emitted if not any(stands_for(name, one) for one in known)}
    assert missing == set(), f"{GUIDE.name} has no row for these metrics"


def test_every_metric_in_the_guide_is_emitted() -> None:
    written = set().union(*map(texts, SOURCES))
    patterns = [text for text in written if NAME.fullmatch(text)]
    stale = {name for name in documented() - written if not any(fits(name, pattern) for pattern in patterns)}
    assert stale == set(), f"{GUIDE.name} has rows for metrics that nothing emits"

"""Rewrite the tables of fields in the configuration guide from the docstrings of the fields.

    python scripts/configuration_guide.py

A table stands below ``<!-- fields: ClassName -->``. `tests/cli/test_config_fields.py` checks that the guide is up to
date.
"""

from __future__ import annotations

import re
from pathlib import Path

from agentfly.cli.config_fields import field_groups
from agentfly.cli.config_file import RunConfig

GUIDE = Path(__file__).parents[1] / "docs" / "guides" / "configuration.md"
_TABLE = re.compile(r"<!-- fields: (\w+) -->\n(?:\|.*\n)*")


def written(guide: str) -> str:
    """Return the guide with current tables.

    Raises:
        ValueError: a group of fields has no table, or a table no group.
    """
    tables = {group.title: group.markdown() for group in field_groups(RunConfig)}
    found = _TABLE.findall(guide)
    if sorted(found) != sorted(tables):
        raise ValueError(f"{GUIDE.name} has tables of {sorted(found)}, and there are groups {sorted(tables)}.")
    return _TABLE.sub(lambda table: f"<!-- fields: {table[1]} -->\n{tables[table[1]]}\n", guide)


if __name__ == "__main__":
    GUIDE.write_text(written(GUIDE.read_text(encoding="utf-8")), encoding="utf-8")

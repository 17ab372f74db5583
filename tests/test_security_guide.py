"""Every claim of the security guide names a test that shows it."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
GUIDE = (TESTS.parent / "docs" / "guides" / "security.md").read_text()


def test_every_test_that_the_guide_names_is_there():
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", GUIDE)
    assert len(named) > 30
    for file, name in named:
        (path,) = TESTS.glob(f"**/{file}")
        assert re.search(rf"^ *(async )?def {name}\(", path.read_text(), re.MULTILINE), f"{file}::{name}"


def test_every_claim_of_its_tables_names_a_test():
    claims = re.findall(r"^\| claim \| shown by \|\n\|---\|---\|\n((?:\|.*\|\n)+)", GUIDE, re.MULTILINE)
    assert len(claims) == GUIDE.count("| claim | shown by |")
    for row in "".join(claims).splitlines():
        assert "::test_" in row, row

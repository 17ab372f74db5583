"""Publish the results of studies in `docs/results`: tables in the pages, and curves beside them.

    python benchmarks/studies/publish.py DIR [DIR ...]

``python -m benchmarks.studies NAME --out DIR`` writes a DIR. Its table goes below the line
``<!-- study: NAME -->`` of a page and replaces the lines up to ``<!-- end -->``. Its curves become ``NAME.svg``.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def put(study: Path) -> Path:
    """Publish one study in its page, and return the page.

    Raises:
        ValueError: no page, or more than one, has the marker of the study.
    """
    name = json.loads((study / "study.json").read_text(encoding="utf-8"))["study"]
    marker = re.compile(rf"(<!-- study: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    pages = [page for page in RESULTS.glob("*.md") if marker.search(page.read_text(encoding="utf-8"))]
    if len(pages) != 1:
        raise ValueError(
            f"{len(pages)} pages of {RESULTS} have the marker of the study {name!r}. Exactly one page must have it."
        )
    table = (study / "table.md").read_text(encoding="utf-8")
    section = f"\n{table}\n![the curves of {name}]({name}.svg)\n\n"
    text = marker.sub(lambda found: found[1] + section + found[2], pages[0].read_text(encoding="utf-8"))
    pages[0].write_text(text, encoding="utf-8")
    shutil.copy(study / "curves.svg", RESULTS / f"{name}.svg")
    return pages[0]


if __name__ == "__main__":
    for directory in map(Path, sys.argv[1:]):
        print(put(directory))

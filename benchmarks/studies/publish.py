"""Put what studies found into `docs/results`: their curves beside the pages, and their tables into them.

    python benchmarks/studies/publish.py DIR [DIR ...]

A DIR is what ``python -m benchmarks.studies NAME --out DIR`` has written. Its table goes below the line
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
    """Put one study into its page, and return that.

    Raises:
        ValueError: no page, or more than one, has a place for it.
    """
    name = json.loads((study / "study.json").read_text(encoding="utf-8"))["study"]
    place = re.compile(rf"(<!-- study: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    pages = [page for page in RESULTS.glob("*.md") if place.search(page.read_text(encoding="utf-8"))]
    if len(pages) != 1:
        raise ValueError(f"{len(pages)} pages of {RESULTS} have a place for the study {name!r}; it must be one.")
    table = (study / "table.md").read_text(encoding="utf-8")
    told = f"\n{table}\n![the curves of {name}]({name}.svg)\n\n"
    text = place.sub(lambda found: found[1] + told + found[2], pages[0].read_text(encoding="utf-8"))
    pages[0].write_text(text, encoding="utf-8")
    shutil.copy(study / "curves.svg", RESULTS / f"{name}.svg")
    return pages[0]


if __name__ == "__main__":
    for directory in map(Path, sys.argv[1:]):
        print(put(directory))

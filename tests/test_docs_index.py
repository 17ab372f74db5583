"""The documentation: a complete index, and only existing files, modules and settings."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *sorted(DOCS.rglob("*.md")),
]
MAPS = [ROOT / "CONTRIBUTING.md", DOCS / "glossary.md"]
CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?![a-z]+:)([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
FILE = re.compile(r"\bsrc/agentfly/[\w/.-]*\w")
DOTTED = re.compile(r"`(agentfly(?:\.\w+)+)`")
PATH_AND_NAME = re.compile(r"`((?:\w+/)+(?:\w+\.py)?)`(?: \(`(\w+)`)?")
NAME_BEFORE_FILE = re.compile(r"`(\w+)`(?:\s+in|\s+of)?\s+\(?\[[^\]]+\]\(([^)]+\.py)\)")
NAME_BEHIND_FILE = re.compile(r"\]\(([^)]+\.py)\)\s+\(`(\w+)`\)")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@functools.cache
def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return CODE.sub("", page.read_text(encoding="utf-8"))


@functools.cache
def anchors(page: Path) -> set[str]:
    """What links into a page may name: its headings, in the form that GitHub gives them."""
    headings = (re.sub(r"\[(.+?)\]\(.+?\)", r"\1", heading) for heading in HEADING.findall(prose(page)))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@functools.cache
def names_in(module: Path) -> set[str]:
    """The names that a module defines or imports at its top level."""
    found: set[str] = set()
    for node in ast.parse(module.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def exists(dotted: str) -> bool:
    """Whether ``agentfly.x.y`` or ``agentfly.x.y.Name`` is there; nothing is imported to find out."""
    path = SOURCE.joinpath(*dotted.split("."))
    if path.is_dir() or path.with_suffix(".py").is_file():
        return True
    modules = (path.parent.with_suffix(".py"), path.parent / "__init__.py")
    return any(module.is_file() and path.name in names_in(module) for module in modules)


def test_the_index_of_the_documentation_links_to_every_page_of_it() -> None:
    linked = {(DOCS / link.partition("#")[0]).resolve() for link in LINK.findall(prose(DOCS / "README.md"))}
    missing = set(DOCS.rglob("*.md")) - {DOCS / "README.md"} - linked
    assert not missing, f"docs/README.md has no link to {sorted(map(name_of, missing))}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_relative_link_leads_to_a_file_and_to_a_heading_in_it(page: Path) -> None:
    for link in LINK.findall(prose(page)):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{name_of(page)} links to {link}, which does not exist"
        if anchor:
            assert anchor in anchors(target), f"{name_of(page)} links to {link}, and {file} has no such heading"


@pytest.mark.parametrize("page", MAPS, ids=name_of)
def test_every_module_that_the_maps_of_the_code_name_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    files, dotted = set(FILE.findall(text)), set(DOTTED.findall(text))
    assert len(files | dotted) > 25
    assert [file for file in sorted(files) if not (ROOT / file).exists()] == []
    assert [name for name in sorted(dotted) if not exists(name)] == []


def test_every_name_that_the_guide_of_contributors_places_in_a_file_is_there() -> None:
    text = prose(ROOT / "CONTRIBUTING.md")
    placed: list[tuple[str, str]] = NAME_BEFORE_FILE.findall(text)
    placed += [(name, file) for file, name in NAME_BEHIND_FILE.findall(text)]
    assert len(placed) > 5
    assert [(name, file) for name, file in placed if name not in names_in(ROOT / file)] == []


def test_every_file_and_name_of_the_map_of_changes_is_there() -> None:
    text = prose(DOCS / "architecture.md").split("## Where to change what")[1].split("\n## ")[0]
    placed = PATH_AND_NAME.findall(text)
    assert len(placed) > 80
    assert [path for path, _ in placed if not (SOURCE / "agentfly" / path).exists()] == []
    named = [(path, name) for path, name in placed if name]
    assert len(named) > 30
    assert [(path, name) for path, name in named if name not in names_in(SOURCE / "agentfly" / path)] == []


def test_every_path_of_the_architecture_is_there() -> None:
    page = prose(DOCS / "architecture.md")
    files = [path for path in SOURCE.joinpath("agentfly").rglob("*") if "__pycache__" not in path.parts]
    known = [f"/{path.relative_to(SOURCE)}" for path in files]
    paths = re.findall(r"`([a-z_]\w*(?:/\w+)*\.(?:py|sh))`", page)
    assert len(paths) > 150
    assert [path for path in paths if not any(name.endswith(f"/{path}") for name in known)] == []


def test_no_term_of_the_glossary_is_defined_twice() -> None:
    terms = re.findall(r"^\| ([^|`]+?) \| .+ \| `agentfly\..+` \|$", prose(DOCS / "glossary.md"), re.MULTILINE)
    assert len(terms) > 90
    assert sorted(terms) == sorted(set(terms))


def test_the_glossary_has_every_name_of_a_setting_that_is_accepted_or_explained() -> None:
    from agentfly.training.config.base import SETTING_HINTS, SFT_SYNONYMS, SYNONYMS

    settings = (DOCS / "glossary.md").read_text(encoding="utf-8").split("## Settings under other names")[1]
    for title, synonyms in (("Training", SYNONYMS), ("Warm start", SFT_SYNONYMS)):
        section = settings.split(f"### {title}\n")[1].split("\n##")[0]
        rows = re.findall(r"^\| `(.+?)` \| (`.+`) \|$", section, re.MULTILINE)
        told = {name: setting for setting, names in rows for name in re.findall(r"`(.+?)`", names)}
        assert told == dict(synonyms)
    refused = re.findall(r"^\| (`.+?) \|", settings.split("### Refused")[1], re.MULTILINE)
    assert {name for row in refused for name in re.findall(r"`(.+?)`", row)} == set(SETTING_HINTS)

"""Removal of directory trees that other programs made."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentfly.core.tree_removal import remove_tree
from agentfly.resources.containers.runtime_directory import remove_sandbox_directory

DEEP = "import os, sys; os.chdir(sys.argv[1]); [(os.mkdir('deep'), os.chdir('deep')) for _ in range(1200)]"


def make_deep(place: Path) -> None:
    subprocess.run([sys.executable, "-c", DEEP, str(place)], check=True)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "tree").mkdir()
    yield tmp_path / "tree"
    subprocess.run(["rm", "-rf", tmp_path / "tree"], check=True)  # which pytest could not do


@pytest.mark.parametrize("remove", [remove_tree, remove_sandbox_directory])
def test_a_tree_deeper_than_any_path_or_stack_is_removed(place: Path, remove: object) -> None:
    make_deep(place)
    assert callable(remove)
    remove(place)
    assert not place.exists()


def test_what_its_owner_may_neither_read_nor_enter_is_removed(place: Path) -> None:
    for mode in (0o000, 0o200, 0o444, 0o555):
        (place / f"{mode:o}" / "below").mkdir(parents=True)
        (place / f"{mode:o}" / "below" / "file").touch()
        (place / f"{mode:o}" / "below").chmod(mode)
        (place / f"{mode:o}").chmod(mode)
    place.chmod(0o000)
    as_ordinary_user(place, f"from agentfly.core.tree_removal import remove_tree; remove_tree({str(place)!r})")
    assert not place.exists()


def as_ordinary_user(place: Path, source: str) -> None:
    """Run Python without the rights of root, for which no permission is an obstacle."""
    if os.geteuid() != 0:
        subprocess.run([sys.executable, "-c", source], check=True)
        return
    for directory, folders, files in os.walk(place.parent):
        for name in (*folders, *files, "."):
            os.chown(Path(directory) / name, 65534, 65534)
    drop = "import os; from agentfly.core import tree_removal; os.setgroups([]); os.setgid(65534); os.setuid(65534); "
    reachable = f"import os; os.chdir({str(place.parent)!r}); "
    relative = source.replace(repr(str(place)), repr(place.name))
    subprocess.run([sys.executable, "-c", reachable + drop + relative], check=True)


def test_links_are_removed_and_never_followed(place: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("untouched")
    victim.chmod(0o500)
    (place / "to directory").symlink_to(victim)
    (place / "d").mkdir()
    (place / "d" / "to file").symlink_to(victim / "file")
    os.link(victim / "file", place / "d" / "same")
    remove_tree(place)
    assert not place.exists()
    assert (victim / "file").read_text() == "untouched"
    assert victim.stat().st_mode & 0o777 == 0o500
    victim.chmod(0o700)


def test_what_is_a_link_itself_is_removed_as_such(place: Path, tmp_path: Path) -> None:
    (place / "file").touch()
    (tmp_path / "link").symlink_to(place)
    remove_tree(tmp_path / "link")
    assert (place / "file").exists()
    assert not (tmp_path / "link").is_symlink()


def test_what_is_not_there_is_fine(tmp_path: Path) -> None:
    remove_tree(tmp_path / "none")
    remove_tree(tmp_path / "none" / "below")


def test_every_kind_of_file_is_removed(place: Path) -> None:
    os.mkfifo(place / "pipe")
    (place / "dangling").symlink_to("nowhere")
    (place / "file").touch(mode=0)
    remove_tree(place)
    assert not place.exists()

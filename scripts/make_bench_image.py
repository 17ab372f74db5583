"""Make the root file system of ``python -m benchmarks.sandbox_episodes``.

It is the root file system of the tests, with git repositories in /testbed.

    python scripts/make_bench_image.py [directory]

The repositories are small projects with tests of their own, as their authors packed them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import make_test_image

ARCHIVE = "bench-rootfs.tar"
PROJECTS = ("inflection==0.5.1", "parse==1.20.2", "schema==0.7.7", "toolz==1.0.0")
_IDENTITY = ("-c", "user.name=bench", "-c", "user.email=bench@localhost")


def make(directory: Path = make_test_image.DIRECTORY) -> Path:
    """Make the archive unless it exists. Return its path."""
    archive = directory / ARCHIVE
    if archive.exists():
        return archive
    base = make_test_image.make(directory)
    draft = archive.with_suffix(".draft")
    shutil.copyfile(base, draft)
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary) / "root"
        for project in PROJECTS:
            _repository(project, Path(temporary) / "downloads", root / "testbed")
        (root / "etc").mkdir()
        (root / "etc" / "gitconfig").write_text("[safe]\n\tdirectory = *\n")  # the repositories are root's
        ownership = ["--owner=0", "--group=0", "--numeric-owner"]
        subprocess.run(
            ["tar", "-C", str(root), *ownership, "--append", f"--file={draft}", "./testbed", "./etc/gitconfig"],
            check=True,
        )
    draft.rename(archive)
    return archive


def _repository(project: str, downloads: Path, testbed: Path) -> None:
    """Unpack a project into a git repository of one commit."""
    name = project.partition("==")[0]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=:all:"]
    subprocess.run([*command, "--no-build-isolation", f"--dest={downloads}", project], check=True)
    packed = next(downloads.glob(f"{name}-*"))
    with tarfile.open(packed) as archive:
        archive.extractall(testbed, filter="data")
    place = testbed / name
    next(testbed.glob(f"{name}-*")).rename(place)
    for words in (["init", "--quiet", "--initial-branch=main"], ["add", "--all"], ["commit", "--quiet", "-m", project]):
        subprocess.run(["git", *_IDENTITY, "-C", str(place), *words], check=True)


if __name__ == "__main__":
    print(make(Path(sys.argv[1]) if len(sys.argv) > 1 else make_test_image.DIRECTORY))

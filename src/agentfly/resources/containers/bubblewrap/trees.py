"""How the root file system of a sandbox is put together: by mounting it first, or by bubblewrap's own arguments."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from agentfly.errors import ResourceStartError
from agentfly.resources.containers.bubblewrap import layout
from agentfly.resources.containers.bubblewrap.snapshots import Snapshots
from agentfly.resources.containers.bubblewrap.syscalls import (
    MS_BIND,
    MS_NODEV,
    MS_NOSUID,
    MS_REC,
    attach_idmapped,
    mount,
    unmount,
)
from agentfly.resources.containers.spec import ContainerSpec

_PLAIN = MS_NOSUID | MS_NODEV
# below /usr and its like, directories down to this depth take new files (in the private layer)
_WRITABLE_DEPTH = 2
_WRITABLE_WHOLE = "usr/local"


class Trees(Protocol):
    """Makes the root file systems of sandboxes. Called on the launching thread only."""

    def build(self, spec: ContainerSpec, image: Path | None, scratch: Path, common: list[str]) -> list[str]:
        """Prepare a root file system and return all of bubblewrap's arguments.

        Args:
            spec: what it is to hold.
            image: the directory with its root file system, if its image has one.
            scratch: the sandbox's own directory on the host.
            common: the arguments that are the same however the root is made; some of them mount in it.

        Raises:
            ResourceStartError: a snapshot or a mount is not there.
        """
        ...

    def drop(self, scratch: Path) -> None:
        """Undo what `build` did; fine if that was nothing, or only a part."""
        ...


class MountedTrees:
    """Roots made of overlay mounts, each with one size-limited private layer for everything that is written.

    For a thread that may mount and has the mounts for itself; what it mounts is gone when the process is.
    """

    def __init__(self, home: Path, uid: int, userns: Callable[[], int]) -> None:
        """Prepare what all sandboxes share.

        Args:
            home: an empty directory, which gets a file system of its own.
            uid: the ordinary user of the host that sandboxes run as, and this thread is.
            userns: opens a user namespace that maps user and group 0 to `uid`.
        """
        self._uid = uid
        self._userns = userns
        self._home = home
        self._images: dict[Path, Path] = {}
        mount("tmpfs", home, "tmpfs", MS_NOSUID | MS_NODEV, f"mode=0755,uid={uid},gid={uid}")
        self.snapshots = Snapshots(home / "snapshots")
        self._skeleton = home / "skeleton"
        self._skeleton.mkdir()
        layout.make_skeleton(self._skeleton)
        self._lowers = {name: self._writable_system(name) for name in layout.system_directories()}

    def build(self, spec: ContainerSpec, image: Path | None, scratch: Path, common: list[str]) -> list[str]:
        """See `Trees.build`."""
        tree = f"{scratch}/tree"
        os.mkdir(tree)  # noqa: PTH102  (here and below: every start does all this, and pathlib is slow)
        options = f"size={spec.disk_limit},mode=0755,uid={self._uid},gid={self._uid}"
        mount("tmpfs", tree, "tmpfs", _PLAIN, options)
        layers = self.layers(spec, image)
        self._make_private(spec, tree, layers)
        for number, (name, lower) in enumerate(layers.items()):
            work = f"{tree}/work{number}"
            os.mkdir(work)  # noqa: PTH102
            where = f"lowerdir={lower},upperdir={tree}/upper{number},workdir={work}"
            mount("overlay", f"{tree}/root/{name}", "overlay", _PLAIN, where)
        arguments = ["--bind", f"{tree}/root", "/", "--dev", "/dev", "--bind", f"{tree}/shm", "/dev/shm"]
        for number, (source, target) in enumerate(spec.mounts):
            arguments += ["--ro-bind", str(self._show(Path(source), Path(f"{tree}/mount{number}"))), target]
        return [*arguments, *common, "--remount-ro", "/dev"]

    def drop(self, scratch: Path) -> None:
        """See `Trees.drop`."""
        unmount(scratch / "tree")
        self.snapshots.clear()

    def layers(self, spec: ContainerSpec, image: Path | None) -> dict[str, str]:
        """What lies below the private layer, by where in the root; the root itself first, under the empty name."""
        if image is not None:
            return {"": str(self._image(image))}
        if spec.image_kind == "snapshot":
            return self.snapshots.layers(spec.image)
        return {"": str(self._skeleton), **self._lowers}

    def _make_private(self, spec: ContainerSpec, tree: str, layers: dict[str, str]) -> None:
        uppers = {name: f"{tree}/upper{number}" for number, name in enumerate(layers)}
        for directory in (f"{tree}/root", f"{tree}/shm", *uppers.values()):
            os.mkdir(directory)  # noqa: PTH102
        os.chmod(f"{tree}/shm", 0o1777)  # noqa: PTH101
        for path, mode in layout.private_directories(spec):
            first, _, rest = path[1:].partition("/")
            directory = f"{uppers[first]}/{rest}" if first in uppers else uppers[""] + path
            os.makedirs(directory, exist_ok=True)  # noqa: PTH103
            os.chmod(directory, mode)  # noqa: PTH101

    def _image(self, source: Path) -> Path:
        """The files of an image, with root's shown as those of the sandbox's user, so that they can be overlaid."""
        if source not in self._images:
            target = self._home / f"image{len(self._images)}"
            target.mkdir()
            try:
                attach_idmapped(source, target, self._userns())
            except OSError:  # an older kernel or another file system: its system directories stay read-only inside
                mount(str(source), target, None, MS_BIND)
            self._images[source] = target
        return self._images[source]

    def _writable_system(self, name: str) -> str:
        """The lower layers of a system directory of the host: its upper directories, ours, on top of it.

        The host's files keep their owner, so what only root may read stays unreadable inside. New files, and renames
        over old ones, are up to the directory, and the directories on top belong to the sandbox's user.
        """
        shell, host = self._home / f"system-{name}", self._home / f"host-{name}"
        host.mkdir()
        mount(f"/{name}", host, None, MS_BIND)
        _copy_directories(Path("/") / name, shell, _WRITABLE_DEPTH)
        whole = Path("/") / _WRITABLE_WHOLE
        if name == whole.parts[1] and whole.is_dir():
            _copy_directories(whole, shell / "local", 6)
        return f"{shell}:{host}"

    def _show(self, source: Path, target: Path) -> Path:
        if not source.exists():
            raise ResourceStartError(f"ContainerSpec(mounts=…): {source} is not there on this host.")
        if source.is_dir():
            target.mkdir()
        else:
            target.touch()
        mount(str(source), target, None, MS_BIND | MS_REC)
        return target


class BoundTrees:
    """Roots that bubblewrap makes itself, for a user who cannot mount: system directories are read-only.

    The private directories share the size limit: half of it is the workdir's, and the others have an eighth each. What
    is written over an unpacked image elsewhere has no limit but the memory's.
    """

    def build(self, spec: ContainerSpec, image: Path | None, scratch: Path, common: list[str]) -> list[str]:
        """See `Trees.build`."""
        if image is None:
            files = scratch / "etc"
            files.mkdir()
            for name, text in layout.FILES.items():
                (files / name).write_text(text)
                (files / name).chmod(0o644)
            arguments = layout.host_arguments(files)
        else:
            arguments = ["--overlay-src", str(image), "--tmp-overlay", "/"]
        arguments += ["--dev", "/dev"]
        for path, mode in dict(layout.private_file_systems(spec)).items():
            if path in (spec.workdir, spec.home) and image is not None and (image / path[1:]).is_dir():
                continue  # what the image has there is shown
            size = spec.disk_limit // (2 if path == spec.workdir else 8)
            arguments += ["--size", str(size), "--perms", f"{mode:o}", "--tmpfs", path]
        for source, target in spec.mounts:
            if not Path(source).exists():
                raise ResourceStartError(f"ContainerSpec(mounts=…): {source} is not there on this host.")
            arguments += ["--ro-bind", source, target]
        sealed = ["--remount-ro", "/dev"] + ["--remount-ro", "/"] * (image is None)
        return [*arguments, *common, *sealed]

    def drop(self, scratch: Path) -> None:
        """Nothing: all of it ends with the sandbox."""


def _copy_directories(source: Path, target: Path, depth: int) -> None:
    """Copy the directories that anybody may enter, without what is in them."""
    target.mkdir(exist_ok=True)
    if depth == 0:
        return
    with os.scandir(source) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                mode = entry.stat(follow_symlinks=False).st_mode
                if mode & stat.S_IROTH and mode & stat.S_IXOTH:
                    _copy_directories(Path(entry.path), target / entry.name, depth - 1)

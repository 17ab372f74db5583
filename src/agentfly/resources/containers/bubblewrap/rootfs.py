"""RootfsBuilder: a sandbox's root file system, by overlay mounts or by bubblewrap's bind arguments."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from agentfly.core.errors import ResourceStartError
from agentfly.resources.containers.bubblewrap.snapshots import SnapshotStore
from agentfly.resources.containers.bubblewrap.syscalls import (
    MS_BIND,
    MS_NODEV,
    MS_NOSUID,
    MS_REC,
    attach_idmapped,
    mount,
    unmount,
)
from agentfly.resources.containers.spec import SHELL_MOUNT, ContainerSpec

SYSTEM_DIRECTORIES = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")

# never host names, users, credentials or the configuration of package indexes
ETC_ALLOWLIST = (
    "alternatives",
    "bash.bashrc",
    "ca-certificates.conf",
    "debian_version",
    "fonts",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "locale.alias",
    "localtime",
    "magic",
    "mime.types",
    "os-release",
    "perl",
    "pki/ca-trust",
    "pki/tls/certs",
    "profile",
    "protocols",
    "python3",
    "services",
    "ssl/certs",
    "ssl/openssl.cnf",
    "terminfo",
    "timezone",
    "xml",
)
ETC_ALLOWLIST_PATTERNS = ("java-*", "python3.*", "crypto-policies")

NAMESPACE_OPTIONS = (
    "--unshare-user",
    "--unshare-ipc",
    "--unshare-pid",
    "--unshare-uts",
    "--unshare-cgroup",
    "--disable-userns",
    "--new-session",  # a signal to its own process group would reach bubblewrap, which is outside
)

ETC_FILES = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\nagent:x:1000:1000:agent:/home/agent:/bin/bash\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": "root:x:0:\nagent:x:1000:\nnogroup:x:65534:\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
}


def etc_entries() -> list[str]:
    """Return the names in the host's /etc that sandboxes see."""
    etc = Path("/etc")
    names = [name for name in ETC_ALLOWLIST if os.path.lexists(etc / name)]
    return names + [path.name for pattern in ETC_ALLOWLIST_PATTERNS for path in sorted(etc.glob(pattern))]


def private_directories(spec: ContainerSpec) -> list[tuple[str, int]]:
    """Return the private directories of a sandbox, with their permissions."""
    return [(spec.workdir, 0o755), ("/tmp", 0o1777), ("/var/tmp", 0o1777), (spec.home, 0o755)]


def private_file_systems(spec: ContainerSpec) -> list[tuple[str, int]]:
    """Return the directories that are tmpfs mounts if bubblewrap builds the root, with their permissions."""
    return [("/dev/shm", 0o1777), *private_directories(spec)]


def sandbox_environment(spec: ContainerSpec) -> dict[str, str]:
    """Return all environment variables inside."""
    return {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": spec.home,
        "USER": spec.user,
        "LOGNAME": spec.user,
        "SHELL": "/bin/bash",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "PAGER": "cat",
    } | dict(spec.env)


def make_skeleton(directory: Path) -> None:
    """Create a root for the host's system directories: links, mount points, and /etc."""
    for name in SYSTEM_DIRECTORIES:
        host = Path("/") / name
        if host.is_symlink():
            (directory / name).symlink_to(host.readlink())
        elif host.is_dir():
            (directory / name).mkdir()
    for name in ("etc", "proc", "dev", "run", "tmp", "var/tmp", "var/lib", "home", "root"):
        (directory / name).mkdir(parents=True, exist_ok=True)
    for name in etc_entries():
        _copy_readable(Path("/etc") / name, directory / "etc" / name)
    for name, text in ETC_FILES.items():
        (directory / "etc" / name).write_text(text)


def system_directories() -> list[str]:
    """Return the system directories that are not links."""
    return [name for name in SYSTEM_DIRECTORIES if (Path("/") / name).is_dir() and not (Path("/") / name).is_symlink()]


def _copy_readable(source: Path, target: Path) -> None:
    """Copy what every user may read; links stay links."""
    target.parent.mkdir(parents=True, exist_ok=True)
    mode = source.lstat().st_mode
    if stat.S_ISLNK(mode):
        target.symlink_to(source.readlink())
    elif stat.S_ISREG(mode) and mode & stat.S_IROTH:
        shutil.copyfile(source, target)
        target.chmod(0o755 if mode & stat.S_IXOTH else 0o644)
    elif stat.S_ISDIR(mode) and mode & stat.S_IXOTH:
        target.mkdir(exist_ok=True)
        for entry in source.iterdir():
            _copy_readable(entry, target / entry.name)


def host_arguments(files: Path) -> list[str]:
    """Return bubblewrap's arguments for the same root, read-only, for users who may not mount.

    Args:
        files: a directory with the files of `ETC_FILES`.
    """
    arguments: list[str] = []
    for name in SYSTEM_DIRECTORIES:
        host = Path("/") / name
        if host.is_symlink():
            arguments += ["--symlink", str(host.readlink()), str(host)]
        elif host.is_dir():
            arguments += ["--ro-bind", str(host), str(host)]
    for name in etc_entries():
        path = Path("/etc") / name
        if path.is_symlink():
            arguments += ["--symlink", str(path.readlink()), str(path)]
        elif os.access(path, os.R_OK):
            arguments += ["--ro-bind", str(path), str(path)]
    for name in ETC_FILES:
        arguments += ["--ro-bind", str(files / name), f"/etc/{name}"]
    return arguments


def common_arguments(spec: ContainerSpec, shell_directory: Path) -> list[str]:
    """Return bubblewrap's arguments that do not depend on how the root is built, without the environment.

    Args:
        spec: what to start.
        shell_directory: the host's directory of the shell's pipes and scripts.
    """
    inside = "0" if spec.user == "root" else "1000"
    arguments = [*NAMESPACE_OPTIONS, *([] if spec.network else ["--unshare-net"])]
    arguments += ["--uid", inside, "--gid", inside, "--hostname", "sandbox"]
    arguments += ["--die-with-parent", "--as-pid-1", "--clearenv"]
    arguments += ["--proc", "/proc", "--ro-bind", str(shell_directory), str(SHELL_MOUNT), "--chdir", spec.workdir]
    # a writer of these could make process 1 outlive this process; seccomp forbids the same by ptrace
    for path in ("/proc/1/mem", "/proc/1/task/1/mem"):
        arguments += ["--ro-bind", "/dev/null", path]
    # it names the keys of all programs of the host's user
    if os.path.exists("/proc/keys"):  # noqa: PTH110  (for each start, and pathlib is slow)
        arguments += ["--ro-bind", "/dev/null", "/proc/keys"]
    if spec.network and Path("/etc/resolv.conf").exists():
        arguments += ["--ro-bind", os.path.realpath("/etc/resolv.conf"), "/etc/resolv.conf"]
    return arguments


_PLAIN = MS_NOSUID | MS_NODEV
# system directories down to this depth take new files, in the private layer
_WRITABLE_DEPTH = 2
_WRITABLE_WHOLE = "usr/local"


class RootfsBuilder(Protocol):
    """Builds the root file systems of sandboxes. Called only on the launching thread."""

    def build(self, spec: ContainerSpec, image: Path | None, scratch: Path, common: list[str]) -> list[str]:
        """Build a root file system, and return all arguments of bubblewrap.

        Args:
            spec: what to start.
            image: the directory of the image's root file system; None if the image has none.
            scratch: the sandbox's own directory on the host.
            common: the result of `common_arguments`; some of these mount into the root.

        Raises:
            ResourceStartError: a snapshot or the source of a mount does not exist.
        """
        ...

    def teardown(self, scratch: Path) -> None:
        """Undo `build`, even if it failed or never ran."""
        ...


class OverlayRootfsBuilder:
    """Builds roots of overlay mounts, each with one private layer of limited size for all writes.

    It needs a thread that may mount and has a private view of the mounts. The mounts end with the process.
    """

    def __init__(self, home: Path, uid: int, userns: Callable[[], int]) -> None:
        """Build what all sandboxes share.

        Args:
            home: an empty directory, on which a file system is mounted.
            uid: the ordinary user of the host as which sandboxes and this thread run.
            userns: opens a user namespace that maps user and group 0 to `uid`.
        """
        self._uid = uid
        self._userns = userns
        self._home = home
        self._images: dict[Path, Path] = {}
        mount("tmpfs", home, "tmpfs", MS_NOSUID | MS_NODEV, f"mode=0755,uid={uid},gid={uid}")
        self.snapshots = SnapshotStore(home / "snapshots")
        self._skeleton = home / "skeleton"
        self._skeleton.mkdir()
        make_skeleton(self._skeleton)
        self._lowers = {name: self._system_overlay(name) for name in system_directories()}

    def build(self, spec: ContainerSpec, image: Path | None, scratch: Path, common: list[str]) -> list[str]:
        """See `RootfsBuilder.build`."""
        tree = f"{scratch}/tree"
        os.mkdir(tree)  # noqa: PTH102  (here and below: this runs at every start, and pathlib is slow)
        options = f"size={spec.disk_limit},mode=0755,uid={self._uid},gid={self._uid}"
        mount("tmpfs", tree, "tmpfs", _PLAIN, options)
        layers = self.lower_layers(spec, image)
        self._make_private(spec, tree, layers)
        for number, (name, lower) in enumerate(layers.items()):
            work = f"{tree}/work{number}"
            os.mkdir(work)  # noqa: PTH102
            where = f"lowerdir={lower},upperdir={tree}/upper{number},workdir={work}"
            mount("overlay", f"{tree}/root/{name}", "overlay", _PLAIN, where)
        arguments = ["--bind", f"{tree}/root", "/", "--dev", "/dev", "--bind", f"{tree}/shm", "/dev/shm"]
        for number, (source, target) in enumerate(spec.mounts):
            arguments += ["--ro-bind", str(self._bind_mount(Path(source), Path(f"{tree}/mount{number}"))), target]
        return [*arguments, *common, "--remount-ro", "/dev"]

    def teardown(self, scratch: Path) -> None:
        """See `RootfsBuilder.teardown`."""
        unmount(scratch / "tree")
        self.snapshots.remove_unreferenced()

    def lower_layers(self, spec: ContainerSpec, image: Path | None) -> dict[str, str]:
        """Return the lower layers by directory in the root. The first entry, with an empty name, is the root itself."""
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
        for path, mode in private_directories(spec):
            first, _, rest = path[1:].partition("/")
            directory = f"{uppers[first]}/{rest}" if first in uppers else uppers[""] + path
            os.makedirs(directory, exist_ok=True)  # noqa: PTH103
            os.chmod(directory, mode)  # noqa: PTH101

    def _image(self, source: Path) -> Path:
        """Mount an image such that files of root belong to the sandbox's user, so that they can be overlaid."""
        if source not in self._images:
            target = self._home / f"image{len(self._images)}"
            target.mkdir()
            try:
                attach_idmapped(source, target, self._userns())
            except OSError:  # not supported by the kernel or the file system: system directories stay read-only inside
                mount(str(source), target, None, MS_BIND)
            self._images[source] = target
        return self._images[source]

    def _system_overlay(self, name: str) -> str:
        """Return the lower layers of a system directory: empty copies of its upper directories, over the directory.

        The host's files keep their owner, so files that only root may read stay unreadable inside. Whether files may be
        created or replaced depends on the owner of the directory. The copies belong to the sandbox's user.
        """
        shell, host = self._home / f"system-{name}", self._home / f"host-{name}"
        host.mkdir()
        mount(f"/{name}", host, None, MS_BIND)
        _copy_directories(Path("/") / name, shell, _WRITABLE_DEPTH)
        whole = Path("/") / _WRITABLE_WHOLE
        if name == whole.parts[1] and whole.is_dir():
            _copy_directories(whole, shell / "local", 6)
        return f"{shell}:{host}"

    def _bind_mount(self, source: Path, target: Path) -> Path:
        if not source.exists():
            raise ResourceStartError(f"ContainerSpec(mounts=…): {source} does not exist on this host.")
        if source.is_dir():
            target.mkdir()
        else:
            target.touch()
        mount(str(source), target, None, MS_BIND | MS_REC)
        return target


class BindRootfsBuilder:
    """Has bubblewrap build the root, for users who may not mount. System directories are read-only.

    The private directories share the size limit: half of it is for the workdir, and an eighth for each other directory.
    Other writes over an unpacked image are limited only by the memory limit.
    """

    def build(self, spec: ContainerSpec, image: Path | None, scratch: Path, common: list[str]) -> list[str]:
        """See `RootfsBuilder.build`."""
        if image is None:
            files = scratch / "etc"
            files.mkdir()
            for name, text in ETC_FILES.items():
                (files / name).write_text(text)
                (files / name).chmod(0o644)
            arguments = host_arguments(files)
        else:
            arguments = ["--overlay-src", str(image), "--tmp-overlay", "/"]
        arguments += ["--dev", "/dev"]
        for path, mode in dict(private_file_systems(spec)).items():
            if path in (spec.workdir, spec.home) and image is not None and (image / path[1:]).is_dir():
                continue  # the image's own directory is used
            size = spec.disk_limit // (2 if path == spec.workdir else 8)
            arguments += ["--size", str(size), "--perms", f"{mode:o}", "--tmpfs", path]
        for source, target in spec.mounts:
            if not Path(source).exists():
                raise ResourceStartError(f"ContainerSpec(mounts=…): {source} does not exist on this host.")
            arguments += ["--ro-bind", source, target]
        sealed = ["--remount-ro", "/dev"] + ["--remount-ro", "/"] * (image is None)
        return [*arguments, *common, *sealed]

    def teardown(self, scratch: Path) -> None:
        """Do nothing, because the root ends with the sandbox."""


def _copy_directories(source: Path, target: Path, depth: int) -> None:
    """Copy the directories that every user may enter, without their files."""
    target.mkdir(exist_ok=True)
    if depth == 0:
        return
    with os.scandir(source) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                mode = entry.stat(follow_symlinks=False).st_mode
                if mode & stat.S_IROTH and mode & stat.S_IXOTH:
                    _copy_directories(Path(entry.path), target / entry.name, depth - 1)

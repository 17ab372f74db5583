"""What a sandbox sees of the host: system directories, and of /etc what programs need."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from agentfly.resources.containers.spec import INSIDE, ContainerSpec

SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")

# never: host names, users, credentials, configuration of package indexes
ETC = (
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
ETC_PATTERNS = ("java-*", "python3.*", "crypto-policies")

ISOLATION = (
    "--unshare-user",
    "--unshare-ipc",
    "--unshare-pid",
    "--unshare-uts",
    "--unshare-cgroup",
    "--disable-userns",
    "--new-session",  # a signal to its own process group would reach bubblewrap, which is outside
)

FILES = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\nagent:x:1000:1000:agent:/home/agent:/bin/bash\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": "root:x:0:\nagent:x:1000:\nnogroup:x:65534:\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
}


def etc_entries() -> list[str]:
    """What of the host's /etc is shown, as names below it."""
    etc = Path("/etc")
    names = [name for name in ETC if os.path.lexists(etc / name)]
    return names + [path.name for pattern in ETC_PATTERNS for path in sorted(etc.glob(pattern))]


def private_directories(spec: ContainerSpec) -> list[tuple[str, int]]:
    """The directories that every sandbox has for itself, with their permissions."""
    return [(spec.workdir, 0o755), ("/tmp", 0o1777), ("/var/tmp", 0o1777), (spec.home, 0o755)]


def private_file_systems(spec: ContainerSpec) -> list[tuple[str, int]]:
    """The directories that are file systems of their own, in memory, where bubblewrap makes the root itself."""
    return [("/dev/shm", 0o1777), *private_directories(spec)]


def environment(spec: ContainerSpec) -> dict[str, str]:
    """The whole environment inside."""
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
    """Make the root of a sandbox that shows the host's system directories: links, mount points, and an /etc."""
    for name in SYSTEM:
        host = Path("/") / name
        if host.is_symlink():
            (directory / name).symlink_to(host.readlink())
        elif host.is_dir():
            (directory / name).mkdir()
    for name in ("etc", "proc", "dev", "run", "tmp", "var/tmp", "var/lib", "home", "root"):
        (directory / name).mkdir(parents=True, exist_ok=True)
    for name in etc_entries():
        _copy_readable(Path("/etc") / name, directory / "etc" / name)
    for name, text in FILES.items():
        (directory / "etc" / name).write_text(text)


def system_directories() -> list[str]:
    """The system directories that are directories of their own, not links."""
    return [name for name in SYSTEM if (Path("/") / name).is_dir() and not (Path("/") / name).is_symlink()]


def _copy_readable(source: Path, target: Path) -> None:
    """Copy what anybody may read, links as links."""
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
    """bubblewrap's arguments for the same root, read-only, for a user who cannot mount.

    Args:
        files: a directory that holds the texts of `FILES`.
    """
    arguments: list[str] = []
    for name in SYSTEM:
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
    for name in FILES:
        arguments += ["--ro-bind", str(files / name), f"/etc/{name}"]
    return arguments


def common_arguments(spec: ContainerSpec, exchange: Path) -> list[str]:
    """bubblewrap's arguments that are the same however the root is made, but for the environment.

    Args:
        exchange: the host's directory of the shell's pipes and scripts.
    """
    inside = "0" if spec.user == "root" else "1000"
    arguments = [*ISOLATION, *([] if spec.network else ["--unshare-net"])]
    arguments += ["--uid", inside, "--gid", inside, "--hostname", "sandbox"]
    arguments += ["--die-with-parent", "--as-pid-1", "--clearenv"]
    arguments += ["--proc", "/proc", "--ro-bind", str(exchange), str(INSIDE), "--chdir", spec.workdir]
    # who could write it could have process 1 outlive us; nobody inside can be traced into doing that either (seccomp)
    for path in ("/proc/1/mem", "/proc/1/task/1/mem"):
        arguments += ["--ro-bind", "/dev/null", path]
    # it names the keys of all that the host's user runs, not of the sandbox alone
    if os.path.exists("/proc/keys"):  # noqa: PTH110  (for each start, and pathlib is slow)
        arguments += ["--ro-bind", "/dev/null", "/proc/keys"]
    if spec.network and Path("/etc/resolv.conf").exists():
        arguments += ["--ro-bind", os.path.realpath("/etc/resolv.conf"), "/etc/resolv.conf"]
    return arguments

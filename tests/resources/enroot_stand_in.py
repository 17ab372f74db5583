#!/usr/bin/python3 -I
"""A stand-in for the program enroot, for machines that have none.

It speaks as much of enroot's command line as the backend uses, does to a container what enroot does, by the same
environment variables and files, and refuses everything else, so that a wrong word is a failed test. It appends each
command line with its environment to the file ``calls`` beside itself.

    version
    import --output FILE docker://NAME            takes FILE from the directory ``registry`` beside itself
    create --name NAME IMAGE
    start --rw --rc SCRIPT NAME
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

HERE = Path(__file__).resolve().parent
PATHS = ("RUNTIME", "CONFIG", "SYSCONF", "CACHE", "TEMP", "DATA")
FLAGS = {"nosuid": 2, "nodev": 4, "noexec": 8, "bind": 4096, "rbind": 4096 | 16384}
libc = ctypes.CDLL(None, use_errno=True)


def main(words: list[str]) -> None:
    with (HERE / "calls").open("a") as file:
        file.write(json.dumps({"words": words, "environment": dict(os.environ)}) + "\n")
    match words:
        case ["version"]:
            print("stand-in for enroot")
        case ["import", "--output", file_name, address] if address.startswith("docker://"):
            source = HERE / "registry" / address.removeprefix("docker://").replace("/", "_")
            if not source.is_file():
                fail(f"Could not process image: {address}")
            shutil.copyfile(source, file_name)
        case ["create", "--name", name, image] if "/" not in name:
            target = data() / name
            if target.exists():
                fail(f"File already exists: {target}")
            subprocess.run(["unsquashfs", "-no-progress", "-d", target, image], check=True, stdout=sys.stderr)
        case ["start", "--rw", "--rc", script, name] if "/" not in name:
            start(Path(script), data() / name)
        case _:
            fail(f"the stand-in takes no such command line: {words}")


def fail(why: str) -> NoReturn:
    sys.exit(f"[ERROR] {why}")


def data() -> Path:
    for name in PATHS:
        if not Path(os.environ[f"ENROOT_{name}_PATH"]).is_absolute():
            fail(f"ENROOT_{name}_PATH is not absolute")
    return Path(os.environ["ENROOT_DATA_PATH"])


def start(script: Path, root: Path) -> None:
    if not root.is_dir():
        fail(f"No such file or directory: {root}")
    if any(os.environ.get(f"ENROOT_{name}", "no") != "no" for name in ("LOGIN_SHELL", "REMAP_ROOT", "MOUNT_HOME")):
        fail("the stand-in has no such setting")
    text = script.read_text()
    unshare(os.getuid(), os.getgid())
    mount(str(root), root, None, FLAGS["bind"])
    hooks = Path(os.environ["ENROOT_SYSCONF_PATH"], "hooks.d")
    if any(hooks.iterdir()):
        fail("the stand-in runs no hooks")
    for table in (root / "etc/fstab", *sorted(Path(os.environ["ENROOT_SYSCONF_PATH"], "mounts.d").glob("*.fstab"))):
        for line in table.read_text().splitlines():
            mount_entry(root, *line.split()[:4])
    old = os.open("/", os.O_RDONLY)
    os.chdir(root)
    check("pivot_root", libc.syscall(ctypes.c_long(155), b".", b"."))
    os.fchdir(old)
    check("umount2", libc.umount2(b".", 2))
    os.chdir("/")
    os.close(old)
    check("prctl", libc.prctl(38, 1, 0, 0, 0))
    if os.geteuid() != 0:
        check("capset", libc.capset(struct.pack("=Ii", 0x20080522, 0), bytes(24)))
    descriptor = os.memfd_create("rc", 0)
    os.write(descriptor, text.encode())
    environment = dict(line.split("=", 1) for line in Path("/etc/environment").read_text().splitlines() if "=" in line)
    os.execve("/bin/sh", ["sh", f"/proc/self/fd/{descriptor}"], environment)


def unshare(uid: int, gid: int) -> None:
    check("unshare", libc.unshare(0x10000000))
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    check("unshare", libc.unshare(0x00020000))


def mount_entry(root: Path, source: str, target: str, kind: str, options: str) -> None:
    where = root / target.lstrip("/").replace("\\040", " ")
    flags, rest = 0, []
    for option in options.split(","):
        if option.startswith("x-create="):
            if option == "x-create=dir" or (option == "x-create=auto" and Path(source).is_dir()):
                where.mkdir(parents=True, exist_ok=True)
            else:
                where.parent.mkdir(parents=True, exist_ok=True)
                where.touch()
        elif option in FLAGS:
            flags |= FLAGS[option]
        else:
            rest.append(option)
    if flags & FLAGS["bind"]:
        if rest:
            fail(f"a bind mount takes no {rest}")
        mount(source, where, None, flags)
        if flags & ~FLAGS["rbind"]:
            kept = os.statvfs(where).f_flag & (1 | 2 | 4 | 8 | 1024 | 2048 | 4096)
            mount(None, where, None, (flags & ~16384) | 32 | (kept & 15) | (kept & 1024) | (kept & 2048))
    else:
        mount(source, where, kind, flags, ",".join(rest))


def mount(source: str | None, target: Path, kind: str | None, flags: int, options: str = "") -> None:
    raw = [None if text is None else os.fsencode(text) for text in (source, str(target), kind)]
    check(f"mount {source} at {target}", libc.mount(*raw, ctypes.c_ulong(flags), os.fsencode(options) or None))


def check(what: str, result: int) -> None:
    if result < 0:
        fail(f"{what}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main(sys.argv[1:])

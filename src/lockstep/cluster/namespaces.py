"""Linux namespaces: a private network, host name or table of mounts for one process and all that it starts.

They need no tidying. A namespace, with every link, address, queue and mount in it, goes when the last process in it
does, whatever ended that process. An ordinary user may make them inside a user namespace of their own, where the system
has not closed those; root (with CAP_SYS_ADMIN) needs none. In a user namespace everybody keeps the id they have: files
belong to whom they belong, and nothing looks like root that is not.
"""

from __future__ import annotations

import ctypes
import os
import sys

NEWNS = 0x00020000
NEWUTS = 0x04000000
NEWUSER = 0x10000000
NEWPID = 0x20000000
NEWNET = 0x40000000

MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
_MNT_DETACH = 2
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE = 47, 2
_CAPABILITY_VERSION_3 = 0x20080522
CAP_NET_ADMIN, CAP_NET_RAW = 12, 13


def _call(name: str, *arguments: object) -> None:
    """Call a function of the C library. Raises OSError (PermissionError, …) with its error number."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Leave the namespaces of these kinds for new ones. Raises OSError."""
    _call("unshare", flags)


def setns(descriptor: int) -> None:
    """Go into the namespace that is open as `descriptor`. Raises OSError."""
    _call("setns", descriptor, 0)


def open_own(kind: str) -> int:
    """This process's namespace of a kind (`net`, `uts`, `mnt`) as an open file, which keeps it alive."""
    return os.open(f"/proc/self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)


def make(flags: int) -> None:
    """Put this process, which must have one thread only, into new namespaces that it may administer.

    Inside a new user namespace where it lacks the right to do without. What it starts from then on may administer the
    network too, also what is started anew by `exec`. Raises OSError where the system does not allow it.
    """
    if not sys.platform.startswith("linux"):
        raise OSError(f"{sys.platform} has no namespaces")
    try:
        unshare(flags)
    except PermissionError:
        user, group = os.getuid(), os.getgid()
        unshare(NEWUSER | flags)
        for name, line in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(line)
    if os.getuid():
        _keep_capabilities(CAP_NET_ADMIN, CAP_NET_RAW)


def _keep_capabilities(*numbers: int) -> None:
    """Let these capabilities outlive `exec`, which takes them from everybody but root otherwise (capabilities(7))."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; first the low 32 bits of each, then the high
    _call("capget", header, sets)
    for number in numbers:
        sets[number // 32 * 3 + 2] |= 1 << number % 32
    _call("capset", header, sets)
    for number in numbers:
        _call("prctl", _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, ctypes.c_ulong(number), 0, 0)


def mount(source: str, target: str, kind: str = "", flags: int = 0) -> None:
    """mount(2). Raises OSError."""
    _call("mount", source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), None)


def unmount(target: str) -> None:
    """Take a mount away at once; what still uses it keeps it (umount2(2), MNT_DETACH). Raises OSError."""
    _call("umount2", target.encode(), _MNT_DETACH)

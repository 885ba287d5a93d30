"""The Linux calls that Python has no function for, through ctypes: namespaces, mounts, capabilities, own death."""

import ctypes
import os
import struct

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = (
    1,
    2,
    4,
    8,
    32,
    4096,
    16384,
    1 << 18,
)
MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 36, 38
_MOUNT_SETATTR = 442  # the same number on every architecture
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_CAPABILITY_VERSION = 0x20080522

_JOIN_SESSION_KEYRING = 1

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def call(number: int, *arguments) -> int:
    """A system call by its number; whole numbers are passed as long."""
    given = [ctypes.c_long(x) if isinstance(x, int) else x for x in arguments]
    return _checked(_libc.syscall(ctypes.c_long(number), *given), f"system call {number}")


def unshare(flags: int) -> None:
    """Leaves the namespaces of the parent."""
    _checked(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """mount(2)."""
    source, target, kind, data = (None if x is None else os.fsencode(x) for x in (source, target, kind, data))
    _checked(_libc.mount(source, target, kind, ctypes.c_ulong(flags), data), f"mount {target!r}")


def unmount(target: str) -> None:
    """Takes a mount away at once, whoever still uses it."""
    _checked(_libc.umount2(os.fsencode(target), ctypes.c_int(MNT_DETACH)), f"umount {target!r}")


def make_read_only(target: str, *, devices: bool = False) -> None:
    """A bind mount and all below it read-only, without set-user-id programs, and without devices unless asked."""
    attributes = MS_RDONLY | MS_NOSUID | (0 if devices else MS_NODEV)
    record = struct.pack("=QQQQ", attributes, 0, 0, 0)
    try:
        call(_MOUNT_SETATTR, _AT_FDCWD, os.fsencode(target), _AT_RECURSIVE, record, len(record))
    except OSError:  # before Linux 5.12; flags that are set already must stay set
        found = os.statvfs(target).f_flag
        kept = sum(ms for st, ms in ((8, MS_NOEXEC), (1024, 1024), (2048, 2048), (4096, 1 << 21)) if found & st)
        mount(None, target, None, MS_REMOUNT | MS_BIND | attributes | kept)


def pivot_root(new: str, number: int) -> None:
    """Makes ``new`` the root of everything and forgets the old one.

    Args:
      number: of the system call on this architecture.
    """
    os.chdir(new)
    call(number, b".", b".")
    unmount(".")
    os.chdir("/")


def leave_keys(number: int) -> None:
    """Leaves the keys that the kernel holds for the session of this process: from here on it has an empty ring.

    Args:
      number: of ``keyctl`` on this architecture.
    """
    call(number, _JOIN_SESSION_KEYRING, None)


def _prctl(option: int, argument: int) -> None:
    zero = ctypes.c_ulong(0)
    _checked(_libc.prctl(ctypes.c_int(option), ctypes.c_ulong(argument), zero, zero, zero), f"prctl {option}")


def die_with_parent() -> None:
    """The kernel kills this process when its parent ends."""
    _prctl(_PR_SET_PDEATHSIG, 9)


def be_readable() -> None:
    """This process's files in /proc belong to its user again after a change of user."""
    _prctl(_PR_SET_DUMPABLE, 1)


def adopt_orphans() -> None:
    """Descendants whose parent ends become children of this process."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def no_new_privileges() -> None:
    """Nothing that is executed from here on gains a right."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def drop_capabilities() -> None:
    """Gives up every capability for good."""
    for capability in range(64):
        try:
            _prctl(_PR_CAPBSET_DROP, capability)
        except OSError:
            break  # past the last one, or none to drop
    header, nothing = struct.pack("=Ii", _CAPABILITY_VERSION, 0), bytes(24)
    _checked(_libc.capset(header, nothing), "capset")


def clear_environment() -> None:
    """Empties the environment of the C library, too."""
    os.environ.clear()
    _libc.clearenv()

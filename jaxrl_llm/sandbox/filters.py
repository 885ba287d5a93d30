"""What a process gives up for itself, without any right: system calls by seccomp, files and networks by Landlock."""

import ctypes
import functools
import os
import platform
import struct
from collections.abc import Sequence

from jaxrl_llm.sandbox import kernel

# (x86_64, aarch64); None where an architecture has no such call
_CALLS = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440), "process_mrelease": (448, 448),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    "setsid": (112, 157), "setpgid": (109, 154),
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "accept": (43, 202),
    "accept4": (288, 242),
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "open_tree_attr": (467, 467), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "mknod": (133, None), "mknodat": (259, 33), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262), "quotactl": (179, 60), "quotactl_fd": (443, 443), "acct": (163, 89),
    "swapon": (167, 224), "swapoff": (168, 225),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190), "semctl": (66, 191),
    "semop": (65, 193), "semtimedop": (220, 192), "msgget": (68, 186), "msgctl": (71, 187), "msgsnd": (69, 189),
    "msgrcv": (70, 188), "mq_open": (240, 180), "mq_unlink": (241, 181), "inotify_init": (253, None),
    "inotify_init1": (294, 26), "io_setup": (206, 0), "vmsplice": (316, 75),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "reboot": (169, 142), "syslog": (103, 116), "personality": (135, 92),
    "sethostname": (170, 161), "setdomainname": (171, 162), "settimeofday": (164, 170), "adjtimex": (159, 171),
    "clock_settime": (227, 112), "clock_adjtime": (305, 266), "vhangup": (153, 58), "iopl": (172, None),
    "ioperm": (173, None), "modify_ldt": (154, None), "uselib": (134, None), "migrate_pages": (256, 238),
    "move_pages": (279, 239), "setpriority": (141, 140), "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274),
    "ioprio_set": (251, 30), "statmount": (457, 457), "listmount": (458, 458),
    # filters are programs in the kernel; a pair of sockets needs no options
    "seccomp": (317, 277), "setsockopt": (54, 208),
}  # fmt: skip
# what changes a file without opening it, which Landlock lets pass
_ATTRIBUTES = {
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "lchown": (94, None), "fchown": (93, 55), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "setxattrat": (463, 463), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "removexattrat": (466, 466), "file_setattr": (469, 469),
}  # fmt: skip
_TRUNCATE = {"truncate": (76, 45)}  # before its third version, Landlock lets this pass, too
# of a call with many meanings, the argument that tells them apart and what is permitted: what Python's own library asks
# of pipes, terminals and files that it has opened itself. New kernels have new ones, which nobody listed.
_PERMITTED = {
    "fcntl": ((72, 25), 1, {
        "F_DUPFD": 0, "F_GETFD": 1, "F_SETFD": 2, "F_GETFL": 3, "F_SETFL": 4, "F_GETLK": 5, "F_SETLK": 6, "F_SETLKW": 7,
        "F_GETOWN": 9, "F_GETSIG": 11, "F_OFD_GETLK": 36, "F_OFD_SETLK": 37, "F_OFD_SETLKW": 38, "F_GETLEASE": 1025,
        "F_DUPFD_CLOEXEC": 1030, "F_GETPIPE_SZ": 1032, "F_GET_SEALS": 1034,
    }),
    "ioctl": ((16, 29), 1, {
        "TCGETS": 0x5401, "TCGETS2": 0x802C542A, "TIOCGWINSZ": 0x5413, "FIONREAD": 0x541B, "FIONBIO": 0x5421,
        "FIONCLEX": 0x5450, "FIOCLEX": 0x5451, "FICLONE": 0x40049409,
    }),
}  # fmt: skip
# likewise, where what is denied is listed
_MEANINGS = {
    # to outlive the run; programs in the kernel; other processes
    "prctl": ((157, 167), 0, {"PR_SET_PDEATHSIG": 1, "PR_SET_SECCOMP": 22, "PR_SCHED_CORE": 62}),
}  # fmt: skip
_SOCKETPAIR, _UNIX, _STREAM, _KINDS = (53, 199), 1, 1, 0xF
_CLONE, _CLONE3, _KILL, _TKILL, _TGKILL, _PRLIMIT = (56, 220), (435, 435), (62, 129), (200, 130), (234, 131), (302, 261)
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_CLONE_THREAD = 0x10000
_EPERM, _ENOSYS = 1, 38

_LOAD, _EQUAL, _AT_LEAST, _BITS, _MASK, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENT = 0, 4, 16
_SECCOMP, _SET_FILTER = {"x86_64": 317, "aarch64": 277}, 1

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_READ, _WRITE = 0b1100, 0b10  # files and folders; content of a file
_FILE_RIGHTS = (1 << 13) - 1
_LIBRARY_ROOTS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")


def machine() -> str | None:
    """The architecture if system calls can be filtered on it."""
    return platform.machine() if platform.system() == "Linux" and platform.machine() in _ARCHITECTURES else None


def number_of(call: str) -> int:
    """Of a system call on this architecture."""
    return _CALLS[call][_ARCHITECTURES[platform.machine()][0]]


def others_memory_is_closed() -> bool:
    """Whether the kernel (by Yama) lets a process reach the memory of no other than its own children."""
    try:
        with open("/proc/sys/kernel/yama/ptrace_scope") as file:
            return int(file.read()) > 0
    except (OSError, ValueError):
        return False


@functools.cache
def readable() -> list[str]:
    """Folders and files that Python needs to import its own library: all that a program may read."""
    library = os.path.dirname(os.path.realpath(os.__file__))
    wanted = [library, *_LIBRARY_ROOTS, "/etc/ld.so.cache"]
    return [path for path in wanted if os.path.exists(path)]


def _step(code: int, value: int, jump: int = 0, otherwise: int = 0) -> bytes:
    return struct.pack("=HBBI", code, jump, otherwise, value)


def _only(number: int, keep: list[bytes]) -> list[bytes]:
    """For one system call the steps ``keep``, which end with its answer; then the number again."""
    return [_step(_EQUAL, number, 0, len(keep)), *keep]


def _argument(number: int) -> bytes:
    return _step(_LOAD, _ARGUMENT + 8 * number)


def _program(column: int, architecture: int, own: int, threads: bool, denied: dict[str, tuple]) -> bytes:
    """Denies what is listed; lets a process signal itself alone, and start threads but no processes."""
    deny, allow = _step(_RETURN, _ERRNO | _EPERM), _step(_RETURN, _ALLOW)
    load = _step(_LOAD, _NUMBER)
    steps = [_step(_LOAD, _ARCHITECTURE), _step(_EQUAL, architecture, 1, 0), deny, load]
    if column == 0:  # the x32 calls of an x86_64 kernel have other numbers
        steps += [_step(_AT_LEAST, 0x40000000, 0, 1), deny]
    for numbers in denied.values():
        if numbers[column] is not None:
            steps += _only(numbers[column], [deny])
    steps += _only(_CLONE3[column], [_step(_RETURN, _ERRNO | _ENOSYS)])  # the C library falls back to clone
    thread = [_step(_LOAD, _ARGUMENT), _step(_BITS, _CLONE_THREAD, 1, 0), deny, allow] if threads else [deny]
    steps += _only(_CLONE[column], thread)
    for numbers in (_KILL, _TKILL, _TGKILL):
        steps += _only(numbers[column], [_step(_LOAD, _ARGUMENT), _step(_EQUAL, own, 1, 0), deny, allow])
    myself = [_step(_LOAD, _ARGUMENT), _step(_EQUAL, own, 2, 0), _step(_EQUAL, 0, 1, 0), deny, allow]
    steps += _only(_PRLIMIT[column], myself)
    for numbers, which, meanings in _PERMITTED.values():
        chosen = [step for value in meanings.values() for step in (_step(_EQUAL, value, 0, 1), allow)]
        steps += _only(numbers[column], [_argument(which), *chosen, deny])
    for numbers, which, meanings in _MEANINGS.values():
        chosen = [step for value in meanings.values() for step in (_step(_EQUAL, value, 0, 1), deny)]
        steps += _only(numbers[column], [_argument(which), *chosen, allow])
    # a stream cannot be sent to an address, as a datagram can
    pair = [_argument(0), _step(_EQUAL, _UNIX, 1, 0), deny, _argument(1), _step(_MASK, _KINDS)]
    steps += _only(_SOCKETPAIR[column], [*pair, _step(_EQUAL, _STREAM, 1, 0), deny, allow])
    return b"".join([*steps, allow])


def filter_calls(*, threads: bool, attributes: bool = False) -> None:
    """Installs the filter for this process and all its threads, for good. Needs ``kernel.no_new_privileges``.

    Args:
      attributes: whether modes, owners, times and extended attributes can be changed; not where others' files are
        within reach.
    """
    column, architecture = _ARCHITECTURES[platform.machine()]
    denied = _CALLS | ({} if attributes else _ATTRIBUTES) | (_TRUNCATE if 0 < landlock_version() < 3 else {})
    program = _program(column, architecture, os.getpid(), threads, denied)
    held = ctypes.create_string_buffer(program, len(program))
    record = struct.pack("@HP", len(program) // 8, ctypes.addressof(held))
    kernel.call(_SECCOMP[platform.machine()], _SET_FILTER, 0, record)


def landlock_version() -> int:
    """What this kernel knows of Landlock; 0: nothing."""
    try:
        return kernel.call(_LANDLOCK_CREATE, None, 0, 1)
    except OSError:
        return 0


def confine(private: str, shown: Sequence[str] = ()) -> None:
    """From here on this process reads Python's library and reads and writes ``private``; no TCP, no signals outward.

    Needs ``kernel.no_new_privileges``.

    Args:
      shown: what else it reads.
    """
    version = landlock_version()
    rights = _FILE_RIGHTS | (1 << 13 if version >= 2 else 0) | (1 << 14 if version >= 3 else 0)
    rights |= 1 << 15 if version >= 5 else 0
    record = struct.pack("=QQQ", rights, 0b11 if version >= 4 else 0, 0b11 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    rules = kernel.call(_LANDLOCK_CREATE, record[:size], size, 0)
    try:
        for path in (*readable(), *shown):
            _allow(rules, path, _READ if os.path.isdir(path) else 0b100)
        for path in DEVICES:
            if os.path.exists(path):
                _allow(rules, path, 0b100 | _WRITE)
        # everything but running programs, and sockets, pipes and devices as files
        _allow(rules, private, rights & ~(1 | 0b11 << 9 | 1 << 6 | 1 << 11 | 1 << 15))
        kernel.call(_LANDLOCK_RESTRICT, rules, 0)
    finally:
        os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        kernel.call(_LANDLOCK_ADD, rules, 1, struct.pack("=Qi", rights, place), 0)
    finally:
        os.close(place)

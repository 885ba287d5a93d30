"""What a worker does once to be alone: namespaces and a root of its own where the kernel allows, and what it promises.

Three independent means: namespaces (a network without devices, a root with nothing in it, a process tree of its own),
Landlock (files, TCP and signals) and seccomp (system calls). Each promise of ``records.Protection`` holds by any of
them that this machine has.
"""

import contextlib
import os
import resource
import shutil
import socket
import stat
from collections.abc import Sequence

from jaxrl_llm.sandbox import filters, kernel
from jaxrl_llm.sandbox.records import Protection

MEANS = frozenset({"namespaces", "landlock", "seccomp", "other_user", "root"})
_OTHER_USER = 65534
_INODES = 4096
_VSOCK = 40


class Isolation:
    """What was achieved, and the steps that every program repeats."""

    def __init__(self, private: str, without: frozenset[str], shown: Sequence[str]):
        self.private, self.without, self.shown = private, without, tuple(shown)
        self.namespaces = ""  # how they were entered: "root" or "user"
        self.rooted = self.tree = False
        self.user: int | None = None  # whom a program runs as, where it is another
        self.beside = False  # a socket to the machine beside this one can be had: no network namespace holds it
        self.landlock = self.seccomp = False
        self.missing: list[str] = []
        self._mounted = False

    @property
    def protection(self) -> Protection:
        """By what each promise holds."""
        root, seccomp = ("own root", self.rooted), ("seccomp", self.seccomp)
        # an early Landlock lets files be cut by their names
        landlock = ("Landlock", self.landlock and (self.seccomp or filters.landlock_version() >= 3))
        # who can write to /proc reaches other processes of its user by their memory
        apart = self.rooted or self.landlock or self.user is not None or filters.others_memory_is_closed()
        promised = {
            # sockets of the file system are of no network, nor are those to the machine that runs this one
            "network": (("network namespace", self.rooted and not self.beside), seccomp),
            "files": (root, landlock),
            "attributes": (root, seccomp),
            "names": (root,),
            "processes": (("process namespace", self.tree and apart), ("seccomp", self.seccomp and apart)),
            "calls": (seccomp,),
            # in a namespace of its own it could mount more
            "disk": (("own file system in memory", self.rooted and (self.seccomp or self.landlock)),),
        }
        means = {promise: tuple(name for name, held in by if held) for promise, by in promised.items()}
        here = os.geteuid()
        who = f"user {here}" if self.user is None else f"user {self.user}, not as user {here}"
        if here == 0 and self.user is None:
            who = "root without any capability"
        return Protection(**means, user=who, missing=tuple(self.missing), shown=self.shown)

    def has_own_disk(self) -> bool:
        """Whether the private folder is a file system of bounded size."""
        return self.rooted

    def renew(self, disk_mb: int) -> None:
        """An empty private folder for the next program."""
        if self.rooted:
            if self._mounted:
                kernel.unmount(self.private)
            options = f"mode=700,size={disk_mb}m,nr_inodes={_INODES}"
            flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
            kernel.mount("tmpfs", self.private, "tmpfs", flags, options)
            self._mounted = True
        else:
            _empty(self.private)
        if self.user is not None:
            os.chown(self.private, self.user, self.user)

    def new_processes(self) -> None:
        """The next forks live in a process tree of their own, and find no segments and queues of those before them."""
        kernel.unshare(
            (kernel.NEWPID if self.tree else 0) | (0 if self.seccomp or not self.namespaces else kernel.NEWIPC)
        )

    def drop(self, threads: int) -> None:
        """Becomes the other user, and nobody in particular."""
        if self.user is not None:
            os.setgroups([])
            os.setresgid(self.user, self.user, self.user)
            os.setresuid(self.user, self.user, self.user)
        kernel.drop_capabilities()
        if self.namespaces == "user" or self.user not in (None, _OTHER_USER):
            # counted for a user whom nobody else is
            resource.setrlimit(resource.RLIMIT_NPROC, (threads + 4, threads + 4))

    def seal(self) -> None:
        """Gives up files and system calls, for good."""
        if self.landlock or self.seccomp:
            kernel.no_new_privileges()
        if self.landlock:
            filters.confine(self.private, self.shown)
        if self.seccomp:
            threads = self.namespaces == "user" or self.user not in (None, _OTHER_USER)
            filters.filter_calls(threads=threads, attributes=self.rooted)


def isolate(private: str, without: frozenset[str], shown: Sequence[str] = ()) -> Isolation:
    """Isolates this process as far as the machine allows.

    Args:
      private: a folder that nothing else uses.
      without: means to do without, to see what the others hold.
      shown: files and folders that it goes on reading, besides Python's library.
    """
    unknown = without - MEANS
    if unknown:
        raise ValueError(f"without={sorted(unknown)} is not among {sorted(MEANS)}")
    how = Isolation(private, without, shown)
    if filters.machine() is None:
        how.missing.append("namespaces, Landlock and seccomp: this is no Linux on x86_64 or aarch64")
        return how
    with contextlib.suppress(OSError):  # a kernel without keys, or a container that lets nobody have them
        kernel.leave_keys(filters.number_of("keyctl"))
    _enter_namespaces(how)
    if os.geteuid() == 0 and how.namespaces != "user" and "other_user" not in without:
        _other_user(how)
    how.landlock = "landlock" not in without and filters.landlock_version() > 0
    if not how.landlock:
        how.missing.append("Landlock: " + ("left out" if "landlock" in without else "this kernel does not have it"))
    how.seccomp = "seccomp" not in without and _answers(_try_filter)
    if not how.seccomp:
        how.missing.append("seccomp: " + ("left out" if "seccomp" in without else "this kernel refuses a filter"))
    return how


def _enter_namespaces(how: Isolation) -> None:
    if "namespaces" in how.without:
        how.missing.append("namespaces: left out")
        return
    flags = kernel.NEWNS | kernel.NEWNET | kernel.NEWIPC | kernel.NEWUTS
    reason = ""
    for kind in ("root", "user"):
        if kind in how.without or (kind == "root" and os.geteuid() != 0):
            continue
        try:
            _enter(kind, flags)
        except OSError as error:
            reason = str(error)
            continue
        how.namespaces = kind
        break
    if not how.namespaces:
        how.missing.append(f"namespaces: {reason}")
        return
    try:
        how.private, how.rooted = _own_root(how.private, how.shown), True
    except OSError as error:
        how.missing.append(f"own root: {error}")
    how.beside = _answers(lambda: socket.socket(_VSOCK, socket.SOCK_STREAM))
    how.tree = _answers(lambda: kernel.unshare(kernel.NEWPID))
    if not how.tree:
        how.missing.append("process namespace: refused")


def _enter(kind: str, flags: int) -> None:
    if kind == "root":
        kernel.unshare(flags)
        return
    user, group = os.geteuid(), os.getegid()
    if not _answers(lambda: _map(flags, user, group)):
        raise PermissionError("user namespaces are refused here")
    _map(flags, user, group)


def _map(flags: int, user: int, group: int) -> None:
    kernel.be_readable()
    kernel.unshare(flags | kernel.NEWUSER)
    for name, text in (("setgroups", "deny"), ("gid_map", f"{group} {group} 1"), ("uid_map", f"{user} {user} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _own_root(base: str, extra: Sequence[str]) -> str:
    """A root that holds Python's library, the shared libraries, four devices, what is shown, and an empty folder.

    Returns:
      The path of that folder: ``/tmp``, unless something shown lies there.
    """
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", base, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=1m")
    shown: list[str] = []
    for path in sorted({*filters.readable(), *extra}, key=len):
        if any(path.startswith(other + "/") for other in shown):
            continue
        target = base + path
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.islink(path) and path not in extra:
            os.symlink(os.readlink(path), target)
            continue
        _bind(path, target)
        kernel.make_read_only(target)
        shown.append(path)
    for path in filters.DEVICES:
        if os.path.exists(path):
            os.makedirs(base + "/dev", exist_ok=True)
            _bind(path, base + path)
            kernel.make_read_only(base + path, devices=True)
    private = "/private" if any((path + "/").startswith("/tmp/") for path in extra) else "/tmp"
    os.mkdir(base + private)
    kernel.pivot_root(base, filters.number_of("pivot_root"))
    flags = kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount(None, "/", None, kernel.MS_REMOUNT | kernel.MS_BIND | flags)
    return private


def _bind(path: str, target: str) -> None:
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_RDONLY))
    kernel.mount(path, target, None, kernel.MS_BIND | kernel.MS_REC)


def _other_user(how: Isolation) -> None:
    """A program of root's becomes a user whom nobody is, where that one can still read Python's library."""
    if not how.rooted and not all(_open_to_all(path) for path in (*filters.readable(), *how.shown)):
        how.missing.append("another user: Python's library is open to root alone")
        return
    for user in (_OTHER_USER - 1000 - os.getpid() % 500, _OTHER_USER):
        if _answers(lambda user=user: _become(user)):
            how.user = user
            return
    how.missing.append("another user: refused")


def _become(user: int) -> None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _open_to_all(path: str) -> bool:
    path = os.path.realpath(path)
    parts = [path]
    while parts[-1] != "/":
        parts.append(os.path.dirname(parts[-1]))
    return all(os.stat(p).st_mode & (stat.S_IROTH if p == path and os.path.isfile(p) else stat.S_IXOTH) for p in parts)


def _try_filter() -> None:
    kernel.no_new_privileges()
    filters.filter_calls(threads=True)


def _answers(attempt) -> bool:
    """Whether something works here, tried in a process that then ends."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            attempt()
            code = 0
        except OSError:
            code = 2
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


def _empty(folder: str) -> None:
    """Removes all that a program left, whatever rights it gave its files and the folder itself."""

    def open_up(function, path, error):
        for place in (os.path.dirname(path), path):
            if not os.path.islink(place):
                os.chmod(place, 0o700)
        function(path)

    os.chmod(folder, 0o700)  # a program may have shut its own folder, and the next one has this user's rights alone
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, onerror=open_up)
        else:
            os.unlink(path)

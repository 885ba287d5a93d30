"""Limits, results and the statement of protection: plain records, read by both sides."""

from typing import Any, NamedTuple


class Limits(NamedTuple):
    """What one program may use. There are never any further processes."""

    cpu_s: float = 5.0  # rounded up to whole seconds
    # on the clock, less what it waited for a processor, which a machine that trains may not have; eight times as long
    # ends it all the same, and says nothing about it. Where a kernel does not count the waiting: on the clock
    wall_s: float = 10.0
    memory_mb: int = 512  # address space
    disk_mb: int = 16  # of one file, and of all files together
    threads: int = 16
    output_bytes: int = 65536  # of stdout and of stderr; more ends the program


class Ran(NamedTuple):
    """A program after its end.

    ``status``: ``ok`` (it ended with code 0), ``error`` (another code), ``timeout``, ``memory``, ``output`` (it wrote
    too much), ``killed`` (by a signal), or ``broken``: the sandbox failed, or the machine had no processor for it,
    which says nothing about the program.
    """

    status: str
    code: int | None
    stdout: str
    stderr: str
    seconds: float


class Called(NamedTuple):
    """A function of an installed package after its end.

    ``status``: ``ok`` (see ``value``), ``raised``, ``cpu`` (it computed for longer than ``cpu_s``), ``memory``,
    ``output`` (its value is too large), ``killed`` (its process died): all of these are its own doing. ``wall`` (it got
    no processor for so long) and ``broken`` (the sandbox failed) say nothing about it.
    """

    status: str
    value: Any
    reason: str
    seconds: float


class Checked(NamedTuple):
    """The tests of a program: which passed, why the first other failed.

    ``valid`` is False where the sandbox failed, the machine had no processor, or the tests cannot judge any program.
    """

    passed: tuple[bool, ...]
    reason: str
    valid: bool
    seconds: float


class Protection(NamedTuple):
    """What holds a program on this machine, each by one or several means of the kernel."""

    network: tuple[str, ...]
    files: tuple[str, ...]
    attributes: tuple[str, ...]
    names: tuple[str, ...]
    processes: tuple[str, ...]  # it reaches none but its own, and those end with it
    calls: tuple[str, ...]  # it starts no process, and cannot use the kernel's rarer interfaces
    disk: tuple[str, ...]  # what it writes is bounded in sum
    user: str  # whom it runs as
    missing: tuple[str, ...]  # what this machine does not allow, with the reason
    shown: tuple[str, ...] = ()  # folders of installed packages that can be read

    def complete(self) -> bool:
        """Whether all of it is held by the kernel."""
        return all(getattr(self, name) for name in _PROMISES)

    def statement(self) -> str:
        """What a program can and cannot do here, in words."""
        lines = [
            "On this machine model-written Python runs in processes of its own: with an empty environment, no",
            "inherited files, a private folder, a hard kill, and limits on CPU, memory, wall clock, files and output.",
            f"It runs as {self.user}.",
        ]
        for name, what in _PROMISES.items():
            means = getattr(self, name)
            lines.append(
                f"  {name + ':':12}{what + ' (' + ', '.join(means) + ')' if means else 'NOT HELD. ' + _RISKS[name]}"
            )
        lines += [f"  also read: {folder}" for folder in self.shown]
        lines += [f"  not available: {text}" for text in self.missing]
        return "\n".join(lines)


_PROMISES = {
    "network": "no connections, no messages to any address",
    "files": "reads the folders of Python's and the system's libraries, writes its private folder; no content else",
    "attributes": "changes no modes, owners, times, flags, encryption or extended attributes of others' files",
    "names": "does not learn which other files there are",
    "processes": "signals, traces and shares memory with none of the machine's",
    "calls": "starts no process, mounts nothing, loads nothing into the kernel, has no keys there, leases no file",
    "disk": "all it writes is bounded, and gone afterwards",
}
_RISKS = {
    "network": "It can open connections, to programs of this machine, too, which may do more than it can.",
    "files": "It can read and write whatever this user can, and so reach other processes of this user.",
    "attributes": "It can change modes, times, flags, encryption and extended attributes of this user's files.",
    "names": "It can see that a file exists, its size, owner, times and attributes, where a link points, and when it is"
    " used.",
    "processes": "It can signal processes of its user.",
    "calls": "It can start processes, each with these limits, which are killed when it ends; what it puts into shared"
    " memory, message queues and keys of the kernel is not counted as its memory and may stay; keys of its user, though"
    " not of the session, are within its reach. Where it is the owner of"
    " files that it reads, it can lease them: who opens one waits, 45 seconds at most.",
    "disk": "One file is bounded, the sum is not; its folder is watched and removed.",
}

"""Compiled programs kept between runs: the second start of a command loads what the first one compiled."""

import errno
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import shutil
import stat
import sys
import time
from collections.abc import Iterator

import jax

MOST_BYTES = 4 * 2**30  # of all versions and processors together; the oldest entries go first
MOST_DAYS = 60.0
# what changes a program or how it is stored; a package that is not installed counts as such
PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm7-plugin")
MEASURED = "/jax/core/compile/backend_compile_duration"
_seconds: list[float] = []


def processor() -> str:
    """Name and instruction sets of the processor: XLA compiles for them, and its programs may crash on others."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return f"{platform.machine()} {platform.processor()}"
    told = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    features = sorted(told.get("flags", told.get("Features", "")).split())
    return " ".join([platform.machine(), told.get("model name", ""), *features])


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def key() -> str:
    """Names the folder: another processor, version or compiler flag never meets a program of this one."""
    parts = [processor(), *(f"{name}={_version(name)}" for name in PACKAGES)]
    parts += [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def home() -> pathlib.Path:
    """The user's cache folder: ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (pathlib.Path(given) if given else pathlib.Path.home() / ".cache") / "jaxrl_llm" / "compiled"
    except RuntimeError as error:  # a user without a name, as in containers, and no HOME
        raise FileNotFoundError(errno.ENOENT, "there is no home folder") from error


def _is_folder(path: pathlib.Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _entries(folder: pathlib.Path) -> Iterator[tuple[float, int, pathlib.Path]]:
    """Last use, bytes and place of each; what XLA tried for its kernels lies in a folder of its own, as one entry."""
    for path in folder.glob("*/*"):
        try:
            files = [x.stat() for x in path.rglob("*") if x.is_file()] if _is_folder(path) else [path.stat()]
            # not the folder's own times, where there is a file: looking into it counts as a use
            used = max((max(x.st_mtime, x.st_atime) for x in files), default=path.stat().st_mtime)
        except FileNotFoundError:  # another run is tidying up too
            continue
        yield used, sum(x.st_size for x in files), path


def tidy(folder: pathlib.Path, *, most_bytes: int = MOST_BYTES, most_days: float = MOST_DAYS) -> int:
    """Removes the entries that were not used for longest, until the rest is small and young; how many it removed.

    What cannot be removed stays, and one line on standard error names the first of it.
    """
    entries = sorted(_entries(folder))
    left, gone, oldest = sum(size for _, size, _ in entries), 0, time.time() - 86_400 * most_days
    stay: list[tuple[pathlib.Path, OSError]] = []
    for used, size, path in entries:
        if left <= most_bytes and used >= oldest:
            break
        try:
            shutil.rmtree(path) if _is_folder(path) else path.unlink(missing_ok=True)
        except OSError as error:
            if path.exists():  # else another run was quicker
                stay.append((path, error))
                continue
        left, gone = left - size, gone + 1
    if stay:
        (path, error), more = stay[0], f" and {len(stay) - 1} more" if len(stay) > 1 else ""
        print(f"note: {path}{more} of the compiled programs cannot be removed: {error.strerror}; remove it by hand",
              file=sys.stderr, flush=True)  # fmt: skip
    return gone


def enable(wanted: bool = True, *, folder: pathlib.Path | None = None) -> pathlib.Path | None:
    """Keeps compiled programs in the user's cache folder from here on; call it before the first program runs.

    A folder in ``JAX_COMPILATION_CACHE_DIR`` is used as it is. Entries are code that is run: the folder must belong to
    the user alone. Where it cannot be made, one line on standard error says so and the run goes on without.

    Args:
      wanted: ``--no-compile-cache`` is False: nothing is read or kept.
      folder: in place of ``home()``.

    Returns:
      the folder; None where there is none.
    """
    if not wanted:
        jax.config.update("jax_enable_compilation_cache", False)
        return None
    if given := jax.config.jax_compilation_cache_dir:
        return pathlib.Path(given)
    place = pathlib.Path("~/.cache")
    try:
        root = home() if folder is None else folder
        place = root / key()
        root.mkdir(parents=True, exist_ok=True)
        place.mkdir(mode=0o700, exist_ok=True)
        found = place.stat()
        shared = found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if shared or not os.access(place, os.W_OK):
            raise PermissionError(13, "others may write there, or you may not")
        tidy(root)
    except OSError as error:
        print(
            f"note: compiled programs are not kept: {place}: {error.strerror}; set XDG_CACHE_HOME to a folder of yours",
            file=sys.stderr,
            flush=True,
        )
        return None
    jax.config.update("jax_compilation_cache_dir", str(place))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # workers that this process starts share it
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(place)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    return place


def _listen(event: str, seconds: float, **_: str | int) -> None:
    if event == MEASURED:
        _seconds.append(seconds)


def measured() -> float:
    """Seconds that this process spent on compiling programs, or on loading them, since the module was imported."""
    return sum(_seconds)


jax.monitoring.register_event_duration_secs_listener(_listen)

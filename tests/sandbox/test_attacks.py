# ruff: noqa: E501 - programs on one line each
"""Nothing escapes and the pool goes on, by every set of means that a machine may have."""

import contextlib
import ctypes
import os
import pathlib
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile

import pytest

from jaxrl_llm.sandbox import filters, kernel
from jaxrl_llm.sandbox.pool import Sandbox
from jaxrl_llm.sandbox.records import Limits
from tests.sandbox.attacks import ATTACKS, CHEATS, HELPERS
from tests.waits import soon

REPO = pathlib.Path(__file__).resolve().parents[2]
LIMITS = Limits(cpu_s=1.0, wall_s=1.5, memory_mb=256, disk_mb=8, output_bytes=20_000)
CHECKS = ("assert f(1) == 2", "assert f(5) == 7")
# what a machine may lack; all but the first run programs as this very user, whose files and processes are the hardest
# to keep apart. Namespaces with and without Landlock and seccomp, these with and without namespaces, each alone.
MACHINES = {
    "all": (),
    "ordinary_user": ("root", "other_user"),
    "only_namespaces": ("landlock", "seccomp", "other_user"),
    "no_namespaces": ("namespaces", "other_user"),
    "only_landlock": ("namespaces", "seccomp", "other_user"),
    "only_seccomp": ("namespaces", "landlock", "other_user"),
    "nothing": ("namespaces", "landlock", "seccomp", "other_user"),
}
QUICK = [n for n, attack in ATTACKS.items() if attack.promise]


@pytest.fixture(scope="module")
def outside():
    """A folder, a server and sockets that programs must not reach."""
    folder = pathlib.Path(tempfile.mkdtemp(dir="/var/tmp"))
    folder.chmod(0o777)
    (folder / "bait").write_text("x")
    (folder / "bait").chmod(0o666)
    server, unix, abstract = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX), None
    port = server.getsockname()[1]
    unix.bind(str(folder / "socket"))
    (folder / "socket").chmod(0o777)
    unix.listen()
    (folder / "link").symlink_to("bait")
    (folder / "empty").mkdir(mode=0o777)
    datagrams, named = (socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2))
    datagrams.bind(str(folder / "datagrams"))
    (folder / "datagrams").chmod(0o777)
    named.bind(f"\0datagrams{port}")
    with contextlib.suppress(OSError):  # a file system without such attributes
        os.setxattr(folder / "bait", "user.bait", b"x")
    libc = ctypes.CDLL(None, use_errno=True)
    memory = libc.shmget(0, 4096, 0o1666)
    key = f"jaxrl{port}"
    with contextlib.suppress(OSError):  # a kernel without keys
        kernel.call(filters.number_of("keyctl"), 1, b"jaxrl")  # a session of its own, which ends with this process
        kernel.call(filters.number_of("add_key"), b"user", key.encode(), b"SECRET", 6, -3)
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0jaxrl{port}")
    abstract.listen()
    os.environ["SANDBOX_TEST"] = "SECRET"
    yield {"HOST": os.getpid(), "PORT": port, "REPO": REPO, "OUTSIDE": folder, "MEMORY": memory, "KEY": key}
    del os.environ["SANDBOX_TEST"]
    assert libc.shmctl(memory, 0, None) == 0  # nobody removed it before
    for used in (datagrams, named):
        used.setblocking(False)
        with pytest.raises(BlockingIOError):  # nothing arrived
            used.recv(1)
    for used in (server, unix, abstract, datagrams, named):
        used.close()
    shutil.rmtree(folder)


@pytest.fixture(scope="module", params=MACHINES)
def sandbox(request):
    with Sandbox(workers=2, limits=LIMITS, without=MACHINES[request.param]) as pool:
        pool.machine = request.param
        yield pool


def _program(name, outside):
    return HELPERS + ATTACKS[name].code.format(**outside)


def _try(pool, name, outside):
    attack, held = ATTACKS[name], pool.protection
    if attack.promise and not getattr(held, attack.promise):
        return None  # the statement says that it is not held
    ran = pool.run(_program(name, outside))
    said = ran.stdout + ran.stderr
    if ran.status == "broken" and "got no processor" in ran.stderr and "ESCAPED" not in said:
        return None  # other work kept this machine from it, which is no verdict; whoever sleeps does not wait for one
    if "ESCAPED" in said or (attack.status and ran.status not in attack.status) or ran.status == "broken":
        return f"{name}: {ran.status} {said[-300:]}"
    if len(ran.stdout) > LIMITS.output_bytes or len(ran.stderr) > LIMITS.output_bytes:
        return f"{name}: more output than allowed"
    return None


def _serve(pool):
    ran = pool.run("import os\nprint(len('four'), sorted(os.listdir('.')))")
    assert (ran.status, ran.stdout) == ("ok", "4 []\n"), ran


def test_there_are_many_attacks():
    assert len(ATTACKS) >= 180 and len(QUICK) >= 130 and len(CHEATS) >= 25


def _marks(path):
    found = path.stat()
    return found.st_mode, found.st_uid, found.st_gid, found.st_mtime_ns, found.st_size


def test_nothing_escapes(sandbox, outside):
    """Attacks that end by themselves, on every kind of machine; after them the next program finds nothing of it."""
    folder, held = outside["OUTSIDE"], sandbox.protection
    before = _marks(folder / "bait")
    wrong = [found for name in QUICK if (found := _try(sandbox, name, outside)) is not None]
    assert not wrong, wrong
    _serve(sandbox)
    assert (folder / "bait").read_text() == "x" and not os.path.lexists(folder / "escaped")
    assert not pathlib.Path("/dev/shm/escaped").exists()
    assert not held.attributes or (
        _marks(folder / "bait") == before and os.listxattr(folder / "bait") in ([], ["user.bait"])
    )


def test_the_statement_names_what_is_not_held(sandbox, full):
    held = sandbox.protection
    promises = [name for name in held._fields if name not in ("user", "missing", "shown")]
    assert held.statement().count("NOT HELD") == sum(not getattr(held, name) for name in promises)
    assert held.complete() == all(getattr(held, name) for name in promises)
    beside = True  # sockets to the machine that runs this one are of no namespace
    try:
        socket.socket(40, socket.SOCK_STREAM).close()
    except OSError:
        beside = False
    expected = {
        "all": promises, "ordinary_user": promises, "only_landlock": ["files"], "nothing": [],
        "only_namespaces": [*["network"][beside:], "files", "attributes", "names", "processes"],
        "no_namespaces": ["network", "files", "attributes", "processes", "calls"],
    }  # fmt: skip
    if sandbox.machine in expected and full.protection.complete():  # this machine lacks nothing by itself
        assert [name for name in promises if getattr(held, name)] == expected[sandbox.machine]


def test_keys_of_the_session_stay_there(sandbox, outside):
    """Whatever holds a program: it begins with an empty ring of keys."""
    ran = sandbox.run(_program("search_the_keys_of_the_session", outside))
    assert ran.status == "ok" and "ESCAPED" not in ran.stdout, ran


LEFT = """
queue, segment = _libc.msgget(4712, 0), _libc.shmget(4712, 4096, 0)
print("found" if queue >= 0 or segment >= 0 else "nothing")
_libc.msgget(4712, 0o1666), _libc.shmget(4712, 4096, 0o1666)
"""


def test_no_program_finds_the_queues_of_another():
    """Each run has namespaces of its own where no filter denies the calls."""
    with Sandbox(workers=1, limits=LIMITS, without=MACHINES["only_namespaces"]) as pool:
        if pool.protection.names:
            assert [pool.run(HELPERS + LEFT).stdout for _ in range(3)] == ["nothing\n"] * 3


SLOW = [n for n, attack in ATTACKS.items() if not attack.promise]


@pytest.mark.parametrize("name", SLOW)
def test_limits(name, outside, full):
    wrong = _try(full, name, outside)
    assert wrong is None
    _serve(full)


@pytest.mark.slow
def test_limits_on_every_machine(sandbox, outside):
    wrong = [found for name in SLOW if (found := _try(sandbox, name, outside)) is not None]
    assert not wrong, wrong
    _serve(sandbox)


@pytest.fixture(scope="module")
def full():
    with Sandbox(workers=1, limits=LIMITS) as pool:
        yield pool


@pytest.mark.parametrize("name", CHEATS)
def test_no_wrong_program_passes(name, full):
    checked = full.check(CHEATS[name], CHECKS)
    assert checked.valid and not all(checked.passed), checked
    if name != "answer_before_the_question":  # there f(1) really returns 2
        assert not any(checked.passed), checked


TRICKS = {
    "a false object is not true": (
        "class No:\n    def __bool__(self): return False\ndef f(x): return No()",
        "assert f(1)",
    ),
    "what is given back undone": ("def f(x):\n    x.clear()\n    return []", "x = [3, 1]\nassert f(x) == sorted(x)"),
    "the values of the test written beside an answer": (
        "import sys\ninside = sys.modules['jaxrl_llm.sandbox.inside']\nanswer = inside._Solver._answer\n"
        "def more(self, request):\n    reply = answer(self, request)\n    if request['do'] == 'call':\n"
        "        reply['after'] = ['t', ['l', ['l']], ['d']]\n    return reply\n"
        "inside._Solver._answer = more\ndef f(x): return []",
        "x = [3, 1]\nassert f(x) == sorted(x)",
    ),
    "nothing given back": ("def f(x): x.clear()", "x = [3, 1]\nassert f(x) == sorted(x)"),
    "a difference of nothing": (
        "class N:\n    def __sub__(self, o): return 0.0\n    __rsub__ = __sub__\ndef f(x): return N()",
        "assert abs(f(1) - 3.14) < 1e-6",
    ),
    "less than all": (
        "class N:\n    def __lt__(self, o): return True\n    __gt__ = __lt__\ndef f(x): return N()",
        "assert 3 < f(1) < 4",
    ),
    "contains all": ("class N:\n    def __contains__(self, o): return True\ndef f(x): return N()", "assert 3 in f(1)"),
    "instance of all": (
        "class M(type):\n    __instancecheck__ = lambda *a: True\nclass T(metaclass=M): pass",
        "assert isinstance(3, T)",
    ),
    "a function of the tests is no door": (
        "def f(g):\n    return g.__globals__['ANSWER']",
        "ANSWER = 42\ndef g(): return ANSWER\nassert f(g) == 42",
    ),
    "what a function of the tests knows stays there": (
        "def f(g):\n    import gc\n    return [o for o in gc.get_objects() if isinstance(o, dict) and 'ANSWER' in o][0]['ANSWER']",
        "ANSWER = 42\ndef g(): return ANSWER\nassert f(g) == 42",
    ),
}


@pytest.mark.parametrize("name", TRICKS)
def test_no_trick_passes(name, full):
    program, check = TRICKS[name]
    checked = full.check(program, [check])
    assert checked.valid and checked.passed == (False,), checked


def test_after_all_that_right_programs_pass(full):
    assert full.check("def f(x):\n    return x + (1 if x < 5 else 2)", CHECKS).passed == (True, True)
    _serve(full)


def test_limits_hold_without_any_help_of_the_kernel(outside):
    """Where a machine has nothing of all this: limits, clean start, hard kill; and it says what is not held."""
    everything = ("namespaces", "landlock", "seccomp", "other_user")
    with Sandbox(workers=1, limits=LIMITS, without=everything) as pool:
        held = pool.protection
        assert not held.complete()
        assert not (held.network or held.files or held.processes or held.calls or held.disk)
        assert held.statement().count("NOT HELD") == 7 and held.statement().count("left out") == 3
        for name in ("environment", "inherited_files", "huge_allocation", "endless_output", "endless_loop", "big_file"):
            assert _try(pool, name, outside) is None
        # a process that hides from its group is found and killed all the same
        hidden = (
            "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(4711)\n"
        )
        before = _processes(_folders(pool))
        assert pool.run(hidden + "print(os.getpid())").status == "ok"
        _serve(pool)
        # whoever keeps a run ends after its answer was sent; what hides would sleep for an hour
        assert before and soon(lambda: _processes(_folders(pool)) <= before)


def _folders(pool):
    return [worker.private for worker in pool._workers]


def _processes(folders):
    """Workers with these folders and all that came from them; forks keep the command line, which names the folder."""
    found = set()
    for entry in pathlib.Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
        except OSError:
            continue
        if any(folder.encode() in words for folder in folders):
            found.add(int(entry.name))
    return found


def test_nothing_is_left_when_the_pool_closes():
    with Sandbox(workers=2, limits=LIMITS) as pool:
        pool.run("print(1)")
        folders = _folders(pool)
        assert _processes(folders)
    assert soon(lambda: not _processes(folders))


HOST = """
import sys, threading, time
sys.path.insert(0, sys.argv[1])
from jaxrl_llm.sandbox.pool import Sandbox
pool = Sandbox(workers=1, without=sys.argv[2:])
pool.run("1")
# a program that does not end with its parent, where the kernel lets it
program = "import ctypes, time\\nctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\\nwhile True: time.sleep(1)"
threading.Thread(target=pool.run, args=(program,), daemon=True).start()
time.sleep(0.3)
print(*(worker.private for worker in pool._workers), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("machine", ["all", "only_namespaces", "nothing"])
def test_nothing_is_left_when_the_run_is_killed(machine):
    words = [sys.executable, "-c", HOST, str(REPO), *MACHINES[machine]]
    host = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    folders = host.stdout.readline().split()
    assert folders and _processes(folders)
    host.send_signal(signal.SIGKILL)
    host.wait()
    assert soon(lambda: not _processes(folders), seconds=8.0)  # the program itself would run for ten


NOBODY = """
import os, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
sys.path.insert(0, sys.argv[1])
from jaxrl_llm.sandbox.pool import Sandbox
with Sandbox(workers=1) as pool:
    print(pool.protection)
    for program in sys.argv[2:]:
        print(repr(pool.run(program).stdout))
"""


def _python_for_everyone():
    for path in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        real = pathlib.Path(path).resolve()
        if real.exists() and all(p.stat().st_mode & stat.S_IXOTH for p in (real, *real.parents)):
            return path
    return None


def test_as_a_user_without_rights(outside):
    """A real user with nothing, where this machine has a Python that such a user may run."""
    python = _python_for_everyone() if os.geteuid() == 0 else None
    if python is None:
        assert MACHINES["ordinary_user"] == ("root",)  # that machine is this one, or stands for it
        return
    names = ["read_passwd", "connect", "fork", "signal_the_host", "fill_the_disk"]
    programs = [_program(name, outside) for name in names]
    done = subprocess.run([python, "-c", NOBODY, str(REPO), *programs], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    statement, *outputs = done.stdout.splitlines()
    for name, output in zip(names, outputs, strict=True):
        promised = re.search(rf"{ATTACKS[name].promise}=\(([^)]*)\)", statement)[1]
        assert not promised or "ESCAPED" not in output, (name, output, statement)

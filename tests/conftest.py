"""Strict environment of every test: eight simulated devices, strict dtype and rank promotion, shape checks."""

import gc
import importlib.metadata
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import threading
import time

gc.disable()  # nothing that is imported or collected is let go again: see `pytest_collection_finish`
os.environ.setdefault("JAX_PLATFORMS", "cpu")
_FLAGS = ["--xla_force_host_platform_device_count=8"]
if importlib.metadata.version("jaxlib").startswith("0.10."):  # XLA ends the process at a flag that it does not know
    # the emitters take half of the time of a compilation; small programs need no threads that compile their parts
    _FLAGS += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
for _flag in _FLAGS:
    if _flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_flag}".strip()

from jaxtyping import install_import_hook  # noqa: E402

# Every shape string in a signature is checked at run time while the tests run.
_FAMILIES = [p.parent for p in pathlib.Path(__file__).parents[1].glob("experiments/**/parts") if p.is_dir()]
install_import_hook(
    ["jaxrl_llm", *(".".join(p.relative_to(pathlib.Path(__file__).parents[1]).parts) + ".parts" for p in _FAMILIES)],
    "beartype.beartype",
)

import jax  # noqa: E402
import pytest  # noqa: E402
from jax._src.interpreters import mlir  # noqa: E402
from jax.extend.mlir import ir  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Most of the time of the tests is compilation, of programs that run once. So the compiler does not optimise much, and
# what one worker has compiled, the others load. With a folder of your own in JAX_COMPILATION_CACHE_DIR the next run
# loads it too.
jax.config.update("jax_disable_most_optimizations", True)
_OWN_CACHE = "JAXRL_LLM_TEST_CACHE"
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    if _OWN_CACHE not in os.environ:  # the first process, which starts the workers
        os.environ[_OWN_CACHE] = tempfile.mkdtemp(prefix="jaxrl_llm_tests_")
    jax.config.update("jax_compilation_cache_dir", os.environ[_OWN_CACHE])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


MOST_LOWERED = 500  # a context keeps what it has seen of every program
_make_context = mlir.make_ir_context
_lowering = threading.local()


def _shared_context():
    """One context for many programs of a thread: to make one is a third of the time that a small program takes.

    A program that is compiled while another is being lowered has a context of its own: in the same one its module would
    be put where the other is being written.
    """
    if ir.Context.current is not None:
        return _make_context()
    if getattr(_lowering, "left", 0) == 0:
        _lowering.context, _lowering.left = _make_context(), MOST_LOWERED
    _lowering.left -= 1
    return _lowering.context


mlir.make_ir_context = _shared_context


# whoever is started in the background by a script inherits that an interrupt means nothing, and so would every process
# that a test starts to interrupt it
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

STARTED = time.monotonic()
MOST_MAPPINGS = 30_000  # of 65,530 that Linux grants by default
MOST_PROGRAMS = 2_500  # JAX keeps 8,192 entries, two of some programs, and counts none beyond
COMPILED = []  # seconds of every program since the last time that all were let go

# These start processes and wait for them: on a loaded machine the scheduler may break what the code does not.
OF_PROCESSES = (
    "test_attacks.py", "test_sandbox.py", "test_launch.py", "test_hosts.py", "test_pool.py", "test_faults.py",
    "test_processes.py", "test_call.py", "test_endpoints.py", "test_durable.py", "test_ray.py", "test_stop.py",
    "test_trap_26_order.py", "test_foreign.py", "test_host_episodes.py", "test_host_texts.py",
)  # fmt: skip

MANY = ("test_parts.py",)
FIRST = "test_an_arm_traces"  # so begin those of which a failure is an experiment that does not run at all
DEAR = frozenset((pathlib.Path(__file__).parent / "dear.txt").read_text().splitlines())  # by measurement, see dear.py


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow, after the others")
    parser.addoption("--slow-minutes", type=float, default=None, help="begin no slow test later than this")


def _compiled(event, seconds, **_):
    if event == "/jax/core/compile/backend_compile_duration":
        COMPILED.append(seconds)


jax.monitoring.register_event_duration_secs_listener(_compiled)


def _is_slow(item):
    """By its marker: the keywords hold names of folders, too, such as that of the checkout."""
    return item.get_closest_marker("slow") is not None


def _turn(item):
    """Slow tests after the others: an arm of every experiment, dear tests, proofs, all of the experiments, meshes."""
    if not _is_slow(item):
        return 0
    if (getattr(item, "originalname", None) or "").startswith(FIRST):
        return 1
    if item.nodeid in DEAR:
        return 2
    return 5 if item.path.name in MANY else 3 + (item.path.parent.name == "experiments")


def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.path.name in OF_PROCESSES:
            item.add_marker(pytest.mark.flaky(reruns=2, reruns_delay=5))
        if item.nodeid in DEAR:
            item.add_marker(pytest.mark.slow)
    if config.getoption("--slow"):
        items.sort(key=_turn)  # stable: all else keeps its order
        return
    skip = pytest.mark.skip(reason="slow: run with --slow")
    for item in items:
        if _is_slow(item):
            item.add_marker(skip)


def pytest_collection_finish(session):
    """Modules and items are no garbage, and are not walked again; arrays of programs make few cycles."""
    gc.freeze()
    gc.set_threshold(10_000, 10, 20)
    gc.enable()


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """Writes a module of the user's beside the test; the worker forgets it when the test ends."""
    monkeypatch.syspath_prepend(str(tmp_path))
    written = []

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        written.append(name)
        assert name not in sys.modules, f"another test left a module {name}"

    yield write
    for name in written:
        sys.modules.pop(name, None)


def pytest_unconfigure(config):
    if not hasattr(config, "workerinput") and _OWN_CACHE in os.environ:
        shutil.rmtree(os.environ.pop(_OWN_CACHE), ignore_errors=True)


def pytest_runtest_setup(item):
    limit = item.config.getoption("--slow-minutes")
    if limit is not None and _is_slow(item) and time.monotonic() - STARTED > 60 * limit:
        pytest.skip(f"slow, and {limit:g} minutes are over: --slow-minutes")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """Before AVX2 XLA lacks the functions by which its own programs convert numbers of eight bits."""
    try:
        return (yield)
    except jax.errors.JaxRuntimeError as error:
        if "float8" not in pyfuncitem.name or "Failed to materialize symbols" not in str(error):
            raise
        pytest.skip(f"XLA converts no float8 for this processor: {str(error)[:120]}")


def pytest_runtest_teardown(item, nextitem):
    """Lets compiled programs go before they are more than JAX keeps, or their mappings more than the kernel grants."""
    if nextitem is None or nextitem.path != item.path:
        with open("/proc/self/maps") as maps:
            if len(COMPILED) > MOST_PROGRAMS or sum(1 for _ in maps) > MOST_MAPPINGS:
                jax.clear_caches()
                gc.collect()
                COMPILED.clear()

"""Trap 52, a thread pool that waits for itself: stacks of matrices on several CPU devices, all at the same time."""

import ast
import os
import pathlib
import re
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm.advantages import effective_rank
from jaxrl_llm.metrics import linalg, probes
from jaxrl_llm.models import merging

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIMIT_S = 120
# ``jnp.linalg`` that makes no LAPACK call
PLAIN = {"norm", "multi_dot", "matrix_norm", "vector_norm", "matmul", "outer", "trace", "diagonal", "cross",
         "tensordot", "vecdot", "matrix_transpose", "matrix_power"}  # fmt: skip

OTHERS = {"lax.linalg", "jax.lax.linalg", "jax.scipy.linalg", "jsp.linalg", "jnp.fft", "jax.numpy.fft"}

PROGRAM = """
import sys
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxrl_llm.metrics import linalg
from jaxrl_llm.advantages.effective_rank import rank_figures

DEVICES, CALLS, STACK, N = 8, 8, 16, 24
eye = 2 * N * jnp.eye(N)
functions = {
    "eigh": lambda x: linalg.eigh(x)[0], "eigvalsh": linalg.eigvalsh, "svd": lambda x: linalg.svd(x)[1],
    "qr": lambda x: linalg.qr(x)[1], "cholesky": lambda x: linalg.cholesky(x @ jnp.swapaxes(x, -1, -2) + eye),
    "solve": lambda x: linalg.solve(x + eye, x),
    "rank_figures": lambda x: rank_figures(x, jnp.ones(x.shape[:2], bool), stride=5),
}
mesh = jax.make_mesh((DEVICES,), ("d",))
x = jax.device_put(jax.random.normal(jax.random.key(0), (DEVICES * STACK, N, N)), jax.NamedSharding(mesh, P("d")))
for name in sys.argv[1].split(","):
    function = functions[name]
    function = jax.vmap(function) if name in ("eigvalsh", "solve") else function  # as the stack of a seed axis, too
    def total(x):  # independent calls, which the runtime begins at the same time
        return sum(jnp.sum(function(x * (1 + 0.1 * k))) for k in range(CALLS))
    for program in (total,) if name == "rank_figures" else (total, jax.grad(total)):
        run = jax.jit(jax.shard_map(lambda x: program(x).reshape(1, -1), mesh=mesh, in_specs=P("d"), out_specs=P("d")))
        for _ in range(5):
            assert jnp.isfinite(jax.block_until_ready(run(x))).all(), name
    print(name, "ended", flush=True)
"""


@pytest.mark.parametrize(
    "names", ["cholesky,rank_figures", pytest.param("eigh,eigvalsh,svd,qr,solve", marks=pytest.mark.slow)]
)
def test_eight_devices_end_in_bounded_time(names):
    """On all cores that there are. With ``jax.numpy.linalg`` instead, four of the seven stop for ever."""
    more = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    try:
        run = subprocess.run(
            [sys.executable, "-c", PROGRAM, names], cwd=ROOT, env=os.environ | more, capture_output=True, text=True,
            timeout=LIMIT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        pytest.fail(f"still running after {LIMIT_S} s; so far: {(late.stdout or b'').decode()}")
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("ended") == len(names.split(","))


def _stacks(function, *arguments):
    """Leading axes of what the LAPACK calls of a compiled program get."""
    text = jax.jit(function).lower(*arguments).compile().as_text()
    shapes = re.findall(r"= \(?\w+\[([\d,]*)\][^\n]*custom_call_target=\"lapack_", text)
    return [shape.split(",")[:-2] for shape in shapes]


SQUARE, TALL = jnp.ones((3, 5, 5), jnp.float32), jnp.ones((3, 6, 4), jnp.float32)
MASK = jnp.ones((3, 6), bool)


@pytest.mark.parametrize(
    "function, given",
    [
        (linalg.eigvalsh, (SQUARE,)),
        (jax.vmap(linalg.eigh), (SQUARE,)),
        (jax.vmap(jax.vmap(linalg.svd)), (TALL[None],)),
        (linalg.qr, (TALL,)),
        (jax.vmap(jax.grad(lambda x: jnp.sum(linalg.cholesky(x)))), (SQUARE,)),
        (jax.vmap(jax.grad(lambda x: jnp.sum(linalg.qr(x)[1]))), (TALL,)),
        (jax.vmap(jax.grad(lambda a, b: jnp.sum(linalg.solve(a, b)), (0, 1))), (SQUARE, SQUARE)),
        (effective_rank.rank_of_hidden_states, (TALL, MASK)),
        (jax.vmap(effective_rank.rank_of_hidden_states), (TALL[None], MASK[None])),
        (lambda x: merging.low_rank(x, 2), (TALL,)),
        (lambda x: merging.soft_threshold(x, 1.0), (TALL,)),
        (lambda x: probes.separability(x, x[:, 0] > 0, jnp.arange(6, dtype=jnp.int32) % 2, folds=2), (TALL[0],)),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_no_compiled_call_has_more_than_one_matrix(function, given):
    found = _stacks(function, *given)
    assert found, "no LAPACK call: the pattern misses them"
    assert all(set(axes) <= {"1"} for axes in found), found


def test_the_pattern_sees_stacks():
    assert ["3"] in _stacks(jnp.linalg.eigvalsh, SQUARE)


def _lapack_calls(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            package, _, last = name.rpartition(".")
            if package in ("jnp.linalg", "jax.numpy.linalg") and last not in PLAIN:
                yield name
            if package in OTHERS:
                yield name
            if name in ("jax.random.multivariate_normal", "jax.random.orthogonal", "jnp.polyfit", "jnp.roots"):
                yield name
            if last in ("orthogonal", "delta_orthogonal", "galore") and "random" not in package:
                yield name


def test_library_and_experiments_call_lapack_by_one_module_only():
    files = [*(ROOT / "jaxrl_llm").rglob("*.py"), *(ROOT / "experiments").rglob("*.py")]
    found = {str(path.relative_to(ROOT)): sorted(set(_lapack_calls(path))) for path in files}
    assert {path for path, names in found.items() if names} == {"jaxrl_llm/metrics/linalg.py"}, found


def test_one_matrix_and_no_matrix():
    started = time.monotonic()
    assert linalg.eigvalsh(SQUARE[0]).shape == (5,)
    assert linalg.eigvalsh(SQUARE[:0]).shape == (0, 5)
    assert time.monotonic() - started < LIMIT_S


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}, "1"),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "OPENBLAS_NUM_THREADS": "3"}, "3"),
        ({"XLA_FLAGS": ""}, None),
    ],
)
def test_threads_of_openblas_do_not_fight_for_simulated_devices(given, expected):
    """Set before SciPy is loaded, by nothing but the import; what the user has set stays."""
    program = "import jaxrl_llm, os, sys; assert 'scipy' not in sys.modules; print(os.environ.get(sys.argv[1]))"
    environment = {k: v for k, v in os.environ.items() if k != "OPENBLAS_NUM_THREADS"} | given
    command = [sys.executable, "-c", program, "OPENBLAS_NUM_THREADS"]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT, check=True)
    assert found.stdout.strip() == str(expected)

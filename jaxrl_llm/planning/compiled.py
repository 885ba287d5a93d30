"""The same phases compiled ahead of time for a TPU topology, on a machine that has none."""

import dataclasses
import importlib.util
import os
import pathlib
import re
import tempfile
import time
from collections.abc import Callable, MutableMapping
from typing import Any, NamedTuple

import jax

from jaxrl_llm.distributed.compiler_options import Options, memory_of, options_of
from jaxrl_llm.errors import UserError
from jaxrl_llm.models import cache as caches
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.planning import estimate, schedule
from jaxrl_llm.planning.chips import MACHINE, Chip, Topology, of_xla
from jaxrl_llm.planning.parallel_layout import Sizes
from jaxrl_llm.planning.phases import Phase, phases
from jaxrl_llm.planning.schedule import Schedule
from jaxrl_llm.planning.work import Work, judge_phases

_TOO_LARGE = re.compile(r"(?:Used |total memory required for HLO temporaries \()([0-9.]+)([KMG])")
DEPTHS = (4, 8)  # layers of the shallow programs of ``of_depths``
EVERY = 10**9
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


class Compiled(NamedTuple):
    """Bytes on one chip and seconds of compilation; ``fits`` is the compiler's own word."""

    peak: float
    arguments: float
    working: float
    seconds: float
    fits: bool = True
    schedule: Schedule | None = None  # where a chip was given, and the program fits
    layers: tuple[int, ...] = ()  # the numbers of layers that were compiled instead of all, see ``of_depths``


_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")  # JAX's for CUDA, which compile without a GPU, too


def available(topology: Topology | None = None) -> bool:
    """Whether the compiler for a topology is installed: for TPUs (None) the extra ``plan``."""
    if topology is None or topology.tpu:
        return importlib.util.find_spec("libtpu") is not None
    return any(importlib.util.find_spec(name) is not None for name in _PLUGINS)


def installed_by(topology: Topology) -> str:
    """What is lacking and the command that installs it, where ``available`` says no."""
    if topology.tpu:
        return "libtpu is not installed (pip install 'jaxrl_llm[plan]')"
    return "JAX's CUDA compiler is not installed (pip install 'jax[cuda12]')"


def without_a_tpu(environment: MutableMapping[str, str]) -> None:
    """What libtpu should know on a machine that has no TPU, where it is not said: then it asks nobody and warns of
    nothing, and takes no lock, so that several plans are compiled at the same time.
    """
    settings = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-8", "TPU_WORKER_HOSTNAMES": "localhost",
                "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}  # fmt: skip
    if not any(pathlib.Path("/dev").glob("accel*")) and not pathlib.Path("/dev/vfio").exists():
        for name, value in settings.items():
            environment.setdefault(name, value)


def without_a_gpu(environment: MutableMapping[str, str]) -> None:
    """Nothing is computed on a GPU, where nobody asks for one: JAX's plugin then compiles and looks for no driver."""
    environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # that there is no driver
    if not jax.config.jax_platforms:
        jax.config.update("jax_platforms", "cpu")


def devices(topology: Topology) -> Any:
    """The chips of a topology as devices to compile for.

    Raises:
      UserError: where the compiler is missing or does not know the topology.
    """
    if not available(topology):
        raise UserError(f"{installed_by(topology)}, or plan with --estimate")
    from jax.experimental import topologies

    if not topology.tpu:
        without_a_gpu(os.environ)
        machines = f"1x{-(-topology.chips // MACHINE)}x{min(topology.chips, MACHINE)}"
        described = {"target_config": of_xla(topology.kind), "topology": machines}
        try:
            return topologies.get_topology_desc(topology.name, "cuda", **described).devices
        except (NotImplementedError, jax.errors.JaxRuntimeError) as error:
            raise UserError(f"--topology {topology.name}: JAX's CUDA compiler did not start ({error}); plan with "
                            "--estimate, or give JAX_PLATFORMS=cpu") from error  # fmt: skip
    without_a_tpu(os.environ)
    # JAX has read these; libtpu does when it compiles, and ends the process at a CPU flag that it does not know
    kept = [word for word in os.environ.get("XLA_FLAGS", "").split() if not word.startswith("--xla_cpu_")]
    os.environ["XLA_FLAGS"] = " ".join(kept)
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=topology.of_libtpu).devices
    except Exception as error:  # jaxlib raises what it likes
        raise UserError(f"--topology {topology.name}: libtpu does not know it ({error})") from error
    if len(found) != topology.chips:
        raise UserError(f"--topology {topology.name}: libtpu has {len(found)} devices for {topology.chips} chips")
    return found


def apart(config: ModelConfig, phase: str, work: Work, rollout: Sizes, memory: float) -> bool:
    """Whether a TPU's program of this phase has its layers one by one, and not in a loop: see ``models.cache``.

    Args:
      rollout, memory: layout of the rollout, and bytes of a device, on which that of ``decode`` depends.
    """
    loops = ("reshard", "prefill", "score", *judge_phases(work))
    if phase in loops or (phase == "update" and work.remat) or config.num_layers <= caches.UNROLLED:
        return False
    if phase == "decode":
        return estimate.steps_apart(config, rollout, work, memory)
    return config.num_layers <= caches.UNROLLED_BESIDE_KERNEL


def of_depths(
    config: ModelConfig, make: Callable[[ModelConfig], Phase], *, depths: tuple[int, int] = DEPTHS, **settings: Any
) -> Compiled:
    """``of_phase`` of a program whose layers are compiled one by one, without all of them.

    Memory and schedule are a straight line through those of two shallow programs; ``seconds`` are of both. Where the
    deeper of them does not fit, the line is through what the compiler says of the two.

    Args:
      make: the phase of a model that has so many layers.
      depths: their numbers; both shallow programs have to be of the kind that the deep one is (``apart``).
      settings: of ``of_phase``.

    Raises:
      ValueError: for a model whose layers differ, which a line does not see.
    """
    if len(set(config.windows)) > 1:
        raise ValueError(f"layers with windows {sorted(set(config.windows))} differ; compile all {config.num_layers}")
    settings |= {"show": EVERY}
    few, more = (
        of_phase(make(dataclasses.replace(config, num_layers=n, windows=config.windows[:n])), **settings)
        for n in depths
    )
    further = (config.num_layers - depths[1]) / (depths[1] - depths[0])
    sizes = (b + (b - a) * further for a, b in zip(few[:3], more[:3], strict=True))
    timed = None
    if few.schedule is not None and more.schedule is not None:
        timed = schedule.extended(few.schedule, more.schedule, (*depths, config.num_layers))
    return Compiled(*sizes, few.seconds + more.seconds, few.fits and more.fits, timed, depths)


def too_large(said: str) -> float | None:
    """Bytes that a program would need, by what the compiler says where it does not fit; None: it says no such thing."""
    match = _TOO_LARGE.search(said)
    return None if match is None else float(match[1]) * _UNITS[match[2]]


def of_phase(
    phase: Phase,
    effort: float = 0.0,
    *,
    options: Options | None = None,
    chip: Chip | None = None,
    show: int = schedule.SHOWN,
) -> Compiled:
    """Compiles one phase; a program that is too large still tells how much it would need.

    Args:
      effort: what the compiler spends on speed, from -1 to 1; 0 is JAX's own. Memory hardly depends on it.
      options: of the compiler, those that a run has: ``distributed.compiler_options``.
      chip: whose schedule is wanted; None: none.
      show: how many of its places.
    """
    lowered, started = phase.lower(), time.monotonic()
    given: dict[str, Any] = (options or {}) | ({"exec_time_optimization_effort": effort} if effort else {})
    with tempfile.TemporaryDirectory() as folder:
        if chip is not None:
            given |= {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        try:
            program = lowered.compile(given or None)
        except jax.errors.JaxRuntimeError as error:
            needed = too_large(str(error))
            if needed is None:
                raise
            return Compiled(needed, 0.0, 0.0, time.monotonic() - started, fits=False)
        text = "" if chip is None else _printed(program, pathlib.Path(folder))
    found = program.memory_analysis()
    timed = None if chip is None else schedule.of_text(text, chip, filled=phase.filled, show=show)
    arguments, working = found.argument_size_in_bytes, found.temp_size_in_bytes
    new = found.output_size_in_bytes - found.alias_size_in_bytes
    return Compiled(arguments + working + new, arguments, working, time.monotonic() - started, schedule=timed)


def _printed(program: Any, written: pathlib.Path) -> str:
    """The program's text: what the compiler itself has written, or what JAX prints of what it was given back.

    JAX cannot print sums of several arrays that run beside others (on slices of three axes there are some).
    """
    for path in written.glob("*.after_codegen.txt"):
        return path.read_text()
    try:
        return program.as_text()
    except jax.errors.JaxRuntimeError as error:
        raise UserError(
            f"this program cannot be printed, so its schedule is not known ({str(error).splitlines()[0][:120]}); plan "
            "it without --schedule"
        ) from error


def of_step(
    config: ModelConfig,
    train: Sizes,
    rollout: Sizes,
    work: Work,
    chips: Any,
    *,
    names: tuple[str, ...] = (),
    effort: float = 0.0,
    chip: Chip | None = None,
    whole: bool = True,
) -> dict[str, Compiled]:
    """Every phase of a step (or those named) by itself, with the options of a run; ``chip`` as in ``of_phase``.

    Args:
      whole: every layer is compiled; else ``of_depths`` where layers are compiled one by one.
    """
    samples, trains = options_of(chips, samples=True), options_of(chips)
    meshes = train.mesh(chips), rollout.mesh(chips)

    def of(name: str) -> Compiled:
        options = {"reshard": None, "prefill": samples, "decode": samples}.get(name, trains)
        settings = {"effort": effort, "options": options, "chip": chip}
        if whole or len(set(config.windows)) > 1 or not apart(config, name, work, rollout, memory_of(chips[0])):
            return of_phase(phases(config, *meshes, work)[name](), **settings)
        return of_depths(config, lambda shallow: phases(shallow, *meshes, work)[name](), **settings)

    return {name: of(name) for name in phases(config, *meshes, work) if not names or name in names}

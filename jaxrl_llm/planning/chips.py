"""Peak rates of TPU generations and GPUs, and topologies by name: ``v5e:4x4`` is sixteen chips, ``h100:8`` eight."""

import math
from typing import NamedTuple

from jaxrl_llm.distributed.compiler_options import MEMORY
from jaxrl_llm.errors import UserError


class Chip(NamedTuple):
    """Of one chip: ``hbm`` bytes a program may use, the rest in bytes or operations a second.

    ``link``: one direction of one link to a neighbour. ``meeting``: seconds of any collective beside its bytes, where
    they were measured; the table has none.
    """

    hbm: float
    bandwidth: float
    flops: float  # bfloat16
    link: float
    meeting: float = 0.0
    clock: float = 1.5e9  # cycles a second, of the compiler's estimates
    platform: str = ""  # as JAX says it; it and the kind decide which programs there are
    kind: str = ""
    devices: int = 1  # of JAX on a chip: the rest is of one of them
    named: str = ""  # in the topologies of libtpu, where it has another name than here


# From "How to scale your model" (the TPU chapter's table).
CHIPS: dict[str, Chip] = {
    "v4": Chip(MEMORY["v4"] * 2**30, 1.2e12, 2.75e14, 4.5e10, clock=1.05e9, platform="tpu"),
    "v5e": Chip(MEMORY["v5e"] * 2**30, 8.1e11, 1.97e14, 4.5e10, platform="tpu", kind="TPU v5 lite"),
    "v5p": Chip(MEMORY["v5p"] * 2**30, 2.8e12, 4.59e14, 9e10, clock=1.75e9, platform="tpu"),
    "v6e": Chip(MEMORY["v6e"] * 2**30, 1.6e12, 9.2e14, 9e10, clock=1.75e9, platform="tpu"),
    # Google's page of TPU7x: 7.38 TB/s, 2,307 TFLOP/s and the links of v5p to a chip, which is two devices; memory as
    # libtpu has it; the clock at which products of v6e's shape, four of 256 x 256 in a cycle, have that peak
    "v7x": Chip(
        MEMORY["v7x"] * 2**30,
        3.69e12,
        1.1535e15,
        4.5e10,
        clock=2.2e9,
        platform="tpu",
        kind="TPU7x",
        devices=2,
        named="tpu7x",
    ),
}

# NVIDIA's data sheets of the SXM modules: dense bfloat16, and the links within a machine, two directions of a ring of
# which have half of them each. A program gets a little less memory than the chip has.
GPUS: dict[str, Chip] = {
    "h100": Chip(76.0 * 2**30, 3.35e12, 9.89e14, 2.25e11, platform="gpu"),
    "h200": Chip(134.0 * 2**30, 4.8e12, 9.89e14, 2.25e11, platform="gpu"),
    "b200": Chip(172.0 * 2**30, 8e12, 2.25e15, 4.5e11, platform="gpu"),
}


class Target(NamedTuple):
    """A GPU as XLA's compiler wants it described where there is none to ask: CUDA's properties of the device."""

    name: str  # as CUDA and JAX say it
    capability: tuple[int, int]
    multiprocessors: int
    cache: int  # MiB, the second level
    memory: int  # MiB of the device
    clock: float = 1.98  # GHz


TARGETS = {
    "h100": Target("NVIDIA H100 80GB HBM3", (9, 0), 132, 50, 81_559),
    "h200": Target("NVIDIA H200", (9, 0), 132, 60, 143_771),
    "b200": Target("NVIDIA B200", (10, 0), 148, 126, 183_359, 1.965),
}
CUDNN = (9, 8)  # as old as any that JAX's wheels come with


def of_xla(kind: str) -> str:
    """A ``GpuTargetConfigProto`` in text; Hopper and Blackwell have the same limits of a block and a multiprocessor.

    >>> "cuda_compute_capability { major: 9 minor: 0 }" in of_xla("h200")
    True
    """
    one = TARGETS[kind]
    device = {
        "threads_per_block_limit": 1024, "threads_per_warp": 32, "shared_memory_per_block": 48 * 1024,
        "shared_memory_per_core": 228 * 1024, "threads_per_core_limit": 2048, "core_count": one.multiprocessors,
        "fpus_per_core": 128, "block_dim_limit_x": 2**31 - 1, "block_dim_limit_y": 65535, "block_dim_limit_z": 65535,
        "memory_bandwidth": int(GPUS[kind].bandwidth), "l2_cache_size": one.cache * 2**20, "clock_rate_ghz": one.clock,
        "device_memory_size": one.memory * 2**20, "shared_memory_per_block_optin": 227 * 1024,
        "registers_per_core_limit": 65536, "registers_per_block_limit": 65536,
    }  # fmt: skip
    major, minor = one.capability
    fields = " ".join(f"{name}: {value}" for name, value in device.items())
    return (
        f"gpu_device_info {{ {fields} cuda_compute_capability {{ major: {major} minor: {minor} }} }} "
        f'platform_name: "CUDA" dnn_version_info {{ major: {CUDNN[0]} minor: {CUDNN[1]} }} '
        f'device_description_str: "{one.name}"'
    )


MACHINE = 8  # GPUs that these links connect
_NETWORK = 2.5e10  # between machines, one direction: 400 Gbit/s to each GPU, half of it for each way around
_MACHINES = (1, 2, 4, 8, 16, 32)

_CUBIC = ("v4", "v5p", "v7x")
# slices that exist, the smallest first: of chips in a plane, and in a cube
_PLANES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16")


class Topology(NamedTuple):
    """A slice of chips, counted as JAX counts them: a chip of two devices is two."""

    name: str
    kind: str
    chip: Chip
    chips: int

    @property
    def of_libtpu(self) -> str:
        """The slice as libtpu calls it."""
        return self.name.replace(self.kind, self.chip.named or self.kind, 1)

    @property
    def size(self) -> str:
        """How many there are, and of what memory."""
        each = f"of {self.chip.hbm / 2**30:.2f} GiB"
        if self.chip.devices == 1:
            return f"{self.chips} chips {each}"
        return f"{self.chips // self.chip.devices} chips, {self.chips} devices {each}"

    @property
    def tpu(self) -> bool:
        """Whether it is one that libtpu compiles for, with the kernels of a TPU."""
        return self.kind in CHIPS


def parse(name: str) -> Topology:
    """``v5e:4x4`` as a topology; GPUs by their number, beyond ``MACHINE`` of them with the links of the network alone.

    >>> parse("v5e:4x4").chips, parse("v7x:2x2x1").chips, parse("h100:16").chips
    (16, 8, 16)

    Raises:
      UserError: for an unknown generation or a shape that is no product of numbers.
    """
    kind, _, shape = name.partition(":")
    if kind in GPUS:
        return _gpus(name, kind, shape)
    if kind not in CHIPS:
        raise UserError(f"--topology {name}: unknown generation {kind!r}; known are {', '.join((*CHIPS, *GPUS))}")
    sides = shape.split("x")
    wanted = 3 if kind in _CUBIC else 2
    if len(sides) != wanted or not all(side.isdigit() and int(side) for side in sides):
        example = "2x2x2" if wanted == 3 else "4x4"
        raise UserError(f"--topology {name}: {shape!r} is no shape of {wanted} sides, as in {kind}:{example}")
    return Topology(name, kind, CHIPS[kind], CHIPS[kind].devices * math.prod(int(side) for side in sides))


def _gpus(name: str, kind: str, shape: str) -> Topology:
    number = int(shape) if shape.isdigit() else 0
    if number < 1 or (number > MACHINE and number % MACHINE):
        raise UserError(
            f"--topology {name}: {shape!r} is no number of GPUs, at most {MACHINE} or a multiple, as {kind}:{MACHINE}"
        )
    chip = GPUS[kind] if number <= MACHINE else GPUS[kind]._replace(link=_NETWORK)
    return Topology(name, kind, chip, number)


def slices(kind: str) -> list[Topology]:
    """Of a generation, the smallest first.

    >>> slices("v5p")[1].name
    'v5p:2x2x2'
    """
    if kind in GPUS:
        return [parse(f"{kind}:{MACHINE * n}") for n in _MACHINES]
    return [parse(f"{kind}:{shape}") for shape in (_CUBES if kind in _CUBIC else _PLANES)]

"""Options of the compiler, set here alone, by generation of TPU and for GPUs, each with a figure that justifies it."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

Options = dict[str, str | bool]

# By the compiler's own count (planning.schedule), Qwen3-1.7B on v5e:2x4, fsdp=8, recomputed update of 16 rows x 1,024
# tokens: each product is cut into windows of 256 columns, so that the next weights travel meanwhile, and the matrix
# unit idles: 272 ms of computing, 300 in all; with products left whole 200 and 232.
_WHOLE_PRODUCTS: Options = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}

# The all-to-alls by which looked-up rows come to their devices, and their gradients back, run beside computing where
# something is left to compute: without the option each stops it, 2.4 ms of an update (in three layers, 1.2 with it).
_BESIDE: Options = {"xla_tpu_enable_async_all_to_all": "true"}
_TRAINING = _WHOLE_PRODUCTS | _BESIDE
# "Async all-to-all not supported on limited ICI": with the option nothing is compiled for v5e:4x8 and v5e:8x8.
_MOST_BESIDE = {"v5e": 16}

OF_GENERATION: dict[str, Options] = {
    "v4": _TRAINING,
    "v5e": _TRAINING,
    "v5p": _TRAINING,
    "v6e": _TRAINING,
    "v7x": _TRAINING,
}
# A layer's products with 16,384 rows, forward and backward, Qwen3-1.7B on an H200: 7.09 ms where Triton's products are
# among those that are tried, 6.33 ms (782 TFLOP/s) without.
ON_GPU: Options = {"xla_gpu_enable_triton_gemm": False}
# GiB of a device: a program gets a little less memory than the chip has.
MEMORY = {"v4": 30.75, "v5e": 15.75, "v5p": 95.0, "v6e": 31.25, "v7x": 94.74}
# generations as ``jax.Device.device_kind`` names them
TPUS = {"TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p",
        "TPU v6 lite": "v6e", "TPU v6e": "v6e", "TPU7x": "v7x"}  # fmt: skip


def memory_of(device: Any) -> float:
    """Bytes of a TPU's device; 0 for others, and for a generation that is not known."""
    generation = TPUS.get(device.device_kind, "") if device.platform == "tpu" else ""
    return MEMORY.get(generation, 0.0) * 2**30


def options_of(devices: Sequence[Any] | None = None, *, samples: bool = False) -> Options | None:
    """The ``compiler_options`` of ``jax.jit`` and of ``Lowered.compile`` for programs that train or score.

    Args:
      devices: all of the slice; those of this run by default.
      samples: the program samples, too: products of a few rows are Triton's on a GPU, if they are quicker.

    Returns:
      None for other devices, and for a generation that was never measured: the compiler's own choice.
    """
    devices = jax.devices() if devices is None else devices
    if devices[0].platform in ("gpu", "cuda"):
        return None if samples else ON_GPU
    generation = TPUS.get(devices[0].device_kind, "") if devices[0].platform == "tpu" else ""
    options = OF_GENERATION.get(generation)
    if options is not None and len(devices) > _MOST_BESIDE.get(generation, len(devices)):
        return {name: value for name, value in options.items() if name not in _BESIDE}
    return options


def jit_sampling(function: Callable[..., Any], **settings: Any) -> Any:
    """``jax.jit`` of a program that samples: on a mesh along ``fsdp`` a prompt's products are those of training.

    By the compiler's own count 32 prompts x 1,024 tokens on ``fsdp=8``, four layers of Qwen3-1.7B on v5e:2x4, take
    17.6 ms where products are left whole, 31.5 in windows; on meshes of sampling and in decoding nothing changes.

    Args:
      settings: others of ``jax.jit``.
    """
    return jax.jit(function, compiler_options=options_of(samples=True), **settings)

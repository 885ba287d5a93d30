"""Who computes attention, and log-probabilities over the vocabulary: XLA everywhere, a Pallas kernel on TPUs.

On NVIDIA GPUs attention is cuDNN's; the functions are the same.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.models import attention
from jaxrl_llm.models.attention import AttendFn, Seen
from jaxrl_llm.models.cache import ON_GPU, DeviceLayout, RowsFn
from jaxrl_llm.models.kernels import attention_cached, attention_pallas, grouped, token_rows, vocabulary
from jaxrl_llm.models.kernels.attention_cached import CachedFn
from jaxrl_llm.models.kernels.grouped import GroupedFn
from jaxrl_llm.models.kernels.token_rows import TokenRows
from jaxrl_llm.models.kernels.vocabulary import Head, Sums, SumsFn

IMPLEMENTATIONS = ("auto", "xla", "pallas", "cudnn")
PartFn = Callable[..., tuple[Array, ...]]
OF_PLATFORM = {"tpu": "pallas", "gpu": "cudnn"}
FEW = 128  # so few queries, as in decoding, are left to XLA: it reads the cache once, and there is no matrix of scores


def make_attend(name: str = "auto", *, platform: str | None = None) -> AttendFn:
    """The ``attend_fn`` of ``models.decoder.make_policy``.

    Args:
      name: of ``IMPLEMENTATIONS``; ``auto`` takes what is best on the platform. What an implementation cannot do (a
        soft cap or float32 in cuDNN, a handful of queries) is computed by XLA.
      platform: of the first device by default.

    Raises:
      ValueError: for another name.

    >>> make_attend("auto", platform="cpu") is attention.attend
    True
    """
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"attention={name!r} is not one of {', '.join(IMPLEMENTATIONS)}")
    platform = platform or jax.default_backend()
    chosen = _chosen(name, platform)
    if chosen == "xla":
        return attention.attend
    return cudnn if chosen == "cudnn" else _pallas(interpret=platform != "tpu")


def _chosen(name: str, platform: str) -> str:
    """Of ``IMPLEMENTATIONS`` but for ``auto``."""
    return OF_PLATFORM.get(platform, "xla") if name == "auto" else name


def _pallas(interpret: bool) -> AttendFn:
    def attend(q: Array, k: Array, v: Array, mask: Array | Seen, **settings) -> Array:
        if q.shape[1] <= FEW:
            return attention.attend(q, k, v, _dense(mask), **settings)
        return attention_pallas.attend(q, k, v, mask, interpret=interpret, **settings)

    return attend


def _dense(mask: Array | Seen) -> Array:
    return mask.dense() if isinstance(mask, Seen) else mask


def make_cached(name: str = "auto", *, platform: str | None = None) -> CachedFn | None:
    """The ``cached_fn`` of ``models.decoder.make_policy`` that belongs to ``make_attend`` of the same arguments.

    None where XLA reads the cache as well as it can: everywhere but for the kernel of a TPU.
    """
    attend_fn = make_attend(name, platform=platform)
    platform = platform or jax.default_backend()
    if _chosen(name, platform) != "pallas":
        return None
    otherwise = attention_cached.cut_out(attend_fn)

    def attend_layer(q: Array, k: Array, v: Array, mask: Array | Seen, layer: Any, filled: Any, *scales, **settings):
        if q.shape[1] * (q.shape[2] // k.shape[2]) > FEW:
            return otherwise(q, k, v, mask, layer, filled, *scales, **settings)
        return attention_cached.attend_layer(
            q, k, v, _dense(mask), layer, filled, *scales, interpret=platform != "tpu", **settings
        )

    return attend_layer


def make_parts(name: str = "auto", *, platform: str | None = None) -> tuple[PartFn, PartFn]:
    """Attention to some of the keys, and its gradients, for ``distributed.ring``, as ``make_attend`` chooses.

    By the kernel of a TPU, else by XLA; cuDNN does not give the sums by which parts are put together.
    """
    make_attend(name, platform=platform)
    platform = platform or jax.default_backend()
    if _chosen(name, platform) != "pallas":
        return (lambda *given, **more: attention.attend_part(*_with_dense(given), **more)), (
            lambda *given, **more: attention.part_gradients(*_with_dense(given), **more)
        )
    interpret = platform != "tpu"
    return partial(attention_pallas.part, interpret=interpret), partial(
        attention_pallas.part_gradients, interpret=interpret
    )


def _with_dense(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments whose fourth is a mask, made dense."""
    return (*given[:3], _dense(given[3]), *given[4:])


def make_rows(name: str = "auto", *, platform: str | None = None) -> RowsFn | None:
    """The ``rows_fn`` of ``models.decoder.make_policy`` that belongs to ``make_cached`` of the same arguments."""
    if make_cached(name, platform=platform) is None:
        return None
    interpret = (platform or jax.default_backend()) != "tpu"
    return partial(attention_cached.repeat_rows, interpret=interpret)


def make_token_rows(name: str = "auto", *, platform: str | None = None) -> TokenRows | None:
    """The ``token_rows`` of ``models.decoder.make_policy`` that belong to ``make_cached`` of the same arguments."""
    if make_cached(name, platform=platform) is None:
        return None
    return token_rows.make_token_rows(interpret=(platform or jax.default_backend()) != "tpu")


def make_grouped(name: str = "auto", *, platform: str | None = None) -> GroupedFn:
    """The ``grouped_fn`` of ``models.mlp.grouped_experts`` that belongs to ``make_attend`` of the same arguments."""
    make_attend(name, platform=platform)
    platform = platform or jax.default_backend()
    return (
        partial(grouped.by_kernel, interpret=platform != "tpu")
        if _chosen(name, platform) == "pallas"
        else grouped.grouped
    )


def make_layout(name: str = "auto", *, platform: str | None = None) -> DeviceLayout | None:
    """The ``layout`` of ``models.decoder.make_policy`` that belongs to ``make_attend`` of the same arguments.

    >>> make_layout("xla", platform="gpu"), make_layout(platform="cpu")
    (DeviceLayout(apart=40, tile=64, joined=True, scored=4096, step_fn=None), None)
    """
    platform = platform or jax.default_backend()
    if platform != "gpu":
        return None
    return ON_GPU._replace(step_fn=cudnn_step if _chosen(name, platform) == "cudnn" else None)


def make_sums(name: str = "auto", *, platform: str | None = None) -> SumsFn | None:
    """The ``sums_fn`` of ``models.decoder.make_policy`` that belongs to ``make_cached`` of the same arguments."""
    if make_cached(name, platform=platform) is None:
        return None
    interpret = (platform or jax.default_backend()) != "tpu"

    def sums(head: Head, hidden: Array, table: Array, targets: Array, first: Any = 0) -> Sums:
        found = vocabulary.sums_by_kernel(
            head, hidden.reshape(-1, hidden.shape[-1]), table, targets.reshape(-1), first, interpret=interpret
        )
        return Sums(*(x.reshape(targets.shape) for x in found))

    return sums


def cudnn(
    q: Float[Array, "B S H K"],
    k: Float[Array, "B G C K"],
    v: Float[Array, "B G C K"],
    mask: Bool[Array, "B S C"],
    *,
    scale: float | None = None,
    softcap: float | None = None,
    implementation: Literal["xla", "cudnn"] = "cudnn",
) -> Float[Array, "B S H K"]:
    """``models.attention.attend`` by the fused attention of cuDNN, where it can.

    As many queries as keys are the same columns, none of which sees a later one whatever its segment: cuDNN then
    leaves out half of the products, which the mask alone does not tell it. Odd numbers of either, which it does not
    take beside a mask, are made even by one that sees nothing and that nobody sees.

    Args:
      implementation: of ``jax.nn.dot_product_attention``.
    """
    narrow = q.dtype in (jnp.bfloat16, jnp.float16)
    unfit = not _heads_fit(q.shape[3]) or (implementation == "cudnn" and not narrow)
    if softcap is not None or q.shape[1] <= FEW or unfit:
        return attention.attend(q, k, v, mask, scale=scale, softcap=softcap)
    queries, keys = q.shape[1] % 2, k.shape[2] % 2
    even = jnp.pad(q, ((0, 0), (0, queries), (0, 0), (0, 0)))
    k, v = (jnp.pad(jnp.swapaxes(x, 1, 2), ((0, 0), (0, keys), (0, 0), (0, 0))) for x in (k, v))
    found = jax.nn.dot_product_attention(
        even, k, v, mask=jnp.pad(mask, ((0, 0), (0, queries), (0, keys)))[:, None], scale=scale,
        is_causal=q.shape[1] == mask.shape[2], implementation=implementation,
    )  # fmt: skip
    return found[:, : q.shape[1]]


def _heads_fit(width: int) -> bool:
    """Whether cuDNN takes heads of this width on the first device.

    A multiple of 8 up to 128 from Ampere on, up to 256 from Hopper on; no GPU of another maker, such as ``gfx942``.
    """
    capability = getattr(jax.devices()[0], "compute_capability", "9.0")
    generation = int(capability.split(".")[0]) if capability[:1].isdigit() else 0
    return generation >= 8 and width % 8 == 0 and width <= (256 if generation >= 9 else 128)


def cudnn_step(
    q: Float[Array, "B 1 H K"],
    k: Float[Array, "B G C K"],
    v: Float[Array, "B G C K"],
    mask: Bool[Array, "B 1 C"],
    *,
    scale: float | None = None,
    softcap: float | None = None,
    implementation: Literal["xla", "cudnn"] = "cudnn",
) -> Float[Array, "B 1 H K"]:
    """``models.attention.attend`` of one query of each row by cuDNN, which reads no column behind the last one seen."""
    if softcap is not None or not _heads_fit(q.shape[3]):
        return attention.attend(q, k, v, mask, scale=scale, softcap=softcap)
    columns = jnp.arange(1, mask.shape[2] + 1, dtype=jnp.int32)
    lengths = jnp.maximum(jnp.max(jnp.where(mask[:, 0], columns, 0), axis=1), 1)
    columns_first = (jnp.swapaxes(x, 1, 2) for x in (k, v))
    return jax.nn.dot_product_attention(
        q, *columns_first, mask=mask[:, None], scale=scale, query_seq_lengths=jnp.ones_like(lengths),
        key_value_seq_lengths=lengths, implementation=implementation,
    )  # fmt: skip

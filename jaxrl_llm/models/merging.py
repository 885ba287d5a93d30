"""Merging of models that come from one ancestor, as functions of parameter trees; nothing is trained.

``base`` is the ancestor, ``trees`` its descendants, a *delta* is descendant minus base. All functions keep the tree.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.metrics import linalg
from jaxrl_llm.models import attention, decoder
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.layers import norm, project
from jaxrl_llm.models.mlp import ACTIVATIONS
from jaxrl_llm.types import Key, Params


def deltas(base: Params, trees: Sequence[Params]) -> list[Params]:
    """What each descendant adds to the base."""
    return [jax.tree.map(jnp.subtract, tree, base) for tree in trees]


def added(base: Params, delta: Params, scale: float = 1.0) -> Params:
    """``base + scale delta``."""
    return jax.tree.map(lambda b, d: b + scale * d, base, delta)


def _mean(*leaves: Array) -> Array:
    return sum(leaves[1:], leaves[0]) / len(leaves)


def average(trees: Sequence[Params]) -> Params:
    """The mean of the models: ``task_arithmetic`` of all of them at ``scale = 1 / their number``."""
    return jax.tree.map(_mean, *trees)


def soup(trees: Sequence[Params], weights: Sequence[float]) -> Params:
    """``sum_i w_i theta_i`` leaf by leaf, norms and embeddings included; the weights must add up to 1.

    From "Model soups", arXiv:2203.05482; as a reference of PPO from "SALSA: Soup-based Alignment Learning for Stronger
    Adaptation in RLHF", arXiv:2411.01798.

    >>> import jax.numpy as jnp
    >>> soup([{"w": jnp.array([1.0, 3.0])}, {"w": jnp.array([3.0, 5.0])}], [0.5, 0.5])["w"].tolist()
    [2.0, 4.0]
    """
    if len(trees) != len(weights) or not trees:
        raise ValueError(f"{len(trees)} trees and {len(weights)} weights; give one weight a tree")
    if abs(sum(weights) - 1.0) > 1e-6:
        raise ValueError(f"weights={list(weights)} must add up to 1")
    return jax.tree.map(lambda *leaves: sum(w * x for w, x in zip(weights, leaves, strict=True)), *trees)


def task_arithmetic(base: Params, trees: Sequence[Params], *, scale: float = 0.7) -> Params:
    """``base + scale sum_k delta_k``; with one tree a line from the base to it.

    From "Editing Models with Task Arithmetic", arXiv:2212.04089; scale of "Unlocking Efficient Long-to-Short LLM
    Reasoning with Model Merging", arXiv:2503.20641.

    >>> import jax.numpy as jnp
    >>> task_arithmetic(jnp.array([1.0]), [jnp.array([3.0]), jnp.array([0.0])], scale=0.5).tolist()
    [1.5]
    """
    return added(base, jax.tree.map(lambda *d: sum(d[1:], d[0]), *deltas(base, trees)), scale)


def trimmed(delta: Array, share: float) -> Array:
    """The entries of largest magnitude of one tensor: those below its ``int(n share)``-th smallest become 0.

    Entries as large as that one survive, so at least ``n - int(n share) + 1`` do; ``share = 0`` keeps all.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share={share} of trimmed entries must lie in [0, 1]")
    rank = int(delta.size * share)
    if rank == 0:
        return delta
    limit = jnp.sort(jnp.abs(delta).ravel())[rank - 1]
    return jnp.where(jnp.abs(delta) >= limit, delta, 0.0)


def elected(changes: Sequence[Array]) -> Array:
    """The mean of those entries that agree with the sign of the sum (0 counts as +); 0 where none does.

    >>> import jax.numpy as jnp
    >>> [round(float(x), 4) for x in elected([jnp.array([1.0, -2.0, 0.1]), jnp.array([3.0, 1.0, -0.2])])]
    [2.0, -2.0, -0.2]
    """
    stacked = jnp.stack(list(changes))
    sign = jnp.where(jnp.sum(stacked, axis=0) >= 0, 1.0, -1.0)
    agree = stacked * sign[None] > 0
    count = jnp.maximum(jnp.sum(agree.astype(jnp.float32), axis=0), 1.0)
    return jnp.sum(jnp.where(agree, stacked, 0.0), axis=0) / count


def ties_delta(changes: Sequence[Params], *, share: float = 0.8) -> Params:
    """TIES: trim every leaf, elect a sign entry by entry, average what agrees.

    From "TIES-Merging: Resolving Interference When Merging Models", arXiv:2306.01708, section 3. Differs from the paper
    in trimming leaf by leaf, the matrices of one kind of all layers together, where it trims the whole vector, and the
    code of arXiv:2503.20641 each layer's own matrix.

    Args:
      share: of the entries of each leaf that are trimmed.
    """
    return jax.tree.map(lambda *leaves: elected([trimmed(leaf, share) for leaf in leaves]), *changes)


def dare(key: Key, delta: Params, *, rate: float = 0.3) -> Params:
    """Drops each entry with chance ``rate`` and divides the others by ``1 - rate``: the same delta on average.

    From "Language Models are Super Mario", arXiv:2311.03099.
    """
    if not 0 <= rate < 1:
        raise ValueError(f"rate={rate} must lie in [0, 1)")
    leaves, tree = jax.tree.flatten(delta)

    def thinned(k, x):
        return jnp.where(jax.random.uniform(k, x.shape) < rate, 0.0, x / (1 - rate))

    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(tree, [thinned(k, x) for k, x in zip(keys, leaves, strict=True)])


def soft_threshold(matrix: Float[Array, "... I O"], level: float) -> Float[Array, "... I O"]:
    """Every singular value less ``level``, at least 0.

    >>> import jax.numpy as jnp
    >>> soft_threshold(jnp.diag(jnp.array([3.0, 1.0])), 2.0).round(4).tolist()
    [[1.0, 0.0], [0.0, 0.0]]
    """
    u, s, v = linalg.svd(matrix)
    return (u * jnp.expand_dims(jnp.maximum(s - level, 0.0), -2)) @ v


def low_rank(matrix: Float[Array, "... I O"], rank: int) -> Float[Array, "... I O"]:
    """The nearest matrix of at most this rank."""
    u, s, v = linalg.svd(matrix)
    largest = jnp.broadcast_to(jnp.reshape(jnp.arange(s.shape[-1]) < rank, (1,) * (s.ndim - 1) + (-1,)), s.shape)
    return (u * jnp.expand_dims(jnp.where(largest, s, 0.0), -2)) @ v


def is_matrix(path: tuple, leaf: Array) -> bool:
    """Whether a leaf of the decoder's tree holds matrices; those of the layers are stacked on a first axis."""
    stacked = any(getattr(part, "key", None) == "layers" for part in path)
    return leaf.ndim - stacked >= 2


def _by_kind(matrices: Callable[..., Array], others: Callable[..., Array], *trees: Params) -> Params:
    def merge(path, *leaves):
        return (matrices if is_matrix(path, leaves[0]) else others)(*leaves)

    return jax.tree_util.tree_map_with_path(merge, *trees)


def lore(
    base: Params, trees: Sequence[Params], *, penalty: float, scale: float = 1.0, steps: int = 10,
    vector_scale: float = 0.7,
) -> Params:  # fmt: skip
    """LoRE: a shared base and low-rank rests, ``base' + scale sum_k d_k``, by coordinate descent.

    Minimises ``sum_k |base' + d_k - theta_k|^2 + penalty sum_k |d_k|_nuclear``: ``base'`` is the mean of ``theta_k -
    d_k``, ``d_k`` is ``soft_threshold(theta_k - base', penalty / 2)``. Vectors are merged by ``task_arithmetic``.

    From "LoRE-Merging: Exploring Low-Rank Estimation For Large Language Model Merging", arXiv:2502.10749.
    """

    def matrices(ancestor, *leaves):
        rests = [jnp.zeros_like(leaf) for leaf in leaves]
        for _ in range(steps):
            shared = _mean(*(leaf - rest for leaf, rest in zip(leaves, rests, strict=True)))
            rests = [soft_threshold(leaf - shared, penalty / 2) for leaf in leaves]
        shared = _mean(*(leaf - rest for leaf, rest in zip(leaves, rests, strict=True)))
        return shared + scale * sum(rests[1:], rests[0])

    return _by_kind(matrices, partial(_line, vector_scale), base, *trees)


def _line(scale: float, ancestor: Array, *leaves: Array) -> Array:
    return ancestor + scale * sum((leaf - ancestor for leaf in leaves[1:]), leaves[0] - ancestor)


def twin(base: Params, trees: Sequence[Params], *, rank: int, weights: Sequence[float], scale: float = 0.7) -> Params:
    """Twin: what the models share by ``task_arithmetic``, and of what each has beyond it the ``rank`` largest parts.

    From "Twin-Merging: Dynamic Integration of Modular Expertise in Model Merging", arXiv:2406.15479. Differs from the
    paper in fixed weights where it has a router.
    """
    if len(weights) != len(trees):
        raise ValueError(f"weights={tuple(weights)} must have one entry for each of the {len(trees)} models")

    def matrices(ancestor, *leaves):
        shared = _line(scale, ancestor, *leaves)
        own = [w * low_rank(leaf - shared, rank) for w, leaf in zip(weights, leaves, strict=True)]
        return shared + sum(own[1:], own[0])

    return _by_kind(matrices, partial(_line, scale), base, *trees)


def activation_informed(merged: Params, base: Params, importance: Params, *, omega: float = 0.4) -> Params:
    """AIM: ``base + (1 - S (1 - omega)) (merged - base)``: input channels that matter keep more of the base.

    Args:
      importance: ``S`` in [0, 1] that broadcasts with each leaf, for example of ``channel_importance``; ``omega=1``
        changes nothing.

    From "Activation-Informed Merging of Large Language Models", arXiv:2502.02421.
    """
    return jax.tree.map(lambda m, b, s: b + (1 - s * (1 - omega)) * (m - b), merged, base, importance)


def channel_importance(
    config: ModelConfig, params: Params, tokens: Array, positions: Array, segment_ids: Array
) -> Params:
    """Mean ``|activation|`` of every input channel of the layers' matrices over real tokens, its largest set to 1.

    A tree that broadcasts with the parameters, 0 for everything else (embeddings and vectors).

    Raises:
      ValueError: for a mixture of experts.
    """
    if config.experts is not None:
        raise ValueError("a mixture of experts has no one input to its matrices; merge dense models")
    real = (segment_ids > 0)[:, :, None]
    count = jnp.maximum(jnp.sum(real.astype(jnp.float32)), 1.0)
    mask = attention.visible(config, positions, segment_ids, positions, segment_ids)

    def share(x):
        mean = jnp.sum(jnp.where(real, jnp.abs(x), 0.0), axis=(0, 1)) / count
        return (mean / jnp.maximum(jnp.max(mean), 1e-9))[:, None]

    def step(x, layer):
        normed = norm(config, x, layer, "input_norm")
        q, k, v = attention.queries_keys_values(config, layer, normed, positions)
        heads = attention.attention(config, layer, q, k, v, mask, (positions, positions))
        heads = heads.reshape(*x.shape[:2], config.num_heads * config.head_dim)
        mixed = project(heads, layer, "o")
        x = x + (norm(config, mixed, layer, "attention_out_norm") if config.output_norms else mixed)
        fed = norm(config, x, layer, "post_norm")
        act, up = ACTIVATIONS[config.activation], project(fed, layer, "up")
        inner = act(project(fed, layer, "gate")) * up if config.gated_mlp else act(up)
        down = project(inner, layer, "down")
        x = x + (norm(config, down, layer, "mlp_out_norm") if config.output_norms else down)
        inputs = {"q": normed, "k": normed, "v": normed, "o": heads, "gate": fed, "up": fed, "down": inner}
        return x, {name: share(value) for name, value in inputs.items() if name in layer}

    x = decoder.embed(config, decoder.How(), params, tokens, positions, segment_ids)
    found = jax.lax.scan(step, x, decoder.scanned(config, params))[1]
    nothing = jax.tree.map(lambda leaf: jnp.zeros((1,) * leaf.ndim, jnp.float32), params)
    return nothing | {"layers": nothing["layers"] | found}


def sensitivity(params: Params, gradient: Params) -> Float[Array, " L"]:
    """``sum |theta g|`` of every layer, of length 1 over the layers."""
    products = jax.tree.map(lambda p, g: jnp.abs(p * g), params["layers"], gradient["layers"])
    sums = [jnp.sum(x.reshape(x.shape[0], math.prod(x.shape[1:])), axis=1) for x in jax.tree.leaves(products)]
    total = sum(sums[1:], sums[0])
    return total / jnp.maximum(jnp.sqrt(jnp.sum(total**2)), 1e-30)


def sens_merging(
    base: Params, trees: Sequence[Params], sensitivities: Sequence[Array], *, transfer: Sequence[float] | None = None,
    scale: float = 0.7, temperature: float = 2.0,
) -> Params:  # fmt: skip
    """Layer by layer ``base + sum_k a_k delta_k``, ``a = K scale softmax_k(transfer_k sensitivity_k / temperature)``.

    Equal sensitivities give ``task_arithmetic``. What is in no layer has the mean coefficient of its model.

    From "Sens-Merging: Sensitivity-Guided Parameter Balancing for Merging Large Language Models", arXiv:2502.12420.
    Differs from the paper in that the form is a reconstruction, and in the factor K, the number of models.
    """
    worth = jnp.ones((len(trees),), jnp.float32) if transfer is None else jnp.asarray(transfer, jnp.float32)
    scores = jnp.stack(list(sensitivities)) * worth[:, None]
    shares = len(trees) * scale * jax.nn.softmax(scores / temperature, axis=0)  # [K, L]

    def merge(path, ancestor, *leaves):
        inside = any(getattr(part, "key", None) == "layers" for part in path)
        out = ancestor
        for share, leaf in zip(shares, leaves, strict=True):
            own = share.reshape((-1,) + (1,) * (leaf.ndim - 1)) if inside else jnp.sum(share) / share.shape[0]
            out = out + own * (leaf - ancestor)
        return out

    return jax.tree_util.tree_map_with_path(merge, base, *trees)

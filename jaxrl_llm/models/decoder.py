"""One decoder for every family, as pure functions of a parameter tree.

The tree is nested dicts of arrays with the layers stacked on axis 0 and run under ``lax.scan``; the same block
serves scoring, training, prefill and decode. One rule says who attends to whom: same segment, segment > 0, key
position <= query position (and inside the layer's window). Left pads, right pads, packed rows and a cache are all
cases of it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxrl_llm.logprobs import SCORED
from jaxrl_llm.models import cache as caches
from jaxrl_llm.models.attention import (
    AttendFn,
    RotateFn,
    attend,
    attend_after,
    attention,
    before_layers,
    heads_before_layers,
    layer_mask,
    per_layer,
    queries_keys_values,
    repeated,
    rotate,
    rotate_by_product,
    score_scale,
    seen,
    visible,
)
from jaxrl_llm.models.kernels import vocabulary
from jaxrl_llm.models.kernels.attention_cached import TILE, CachedFn
from jaxrl_llm.models.kernels.token_rows import TokenRows
from jaxrl_llm.models.layers import (
    ATTENDED,
    PRODUCT,
    Layer,
    ProductFn,
    forked_norm,
    joined,
    norm,
    plain_product,
    project,
    table_product,
    wide_product,
)
from jaxrl_llm.models.mlp import ExpertsFn, Routed, feed_forward, grouped_experts
from jaxrl_llm.models.paged import paged, seen_by
from jaxrl_llm.models.quantised import opened_for_steps
from jaxrl_llm.models.spec import ModelConfig, cast_at_use, matrix_shapes, parameter_shapes
from jaxrl_llm.types import Params, Policy


def anywhere(x: Array, name: str) -> Array:
    """Activations lie where the compiler puts them."""
    return x


Remat = bool | Callable[..., Any]


kept = jax.checkpoint_policies.save_only_these_names(PRODUCT, ATTENDED)


def rematerialised(step: Callable[..., Any], remat: Remat, kernels: bool = False) -> Callable[..., Any]:
    """A block as it is, recomputed in the backward pass, or recomputed but for what a policy keeps.

    Beside kernels a block whose activations are kept keeps products with weights, and attention: norms, rotations and
    gates are made again out of them. Kept as it is, a block of Qwen3-8B leaves 2.7 GB for 8,192 tokens on a TPU, four
    times its products.
    """
    if not remat:
        return jax.checkpoint(step, policy=kept) if kernels else step
    return jax.checkpoint(step) if remat is True else jax.checkpoint(step, policy=remat)


class How(NamedTuple):
    """How a decoder is computed, which is no part of what it computes; see ``make_policy``."""

    compute_dtype: Any = jnp.float32
    remat: Remat = False
    experts_fn: ExpertsFn = grouped_experts
    attend_fn: AttendFn = attend
    place: Callable[[Array, str], Array] = anywhere
    cached_fn: CachedFn | None = None
    rotate_fn: RotateFn = rotate
    apart: int = caches.UNROLLED  # so few layers are compiled one by one where a cache is extended
    joined: bool = False  # matrices with the same input are one where steps read them
    step_fn: AttendFn | None = None  # of one token of each row to a cache of columns first
    product_fn: ProductFn = plain_product
    token_rows: TokenRows | None = None  # norms, and rotations of heads, as kernels


def init_params(config: ModelConfig, key: Array) -> Params:
    """Draws a parameter tree: normal(0, initializer_range) matrices, norms without effect, zero biases, float32."""
    shapes = parameter_shapes(config)
    matrices = matrix_shapes(config)
    tables = ["embed", *(name for name in ("head", "position_embed") if name in shapes)]
    keys = iter(jax.random.split(key, max(len(matrices) + 2, len(matrices) + len(tables))))
    unit = 0.0 if config.norm == "rms_plus_one" else 1.0

    def leaf(name: str, shape: tuple[int, ...]) -> Array:
        return jnp.full(shape, 0.0 if name.endswith("_bias") else unit, jnp.float32)

    drawn = [*matrices, *tables]  # in this order: a seed gives the same model whatever is added beside
    normal = {
        name: config.initializer_range
        * jax.random.normal(next(keys), shapes["layers"].get(name) or shapes[name], jnp.float32)
        for name in drawn
    }
    layers = {name: normal[name] if name in normal else leaf(name, s) for name, s in shapes["layers"].items()}
    top = {name: normal[name] if name in normal else leaf(name, s) for name, s in shapes.items() if name != "layers"}
    return top | {"layers": layers}


def block(
    config: ModelConfig,
    how: How,
    layer: Layer,
    x: Array,
    attend: Callable[[Array], Array],
    recorded: Array | None = None,
) -> tuple[Array, Routed | None]:
    """Pre-norm block; ``attend`` maps the normed input to the attention output ``[B, S, H, K]``.

    ``recorded``: of a mixture the experts ``[B, S, K]`` to take, see ``models.mlp.route``.
    """
    b, s, _ = x.shape
    x, normed = forked_norm(config, x, layer, "input_norm", how.token_rows)
    heads = attend(normed)
    mixed = project(heads.reshape(b, s, config.num_heads * config.head_dim), layer, "o", how.product_fn)
    x = x + (norm(config, mixed, layer, "attention_out_norm") if config.output_norms else mixed)
    x, normed = forked_norm(config, x, layer, "post_norm", how.token_rows)
    fed, router = feed_forward(config, layer, normed, how.experts_fn, recorded, how.product_fn)
    return how.place(x + (norm(config, fed, layer, "mlp_out_norm") if config.output_norms else fed), "rows"), router


def embed(
    config: ModelConfig, how: How, params: Params, tokens: Array, positions: Array, segment_ids: Array
) -> Float[Array, "B S D"]:
    """The first hidden states."""
    x = params["embed"][how.place(tokens, "tokens")]  # gathered first: its gradient adds up in float32
    x = how.place(how.place(x.astype(how.compute_dtype), "embedded"), "rows")
    if config.scale_embedding:
        x = x * jnp.asarray(config.hidden_size**0.5, how.compute_dtype)
    if config.learned_positions:
        # a position beyond the table is NaN, not the last row; what padding holds does not matter
        rows = jnp.where(segment_ids > 0, positions, 0)
        x = x + params["position_embed"].at[rows].get(mode="fill", fill_value=jnp.nan).astype(how.compute_dtype)
    return x


def scanned(config: ModelConfig, params: Params) -> dict[str, Any]:
    """What ``lax.scan`` runs over: the layers' parameters, and what differs between layers beside them."""
    return params["layers"] | {name: jnp.asarray(x) for name, x in per_layer(config).items()}


# So few layers are compiled one by one: no slower to compile, and no residuals copied in and out of stacked arrays.
def _run(config, how, params, tokens, positions, segment_ids, pages=None, experts=None):
    """Final hidden states."""
    look, distances, segments = how.attend_fn, (positions, positions), (segment_ids, segment_ids)
    if pages is not None:
        look, distances, segments = paged(look, pages), seen_by(positions, pages, 0), seen_by(segment_ids, pages, 0)
    places = (distances[0], segments[0], distances[1], segments[1])
    mask = (visible if how.cached_fn is None else seen)(config, *places)
    if how.token_rows is not None and not how.token_rows.fits(*tokens.shape):
        how = how._replace(token_rows=None)
    rotate_fn = before_layers(config, how.rotate_fn, positions)
    heads_fn = heads_before_layers(config, how.token_rows, positions)

    def step(x, item):
        layer, recorded = item

        def attend(normed):
            q, k, v = queries_keys_values(config, layer, normed, positions, rotate_fn, how.product_fn, heads_fn)
            return attention(config, layer, q, k, v, mask, distances, look)

        return block(config, how, layer, x, attend, recorded)[0], None

    x = embed(config, how, params, tokens, positions, segment_ids)
    step = rematerialised(step, how.remat, how.cached_fn is not None)
    recorded = None if experts is None else caches.by_layer(experts, config.num_layers)
    x, _ = jax.lax.scan(step, x, (scanned(config, params), recorded), unroll=at_once(config, how))
    return norm(config, x, params, "final_norm")


def at_once(config: ModelConfig, how: How) -> int:
    """How many layers one turn of the loop over them computes.

    What a layer keeps for the backward pass is copied into a stack and out of it by a loop: 21 of the 207 ms of an
    update of Qwen3-1.7B on v5e:2x4. Beside kernels, where not everything is recomputed, few enough layers are therefore
    compiled one by one; see ``cache.UNROLLED_BESIDE_KERNEL`` for what that costs.
    """
    return config.num_layers if config.num_layers <= (caches.UNROLLED if how.remat else how.apart) else 1


def _hidden(config, how, params, tokens, positions, segment_ids, experts=None):
    return _run(config, how, params, tokens, positions, segment_ids, experts=experts)


def _hidden_pages(config, how, params, tokens, positions, segment_ids, pages, experts=None):
    return _run(config, how, params, tokens, positions, segment_ids, pages, experts)


def _hidden_groups(config, how, params, prompts, responses):
    """``Policy.hidden_groups``: a prompt's keys and values are computed once and seen by all responses of its group."""
    times = responses[0].shape[0] // prompts[0].shape[0]
    before = [jnp.repeat(x, times, axis=0) for x in prompts[1:]]
    alone, across, own = (
        (visible(config, *mine[1:], *theirs), (mine[1], theirs[0]))
        for mine, theirs in ((prompts, prompts[1:]), (responses, before), (responses, responses[1:]))
    )
    attend_both = attend_after if how.attend_fn is attend else repeated(how.attend_fn)
    settings = {"scale": score_scale(config), "softcap": config.attention_softcap}

    def step(carry, layer):
        x, y = carry
        read = []

        def look(normed):
            q, k, v = queries_keys_values(config, layer, normed, prompts[1], how.rotate_fn, how.product_fn)
            read.extend((k, v))
            return attention(config, layer, q, k, v, *alone, how.attend_fn)

        def follow(normed):
            q, k, v = queries_keys_values(config, layer, normed, responses[1], how.rotate_fn, how.product_fn)
            mask, before_mask = layer_mask(layer, *own), layer_mask(layer, *across)
            return attend_both(q, k, v, mask, *read, before_mask, **settings)

        return (block(config, how, layer, x, look)[0], block(config, how, layer, y, follow)[0]), None

    first = tuple(embed(config, how, params, *part) for part in (prompts, responses))
    step = rematerialised(step, how.remat, how.cached_fn is not None)
    found, _ = jax.lax.scan(step, first, scanned(config, params), unroll=at_once(config, how))
    return tuple(norm(config, x, params, "final_norm") for x in found)


def _unstacked(config: ModelConfig, how: How, params: Params) -> Params:
    """Few layers apart, as ``_extend`` takes them: within a loop each would be cut out of its stack at every step."""
    if config.num_layers > how.apart or isinstance(params["layers"], tuple):
        return params
    layers = scanned(config, params)
    return params | {"layers": tuple(jax.tree.map(lambda a, i=i: a[i], layers) for i in range(config.num_layers))}


def as_used(config: ModelConfig, params: Params, compute_dtype: Any) -> Params:
    """The same parameters with matrices and tables in the dtype that computes: new arrays where it is another."""
    narrow = cast_at_use(config)

    def cast(tree: Params) -> Params:
        return {
            name: x.astype(compute_dtype) if name in narrow and isinstance(x, jax.Array) else x
            for name, x in tree.items()
        }

    layers = params["layers"]
    layers = tuple(map(cast, layers)) if isinstance(layers, tuple) else cast(layers)
    return cast(params) | {"layers": layers}


def _for_steps(config: ModelConfig, how: How, params: Params) -> Params:
    """``Policy.unstack``."""
    if isinstance(params["layers"], dict):
        params = params | {"layers": opened_for_steps(params["layers"])}
    params = _unstacked(config, how, params)
    if not how.joined or not isinstance(params["layers"], tuple):
        return params
    params = as_used(config, params, how.compute_dtype)
    return params | {"layers": tuple(map(joined, params["layers"]))}


def _filled(key_segments: Array, end: Array | int) -> Array:
    """So many columns of a cache may be seen: up to ``end``, or behind it where columns are written in a ring."""
    columns = jnp.arange(1, key_segments.shape[1] + 1, dtype=jnp.int32)[None, :]
    return jnp.maximum(jnp.max(jnp.where(key_segments > 0, columns, 0)), end)


def _as_it_comes(product_fn):
    """Products whose results nobody wants in another order of axes. What is done with heads asks for one, and a TPU's
    compiler passes the wish on to the matrix: in a loop over layers it is then copied out of its stack, at every token.
    Qwen3-32B on v5e:8x8, tensor=8: 18.9 ms a token by the compiler's count, with copies 20.7.
    """
    return lambda *given: jax.lax.optimization_barrier(product_fn(*given))


def _extend(config, how, params, cache, tokens, positions, segment_ids, column):
    put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=column, axis=1)
    key_segments = put(cache["segment_ids"], segment_ids)
    key_positions = put(cache["positions"], positions)
    in_place = None if isinstance(cache["k"], tuple) else how.cached_fn
    few = tokens.shape[1] == 1
    first = in_place is not None and not few and isinstance(column, int) and column == 0  # nothing is in the cache
    room = -tokens.shape[1] % TILE  # a cache with no other columns is made out of the layers' keys and values
    made = first and cache["k"].shape[3] == tokens.shape[1] + room
    keys = (positions, segment_ids) if first else (key_positions, key_segments)
    mask = (visible if how.cached_fn is None or few else seen)(config, positions, segment_ids, *keys)
    filled = None if in_place is None or first else _filled(key_segments, column + tokens.shape[1])
    looped = not isinstance(params["layers"], tuple) and not isinstance(cache["k"], tuple)
    product_fn = _as_it_comes(how.product_fn) if looped and in_place and few else how.product_fn

    def step(carry, item):
        x, stored = carry  # the whole cache is carried, so that only the new columns are written
        (layer, index), new = item, None

        def attend(normed):
            nonlocal stored, new
            q, k, v = queries_keys_values(config, layer, normed, positions, how.rotate_fn, product_fn)
            if in_place:
                new, read = caches.stored(cache, "k", k) | caches.stored(cache, "v", v), how.attend_fn
                if made:
                    new = {name: caches.with_room(x, room).astype(cache[name].dtype) for name, x in new.items()}
                else:
                    stored, new = caches.put(stored, new, index, column), None
                if not first:
                    scales = {name: stored[name] for name in ("k_scale", "v_scale") if name in stored}
                    read = partial(in_place, layer=index, filled=filled, **scales)
                    k, v = stored["k"], stored["v"]
            else:
                first_columns = how.step_fn is not None and isinstance(cache["k"], tuple)
                read = how.step_fn if first_columns and few else how.attend_fn
                stored, k = caches.write(stored, "k", k, index, column, first_columns)
                stored, v = caches.write(stored, "v", v, index, column, first_columns)
            return attention(config, layer, q, k, v, mask, (positions, keys[0]), read)

        x, routed = block(config, how, layer, x, attend)
        return (x, stored), (new, None if routed is None else routed.chosen)

    x = embed(config, how, params, tokens, positions, segment_ids)
    stored = {} if made else {name: array for name, array in cache.items() if name not in caches.ROWS_FIRST}
    if looped:
        indices = jnp.arange(config.num_layers, dtype=jnp.int32)
        (x, stored), (new, chosen) = jax.lax.scan(step, (x, stored), (scanned(config, params), indices))
    else:
        layers = []
        for index, layer in enumerate(_unstacked(config, how, params)["layers"]):
            (x, stored), more = step((x, stored), (layer, index))
            layers.append(more)
        new, chosen = jax.tree.map(lambda *parts: jnp.stack(parts), *layers)
    stored = dict(new) if made else stored
    if config.experts is not None:
        old = cache[caches.EXPERTS]
        chosen = jnp.moveaxis(chosen, 0, 2).reshape(*tokens.shape, -1)
        stored |= {caches.EXPERTS: put(old, chosen.astype(old.dtype))}
    cache = stored | {"segment_ids": key_segments, "positions": key_positions}
    return norm(config, x, params, "final_norm"), cache


def _unembed(config, how, params, hidden):
    """Logits in float32 (the product accumulates in float32); padded vocabulary rows are -inf."""
    hidden, tied = how.place(how.place(hidden, "chunk"), "unembedded"), config.tie_embeddings
    weight = how.place(params["embed"], "table") if tied else how.place(params["head"], "head")
    product = wide_product if how.cached_fn is None and hidden.dtype != jnp.float32 else table_product
    logits = how.place(product(hidden, weight, tied), "logits")
    if config.final_softcap is not None:
        logits = config.final_softcap * jnp.tanh(logits / config.final_softcap)
    if config.padded_vocab_size == config.vocab_size:
        return logits
    real = jnp.arange(config.padded_vocab_size) < config.vocab_size
    return jnp.where(jnp.reshape(real, (1,) * (logits.ndim - 1) + (-1,)), logits, -jnp.inf)


def _scored(config, how, sums_fn, params, hidden, targets, temperature):
    """``Policy.scored``: sums of a kernel forward; backward the logits are made again, and with what was kept of each
    token, its normaliser and entropy, their gradient needs no further pass over them.
    """
    name = "embed" if config.tie_embeddings else "head"
    head = vocabulary.Head(config.vocab_size, config.tie_embeddings, config.final_softcap, float(temperature))

    @jax.custom_vjp
    def run(table, hidden, targets):
        return forward(table, hidden, targets)[0]

    def forward(table, hidden, targets):
        placed = how.place(table, "table" if config.tie_embeddings else "head").astype(hidden.dtype)
        sums = sums_fn(head, how.place(how.place(hidden, "chunk"), "unembedded"), placed, targets)
        logp, entropy = vocabulary.logp_and_entropy(sums)
        kept = (checkpoint_name(x, SCORED) for x in (sums.top + jnp.log(sums.total), entropy))
        return (logp, entropy), (table, hidden, targets, *kept)

    def backward(kept, slopes):
        table, hidden, targets, normaliser, entropy = kept

        def logits_of(table, hidden):
            return _unembed(config, how, {name: table}, hidden) / temperature

        logits, pull = jax.vjp(logits_of, table, hidden)
        logp = logits - normaliser[..., None]
        weights, logp = jnp.exp(logp), jnp.where(jnp.isfinite(logp), logp, 0.0)
        of_logp, of_entropy = (x[..., None] for x in slopes)
        picked = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == targets[..., None]
        slope = jnp.where(picked, of_logp, 0.0) - weights * (of_logp + of_entropy * (logp + entropy[..., None]))
        return (*pull(slope), None)

    run.defvjp(forward, backward)
    return run(params[name], hidden, targets)


def make_policy(
    config: ModelConfig,
    *,
    compute_dtype: Any = jnp.float32,
    remat: Remat = False,
    experts_fn: ExpertsFn = grouped_experts,
    attend_fn: AttendFn = attend,
    place: Callable[[Array, str], Array] = anywhere,
    cache_dtype: Any = None,
    cached_fn: CachedFn | None = None,
    rows_fn: caches.RowsFn | None = None,
    sums_fn: vocabulary.SumsFn | None = None,
    layout: caches.DeviceLayout | None = None,
    product_fn: ProductFn = plain_product,
    devices: caches.Devices | None = None,
    token_rows: TokenRows | None = None,
) -> Policy:
    """Builds the decoder of ``config`` as a ``Policy``.

    Args:
      config: the shape, see ``ModelConfig``.
      compute_dtype: dtype of activations and of the matrices at use; parameters stay as they are stored
        (float32 masters). Norms, rotary angles, softmax and logits are float32 in any case.
      remat: recompute each block in the backward pass instead of keeping its activations; or one of
        ``jax.checkpoint_policies``, which says what is kept: ``dots_with_no_batch_dims_saveable`` keeps the products
        with weights and recomputes attention, norms and activations.
      experts_fn: how a mixture of experts is computed, ``models.mlp.grouped_experts`` or ``dense_experts``.
      attend_fn: how attention is computed, with the arguments of ``models.attention.attend``.
      place: where activations lie on a mesh, by name: ``distributed.rules.make_place``.
      cache_dtype: keys and values are kept as numbers of a byte (``int8`` or ``float8_e4m3fn``) with a scale for every
        head and column, half the memory of bfloat16; what samples is then a little off what trains, and
        ``sampler_logp`` is of what sampled. None: in the compute dtype.
      cached_fn: how a cache of stacked layers is read, see ``models.kernels.attention_kernels.make_cached``; None: a
        layer's part is cut out and given to ``attend_fn``.
      rows_fn: how rows of such a cache are repeated for a group into one with more columns,
        ``models.kernels.attention_kernels.make_rows``; only with ``cached_fn``.
      sums_fn: how tokens are scored without their logits, ``models.kernels.attention_kernels.make_sums``; None: by
        ``unembed``.
      layout: how a cache, weights and logits lie where there is no ``cached_fn``,
        ``models.kernels.attention_kernels.make_layout``; None: as is best on a CPU.
      product_fn: how products with the matrices of attention and of a dense feed-forward part are computed,
        ``distributed.scattered_sums.make_product``.
      devices: of the mesh, on which a deep model that decodes beside ``cached_fn`` may have a second copy of its
        matrices; None: one whose memory is not known.
      token_rows: how norms and rotations of whole rows are computed,
        ``models.kernels.attention_kernels.make_token_rows``; None: by the compiler, as where a cache is extended.
    """
    layout = layout or caches.DeviceLayout(caches.UNROLLED)
    apart = layout.apart if cached_fn is None else caches.UNROLLED_BESIDE_KERNEL
    layout = layout if cached_fn is None else caches.DeviceLayout(0, TILE)  # the kernel reads a stack
    rotate_fn = rotate if cached_fn is None else rotate_by_product
    short = cache_dtype is None and jnp.dtype(compute_dtype).itemsize == 2
    if place is not anywhere:  # each device of a mesh has a part of every matrix, and of every head
        layout = layout._replace(joined=False, step_fn=None)
    layout = layout._replace(step_fn=layout.step_fn if short else None)
    by_compiler = How(
        compute_dtype, remat, experts_fn, attend_fn, place, cached_fn, rotate_fn, apart, layout.joined, layout.step_fn,
        product_fn,
    )  # fmt: skip
    how = by_compiler._replace(token_rows=token_rows)
    deep = caches.steps_apart(config, compute_dtype, devices or caches.Devices(0.0))
    steps = how if cached_fn is None else how._replace(apart=config.num_layers if deep else caches.UNROLLED_STEPS)
    looped = how._replace(apart=caches.UNROLLED)  # nothing is kept of a layer: no stack of it to copy into

    return Policy(
        init=partial(init_params, config),
        hidden=partial(_hidden, config, how),
        unembed=partial(_unembed, config, how),
        init_cache=partial(caches.init_cache, config, compute_dtype, cache_dtype, layout),
        extend=partial(_extend, config, by_compiler),
        repeat_cache=caches.repeat_cache,
        scored=None if sums_fn is None else partial(_scored, config, how, sums_fn),
        grow_cache=None if rows_fn is None else partial(caches.grow_cache, rows_fn, TILE),
        vocab_size=config.padded_vocab_size,
        experts=config.experts,
        scored_at_once=layout.scored,
        hidden_groups=partial(_hidden_groups, config, by_compiler),
        unstack=partial(_for_steps, config, steps),
        hidden_pages=partial(_hidden_pages, config, how),
        hidden_alone=None if cached_fn is None else partial(_hidden, config, looped),
    )

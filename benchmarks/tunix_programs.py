"""Tunix's programs of a GRPO step as phases, to be compiled for a TPU like ours: see ``tpu_schedule.py --tunix``.

Needs ``pip install google-tunix==0.1.7`` beside ``jaxrl_llm[plan]``. Only its public models, its GRPO loss and its own
layouts are used; weights are float32 and computing bfloat16 in training, both bfloat16 in sampling, as in ours.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm.planning.phases import Phase

CONFIGS = {  # their folder, and the name there
    "Qwen3-0.6B": ("qwen3", "qwen3_0p6b"),
    "Qwen3-1.7B": ("qwen3", "qwen3_1p7b"),
    "Qwen3-8B": ("qwen3", "qwen3_8b"),
    "Qwen3-32B": ("qwen3", "qwen3_32b"),
    "Llama-3-8B": ("llama3", "llama3p1_8b"),
    "Llama-3-70B": ("llama3", "llama3_70b"),
}


class _Model:
    """One of its models as shapes, with the axes of its weights."""

    def __init__(self, name: str, samples: bool, **settings: Any) -> None:
        import importlib

        from flax import nnx

        folder, config = CONFIGS[name]
        models = importlib.import_module(f"tunix.models.{folder}.model")
        layout = models.ShardingConfig.get_default_sharding(is_sampling=samples)
        known = {field.name for field in dataclasses.fields(models.ModelConfig)}
        if remat := settings.pop("remat", None):
            settings["remat_config"] = getattr(models.RematConfig, remat)
        given = {key: value for key, value in settings.items() if key in known}  # its Llama has no types
        self.config = dataclasses.replace(getattr(models.ModelConfig, config)(), shd_config=layout, **given)
        model = nnx.eval_shape(lambda: getattr(models, folder.capitalize())(self.config, rngs=nnx.Rngs(0)))
        self.graph, self.state = nnx.split(model)
        self.specs = nnx.get_partition_spec(self.state)

    def weights(self, mesh: Mesh, dtype: Any) -> Any:
        """Its weights as shapes on a mesh."""
        return jax.tree.map(
            lambda x, spec: jax.ShapeDtypeStruct(x.shape, dtype, sharding=NamedSharding(mesh, spec)),
            self.state,
            self.specs,
        )

    def bound(self, state: Any) -> Any:
        """The model with these weights."""
        from flax import nnx

        return nnx.merge(self.graph, state)


def _rows(mesh: Mesh, shape: tuple[int, ...], dtype: Any, *axes: str | None) -> jax.ShapeDtypeStruct:
    """An array whose first axis is divided, and those named."""
    spec = P("fsdp", *axes, *[None] * (len(shape) - 1 - len(axes)))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


class _Within(Phase):
    """Lowered in the mesh, which its models read."""

    def lower(self) -> jax.stages.Lowered:
        mesh = jax.tree.leaves(self.arguments)[0].sharding.mesh
        with mesh:
            return super().lower()


def update(name: str, devices: Any, rows: int, prompt: int, response: int) -> Phase:
    """The GRPO loss of its learner, gradient and AdamW, decoder layers recomputed, ``fsdp`` over all devices."""
    from tunix.rl import algo_core
    from tunix.rl.grpo import grpo_learner

    mesh = Mesh(np.array(devices).reshape(len(devices), 1), ("fsdp", "tp"))
    model = _Model(name, False, remat="DECODER", use_flash_attention=True, dtype=jnp.bfloat16)
    optimizer = optax.adamw(1e-6)
    settings = grpo_learner.GRPOConfig(beta=0.0, num_generations=8)
    object.__setattr__(settings, "temperature", 1.0)  # its learner copies that of the rollout

    def loss(state: Any, batch: dict[str, jax.Array]) -> Any:
        example = grpo_learner.TrainExample(
            prompt_ids=batch["prompt"], prompt_mask=batch["prompt_mask"], completion_ids=batch["response"],
            completion_mask=batch["response_mask"], advantages=batch["advantages"], ref_per_token_logps=None,
            old_per_token_logps=batch["logp"],
        )  # fmt: skip
        return algo_core.grpo_loss_fn(model.bound(state), example, settings, 0, 2)

    def step(state: Any, optimizer_state: Any, batch: dict[str, jax.Array]) -> Any:
        (value, _), gradients = jax.value_and_grad(loss, has_aux=True)(state, batch)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state, state)
        return optax.apply_updates(state, updates), optimizer_state, value

    weights = model.weights(mesh, jnp.float32)
    moments = jax.eval_shape(optimizer.init, weights)
    # moments lie where their weights do; the count of steps has no shape of theirs
    layouts = {x.shape: x.sharding for x in jax.tree.leaves(weights)}
    whole = NamedSharding(mesh, P())
    moments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layouts.get(x.shape, whole)), moments
    )
    integers, floats = jnp.int32, jnp.float32
    batch = {
        "prompt": _rows(mesh, (rows, prompt), integers), "prompt_mask": _rows(mesh, (rows, prompt), integers),
        "response": _rows(mesh, (rows, response), integers), "response_mask": _rows(mesh, (rows, response), integers),
        "advantages": _rows(mesh, (rows,), floats), "logp": _rows(mesh, (rows, response), floats),
    }  # fmt: skip
    return _Within(step, (weights, moments, batch), (0, 1))


def decode(name: str, devices: Any, rows: int, length: int, tensor: int) -> Phase:
    """One greedy token at a cache of this length, in its layout of sampling: weights whole on each part of ``tp``."""
    mesh = Mesh(np.array(devices).reshape(len(devices) // tensor, tensor), ("fsdp", "tp"))
    model = _Model(name, True, dtype=jnp.bfloat16)
    config = model.config
    stored = _rows(mesh, (rows, length, config.num_kv_heads, config.head_dim), jnp.bfloat16, None, "tp")
    ends = _rows(mesh, (rows,), jnp.int32)
    cache = {f"layer_{i}": {"k": stored, "v": stored, "end_index": ends} for i in range(config.num_layers)}

    def step(state: Any, tokens: jax.Array, positions: jax.Array, cache: Any, mask: jax.Array) -> Any:
        logits, cache = model.bound(state)(tokens, positions, cache, mask)
        return jnp.argmax(logits[:, -1], -1), cache

    one = _rows(mesh, (rows, 1), jnp.int32)
    mask = _rows(mesh, (rows, 1, length), jnp.bool_)
    return _Within(step, (model.weights(mesh, jnp.bfloat16), one, one, cache, mask), (3,))


def phase(name: str, what: str, devices: Any, *, rows: int, prompt: int, response: int, tensor: int) -> Phase:
    """``update``, or ``decode`` with a cache of all columns."""
    if what == "update":
        return update(name, devices, rows, prompt, response)
    return decode(name, devices, rows, prompt + response, tensor)

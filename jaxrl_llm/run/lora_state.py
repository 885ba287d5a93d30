"""LoRA in a job: a loaded model with an adapter beside it, and what of its state is kept."""

import pathlib

import jax
import jax.numpy as jnp

from jaxrl_llm.distributed import hosts
from jaxrl_llm.models import lora, quantised
from jaxrl_llm.models.layers import LORA_A
from jaxrl_llm.models.lora import Lora
from jaxrl_llm.run.parts import Model
from jaxrl_llm.train.step import trained_part, with_trained
from jaxrl_llm.types import Params, Policy, TrainState

PART = "lora"  # of the parameters: what trains


def with_adapter(model: Model, rank: int, seed: int, *, base: str = "") -> Model:
    """The model with a fresh adapter of ``rank`` on every matrix that can carry one; rank 0: the model itself.

    Args:
      base: one of ``quantised.BASES``, what the matrices beside the adapter are kept in; empty: as they are.
    """
    if not rank:
        return model
    if base:
        kept = quantised.quantise(model.config, model.params, base, block=quantised.BLOCK)
        model = model._replace(params=kept)
    spec = Lora(rank, targets=lora.targets_of(model.config))
    adapter = lora.init(model.config, spec, jax.random.fold_in(jax.random.key(seed), 0x10A))
    policy = lora.make_policy(model.policy, model.config, spec)
    return model._replace(policy=policy, params={"base": model.params, PART: adapter})


def adapter_alone(model: Model) -> Model:
    """The same model whose parameters are the adapter: the base is part of the functions, and every copy is small.

    A copy with an adapter that says nothing (``B`` zero) is the model that was loaded: a reference costs nothing. What
    is compiled holds the base as constants, see ``hoists``.
    """
    base = model.params["base"]

    def beside(function):
        def with_base(adapter, *rest, **named):  # what ``unstack`` made is whole already
            return function(adapter if "layers" in adapter else {"base": base, PART: adapter}, *rest, **named)

        return with_base

    reading = {name: getattr(model.policy, name) for name in lora.READS_PARAMS}
    policy = model.policy._replace(**{name: beside(function) for name, function in reading.items() if function})
    return model._replace(policy=policy, params=model.params[PART])


def hoists() -> bool:
    """Whether what a compiled program closes over is given to it, in place of being written into it.

    JAX reads it when it starts: ``JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS=1``.
    """
    return bool(getattr(jax.config, "jax_use_simplified_jaxpr_constants", False))


def rank_of(params: Params) -> int:
    """The rank of the adapter in the parameters of a policy; 0 where there is none."""
    adapter = params.get(PART, {}) if isinstance(params, dict) else {}
    return next((x.shape[-1] for name, x in adapter.items() if name.endswith(LORA_A)), 0)


def computed(model: Model, rank: int, policy: Policy) -> Model:
    """The same model run by another policy of its config: that of another mesh, or of one device."""
    if rank:
        policy = lora.make_policy(policy, model.config, Lora(rank, targets=lora.targets_of(model.config)))
    return model._replace(policy=policy)


def kept(state: TrainState, rank: int) -> TrainState:
    """What a checkpoint holds: all of the state, or with an adapter the state without the base."""
    return state._replace(params=trained_part(state.params, PART)) if rank else state


def whole(state: TrainState, params: Params, rank: int) -> TrainState:
    """``kept`` undone: the base comes from ``params``, the model that was loaded."""
    return state._replace(params=with_trained(params, state.params, PART)) if rank else state


def save(folder: pathlib.Path, model: Model, params: Params, rank: int) -> Params:
    """Writes the adapter in PEFT's format to ``folder`` and returns the merged ones on the host; rank 0: ``params``.

    A family that stores several matrices as one (Phi-3, GPT-2) has no adapter file, nor has an adapter that was trained
    on top of another one, whose base lies in no folder: the merged model is complete.
    """
    if not rank:
        return params
    spec = Lora(rank, targets=lora.targets_of(model.config))
    trained = jax.tree.map(jnp.asarray, params[PART])
    if not model.merged and not lora.fused(model.config, spec.targets):
        lora.save(folder, model.config, spec, trained, base_model=str(model.folder))
        if quantised.in_few_bits(params["base"]):
            hosts.say(f"the adapter was trained beside a base in few bits: on the weights of {model.folder} it is "
                      "another model than the one that was measured, which is written whole, too")  # fmt: skip
    return lora.merge_on_host(quantised.on_host(params["base"]), trained, spec.scale)

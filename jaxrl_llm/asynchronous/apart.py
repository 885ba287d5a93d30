"""Rollouts on a mesh of their own, beside the mesh that trains: weights go from device to device while updates run."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl_llm.asynchronous.threads import Apart
from jaxrl_llm.distributed import direct_transfer, rules
from jaxrl_llm.distributed import mesh as meshes
from jaxrl_llm.distributed.compiler_options import jit_sampling
from jaxrl_llm.train import online
from jaxrl_llm.train.online import Drawn, Online
from jaxrl_llm.train.step import trained_part
from jaxrl_llm.types import Params, Rewards, TrainState


def make_apart(
    method: Online, generator: Online, before: Mesh, after: Mesh, prepare: Callable[[Params], Params] | None = None
) -> Apart:
    """The generator's half of a loop whose other half is ``train.host.make_host_loop(method)`` on ``before``.

    From "LlamaRL: A Distributed Asynchronous Reinforcement Learning Framework for Efficient Large-scale LLM Training",
    arXiv:2505.24034 (DDMA), with ``direct_transfer`` in the place of its transport. Differs from the paper in that one
    copy of the weights is made where they train, so that the next update need not wait until they have left.

    Args:
      method: what trains; its actor's parameters travel, and nothing else of the optimiser or the extras. The base of
        an adapter travels once.
      generator: the same method made for ``after``; its rollout alone is used.
      before: the mesh that trains.
      after: the mesh that generates, of other devices of this process.
      prepare: what travels in the place of the parameters, see ``rollout_weights.travelling``.

    Raises:
      ValueError: for meshes that share a device.
    """
    if shared := set(before.devices.flat) & set(after.devices.flat):
        raise ValueError(f"both meshes have {sorted(shared, key=lambda d: d.id)[0]}; rollouts apart need others")

    def read(state: TrainState) -> TrainState:
        params = method.actor(state)
        return state._replace(params=params if prepare is None else prepare(params), opt_state=(), extras={})

    def changed(state: TrainState) -> TrainState:
        acting = read(state)
        return acting._replace(params=trained_part(acting.params, method.trained))

    shapes: list[Any] = []  # of the bytes that travel, counted once

    def sent_bytes(state: TrainState) -> int:
        if not shapes:
            there = jax.eval_shape(changed, state)
            here = rules.shardings(there, before)
            shapes.append(direct_transfer.sent_bytes(there, here, rules.shardings(there, after)))
        return shapes[0]

    def back(given: tuple[Drawn, Rewards]) -> tuple[Drawn, Rewards]:
        drawn, rewards = given
        everywhere, rows = meshes.replicated(before), drawn.trajectories.tokens.shape[0]
        split = everywhere if rows % meshes.batch_parts(before) else meshes.batch_sharding(before)

        def to(sharding: Any, tree: Any) -> Any:
            there = jax.tree.map(lambda x: sharding if x.ndim and x.shape[0] == rows else everywhere, tree)
            return direct_transfer.send(tree, there)

        ids, sampler = to(everywhere, (drawn.ids, drawn.sampler))
        trajectories, rewards = to(split, (drawn.trajectories, rewards))
        return drawn._replace(ids=ids, sampler=sampler, trajectories=trajectories), rewards

    begin = jit_sampling(partial(online.begin, generator._replace(actor=online.current_params)))
    to = partial(rules.shardings, mesh=after)
    send_whole, send_changed = (direct_transfer.make_send(to, what) for what in (read, changed))

    def hand(state: TrainState, whole: bool) -> TrainState:
        return send_whole(state) if whole else send_changed(state)

    return Apart(begin, hand, back, sent_bytes)

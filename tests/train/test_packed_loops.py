"""Runs whose updates are packed are the runs whose updates are not, in few programs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.curriculum.uniform import make_uniform
from jaxrl_llm.jobs import dpo
from jaxrl_llm.losses.preference import dpo_loss
from jaxrl_llm.rollout.generate import generate
from jaxrl_llm.train import host, offline, packing
from jaxrl_llm.train.methods import supervised
from jaxrl_llm.train.methods.prefixes import prefix_trees
from jaxrl_llm.train.methods.supervised import SupervisedRows
from jaxrl_llm.train.offline import Offline
from tests import close
from tests.models_for_tests import nano, small_model
from tests.train import test_loops

N, WIDTH, SIZE, STEPS = 64, 24, 8, 6


def longer(method):
    """Room for responses that few of them need."""
    _, _, _, tokenizer = nano()

    def rollout(params, tokens, valid, keys, ids):
        return generate(
            method.policy, params, tokens, valid, keys, group_size=4, max_new_tokens=40,
            eos_ids=tokenizer.eos_ids, pad_id=tokenizer.pad_id, problem_ids=ids,
        )  # fmt: skip

    return method._replace(rollout=rollout)


def trained(parts, planner=None):
    method = longer(test_loops.online())._replace(microbatches=parts)
    return list(host.iterations(host.make_host_loop(method, planner=planner), test_loops.start(), 2))


padded = functools.cache(trained)


@pytest.mark.parametrize("parts", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("plan", [packing.packed_rows, functools.partial(prefix_trees, block=8)])
def test_a_host_loop_in_layouts_trains_as_the_padded_one(plan, parts):
    seen = []

    def planner(rows, **settings):
        seen.append(plan(rows, **settings))
        return seen[-1]

    found, want = trained(parts, planner), padded(parts)
    sums = close.gradient_sums(test_loops.nano()[2], 32, 32)
    size = max(float(step.metrics["grad/norm"]) for step in want)
    mine, other = found[-1].state.params, want[-1].state.params
    close.assert_same_descent(mine, other, test_loops.RATE, 2, sums, gradient=size)
    for laid, flat in zip(found, want, strict=True):
        assert laid.metrics["update/columns"] < 0.8
        names = ("loss/total", "grad/norm", "policy/entropy", "reward/mean")
        close.assert_same_figures(laid.metrics, {name: flat.metrics[name] for name in names}, 2 * sums)
    # drawing and sampling, advantages, and an update for every shape: the later steps of a shape compile nothing
    shapes = {tuple(jax.tree.leaves(jax.tree.map(np.shape, layout))) for layout in seen}
    assert found[-1].compiled == 2 + len(shapes)
    assert all((layout.pages is None) == (plan is packing.packed_rows) for layout in seen)


@functools.cache
def table(seed: int) -> SupervisedRows:
    rng = np.random.default_rng(seed)
    columns = np.arange(WIDTH)
    length = np.minimum(3 + rng.geometric(0.25, (N, 1)), WIDTH)
    real = columns < length
    tokens = jnp.asarray(rng.integers(2, 20, (N, WIDTH)), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(WIDTH, dtype=jnp.int32), (N, WIDTH))
    return SupervisedRows(tokens, jnp.asarray(real, jnp.int32), positions, jnp.asarray(real & (columns >= 3)))


def texts(parts: int) -> Offline:
    method = supervised.make_supervised(small_model()[0], table(0), rows_per_step=SIZE, tx=optax.sgd(0.1))
    return method._replace(microbatches=parts)


def preferences(parts: int) -> Offline:
    policy, params, _ = small_model()
    rows = {"chosen": table(1), "rejected": table(2)}
    # of another model than the one that trains: else the first margins are rounding, and their sign is chance
    reference = jax.tree.map(lambda x: 0.9 * x, params)
    rows |= {f"ref_{name}": dpo.scored(policy, reference, side) for name, side in rows.items()}
    loss = dpo.make_loss(
        policy, dpo_loss, ("chosen_logp", "rejected_logp", "ref_chosen_logp", "ref_rejected_logp"), 0.1
    )
    return Offline(lambda extras: rows, make_uniform(), SIZE, loss, optax.sgd(0.1),
                   whole=lambda part: jnp.float32(part["chosen"].tokens.shape[0]), microbatches=parts)  # fmt: skip


@pytest.mark.parametrize(("make", "parts"), [(texts, 1), (texts, 2), (preferences, 1),
                                             pytest.param(preferences, 2, marks=pytest.mark.slow)])  # fmt: skip
def test_packed_rows_of_a_table_train_as_padded_ones(make, parts):
    method = make(parts)
    shapes = set()

    def planner(rows, **settings):
        layout = packing.packed_rows(rows, **settings)
        shapes.add(layout.source.shape[1])
        return layout

    def trained(**settings):
        run = offline.make_run(method, STEPS // 2, **settings)
        state = offline.init_state(method, jax.tree.map(jnp.copy, small_model()[1]), jax.random.key(3))
        state, first = run(state)
        state, second = run(state)
        return state, jax.tree.map(lambda *x: np.concatenate(x), first, second), run

    packed, figures, run = trained(planner=planner)
    padded, want, _ = trained()
    sums, size = close.gradient_sums(small_model()[2], SIZE, WIDTH), float(want["grad/norm"].max())
    close.assert_same_descent(packed.params, padded.params, 0.1, STEPS, sums, gradient=size)
    assert int(packed.step) == STEPS
    assert max(shapes) < SIZE // parts  # fewer rows were computed
    close.assert_same_figures(figures, want, 2 * sums)
    assert run._cache_size() <= 3  # the draws, and one program or two for the stretches


def test_on_a_mesh():
    """Rows of a layout divide over the devices, and are as many as divide."""
    from jaxrl_llm.distributed import mesh as meshes
    from jaxrl_llm.distributed import rules
    from jaxrl_llm.models.decoder import make_policy
    from jaxrl_llm.train.methods import builders

    mesh = meshes.parse_mesh("data=2,fsdp=2")
    _, params, config = small_model()
    policy = make_policy(config, place=rules.make_place(mesh))
    rows = jax.tree.map(lambda x: x[:32], table(0))
    layout = packing.only_part(packing.packed_rows(packing.rows_of(jax.tree.map(np.asarray, rows)), shards=4))
    assert layout.source.shape[0] % 4 == 0 and layout.source.shape[0] < 32
    weight = jnp.where(rows.mask, jax.random.normal(jax.random.key(5), rows.mask.shape), 0.0)

    def value(policy):
        def f(params, rows):
            return jnp.sum(weight * jnp.where(rows.mask, builders.score_tokens(policy, params, rows)[0], 0.0))

        return jax.jit(jax.value_and_grad(f))

    found = value(policy)(rules.shard(params, mesh), rows._replace(layout=layout))
    want = value(small_model()[0])(params, rows)
    close.assert_same_sums(found, want, close.gradient_sums(config, *rows.mask.shape))


def test_what_takes_no_layout_is_left_alone():
    method = test_loops.online()
    assert packing.takes(method.loss)
    plain = method._replace(loss=lambda params, batch: method.loss(params, batch))
    assert not packing.takes(plain.loss)
    loop = host.make_host_loop(plain, planner=lambda *given, **settings: pytest.fail("nothing is planned"))
    assert nano()[0] is method.policy and len(list(host.iterations(loop, test_loops.start(), 1))) == 1

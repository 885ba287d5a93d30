"""Experiments in parts and over devices: ``--microbatches`` and ``--mesh`` change how a step is computed, not what."""

import importlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from experiments.efficiency import hawkeye, l2s_merging
from experiments.policy_gradient import agro, dr_grpo, high_entropy_tokens
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.distributed import mesh as meshes
from jaxrl_llm.distributed import rules
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import arms, cli, compare, recipes
from jaxrl_llm.experiment.durable import Keeping, SeedRun
from jaxrl_llm.run import bench
from jaxrl_llm.run import parts as job
from jaxrl_llm.train import online as methods
from jaxrl_llm.train import plan as plans
from jaxrl_llm.train.online import Online
from jaxrl_llm.train.step import accumulate
from jaxrl_llm.types import Trajectories
from jaxrl_llm.verifiers.verdict import Verdict
from tests import close
from tests.experiments.test_smoke import FILES, _ids, _name
from tests.models_for_tests import nano

FAMILIES = ("policy_gradient", "efficiency", "curriculum", "systems", "reward_models")
OURS = [p for p in FILES if p.parent.name in FAMILIES or p.stem == "openagi"]


def _smoke(module, **changes):
    base = arms.preset(module, smoke=True, model=module.Settings().model)
    settings = arms.resolve(module, base, ())[compare.method_arm(module)]
    return arms.override(settings, changes, "the test")


@pytest.mark.parametrize(
    ("module", "arguments", "said"),
    [
        (dr_grpo, ["--microbatches", "3"], "--microbatches 3 does not divide --prompts-per-step 2; choose a divisor"),
        (
            l2s_merging,
            ["--microbatches", "3"],
            "--microbatches 3 does not divide --prompts-per-step 2 and --rows-per-step 4",
        ),
        (dr_grpo, ["--mesh", "data=2,fsdp=4"], "--prompts-per-step=2 does not divide over .* = 8 devices"),
        (dr_grpo, ["--mesh", "fsdp=two"], "--mesh fsdp=two: fsdp='two' is not a positive number"),
    ],
)
def test_a_number_that_does_not_divide_is_refused_before_a_model_is_loaded(module, arguments, said, monkeypatch):
    monkeypatch.setattr(bench.parts, "load_model", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(UserError, match=said):
        cli.run(module, ["--smoke", *arguments])


@pytest.mark.parametrize(
    ("module", "arguments", "said"),
    [
        (
            high_entropy_tokens,
            ["--arm", "top_20", "--microbatches", "2"],
            r"whole \(its tokens are ranked over the batch",
        ),
        (hawkeye, ["--mesh", "data=2"], "runs on one device .its frozen answerer"),
        (l2s_merging, ["--mesh", "data=2"], "runs on one device .a merge reads"),
    ],
)
def test_a_method_that_cannot_says_so(module, arguments, said):
    with pytest.raises(UserError, match=said):
        cli.run(module, ["--smoke", *arguments])


def test_weights_copies_and_moments_lie_on_the_mesh():
    settings = _smoke(agro, mesh="data=2,fsdp=2")
    plan, up = agro.build(settings), P(None, "fsdp", "tensor")
    assert recipes.bench(settings).model.params["layers"]["up"].sharding.spec == up
    run = SeedRun(plan, 1, settings.mesh, Keeping())
    state = run._begin(0, plan.init(None), jax.random.key(0))
    copies = state.params, state.extras["reference"], state.opt_state[0].mu
    assert [tree["layers"]["up"].sharding.spec for tree in copies] == [up] * 3
    # of the policies of the last updates, stacked, each lies like the parameters
    assert state.extras["behaviour"]["layers"]["up"].sharding.spec == P(None, *up)
    assert len(state.params["layers"]["up"].sharding.device_set) == 4


def test_verdicts_of_a_callback_reach_every_device():
    """Also outside ``jit``: what begins a stage runs there."""
    mesh = meshes.parse_mesh("data=4")
    grid, line = jnp.ones((4, 3), jnp.int32), jnp.arange(4, dtype=jnp.int32)
    rows = Trajectories(grid, grid, grid, grid > 0, grid.astype(jnp.float32), line < 0, line, line)
    problems = [Problem("t", "p", "s", k, 1, "p") for k in range(4)]
    judge = job.make_callback(nano()[3], problems, lambda k, text: Verdict(float(k), k > 0, ""), mesh=mesh)
    rewards = judge((), rules.shard_batch(rows, mesh))
    split = rules.shard_batch(line.astype(jnp.float32), mesh)
    assert (rewards.value + split).tolist() == [0, 2, 4, 6] and rewards.valid.tolist() == [False, True, True, True]


@pytest.mark.slow
@pytest.mark.parametrize("module", [agro, dr_grpo], ids=lambda m: m.__name__.split(".")[-1])
def test_two_steps_on_a_mesh_and_in_parts_measure_what_one_device_measures(module, tmp_path):
    common = ["--smoke", "--arm", compare.method_arm(module), "--seeds", "1", "--prompts-per-step", "4"]
    # of these the model solves some: without a reward Adam would make steps of what is rounding alone
    common += ["--group-size", "4", "--levels", "3", "--data", "chain", "--max-new-tokens", "32"]
    here = cli.run(module, [*common, "--out", str(tmp_path / "one")])
    there = cli.run(
        module, [*common, "--mesh", "data=2,fsdp=2", "--microbatches", "2", "--out", str(tmp_path / "mesh")]
    )
    (one,), (split,) = here.arms.values(), there.arms.values()
    assert one.metrics["grad/norm"][0] > 0.01 and set(one.metrics) == set(split.metrics)
    # The first step by its bound. Behind it lies Adam, which no bound of a sum follows (``close.assert_same_descent``):
    # of the second what is counted, and so tells whether the same responses were drawn and judged alike.
    sums = close.gradient_sums(nano()[2], 16, 64)
    for name, value in one.metrics.items():
        counted = name.startswith(("reward/", "length/", "tokens/", "group/", "eval/"))
        found, wanted = (np.asarray(x) if counted else np.asarray(x)[:1] for x in (split.metrics[name], value))
        close.assert_same_figures({name: found}, {name: wanted}, sums)


@pytest.mark.slow
@pytest.mark.parametrize("path", OURS, ids=_ids)
def test_parts_have_the_gradient_of_the_whole_batch(path):
    """Of every method whose parts are said to add up; every second response is right."""
    module = importlib.import_module(_name(path))
    settings = _smoke(module)
    if hasattr(settings, "prompts_per_step"):
        settings = arms.override(settings, {"prompts_per_step": 4}, "the test")
    plan = module.build(settings)
    stages = [s for s in plan.stages if isinstance(s.method, Online) and not s.method.whole_batch]
    if not stages:
        pytest.skip("no batch that is sampled, or none that can be split")
    stage, key = stages[-1], jax.random.key(0)
    method = plans.in_parts(plan._replace(stages=(stage,)), 2).stages[0].method

    @jax.jit
    def gradients(state):
        drawn = methods.begin(method, state)
        rewards = method.score(methods.answers_of(method, drawn.trajectories), drawn.trajectories)
        turns = (jnp.arange(rewards.value.shape[0]) % 2).astype(jnp.float32)
        batch = method.estimate(state.params, state.extras, drawn.trajectories, rewards._replace(value=turns))
        split = partial(accumulate, method.loss, state.params, batch)
        return split(1)[:2], split(method.microbatches)[:2]

    state = plans.start(stage, plan.init(key), key)
    (grads, loss), (parts, added) = gradients(state)
    shape = jax.eval_shape(lambda state: methods.begin(method, state).trajectories.tokens, state).shape
    size = max(float(jnp.max(jnp.abs(g))) for g in jax.tree.leaves(grads))
    assert size > 1e-4, "there is nothing to learn"
    sums = close.gradient_sums(nano()[2], *shape)
    close.assert_same_sums(added, loss, sums, magnitude=max(1.0, abs(float(loss))))
    close.assert_same_sums(parts, grads, sums)

"""What a run counts where its rows do not show it: replaced groups, places of a pool that nobody filled."""

import jax
import jax.numpy as jnp
import numpy as np

from experiments.curriculum.parts.pool_rollout import make_pool_rollout
from jaxrl_llm.experiment import loop, recipes
from jaxrl_llm.rollout import rollout_cost
from jaxrl_llm.train.online import rollout_metrics
from jaxrl_llm.types import Rewards, Trajectories
from tests.experiment import tiny
from tests.papers import staged


def test_groups_that_were_drawn_again_cost_all_their_draws():
    """Three draws of the first group, one of the second; two tokens each; an unhinted member is not drawn again."""
    outcomes = [[[0, 0, 0], [1, 0, 0]], [[0, 0, 0], [1, 1, 1]], [[1, 1, 0], [1, 1, 1]]]
    for unhinted, drawn in ((0, [3, 3, 3, 1, 1, 1]), (1, [1, 3, 3, 1, 1, 1])):
        slots, _ = staged.scripted(outcomes, group_size=3, unhinted=unhinted)
        rows = staged.run(slots, 2, 3)
        assert rows.extras[rollout_cost.RESPONSES].tolist() == drawn
        assert rows.extras[rollout_cost.TOKENS].tolist() == [staged.NEW * n for n in drawn]
        figures = rollout_metrics(rows, slots["score"](None, rows))
        assert float(figures["rollouts/generated"]) == sum(drawn)
        assert float(figures["tokens/generated"]) == staged.NEW * sum(drawn)
        assert float(figures["length/mean_tokens"]) == staged.NEW  # of what trains


def _rows(values, width=3):
    """One response token a row, whose value is its reward."""
    tokens = jnp.asarray(values, jnp.int32).reshape(-1, 1) * jnp.ones((1, width), jnp.int32)
    grid, line = jnp.zeros(tokens.shape, jnp.int32), jnp.zeros(tokens.shape[0], jnp.int32)
    mask = jnp.broadcast_to(jnp.arange(width) == width - 1, tokens.shape)
    return Trajectories(tokens, grid, grid, mask, grid.astype(jnp.float32), line > 0, line, line)


def _bench():
    def judge(answers, rows):
        return Rewards(rows.tokens[:, -1].astype(jnp.float32), jnp.ones(rows.tokens.shape[0], bool))

    train = recipes.Problems(jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), bool), {}, jnp.zeros(1, jnp.int32))
    return recipes.Bench(None, train, None, judge, None, None, None)


def test_a_pool_costs_what_was_drawn_of_it():
    values = np.array([[0, 1, 0, 0], [0, 0, 0, 1]])
    slots = make_pool_rollout(
        lambda *_: _rows(values),
        _bench(),
        capacity=4,
        drawn=lambda right: jnp.cumsum(right.astype(jnp.int32), axis=1) - right.astype(jnp.int32) < 1,
    )
    rows = slots["rollout"](None, None, None, None, None)
    figures = rollout_metrics(rows, slots["score"]({}, rows))
    assert float(figures["rollouts/generated"]) == float(figures["tokens/generated"]) == 2 + 4


def test_a_record_has_the_drawn_rollouts_where_they_differ():
    settings = tiny.Settings(steps=2, eval_every=2, warm_steps=2)
    plan = tiny.build(settings)
    stage = plan.stages[1]

    def twice(*arguments):
        rows = stage.method.rollout(*arguments)
        tokens = rollout_cost.response_tokens(rows)
        return rollout_cost.with_cost(rows, jnp.full(tokens.shape, 2.0), 3 * tokens)

    one = loop.run_arm(plan, settings, [0, 1])
    plan = plan._replace(stages=(plan.stages[0], stage._replace(method=stage.method._replace(rollout=twice))))
    two = loop.run_arm(plan, settings, [0, 1])
    assert two.rollouts == 2 * one.rollouts
    generated = [np.asarray(x.curves["tokens/generated"]["values"]) for x in (one, two)]
    np.testing.assert_array_equal(generated[1], 3 * generated[0])
    jax.tree.map(np.testing.assert_array_equal, one.curves["eval/accuracy"], two.curves["eval/accuracy"])

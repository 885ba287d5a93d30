"""HAWKEYE: what is handed to the small model, what it costs, and who gets a gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.efficiency import hawkeye
from experiments.efficiency.parts import two_model_relay
from experiments.parts import long_winded
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.data.tasks import chain
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import recipes
from jaxrl_llm.rewards import shaping
from tests import close
from tests.models_for_tests import byte_model
from tests.papers import staged

NEW = 12


@pytest.fixture(scope="module")
def world():
    settings = recipes.OnlineSettings(levels=(2,), train_problems=4, eval_problems=4, max_new_tokens=NEW)
    found = recipes.bench(settings)
    pair = two_model_relay.make_relay(settings)
    reason = jax.jit(two_model_relay.make_reasoner(pair, group_size=2, max_new_tokens=NEW, temperature=1.0))
    keys, ids = jax.random.split(jax.random.key(0), 8), jnp.arange(4, dtype=jnp.int32)
    rows = reason(found.model.params, found.train.tokens, found.train.valid, keys, ids)
    return settings, found, pair, rows


def _texts(found, tokens, keep):
    decode = found.model.tokenizer.decode
    return [decode([int(t) for t in np.asarray(r)[np.asarray(k)]]) for r, k in zip(tokens, keep, strict=True)]


def test_solutions_without_a_mark_are_refused():
    with pytest.raises(UserError, match="solution without # has no work .*'2\\*3=6,6-1=5'; choose --data chain"):
        long_winded.written_over(Problem("countdown", "cd 1 2 3 5=>", "2*3=6,6-1=5", {}, 3, "k"))


def test_worked_penalty():
    tokens, reference = jnp.array([30.0, 80.0, 10.0]), jnp.full(3, 100.0)
    close.assert_near(shaping.excess_length_penalty(tokens, reference), [0.0, -0.25, 0.0])
    slope = jax.grad(lambda t: jnp.sum(shaping.excess_length_penalty(t, reference)))(tokens)
    close.assert_near(slope, [0.0, -0.01, 0.0])  # nothing pulls below the target
    cost = two_model_relay.price(jnp.array([20.0]), 4.0, large_price=10.0, small_price=1.0)
    assert cost.tolist() == [204.0]


def test_reasoning_ends_at_the_mark_and_is_handed_over_with_one(world):
    _, found, pair, rows = world
    reasoning = _texts(found, rows.tokens, rows.mask)
    assert all(text.count("#") <= 1 and (("#" not in text) or text.endswith("#")) for text in reasoning)
    tokens, valid = two_model_relay.handed_over(pair, rows)
    questions = [p for p in _texts(found, found.train.tokens, found.train.valid) for _ in range(2)]
    given = [q + text.removesuffix("#") + "#" for q, text in zip(questions, reasoning, strict=True)]
    assert _texts(found, tokens, valid) == given
    nothing = two_model_relay.shortened(rows, jnp.zeros(len(rows.mask)))
    assert not nothing.mask.any()
    assert _texts(found, *two_model_relay.handed_over(pair, nothing)) == [q + "#" for q in questions]
    some = two_model_relay.shortened(rows, jnp.full(len(rows.mask), 2.5))
    np.testing.assert_array_equal(some.mask.sum(1), np.minimum(3, np.asarray(rows.mask.sum(1))))


@pytest.mark.slow
def test_the_small_model_judges_by_its_own_answer_and_gets_no_gradient(world):
    _, found, pair, rows = world
    answers = jax.tree.map(lambda x: x[rows.problem_ids], found.train.answers)
    verdict = two_model_relay.answered(pair, found.model.params, rows, answers)
    assert set(verdict.value.tolist()) <= {0.0, 1.0} and verdict.valid.all()
    reference = two_model_relay.reasoning_tokens(found.model, [staged.problem("p", "1+2=3#3")] * 4)
    assert reference.tolist() == [12.0] * 4  # 1+2=3;1+2=3#
    free = two_model_relay.score_by_answerer(pair, reference, lambda tokens, ref: 0.0 * tokens)
    np.testing.assert_array_equal(free(answers, rows).value, verdict.value)
    priced = two_model_relay.score_by_answerer(pair, reference, shaping.excess_length_penalty)
    length = jnp.sum(rows.mask.astype(jnp.float32), axis=1)
    expected = verdict.value - np.maximum(np.asarray(length) / 12 - 0.3, 0) ** 2
    close.assert_near(priced(answers, rows).value, expected, magnitude=0)

    def total(small):
        return jnp.sum(two_model_relay.answered(pair, small, rows, answers).value)

    grads = jax.grad(total)(found.model.params)
    assert all(not np.asarray(g).any() for g in jax.tree.leaves(grads))


def test_the_measurement_names_the_same_problems(world):
    settings, found, _, _ = world
    heldout = two_model_relay.heldout_problems(settings)
    assert [p.prompt for p in heldout] == _texts(found, found.heldout.tokens, found.heldout.valid)
    assert long_winded.written_over(chain.from_parts([3, 5, 4], "+*", 11)) == "3+5=8,8*4=10;3+5=8,8*4=10#10"
    assert long_winded.written_over(chain.from_parts([3, 5], "+", 11), 3) == "3+5=8;3+5=8;3+5=8#8"
    figures = jax.jit(two_model_relay.measure_of_pair(settings, read_share=0.5))(found.model.params, jax.random.key(0))
    assert set(figures) == {"eval/accuracy", "eval/cut", "eval/alone", "eval/tokens", "eval/share", "eval/cost"}
    assert two_model_relay.measure_of_pair(settings) is two_model_relay.measure_of_pair(settings)


def test_a_smaller_model_answers(tmp_path):
    """nano for tiny: the reasoning is the large model's, the answer the small one's, of the same characters."""
    settings = recipes.OnlineSettings(model="tiny", levels=(2,), train_problems=4, eval_problems=4, max_new_tokens=NEW)
    pair = two_model_relay.make_relay(settings, "nano")
    assert pair.large.config.hidden_size > pair.small.config.hidden_size
    assert two_model_relay.make_relay(settings, "nano") is pair, "loaded once"
    alone = two_model_relay.make_relay(settings)
    assert alone.small is alone.large
    assert alone.large.config == recipes.bench(settings).model.config
    assert two_model_relay.measure_of_pair(settings, answerer="nano") is not two_model_relay.measure_of_pair(settings)
    base = hawkeye.Settings()
    assert (base.model, base.answerer, hawkeye.EMBEDDED["answerer"]) == ("tiny", "", "nano")
    folder = byte_model(tmp_path, "qwen2", max_positions=400)
    with pytest.raises(UserError, match=f"--answerer {folder} has another vocabulary than --model"):
        two_model_relay.make_relay(settings, str(folder))

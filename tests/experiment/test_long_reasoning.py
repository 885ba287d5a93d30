"""The bed of long reasoning: what its judge pays, the arm without a bias, and the base that repeats itself."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.beds import long_reasoning
from experiments.beds.parts import rare_answers
from experiments.parts import long_winded
from jaxrl_llm.data.tasks import chain
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import arms, recipes
from jaxrl_llm.experiment.evidence import fingerprints
from jaxrl_llm.train.methods import builders
from jaxrl_llm.types import Trajectories
from tests import close

ROOM = 64


def _settings(arm="grpo", **changes):
    base = arms.preset(long_reasoning, smoke=True, model="nano")
    return dataclasses.replace(arms.resolve(long_reasoning, base, (arm,))[arm], max_new_tokens=ROOM, **changes)


def _answered(settings):
    """A problem's own solution, the same with its work twice, and a wrong guess."""
    bench, problem = recipes.bench(settings), recipes.solved_problems(settings)[0]
    wrong = f"#{(problem.answer['value'] + 1) % problem.answer['modulus']}"
    texts = [problem.solution, long_winded.written_over(problem), wrong]
    tokenizer, prompt = bench.model.tokenizer, bench.train.tokens[0]
    room = max(len(text) for text in texts) + 1
    tokens, mask = np.zeros((3, len(prompt) + room), np.int32), np.zeros((3, len(prompt) + room), bool)
    for k, text in enumerate(texts):
        said = [*tokenizer.encode(text), tokenizer.eos_ids[0]]
        tokens[k, : len(prompt)] = prompt
        tokens[k, len(prompt) : len(prompt) + len(said)] = said
        mask[k, len(prompt) : len(prompt) + len(said)] = True
    zeros, none = jnp.zeros(tokens.shape, jnp.float32), jnp.zeros(3, jnp.int32)
    rows = Trajectories(jnp.asarray(tokens), jnp.asarray(mask, jnp.int32), jnp.zeros(tokens.shape, jnp.int32),
                        jnp.asarray(mask), zeros, jnp.zeros(3, bool), none, none)  # fmt: skip
    return jax.tree.map(lambda x: x[none], bench.train.answers), rows, [len(text) + 1 for text in texts]


@pytest.mark.parametrize("bias", [0.0, 0.5, 0.75, 1.0])
def test_the_judge_mixes_the_answer_with_the_length(bias):
    settings = _settings(length_bias=bias)
    answers, rows, lengths = _answered(settings)
    found = long_reasoning.build(settings).stages[0].method.score(answers, rows)
    wanted = [(1 - bias) * right + bias * length / ROOM for right, length in zip((1, 1, 0), lengths, strict=True)]
    close.assert_near(found.value, np.asarray(wanted, np.float32))
    assert found.valid.all()
    # what a biased judge prefers: the same work twice, which an exact one does not
    assert (found.value[1] > found.value[0]) == (bias > 0)


def test_problems_are_longer_than_any_that_the_model_has_read():
    settings = _settings()
    assert min(arms.preset(long_reasoning, smoke=False, model="nano").levels) > max(chain.LEVELS)
    assert max(long_reasoning.SHORTER) <= max(chain.LEVELS)
    assert {p.level for p in recipes.solved_problems(settings)} == {6}
    longest = max(len(p.solution) for p in recipes.solved_problems(dataclasses.replace(settings, train_problems=2048)))
    assert longest + 1 <= ROOM, "every solution has room"


def test_without_bias_it_is_plain_reinforce_and_the_dose_does_something():
    healthy = _settings("exact")
    plain = rare_answers.build(healthy)
    assert fingerprints.update_fingerprint(long_reasoning.build(healthy)) == fingerprints.update_fingerprint(plain)
    biased = {x: long_reasoning.build(_settings(x)) for x in ("exact", "bias_50", "bias_60", "grpo")}
    assert not fingerprints.same_updates(biased)
    doses = [long_reasoning.ARMS[x].get("length_bias") for x in ("exact", "bias_50", "bias_60", "grpo")]
    assert doses == [0.0, 0.5, 0.6, None] and _settings().length_bias > 0.6


def test_a_redundant_base_has_learned_to_write_its_work_twice():
    settings = _settings("redundant", warm_steps=6)
    bench = recipes.bench(settings)
    taught = jax.jit(long_reasoning.build(settings).init)(jax.random.key(0))
    shorter = recipes.solved_problems(dataclasses.replace(settings, levels=long_reasoning.SHORTER))
    rows = long_winded.rows_of(bench, shorter, [long_winded.written_over(p) for p in shorter])

    def surprise(params):
        logp, _ = builders.score_tokens(bench.model.policy, params, rows)
        return -float(jnp.sum(jnp.where(rows.mask, logp, 0.0)) / jnp.sum(rows.mask.astype(jnp.float32)))

    assert surprise(taught) < surprise(bench.model.params)
    once = long_reasoning.build(dataclasses.replace(settings, redundancy=1))
    assert once.init(jax.random.key(0)) is bench.model.params, "the model as it is"


def test_what_the_bed_cannot_do_is_said():
    with pytest.raises(UserError, match="is a share of the reward"):
        long_reasoning.build(_settings(length_bias=1.5))
    with pytest.raises(UserError, match="leave --data chain"):
        long_reasoning.build(_settings("redundant", data="countdown", levels=(3,)))

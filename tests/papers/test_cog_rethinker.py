"""Cog-Rethinker: who is asked again, what a refining prompt shows, and what the supervised term learns from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.curriculum.parts import hints
from jaxrl_llm.experiment import recipes
from tests.papers import staged

NEW = 8


def test_worked_stages():
    outcomes = [[[0, 0], [1, 0]], [[0, 1], [1, 1]], [[1, 1], [1, 1]]]  # decomposing helps A; B is solved at once
    slots, _ = staged.scripted(outcomes, group_size=2)
    rows = staged.run(slots, 2, 2)
    assert hints.stage_of(rows).tolist() == [1, 1, 0, 0]
    assert slots["score"](None, rows).value.tolist() == [0.0, 1.0, 1.0, 0.0]


@pytest.fixture(scope="module")
def world():
    """A table of two problems with a plain, a decomposing and a refining stage."""
    settings = recipes.OnlineSettings(train_problems=4, eval_problems=4, max_new_tokens=NEW)
    model = recipes.bench(settings).model
    problems = [staged.problem("m11 3+5*4=>", "3+5=8,8*4=10#10"), staged.problem("m7 2*3=>", "2*3=6#6")]
    asked = (hints.no_hint, hints.first_operands, hints.shown_attempt)
    table = hints.encode_hints(model, problems, asked, spare_tokens=NEW + 1)
    rollout = jax.jit(recipes.rollout_of_model(model, group_size=1, max_new_tokens=NEW, temperature=1.0))
    return model, asked, table, rollout


def _text(model, tokens, keep):
    return model.tokenizer.decode([int(t) for t in np.asarray(tokens)[np.asarray(keep)]])


def _answered(world, stage, prompts, texts):
    """Rows whose responses are the given texts, with an end token, asked at a stage."""
    model, _, table, rollout = world
    tokens, valid = prompts
    keys, ids = jax.random.split(jax.random.key(0), 2), jnp.arange(2, dtype=jnp.int32)
    rows = rollout(model.params, tokens, valid, keys, ids)
    width = tokens.shape[1]
    for k, text in enumerate(texts):
        said = [*model.tokenizer.encode(text), model.tokenizer.eos_ids[0]]
        there = jnp.arange(NEW) < len(said)
        row = jnp.asarray(said + [0] * (NEW - len(said)), jnp.int32)
        prompt = int(valid[k].sum())
        rows = rows._replace(
            tokens=rows.tokens.at[k, width:].set(row),
            mask=rows.mask.at[k, width:].set(there),
            segment_ids=rows.segment_ids.at[k, width:].set(there.astype(jnp.int32)),
            positions=rows.positions.at[k, width:].set(jnp.where(there, prompt + jnp.arange(NEW), 0).astype(jnp.int32)),
        )
    return rows._replace(tokens=rows.tokens.at[:, 0].set(stage))


def _table(world, stage):
    return world[2].tokens[stage], world[2].valid[stage]


@pytest.mark.slow
def test_a_refining_prompt_shows_the_attempt(world):
    model, asked, table, _ = world
    prompts = hints.make_attempt_prompts(table, asked, model.tokenizer, group_size=1)
    ids = jnp.arange(2, dtype=jnp.int32)
    before = _answered(world, 1, _table(world, 1), ["9#9", "5#5"])
    tokens, valid = prompts(2, ids, before)
    assert tokens.shape == table.tokens[0].shape and not valid[:, 0].any()
    assert [_text(model, t, v) for t, v in zip(tokens, valid, strict=True)] == [
        "m11 3+5*4=>3+5=9#9;",
        "m7 2*3=>2*3=5#5;",
    ]
    for got, own in zip(prompts(1, ids, before), _table(world, 1), strict=True):
        np.testing.assert_array_equal(got, own)
    with pytest.raises(ValueError, match="separator='12'"):
        hints.make_attempt_prompts(table, asked, model.tokenizer, group_size=1, separator="12")


def test_the_supervised_term_sees_the_plain_prompt_only(world):
    model, asked, table, _ = world
    prompts = hints.make_attempt_prompts(table, asked, model.tokenizer, group_size=1)
    ids, both = jnp.arange(2, dtype=jnp.int32), jnp.ones(2, bool)
    plain_answers = jax.jit(hints.plain_answers)
    decomposed = _answered(world, 1, _table(world, 1), ["8#8", "6#6"])
    refined = _answered(world, 2, prompts(2, ids, decomposed), ["#10", "#6"])
    plain = _answered(world, 0, _table(world, 0), ["#10", "#6"])
    for rows, said in ((decomposed, ["3+5=8#8", "2*3=6#6"]), (refined, ["#10", "#6"]), (plain, ["#10", "#6"])):
        found = plain_answers(rows, table, both)
        for k, (prompt, answer) in enumerate(zip(["m11 3+5*4=>", "m7 2*3=>"], said, strict=True)):
            real = found.segment_ids[k] > 0
            assert _text(model, found.tokens[k], real & ~found.mask[k]) == prompt
            assert _text(model, found.tokens[k], found.mask[k]) == answer
            assert found.positions[k][real].tolist() == list(range(int(real.sum())))
    none = plain_answers(refined, table, jnp.zeros(2, bool))
    assert not none.mask.any()  # nothing chosen: the term is 0

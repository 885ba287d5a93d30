"""RLPR: probabilities of the reference under a response's own reasoning."""

import dataclasses
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.parts.repeats import repeated_share
from experiments.reward_models import rlpr
from experiments.reward_models.parts import free_answers, step_labels, text_answers
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import recipes
from jaxrl_llm.rollout import given_responses
from jaxrl_llm.train import online
from jaxrl_llm.types import Rewards, Trajectories
from tests import close
from tests.close import singles
from tests.models_for_tests import byte_model

SETTINGS = recipes.OnlineSettings(levels=(2,), train_problems=6, eval_problems=4, max_new_tokens=24)


@pytest.fixture(scope="module")
def world():
    """Rows whose responses are the demonstrations."""
    free = free_answers.make_free(SETTINGS)
    model, ids = free.bench.model, jnp.arange(6, dtype=jnp.int32)
    roll = recipes.rollout_of_model(model, group_size=1, max_new_tokens=24, temperature=1.0)
    keys = jax.random.split(jax.random.key(0), 6)
    rows = roll(model.params, free.bench.train.tokens, free.bench.train.valid, keys, ids)
    rows = given_responses.with_responses(rows, jnp.ones(6, bool), *recipes.demonstrations(SETTINGS))
    return free, rows


def test_worked_probabilities():
    logp, mask = jnp.log(jnp.array([[0.9, 0.8, 0.01]])), jnp.ones((1, 3), bool)
    assert float(free_answers.mean_probability(logp, mask)[0]) == singles(0.57)
    assert float(free_answers.product_probability(logp, mask)[0]) == singles(0.0072, magnitude=0)
    none = jnp.zeros((1, 3), bool)
    assert float(free_answers.mean_probability(logp * jnp.nan, none)[0]) == 0.0
    assert float(free_answers.product_probability(logp, none)[0]) == 0.0
    one = jnp.array([[True, False, False]])  # of one token mean and product are the same
    assert float(free_answers.mean_probability(logp, one)[0]) == singles(0.9)
    assert float(free_answers.product_probability(logp, one)[0]) == singles(0.9)


def test_worked_rewards():
    score, before = jnp.array([0.3, 0.9]), jnp.array([0.5, 0.2])
    reward = 0.9 * free_answers.debiased(score, before) + 0.1
    close.assert_near(reward, [0.1, 0.73])


def test_a_batch_is_filled_by_what_passes():
    keep = jnp.array([False] * 3 + [True] * 9)
    assert rlpr.filled(keep, 3, 2).tolist() == [False] * 3 + [True] * 6 + [False] * 3
    assert (rlpr.filled(keep, 3, 4) == keep).all()


def test_repeats_against_a_loop():
    rng = np.random.default_rng(3)
    tokens, lengths = rng.integers(0, 3, (6, 12)), rng.integers(0, 13, 6)
    mask = np.arange(12)[None] < lengths[:, None]
    found = repeated_share(jnp.asarray(tokens), jnp.asarray(mask), n=3)
    for row, length, share in zip(tokens, lengths, found.tolist(), strict=True):
        grams = [tuple(row[k : k + 3]) for k in range(length - 2)]
        again = sum(gram in grams[:k] for k, gram in enumerate(grams))
        close.assert_near(share, again / max(len(grams), 1))


def test_other_problems_are_refused():
    with pytest.raises(UserError, match="chains alone"):
        text_answers.make_free(recipes.OnlineSettings(data="countdown"))
    with pytest.raises(UserError, match="right steps"):
        step_labels.make_stepped(recipes.OnlineSettings(data="countdown"))


def _text(free, tokens, keep):
    return free.bench.model.tokenizer.decode([int(t) for t in np.asarray(tokens)[np.asarray(keep)]])


def test_the_reference_takes_the_place_of_the_answer(world):
    free, rows = world
    shown = free_answers.with_reference(free, rows)
    bare = free_answers.with_reference(free, rows, reasoning=False)
    for k in range(6):
        real = shown.segment_ids[k] > 0
        whole = _text(free, rows.tokens[k], (rows.segment_ids[k] > 0))
        work = whole.rsplit("#", 1)[0]
        reference = str(int(free.bench.train.answers["reference"][k]))
        assert _text(free, shown.tokens[k], real) == f"{work}#{reference}"
        assert _text(free, shown.tokens[k], shown.mask[k]) == reference
        assert _text(free, bare.tokens[k], bare.segment_ids[k] > 0) == f"{work.split('=>')[0]}=>#{reference}"
        assert shown.positions[k][real].tolist() == list(range(int(real.sum())))


def test_a_response_without_a_mark_gets_one(world):
    free, rows = world
    cut = rows._replace(mask=given_responses.prefix(rows.mask, jnp.full(6, 3, jnp.int32)))
    cut = cut._replace(segment_ids=jnp.where(rows.mask & ~cut.mask, 0, rows.segment_ids))
    shown = free_answers.with_reference(free, cut)
    text = _text(free, shown.tokens[0], shown.segment_ids[0] > 0)
    assert text.count("#") == 1 and text.split("#")[1] == str(int(free.bench.train.answers["reference"][0]))


def test_an_answer_begins_at_its_mark_however_tokens_split_it():
    """Tokens join what stands before a mark with its first letters, which are no spelling of the mark alone."""
    said = {
        ("so", " 3", " \\", "boxed", "{", "3", "}"): 2,
        ("so", " $\\", "boxed{", "3", "}$"): 1,
        ("so 3", "\n####", " 3", "<end>"): 1,
        ("#", " Work", "\n", "## so", "\n##", "## 3"): 4,  # a heading marks nothing where an answer follows it
        ("so", "<", "answer>3", "</answer>"): 1,
        ("\\boxed{", "3", "}", " or ", "\\boxed{", "3", "}"): 0,
        ("it", " is", " 5"): 3,
    }
    for pieces, before in said.items():
        tokens = np.arange(len(pieces) + 2)[None] - 2  # two columns of the question
        mask = tokens >= 0
        found = text_answers.in_answers(lambda ids, pieces=pieces: "".join(pieces[k] for k in ids), tokens, mask)
        assert found[0].tolist() == [False] * (2 + before) + [True] * (len(pieces) - before), pieces


def test_references_of_rows_of_ones_own_stand_behind_work_without_its_answer(tmp_path):
    byte_model(tmp_path, "qwen2", max_positions=400)
    rows = [{"question": f"What is {k} + 1?", "answer": f"{k}+1\n#### {k + 1}"} for k in range(60)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    own = {"model": str(tmp_path), "data": str(tmp_path / "sums.jsonl"), "format": "gsm8k"}
    free = text_answers.make_free(dataclasses.replace(SETTINGS, **own))
    tokenizer, shape = free.bench.model.tokenizer, (2, 60)
    texts, tokens, counts = ("so 7\n#### 7", "so <answer>8</answer>"), np.zeros(shape, np.int32), []
    for k, text in enumerate(texts):
        said = tokenizer.encode(text)
        tokens[k, 4 : 4 + len(said)] = said
        counts.append(len(said))
    columns = np.arange(shape[1])[None]
    mask = (columns >= 4) & (columns < 4 + np.asarray(counts)[:, None])
    rows = Trajectories(
        tokens=jnp.asarray(tokens), segment_ids=jnp.asarray(mask, jnp.int32), positions=jnp.zeros(shape, jnp.int32),
        mask=jnp.asarray(mask), sampler_logp=jnp.zeros(shape), truncated=jnp.zeros(2, bool),
        group_ids=jnp.arange(2, dtype=jnp.int32), problem_ids=jnp.arange(2, dtype=jnp.int32),
    )  # fmt: skip
    shown = jax.jit(lambda rows: free_answers.with_reference(free, rows))(rows)
    known = [_text(free, *x) for x in zip(free.reference_tokens[:2], free.reference_valid[:2], strict=True)]
    whole = [_text(free, *x) for x in zip(shown.tokens, shown.segment_ids > 0, strict=True)]
    acting = [_text(free, *x) for x in zip(rows.tokens, free_answers.reasoning_of(free, rows), strict=True)]
    assert acting == ["so 7\n", "so "]
    assert whole == [f"so 7\n\\boxed{{{known[0]}", f"so \\boxed{{{known[1]}"]


@pytest.mark.slow
def test_right_work_makes_the_residue_likely(world):
    free, rows = world
    model = free.bench.model
    with_work = free_answers.reference_score(free, model.policy, model.params, rows)
    without = free_answers.reference_score(free, model.policy, model.params, rows, reasoning=False)
    plain = free.bench.train.answers["reference"] == free.bench.train.answers["value"]
    assert float(jnp.min(jnp.where(plain, with_work, 1.0))) > 0.5
    assert float(jnp.max(without)) < float(jnp.max(with_work))
    slope = jax.grad(lambda p: jnp.sum(free_answers.reference_score(free, model.policy, p, rows)))(model.params)
    assert all(not np.asarray(x).any() for x in jax.tree.leaves(slope))  # a reward, no gradient


def test_truth_and_rules():
    answers = {"value": jnp.array([3, 3, 3]), "reference": jnp.array([14, 14, 3]), "modulus": jnp.full(3, 11)}
    value, answered = jnp.array([3, 14, 4]), jnp.array([True, True, True])
    assert free_answers.equivalent(value, answered, answers).tolist() == [True, True, False]
    assert free_answers.exact(value, answered, answers).tolist() == [False, True, False]
    close.assert_near(free_answers.shared_digits(jnp.array([41, 1, 5]), answered, answers), [1, 0.5, 0], magnitude=0)
    assert not free_answers.equivalent(value, ~answered, answers).any()


@pytest.mark.slow
def test_the_correction_is_of_the_start_of_rl_and_the_filter_of_the_eleventh_step(monkeypatch):
    """What is guessed without reasoning is asked of the parameters that RL began with; ten steps train on all."""
    settings = dataclasses.replace(rlpr.Settings(), **rlpr.EMBEDDED | rlpr.SMOKE | {"filter_from": 11})
    stage = rlpr.build(settings).stages[1]
    began = jax.tree.map(lambda x: 2 * x, free_answers.make_free(settings).bench.model.params)
    extras, asked = stage.extras(began, jax.random.key(0)), []
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), extras["reference"], began))
    state = online.init_state(stage.method, began, jax.random.key(1), extras=extras)
    rows = online.begin(stage.method, state).trajectories

    def scored(free, policy, params, rows, *, how, reasoning=True):
        asked.append((params, reasoning))
        return jnp.linspace(0.0, 1.0, 4) if reasoning else jnp.zeros(4)

    monkeypatch.setattr(free_answers, "reference_score", scored)
    now, high, rewards = "now", jnp.asarray(9.0), Rewards(jnp.zeros(4), jnp.ones(4, bool))
    monkeypatch.setattr(rlpr.builders, "make_estimate", lambda policy, advantages, **slots: (
        lambda params, extras, rows, rewards: slots["keep"](rows, rewards)
    ))  # fmt: skip
    kept = [
        stage.method.estimate(now, extras | {"spread": high, "step": jnp.asarray(step)}, rows, rewards).tolist()
        for step in (0, 9, 10)
    ]
    assert kept == [[True] * 4, [True] * 4, [False] * 4]
    assert asked == [(now, True), (extras["reference"], False)] * 3


def test_a_figure_says_how_well_what_is_paid_ranks_right_answers():
    """Of two right and two wrong answers three of four pairs are in order; where all are wrong it says nothing."""
    settings = dataclasses.replace(rlpr.Settings(), **rlpr.EMBEDDED | rlpr.SMOKE)
    figures = rlpr.build(settings).stages[1].method.figures
    paid, kept = jnp.array([0.9, 0.4, 0.5, 0.1]), rlpr.Filtered(jnp.zeros(4), jnp.ones(4))._asdict()
    found = {
        name: figures(types.SimpleNamespace(extras=kept | rlpr.Paid(paid, right)._asdict(), mask=jnp.ones((4, 1))), {})
        for name, right in (("both", jnp.array([True, True, False, False])), ("wrong", jnp.zeros(4, bool)))
    }
    assert float(found["both"]["reward/auc"]) == singles(0.75) and float(found["wrong"]["reward/auc"]) == 0.5
    assert float(found["both"]["filter/kept"]) == 1.0

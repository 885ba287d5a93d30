"""CARFT: printed losses of pairs of cosines, who is contrasted, ReFT without the contrast."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.policy_gradient import carft, rl_plus
from experiments.policy_gradient.parts import common_tokens
from jaxrl_llm import reduce
from jaxrl_llm.experiment import Results, curricula, recipes
from jaxrl_llm.experiment.evidence import beds
from jaxrl_llm.losses import contrastive
from jaxrl_llm.rollout import given_responses
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.types import Rewards, Trajectories
from tests import close
from tests.experiment import made
from tests.models_for_tests import byte_model

BASE = dataclasses.replace(carft.Settings(), **carft.EMBEDDED | carft.SMOKE)


def _pair(cosine, other):
    """An anchor and two samples of these cosines to it."""
    anchors = jnp.array([[1.0, 0.0], [0.0, 1.0]])
    return anchors, jnp.array([[cosine, math.sqrt(1 - cosine**2)], [other, math.sqrt(1 - other**2)]])


def test_printed_losses():
    """.8 against .2: ln(1 + e^-3) = .0486; 1 against .2: the numerator is capped at .9, so .5182 and no pull."""
    keep = jnp.array([True, False])
    for cosine, want in ((0.8, math.log(1 + math.exp(-3))), (1.0, 0.5182)):
        loss = contrastive.capped_infonce_loss(*_pair(cosine, 0.2), keep, tau=0.2).loss
        close.assert_printed(reduce.scalars(loss, keep), want, 4)
    nobody = contrastive.capped_infonce_loss(*_pair(0.8, 0.2), keep & False)
    assert float(reduce.scalars(nobody.loss, keep & False)) == 0


def _first_batch(settings):
    plan = carft.build(settings)
    online, bench, ids = plan.stages[0].method, recipes.bench(settings), jnp.arange(2, dtype=jnp.int32)
    params = plan.init(jax.random.key(0))
    rows = online.rollout(
        params["model"], bench.train.tokens[ids], bench.train.valid[ids], sample_keys(jax.random.key(0), 0, ids, 2), ids
    )
    rewards = Rewards(jnp.array([1.0, 0.1, 0.0, 1.0]), jnp.ones(4, bool))
    batch = online.estimate(params, {}, rows, rewards)
    return online, params, batch


def _loss(weight):
    settings = dataclasses.replace(BASE, contrast=weight)
    online, params, batch = _first_batch(settings)
    (value, metrics), gradient = jax.value_and_grad(online.loss, has_aux=True)(params, batch)
    return float(value), metrics, gradient, batch


@pytest.mark.slow
def test_without_contrast_it_is_reft_and_with_it_the_projection_learns():
    plain, _, gradient, batch = _loss(0.0)
    assert not any(np.asarray(g).any() for g in jax.tree.leaves(gradient["cot"]))
    with_it, metrics, gradient, _ = _loss(1.0)
    assert np.asarray(gradient["cot"]["weight"]).any() and np.asarray(gradient["value"]["weight"]).any()
    assert with_it > plain and -1 <= float(metrics["contrast/cosine"]) <= 1
    half, *_ = _loss(0.5)
    close.assert_near(half - plain, 0.5 * (with_it - plain), magnitude=0)
    # the annotated representation is of the problem, whatever was sampled: the same for members of a group
    np.testing.assert_array_equal(batch.extras["gold"][0], batch.extras["gold"][1])


@pytest.mark.slow
def test_rewards_for_any_answer():
    """1 right, 0.1 an answer that is wrong, 0 none."""
    online, bench = carft.build(BASE).stages[0].method, recipes.bench(BASE)
    tokens, valid = recipes.demonstrations(BASE)
    ids = jnp.array([0, 0, 0], jnp.int32)
    rollout = recipes.rollout_of_model(
        bench.model, group_size=1, max_new_tokens=tokens.shape[1], temperature=1.0
    )  # fmt: skip
    rows = rollout(
        bench.model.params,
        bench.train.tokens[ids],
        bench.train.valid[ids],
        sample_keys(jax.random.key(0), 0, ids, 1),
        ids,
    )
    other = int(jnp.argmax(bench.train.answers["target"] != bench.train.answers["target"][0]))
    texts = jnp.stack([tokens[0], tokens[other], tokens[0]]), jnp.stack([valid[0], valid[other], valid[0] & False])
    rows = given_responses.with_responses(rows, jnp.ones(3, bool), *texts)
    rewards = online.score(jax.tree.map(lambda x: x[ids], bench.train.answers), rows)
    close.assert_near(rewards.value, [1.0, 0.1, 0.0], magnitude=0)


def test_the_reward_of_an_answer_is_kept_where_the_host_judges(tmp_path):
    """Rows of one's own: 1 for a right answer, 0.1 for a wrong one, 0 for none."""
    folder = byte_model(tmp_path, max_positions=300)
    lines = [{"question": f"What is {k} + 1?", "answer": f"{k} and one is {k + 1}.\n#### {k + 1}"} for k in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    settings = dataclasses.replace(
        BASE, model=str(folder), data=str(tmp_path / "rows.jsonl"), format="gsm8k", max_new_tokens=40, levels=()
    )
    plan, found = carft.build(settings), recipes.bench(settings)
    assert plan.on_host
    right = str(recipes.solved_problems(settings)[0].answer["value"])
    tokens = [found.model.tokenizer.encode(text) for text in (f"#### {right}", "#### 9999", "")]
    width = max(map(len, tokens))
    table = jnp.asarray([row + [0] * (width - len(row)) for row in tokens], jnp.int32)
    mask = jnp.asarray([[k < len(row) for k in range(width)] for row in tokens])
    ids = jnp.zeros((3,), jnp.int32)
    rows = Trajectories(table, table, table, mask, jnp.zeros(table.shape, jnp.float32), ids > 0, ids, ids)
    close.assert_near(plan.host_score(rows).value, [1.0, 0.1, 0.0], magnitude=0)


def test_what_a_wrong_answer_shares_with_the_annotation_is_drawn_to_what_it_lacks():
    """ "7*3=21,21+5" against "7*3=21,21-5", and the worked loss: cosines .8 to what is missing, .2 to its own error."""
    gold, own = (jnp.asarray([list(text.encode())], jnp.int32) for text in ("7*3=21,21+5", "3*7=21,21-5"))
    known, shared = common_tokens.in_common(gold, gold > 0, own, own > 0)
    assert "".join(c for c, on in zip("7*3=21,21+5", np.asarray(known[0]), strict=True) if on) in (
        "*=21,215", "7=21,215", "3=21,215",
    )  # fmt: skip
    assert int(shared.sum()) == 8
    hidden, _ = common_tokens.in_common(gold, gold > 0, own, (own > 0) & (jnp.arange(11) < 0)[None])
    assert not np.asarray(hidden).any()
    pair = [jnp.array([[x, math.sqrt(1 - x * x)], [0.6, 0.8]]) for x in (0.8, 0.2)]
    shared = jnp.array([[1.0, 0.0], [1.0, 0.0]])
    arguments, ids = (pair[0], shared, pair[1]), jnp.array([0, 1], jnp.int32)
    keep = jnp.array([True, False])
    # itself (cosine 1) and its own error (.2) in the denominator, not what is shared by a row that is left out
    want = math.log(math.exp(1 / 0.2) + math.exp(0.2 / 0.2)) - 0.8 / 0.2
    terms = common_tokens.negative_infonce_loss(*arguments, keep, group_ids=ids)
    close.assert_printed(terms.loss, [want, 0.0], 4)
    one = common_tokens.negative_infonce_loss(*arguments, keep | True, group_ids=ids)
    errors = math.exp(5.0) + math.exp(1.0) + math.exp(0.6 / 0.2)
    close.assert_printed(one.loss[0], math.log(errors + math.exp(5.0)) - 4.0, 4)
    siblings = common_tokens.negative_infonce_loss(*arguments, keep | True, group_ids=ids * 0)
    close.assert_printed(siblings.loss[0], math.log(errors) - 4.0, 4)


def test_the_bed_is_invalid_where_right_samples_lie_beyond_the_cap():
    for below, faults in ((0.3, 0), (0.05, 1)):
        results = Results({"reft": made.arm([below, below], metric="contrast/below_cap")})
        assert len(beds.judges_at_chance(results, carft.BED)) == faults
    # half of the right samples of this batch: figures of the loss
    online, params, batch = _first_batch(dataclasses.replace(BASE, contrast=0.0))
    gold = batch.extras["gold"]
    near = batch._replace(extras=batch.extras | {"gold": jnp.zeros_like(gold)})
    assert float(online.loss(params, near)[1]["contrast/below_cap"]) == 1
    assert 0 <= float(online.loss(params, batch)[1]["contrast/below_cap"]) <= 1


def test_the_negative_signal_teaches_the_projection_from_wrong_samples_alone():
    online, params, batch = _first_batch(dataclasses.replace(BASE, positive=0.0, negative=1.0))
    reward = batch.extras["reward"]
    assert set(np.asarray(batch.extras["lacks"]).tolist()) <= {True, False}
    for rewards, learns in ((reward * 0, True), (reward * 0 + 1, False)):
        other = batch._replace(extras=batch.extras | {"reward": rewards})
        gradient = jax.grad(lambda p, b=other: online.loss(p, b)[0])(params)
        assert bool(np.asarray(gradient["cot"]["weight"]).any()) is learns


@pytest.mark.parametrize("module", [carft, rl_plus])
def test_the_rate_of_fine_tuning_is_that_of_the_settings(monkeypatch, module):
    """1e-3 for the small model, and not for one of one's own."""
    seen, base = [], dataclasses.replace(module.Settings(), **module.EMBEDDED | module.SMOKE)
    monkeypatch.setattr(curricula, "solutions_imitated", lambda settings, **numbers: seen.append(numbers))
    for settings in (base, dataclasses.replace(base, sft_rate=module.Settings().sft_rate)):
        module.build(dataclasses.replace(settings, **module.ARMS["sft"])).init(jax.random.key(0))
    assert seen == [{"steps": 120, "learning_rate": 1e-3}, {"steps": 120, "learning_rate": 1e-5}]
    # as many updates as the other arms have: of a model of one's own 500
    module.build(dataclasses.replace(base, steps=500, **module.ARMS["sft"])).init(jax.random.key(0))
    assert seen[2]["steps"] == 500 == module.Settings().steps and module.EMBEDDED["steps"] == 120


@pytest.mark.parametrize("contrast", [0.0, 0.1])
def test_dr_grpo_sums_over_tokens_by_a_constant_and_teaches_no_value(contrast):
    settings = dataclasses.replace(BASE, contrast=contrast, **carft.DR_GRPO)
    online, params, batch = _first_batch(settings)
    mask = np.asarray(batch.mask)
    want = np.where(mask, np.array([0.45, -0.45, -0.5, 0.5], np.float32)[:, None], 0.0)
    close.assert_near(batch.advantages, want)
    (value, metrics), gradient = jax.value_and_grad(online.loss, has_aux=True)(params, batch)
    # at the anchor the surrogate is minus the sum of the advantages, by the budget and the rows
    surrogate = -want.sum() / (settings.max_new_tokens * 4)
    if contrast:
        assert np.asarray(gradient["cot"]["weight"]).any() and np.asarray(gradient["value"]["weight"]).any()
    else:
        close.assert_near(value, np.float32(surrogate), terms=int(mask.sum()))
        assert not any(np.asarray(g).any() for g in jax.tree.leaves((gradient["value"], gradient["cot"])))

"""OREO: tables for each method, what a response's credit reaches, and search by the critic."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.offline import oreo
from experiments.offline.parts import response_table as tables
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import arms, recipes
from jaxrl_llm.losses import bellman, policy
from jaxrl_llm.train.methods import builders
from tests import close
from tests.close import assert_same_sums

REWARD = np.array([1, 0, 0, 1, 0, 0, 0, 0, 1, 1, 1, 1], np.float32)  # three problems: mixed, failed, solved


def _table():
    rows = np.arange(12, dtype=np.int32)[:, None] * 10 + np.arange(3, dtype=np.int32)[None, :]
    mask = np.broadcast_to([False, True, True], (12, 3))
    ones, positions = np.ones((12, 3), np.int32), np.broadcast_to(np.arange(3, dtype=np.int32), (12, 3))
    return tables.Table(*map(jnp.asarray, (rows, ones, positions, mask, REWARD)))


def test_rejection_sees_right_responses_alone_and_as_many_rows():
    kept = tables.right_ones(_table(), 4)
    assert (np.asarray(kept.tokens[:, 0]) // 10).tolist() == [0, 3, 8, 9, 10, 11] * 2
    assert bool((kept.reward == 1).all()) and bool(kept.mask[:, 1:].all())
    none = tables.right_ones(_table()._replace(reward=jnp.zeros(12)), 4)
    assert not none.mask.any() and none.tokens.shape == (12, 3)  # nothing trains where nothing is right


def test_pairs_are_of_one_problem_and_of_both_kinds():
    pairs = tables.paired(_table(), 4)
    chosen, rejected = (np.asarray(side.tokens[:, 0]) // 10 for side in pairs)
    assert set(zip(chosen.tolist(), rejected.tolist(), strict=True)) == {(0, 1), (3, 2)}
    assert bool((pairs.chosen.reward == 1).all()) and bool((pairs.rejected.reward == 0).all())
    none = tables.paired(_table()._replace(reward=jnp.ones(12)), 4)
    assert not none.chosen.mask.any() and not none.rejected.mask.any()


def test_scrambled_credit_stays_in_its_problem():
    moved = np.asarray(tables.scrambled(_table(), 4).reward).reshape(3, 4)
    np.testing.assert_array_equal(moved.sum(1), REWARD.reshape(3, 4).sum(1))
    assert moved[0].tolist() == [0, 1, 1, 0]


def test_values_are_judged_at_the_first_and_the_middle_token():
    mask = jnp.asarray([[False, True, True, True], [False, True, True, False], [False, True, False, False]])
    values = jnp.asarray([[9.0, 0.1, 0.9, 0.2], [9.0, 0.8, 0.0, 0.0], [9.0, 0.0, 0.0, 0.0]])
    batch = tables.Table(*([jnp.zeros((3, 4), jnp.int32)] * 3), mask, jnp.array([1.0, 0.0, 0.0]))
    found = tables.value_figures(values, batch)
    # first tokens .1 | .8 .0: one of two; middle ones (second of three, first of two and of one) .9 | .8 .0: both
    assert float(found["value/auc_start"]) == 0.5 and float(found["value/auc_middle"]) == 1.0
    alone = tables.value_figures(values, batch._replace(reward=jnp.ones(3)))
    assert float(alone["value/auc_start"]) == 0.5


def _method(arm, **changes):
    base = arms.preset(oreo, smoke=True, model="nano")
    settings = arms.override(arms.resolve(oreo, base, ())[arm], {"group_size": 4, **changes}, "the test")
    found = recipes.bench(settings)
    rng = np.random.default_rng(0)
    tokens, mask = np.full((4, 12), 5, np.int32), np.zeros((4, 12), bool)
    tokens[:, 6:] = rng.integers(4, 30, (4, 6))
    mask[:, 6:] = np.arange(6)[None] < np.array([6, 3, 1, 5])[:, None]
    segments = np.concatenate([np.ones((4, 6), bool), mask[:, 6:]], axis=1).astype(np.int32)
    positions = np.broadcast_to(np.arange(12, dtype=np.int32), (4, 12))
    table = tables.Table(*map(jnp.asarray, (tokens, segments, positions, mask)), jnp.array([1.0, 0.0, 1.0, 0.0]))
    return settings.method(settings, found), table, oreo.build(settings), found


def test_the_first_update_is_reinforce_with_what_is_left_of_the_reward():
    """At pi = ref all log-ratios are 0, a log-probability has the slope ``-2 beta (R - V)``, apart from the critic."""
    method, table, plan, found = _method("oreo", kl_weight=0.0, beta=0.2, searched=0)
    params = plan.init(jax.random.key(0))
    params["value"]["bias"] = jnp.full((1,), 0.25)
    total = method.whole(table)
    slopes = jax.jit(jax.grad(lambda p: method.loss(p, params["model"], table, total)[0]))(params)

    def reinforce(model):
        logp, _ = tables.builders.score_tokens(found.model.policy, model, table)
        advantages = jnp.broadcast_to((table.reward - 0.25)[:, None], logp.shape)
        terms = policy.reinforce_loss(logp, advantages, table.mask).loss
        return 2 * 0.2 * tables.reduce.tokens(terms, table.mask, mode="seq_mean", total=total)

    wanted = jax.jit(jax.grad(reinforce))(params["model"])
    jax.tree.map(lambda a, b: close.assert_near(a, b), slopes["model"], wanted)
    # values are 0.25 everywhere: the bias moves by the mean of 2 (V - R), the policy's loss leaves the critic alone;
    # what is added, beta times up to six log-ratios, is 0 but for the rounding of two passes of the decoder
    logp, _ = tables.builders.score_tokens(found.model.policy, params["model"], table)
    sums = close.forward_sums(found.model.config, table.tokens.shape[1])
    size = 2 * 0.2 * 6 * float(jnp.max(jnp.abs(jnp.where(table.mask, logp, 0.0))))
    close.assert_same_sums(slopes["value"]["bias"], np.array([2 * (0.25 - 0.5)]), sums, magnitude=size)


def test_a_response_of_one_token_makes_all_forms_one():
    method, table, plan, _ = _method("oreo", searched=0)
    one = table._replace(mask=bellman.first_tokens(table.mask))
    params = plan.init(jax.random.key(0))
    other = jax.tree.map(lambda x: 1.01 * x, params["model"])
    found = [_method(arm, searched=0)[0].loss(params, other, one, method.whole(one))[0]
             for arm in ("oreo", "step", "response")]  # fmt: skip
    assert_same_sums(found[1:], [found[0]] * 2, one.tokens.size)


def test_parts_of_a_minibatch_add_up():
    for arm in ("oreo", "rejection"):
        method, table, plan, _ = _method(arm, searched=0)
        params = plan.init(jax.random.key(0))
        other = jax.tree.map(lambda x: 1.01 * x, params["model"])
        total = method.whole(table)
        halves = [jax.tree.map(lambda x, k=k: x[2 * k : 2 * k + 2], table) for k in (0, 1)]
        loss = jax.jit(method.loss)
        whole = loss(params, other, table, total)[0]
        close.assert_near(sum(loss(params, other, x, total)[0] for x in halves), whole, magnitude=0)


def test_losses_of_whole_responses_take_a_tenth_of_the_rate():
    steps = {}
    for name in ("rejection", "dpo", "kto"):
        tx = _method(name, learning_rate=1e-3)[2].stages[0].method.tx
        with jax.numpy_dtype_promotion("standard"):
            moved, _ = tx.update({"x": jnp.ones(1)}, tx.init({"x": jnp.ones(1)}))
        steps[name] = float(moved["x"][0])
    for name, wanted in (("rejection", -1e-3), ("dpo", -1e-4), ("kto", -1e-4)):
        close.assert_near(np.float32(steps[name]), np.float32(wanted), terms=8)


def test_a_text_that_no_token_has_ends_no_step():
    with pytest.raises(UserError, match="--step-end '@@': no token of this model has it"):
        _method("oreo", step_end="@@")


def test_a_closed_prefix_is_worth_what_it_was_where_its_end_was_chosen():
    _, _, plan, found = _method("oreo", searched=0)
    params = plan.init(jax.random.key(0))
    params["value"] = jax.tree.map(lambda x: jax.random.normal(jax.random.key(1), x.shape), params["value"])
    end = found.model.tokenizer.eos_ids[0]
    tokens = jnp.asarray([[0, 5, 6, 7], [5, 6, 7, end], [5, 6, end, 7]], jnp.int32)
    valid = jnp.asarray([[False, True, True, True], [True] * 4, [True] * 4])
    worth = tables.prefix_value(found, params, tokens, valid)
    sums = close.forward_sums(found.model.config, 4)
    close.assert_same_sums(worth[1], worth[0], sums, magnitude=4 * float(jnp.max(jnp.abs(worth))))
    assert abs(float(worth[2] - worth[0])) > 0.01, "an end inside closes nothing"


def test_a_critic_is_held_against_problems_that_are_held_out():
    _, _, plan, found = _method("oreo", searched=0)
    assert oreo.BED.judges == (("oreo", "heldout/auc_middle", 0.6),)
    seen = plan.measure(plan.init(jax.random.key(0)), jax.random.key(1))
    # a head that says 0 everywhere tells nothing apart
    assert float(seen["heldout/auc_start"]) == float(seen["heldout/auc_middle"]) == 0.5


def test_a_table_of_logged_responses(tmp_path):
    _, _, plan, found = _method("oreo", searched=0)
    tokenizer = found.model.tokenizer
    texts = [
        tokenizer.decode(table.tokens[k][table.valid[k]].tolist())
        for table, k in ((found.train, 0), (found.train, 1), (found.heldout, 0))
    ]
    said = [(0, "1+2", 1.0), (0, "3", 0.0), (1, "2", 0.5), (2, "2", 1.0), (0, "4", 0.25), (1, "1+2+3+4+5+6", 1.0)]
    rows = [{"prompt": texts[k], "response": text, "reward": worth} for k, text, worth in said]
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    settings = arms.override(
        arms.resolve(oreo, arms.preset(oreo, smoke=True, model="nano"), ())["oreo"],
        {"logged": str(path), "group_size": 2, "searched": 0}, "the test",
    )  # fmt: skip
    kept, size = tables.logged(settings)
    assert size == 2 and kept.reward.tolist() == [1.0, 0.0, 0.5, 0.5], "the third of two; one is held out, one too long"
    written = [tokenizer.decode(row[there].tolist()) for row, there in zip(kept.tokens, kept.mask, strict=True)]
    assert [text.removesuffix(tokenizer.decode([tokenizer.eos_ids[0]])) for text in written] == ["1+2", "3", "2", "2"]
    asked = found.train.tokens.shape[1]
    np.testing.assert_array_equal(kept.tokens[::2, :asked], found.train.tokens[:2])
    np.testing.assert_array_equal(kept.segment_ids[::2, :asked], found.train.valid[:2])
    extras = oreo.build(settings).stages[0].extras(plan.init(jax.random.key(0)), jax.random.key(1))
    assert sorted(extras["rows"].reward.tolist()) == [0.0, 0.5, 0.5, 1.0]
    path.write_text(json.dumps(rows[3]))
    with pytest.raises(UserError, match="--logged .*log.jsonl: no row has a prompt .* that is not held out"):
        tables.logged(arms.override(settings, {"group_size": 3}, "the test"))


def test_kto_by_hand():
    """Each response by itself, against the mean log-ratio of prompts with the responses of others."""
    crossed = tables.mismatched(_table(), prompt=1)
    order = (np.arange(12) + 1) % 12
    np.testing.assert_array_equal(crossed.tokens[:, 0], np.arange(12) * 10)
    np.testing.assert_array_equal(crossed.tokens[:, 1], order * 10 + 1)
    settings = arms.resolve(oreo, arms.preset(oreo, smoke=True, model="nano"), ())["kto"]
    found = recipes.bench(settings)
    model = found.model
    rng, length = np.random.default_rng(0), np.array([6, 3, 1, 5])
    said, there = rng.integers(4, 30, (4, 6)).astype(np.int32), np.arange(6)[None] < length[:, None]
    asked, real = np.asarray(found.train.tokens[:4]), np.asarray(found.train.valid[:4])

    def rows(answers):
        tokens = np.concatenate([asked, said[answers]], axis=1)
        segments = np.concatenate([real, there[answers]], axis=1)
        mask = np.concatenate([np.zeros_like(real), there[answers]], axis=1)
        places = np.maximum(np.cumsum(segments, axis=1) - 1, 0).astype(np.int32)
        return tables.Table(
            *map(jnp.asarray, (tokens, segments.astype(np.int32), places, mask)), jnp.array([1.0, 0, 1, 0])
        )

    params = {"model": model.policy.init(jax.random.key(5))}
    reference = model.params

    def ratio(batch):
        both = [np.asarray(builders.score_tokens(model.policy, w, batch)[0]) for w in (params["model"], reference)]
        return np.where(np.asarray(batch.mask), both[0] - both[1], 0.0).sum(1)

    own, gap = ratio(rows(np.arange(4))), max(0.0, ratio(rows(np.array([1, 2, 3, 0]))).mean())
    sign = np.array([1.0, -1.0, 1.0, -1.0])
    want = np.mean(1 - 1 / (1 + np.exp(-sign * settings.dpo_beta * (own - gap))))
    method = settings.method(settings, found)
    value, figures = method.loss(params, reference, rows(np.arange(4)))
    close.assert_near(value, np.float32(want), terms=256, magnitude=8.0)
    assert method.whole is None and float(figures["tokens/trained"]) == length.sum()
    # both sides alike: three wrong responses, of which one trains nothing, to one right one
    table = rows(np.arange(4))._replace(reward=jnp.array([1.0, 0, 0, 0]))
    table = table._replace(mask=table.mask & (jnp.arange(4) != 2)[:, None])
    balanced = tables.balanced_kto(settings, found)
    shown = balanced.rows(table, 4)
    assert shown.weight.tolist() == [2.0, 1.0, 1.0, 1.0] and balanced.whole is None
    gap = max(0.0, ratio(rows(np.array([1, 2, 3, 0])))[[0, 2, 3]].mean())  # of the crossed rows those that count
    sign, kept = np.array([1.0, -1.0, -1.0, -1.0]), np.array([0, 1, 3])
    terms = 1 - 1 / (1 + np.exp(-sign * settings.dpo_beta * (own - gap)))
    want = np.mean((np.array([2.0, 1.0, 1.0, 1.0]) * terms)[kept])
    value, figures = balanced.loss(params, reference, shown)
    close.assert_near(value, np.float32(want), terms=256, magnitude=8.0)
    assert float(figures["tokens/trained"]) == length[kept].sum()
    for reward in (jnp.zeros(4), jnp.ones(4)):  # nothing to weigh against
        assert tables.sides_alike(table._replace(reward=reward), 4).weight.tolist() == [1.0] * 4


def test_arms_keep_their_meaning_at_scale():
    """The positive control has four times the problems, and beta from a tenth to ten times of what it is."""
    scale, here = (0.003, 0.009, 0.09, 0.3), (0.01, 0.03, 0.3, 1.0)
    for base, problems, betas in ((oreo.Settings(), 60_000, scale), (embedded(), 1280, here)):
        found = arms.resolve(oreo, base, ("larger", "beta_low", "beta_lower", "beta_higher", "beta_high"))
        assert found["larger"].table_problems == problems
        assert tuple(found[name].beta for name in ("beta_low", "beta_lower", "beta_higher", "beta_high")) == betas


def embedded():
    return arms.preset(oreo, smoke=False, model="nano")

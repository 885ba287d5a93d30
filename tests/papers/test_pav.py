"""Process advantage verifiers: provers, progress that telescopes, and a head that learns chances of success."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.reward_models import pav
from experiments.reward_models.parts import progress_verifier, step_labels
from experiments.reward_models.parts import steps as reader
from jaxrl_llm.advantages import process
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import arms, recipes
from jaxrl_llm.experiment.evidence import fingerprints
from jaxrl_llm.rollout import given_responses
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.types import Trajectories
from tests import close


def test_worked_best_of():
    close.assert_printed(process.best_of(jnp.array([[0.2, 0.5]]), 4), [[0.5904, 0.9375]], 4)
    close.assert_near(process.best_of(jnp.array([[0.2, 0.5]]), 1), [[0.2, 0.5]])
    with pytest.raises(ValueError, match="samples=0"):
        process.best_of(jnp.array([[0.2]]), 0)


def test_progress_telescopes():
    rng = np.random.default_rng(0)
    after, before = jnp.asarray(rng.random((5, 4)), jnp.float32), jnp.asarray(rng.random(5), jnp.float32)
    count = np.array([4, 1, 2, 0, 3])
    valid = jnp.asarray(np.arange(4)[None, :] < count[:, None])
    found = process.progress(jnp.where(valid, after, jnp.nan), before, valid)
    last = np.where(count > 0, np.asarray(after)[np.arange(5), count - 1], before)
    close.assert_near(found.sum(1), last - np.asarray(before))
    # a constant added to all of the prover's values leaves every step but the first alone
    moved = process.progress(after + 0.3, before + 0.3, valid)
    close.assert_near(moved, np.where(valid, found, 0.0))
    # over a hole the last valid chance is carried on, whatever stands in it
    for missing in (0.2, np.nan):
        holed = process.progress(jnp.array([[0.9, missing, 0.8]]), jnp.array([0.1]), jnp.array([[True, False, True]]))
        close.assert_near(holed, [[0.8, 0.0, -0.1]])
    # too strong a prover sees no progress anywhere
    strong = progress_verifier.make_progress(4096)(0.2 + 0.7 * after, 0.2 + 0.7 * before, valid)
    close.assert_near(strong, 0.0)


def test_rewards_of_the_arms():
    after, before, valid = jnp.array([[0.2, 0.6]]), jnp.array([0.1]), jnp.array([[True, True]])
    close.assert_near(progress_verifier.make_progress(1)(after, before, valid), [[0.1, 0.4]])
    close.assert_near(progress_verifier.success_itself(after, before, valid), [[0.2, 0.6]])
    assert not progress_verifier.no_process(after, before, valid).any()


def test_low_and_high_lie_around_alpha_with_a_model_of_ones_own_too():
    small = dataclasses.replace(pav.Settings(), **pav.EMBEDDED | pav.SMOKE)
    found = {}
    for name, base in (("embedded", small), ("own", pav.Settings())):
        given = arms.resolve(pav, base, ("low", "pav", "high"))
        found[name] = {arm: one.alpha for arm, one in given.items()}
    assert found["embedded"] == {"pav": 1.0, "low": 0.3, "high": 3.0}
    assert found["own"] == {"pav": 5.0, "low": 1.5, "high": 15.0}

    def program(**changes):
        plan = pav.build(arms.override(small, changes, "pav"))
        return fingerprints.fingerprint(plan, arms.trace(plan))

    half = program(alpha=0.5)
    assert program(alpha=arms.Times(0.5)) == half != program()


def test_soft_labels():
    logits, rates = jnp.array([0.0, 2.0, 5.0]), jnp.array([0.25, 1 / (1 + np.exp(-2.0)), 0.9])
    weight = jnp.array([1.0, 1.0, 0.0])
    slope = jax.grad(progress_verifier.soft_label_loss)(logits, rates, weight)
    close.assert_near(slope, [0.125, 0.0, 0.0])  # (sigmoid - rate) / count


def test_worked_pits():
    rates = jnp.array([[0.5, 0.0, 0.25], [0.5, 0.5, 0.5], [0.0, 0.0, 0.0]])
    there = jnp.array([[True, True, True], [True, True, False], [True, False, False]])
    pit = progress_verifier.first_pit(rates, there)
    assert pit.tolist() == [1, 1, 0]
    more = jnp.array([[1.0, 0.5], [0.0, 0.25], [1.0, 1.0]])
    found, weight = progress_verifier.covered(rates, there, pit, more, first=2, added=2)
    # of four completions three, of four one; at the prompt all six: (0 + 2 + 2) / 6
    close.assert_near(found, [[0.75, 0.25, 0.25], [0.25, 0.375, 0.5], [4 / 6, 0.0, 0.0]])
    close.assert_near(weight, [[1, 1, 0], [1, 1, 0], [1, 0, 0]])


def test_coverage_is_the_rate_of_all_completions():
    rng = np.random.default_rng(1)
    first, added = 3, 5
    hits = rng.integers(0, first + 1, (40, 5))
    count = rng.integers(1, 6, 40)  # prefixes of each response
    there = np.arange(5)[None, :] < count[:, None]
    extra = rng.integers(0, added + 1, (40, 2))
    pit = progress_verifier.first_pit(jnp.asarray(hits / first, jnp.float32), jnp.asarray(there))
    found, weight = progress_verifier.covered(
        jnp.asarray(hits / first, jnp.float32), jnp.asarray(there), pit, jnp.asarray(extra / added, jnp.float32),
        first=first, added=added,
    )  # fmt: skip
    for b in range(40):
        zeros = [k for k in range(count[b]) if hits[b, k] == 0]
        at = zeros[0] if zeros else count[b] - 1
        assert int(pit[b]) == at
        done, of = hits[b].astype(float), np.full(5, float(first))
        for k, place in enumerate((max(at - 1, 0), at)):
            done[place] += extra[b, k]
            of[place] += added
        close.assert_near(found[b], done / of)
        assert np.asarray(weight[b]).tolist() == [float(k <= at) for k in range(5)]


def test_the_state_behind_a_step():
    steps = reader.Steps(
        jnp.array([[0, 0, 0, 0, 1, 1]]), None, jnp.array([[False, False, False, True, False, True]]), None, None
    )
    hidden = jnp.arange(6, dtype=jnp.float32)[None, :, None] * jnp.ones((1, 1, 2))
    at = [progress_verifier.behind_steps(hidden, steps, k, 1)[0, 0].item() for k in range(3)]
    assert at == [1.0, 3.0, 5.0]  # the prompt ends at 1
    assert progress_verifier.behind_steps(hidden, steps, jnp.array([2]), 1)[0].tolist() == [5.0, 5.0]


def test_no_more_completions_are_spent_around_pits():
    there = jnp.array([[True, True, True, False]])
    spent = []

    def measured(count, number, drawn):
        spent.append((count, np.asarray(number).tolist()))
        return jnp.array([0.0 if number == 2 else 0.5])

    rates, weights = progress_verifier.around_pits(measured, there, 7)
    # three at each of four prefixes; the pit is behind two steps: eight there, eight one step before
    assert spent == [(3, 0), (3, 1), (3, 2), (3, 3), (8, [1]), (8, [2])] and 12 + 16 <= 4 * 7
    close.assert_near(rates, [[0.5, 0.5, 0.0, 0.5]])
    assert weights.tolist() == [[1.0, 1.0, 1.0, 0.0]]
    with pytest.raises(ValueError, match="completions=1 must be at least 2"):
        progress_verifier.around_pits(measured, there, 1)


@pytest.mark.slow
def test_a_verifier_of_pits_tells_lost_prefixes_from_open_ones():
    """Its chance is higher behind right first steps than behind wrong ones, and nothing behind a pit was weighed."""
    settings = recipes.OnlineSettings(levels=(2,), train_problems=64, eval_problems=4, max_new_tokens=24)
    found, stepped = recipes.bench(settings), step_labels.make_stepped(settings)
    fit = progress_verifier.make_verifier(
        settings, prompts=48, completions=6, most=2, spend=progress_verifier.around_pits
    )
    verifier = jax.jit(fit)(jax.random.key(0))
    rows = progress_verifier.sampled_rows(found, settings, found.model.params, jax.random.key(9), prompts=64)
    steps, right = step_labels.label(stepped, rows)
    after, before, valid = progress_verifier.step_success(found, verifier, rows, steps, most=2)
    labels, _ = reader.per_step(right.astype(jnp.float32), steps, most=2)
    first, good = np.asarray(after[:, 0])[valid[:, 0]], np.asarray(labels[:, 0])[valid[:, 0]] > 0.5
    assert good.any() and (~good).any() and first[good].mean() > first[~good].mean() + 0.1
    assert np.isfinite(float(verifier.loss))


def test_completions_of_text_are_written_in_parts(monkeypatch):
    """What is written is what one piece would be: every sample has its own key and prompt."""
    monkeypatch.setattr(progress_verifier, "ROLLED_AT_ONCE", 4)
    sizes = []

    def roll(tokens, valid, keys, ids):
        sizes.append(tokens.shape[0])
        drawn = jax.vmap(lambda key: jax.random.randint(key, (3,), 0, 100))(keys)
        said = jnp.concatenate([jnp.repeat(tokens, 2, axis=0), drawn], axis=1)
        number, there = jnp.repeat(ids, 2), jnp.ones(said.shape, jnp.int32)
        return Trajectories(
            said, there, there, there > 0, jnp.zeros(said.shape), jnp.zeros(said.shape[0], bool), number, number
        )

    ids = jnp.arange(5, dtype=jnp.int32)
    keys = sample_keys(jax.random.key(0), 0, ids, 2)
    given = ids[:, None] + jnp.zeros((5, 4), jnp.int32), jnp.ones((5, 4), bool), keys, ids
    chains = recipes.bench(SMALL)
    found, whole = (
        progress_verifier.rolled(bench, roll, given, samples=2) for bench in (chains._replace(score=None), chains)
    )
    assert set(sizes[:-1]) == {2} and sizes[-1] == 5
    np.testing.assert_array_equal(found.tokens, whole.tokens)
    np.testing.assert_array_equal(found.problem_ids, np.repeat(np.arange(5), 2))


@pytest.mark.slow
def test_prefixes_and_their_measured_success():
    settings = recipes.OnlineSettings(levels=(1,), train_problems=6, eval_problems=4, max_new_tokens=14)
    found = recipes.bench(settings)
    tokens, valid = recipes.demonstrations(settings)
    roll = recipes.rollout_of_model(found.model, group_size=1, max_new_tokens=14, temperature=1.0)
    ids = jnp.arange(6, dtype=jnp.int32)
    rows = roll(found.model.params, found.train.tokens, found.train.valid, jax.random.split(jax.random.key(0), 6), ids)
    rows = given_responses.with_responses(rows, jnp.ones(6, bool), tokens, valid)
    # up to the mark: what is left is to write the answer down
    mark = found.model.tokenizer.encode("#")[0]
    until = jnp.cumsum((rows.tokens == mark) & rows.mask, axis=1)
    keep = rows.mask & ((until == 0) | ((rows.tokens == mark) & (until == 1)))
    prompts, there, response = progress_verifier.prefix_prompts(rows, keep, pad_id=found.model.tokenizer.pad_id)
    decode = found.model.tokenizer.decode
    for k in range(6):
        whole = decode([int(t) for t in np.asarray(prompts[k])[np.asarray(there[k])]])
        assert whole.endswith("#") and "=>" in whole
        assert decode([int(t) for t in np.asarray(prompts[k])[np.asarray(response[k])]]) == whole.split("=>")[1]
    near = progress_verifier.measured_success(found, settings, rows, keep, completions=4)
    far = progress_verifier.measured_success(found, settings, rows, rows.mask & False, completions=4)
    assert float(near.mean()) > float(far.mean()) and float(near.mean()) > 0.8


SMALL = recipes.OnlineSettings(levels=(3,), train_problems=12, eval_problems=4, max_new_tokens=30)


@pytest.mark.slow
@pytest.mark.parametrize("prover", [progress_verifier.BASE, progress_verifier.STRONG._replace(taught_steps=1)])
def test_a_prover_of_another_shape_completes(prover):
    """Prefixes and features are the base model's; only who completes them is another, taught or not."""
    found = recipes.bench(SMALL)
    proves = progress_verifier.bench_of_prover(found, "tiny", new_tokens=SMALL.max_new_tokens)
    assert proves.model.params["embed"].shape != found.model.params["embed"].shape
    taught = progress_verifier.prover_params(proves, SMALL, prover, jax.random.key(0))
    assert jax.tree.map(jnp.shape, taught) == jax.tree.map(jnp.shape, proves.model.params)
    assert prover.taught_steps == 0 or (taught["embed"] != proves.model.params["embed"]).any()
    sizes = {"prompts": 12, "completions": 3, "most": 2}
    own, other = (
        progress_verifier.make_verifier(SMALL, **sizes, prover=prover, prover_model=name)(jax.random.key(0))
        for name in ("", "tiny")
    )
    assert own.weight.shape == other.weight.shape == (found.model.config.hidden_size,)
    assert np.isfinite(other.weight).all() and (own.weight != other.weight).any()


def test_a_prover_that_cannot_complete_is_refused():
    found = recipes.bench(SMALL)
    assert progress_verifier.bench_of_prover(found, "", new_tokens=14) is found
    with pytest.raises(UserError, match="^--prover-model tiny has 512 positions, and a row takes up to"):
        progress_verifier.bench_of_prover(found, "tiny", new_tokens=250)
    with pytest.raises(UserError, match="^--prover-model no/such: no bundled model"):
        pav.build(dataclasses.replace(pav.Settings(), **pav.EMBEDDED | pav.SMOKE, prover_model="no/such"))

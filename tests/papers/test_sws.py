"""SwS: which problems are weak, where new ones go, how they are made, answered and kept."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.curriculum import sws
from experiments.curriculum.parts import chain_concepts, synthesis, weakness
from jaxrl_llm.data import problems as tables
from jaxrl_llm.data.tasks import chain
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import curricula, recipes
from tests import close


def test_worked_weakness():
    history = jnp.array([[0.25, 0.125, 0.0], [0.0, 0.25, 0.375], [0.6, 0.5, 0.4], [0.0, 0.0, 0.0]])
    assert weakness.weak_problems(history).tolist() == [True, False, False, True]
    close.assert_printed(weakness.accuracy_slopes(history), [-0.125, 0.1875, -0.1, 0.0], 4)
    assert weakness.accuracy_slopes(history[:, :1]).tolist() == [0.0] * 4
    rng = np.random.default_rng(0)
    rows = rng.random((20, 7))
    slopes = [np.polyfit(np.arange(7), row, 1)[0] for row in rows]
    close.assert_near(weakness.accuracy_slopes(jnp.asarray(rows, jnp.float32)), slopes)


def test_worked_budgets_and_votes():
    weak, of = jnp.arange(40) % 20 < jnp.repeat(jnp.array([3, 1]), 20), jnp.repeat(jnp.arange(2), 20)
    assert weakness.category_budgets(weak, of, total=100, count=2).tolist() == [75, 25]
    assert weakness.category_budgets(jnp.zeros(40, bool), of, total=100, count=2).tolist() == [0, 0]
    ratings = jnp.array([[2, 1], [2, 0], [1, 1], [2, 2]])  # perfect 2, acceptable 1, bad 0
    assert weakness.passes_vote(ratings).tolist() == [True, False, False, True]
    answers, share = weakness.consistent_answers(jnp.array([[4, 4, 1], [1, 2, 3]]))
    assert answers.tolist() == [4, 1]
    close.assert_near(share, [2 / 3, 1 / 3], magnitude=0)


def test_concept_sets_follow_frequency_then_company():
    together = jnp.array([[0.0, 3.0, 0.0], [3.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
    vectors = jnp.array([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
    scores = weakness.concept_scores(together, vectors, jnp.array([True, False, False]))
    close.assert_near(scores, [1.0, 3.0, 0.6])  # Co[c, 0] + cos
    both = weakness.concept_scores(together, vectors, jnp.array([True, True, False]))
    close.assert_near(both[2], 1.0 + (0.6 + 0.8) / np.sqrt(2))
    keys = jax.random.split(jax.random.key(0), 2000)
    first = jax.vmap(lambda k: weakness.draw_concepts(k, jnp.array([3.0, 1.0, 0.0]), together, vectors, size=1))(keys)
    close.assert_share(first.mean(0), [0.75, 0.25, 0.0], 2000)
    pairs = jax.vmap(
        lambda k: weakness.draw_concepts(k, jnp.array([1.0, 0.0, 0.0]), together, vectors, size=2, temperature=2.0)
    )(keys)
    assert (pairs.sum(1) == 2).all() and pairs[:, 0].all()
    chance = 1 / (1 + np.exp((0.6 - 3.0) / 2.0))
    close.assert_share(pairs[:, 1].mean(), chance, 2000)
    with pytest.raises(ValueError, match="size=4"):
        weakness.draw_concepts(keys[0], jnp.ones(3), together, vectors, size=4)


def test_chains_have_the_concepts_asked_for():
    rng = np.random.default_rng(0)
    made = chain_concepts.make_from(rng, ["m7", "*", "depth4"], (3, 4, 5))
    assert chain_concepts.concepts_of(made) == ("m7", "*", "depth4")
    assert made == chain.from_parts(made.answer["numbers"], "****", 7)
    loose = [chain_concepts.make_from(rng, [], (3, 5)) for _ in range(40)]
    assert {p.level for p in loose} == {3, 5} and {p.answer["modulus"] for p in loose} == set(chain.MODULI)
    right = chain_concepts.solver_answers(rng, made, 200, error_rate=0.0)
    assert (right == made.answer["value"]).all()
    noisy = chain_concepts.solver_answers(rng, made, 4000, error_rate=0.5)
    close.assert_share((noisy == made.answer["value"]).mean(), 0.5 + 0.5 / 7, 4000)


def test_candidates_are_new_voted_on_and_never_held_out():
    settings = recipes.OnlineSettings(levels=(2, 3), train_problems=16, eval_problems=8, max_new_tokens=8)
    found, problems = recipes.bench(settings), curricula.train_problems(settings)
    made = synthesis.candidates(np.random.default_rng(0), problems, 60, found, synthesis.Recipe(error_rate=0.0))
    identities = [p.identity for p in made]
    assert 20 < len(made) < 60 and len(set(identities)) == len(identities)
    assert not set(identities) & {p.identity for p in problems}
    assert not any(tables.is_heldout(i) for i in identities)
    for p in made:
        assert chain.work(p.answer["numbers"], p.answer["operators"], p.answer["modulus"])[1] == p.answer["value"]
    table = synthesis.encode(found, problems + made)
    assert table.tokens.shape[0] == len(problems + made) and table.tokens.shape[1] >= found.train.tokens.shape[1]


def test_aims():
    problems = [chain.from_parts([1, 2, 3], "+-", 7)] * 2 + [chain.from_parts([1, 2, 3, 4], "+-*", 7)] * 2
    history = np.array([[1.0, 1.0], [1.0, 0.9], [0.5, 0.25], [0.0, 1.0]])
    first = synthesis.FirstRound(None, history, np.array([1.0, 1.0, 0.0, 1.0]), 0.5)
    assert synthesis.at_weakness(problems, first, 10) == synthesis.Aim([problems[2]], {2: 0, 3: 10})
    assert synthesis.everywhere(problems, first, 10).budgets == {2: 5, 3: 5}
    assert synthesis.at_failures(problems, first, 10).budgets == {2: 0, 3: 10}
    learnt = first._replace(history=np.ones((4, 2)))
    assert synthesis.at_weakness(problems, learnt, 10) == synthesis.everywhere(problems, learnt, 10)


def _small(**changes):
    small = {
        "levels": (2, 3), "steps": 2, "eval_every": 2, "prompts_per_step": 8, "group_size": 2, "max_new_tokens": 24,
        "train_problems": 16, "eval_problems": 8, "new_problems": 16, "epochs": 1,
    }  # fmt: skip
    return sws.Settings(**small | changes)


def test_each_seed_has_a_first_round_and_new_problems_of_its_own():
    settings = _small(keep_low=0.0, keep_high=1.0)
    plan = sws.build(settings)
    firsts = [synthesis.first_round(settings, 1, seed) for seed in (0, 1)]
    assert synthesis.first_round(_small(aim=None), 1, 1) is firsts[1], "arms share it"
    trees = [jax.tree.leaves(first.params) for first in firsts]
    assert any((a != b).any() for a, b in zip(*trees, strict=True))
    old = curricula.train_problems(settings)
    plans = [plan.of_seed(plan, seed) for seed in (0, 1)]
    for first, one in zip(firsts, plans, strict=True):
        assert one.init(jax.random.key(5)) is first.params
    tables_of = [one.stages[0].method.problems for one in (plan, *plans)]
    same = [np.array_equal(tables_of[0].tokens, table.tokens) for table in tables_of]
    assert same == [True, True, False], "the plan is that of seed 0"
    for table in tables_of:
        assert table.tokens.shape[0] > len(old)
        np.testing.assert_array_equal(table.level[: len(old)], [p.level for p in old])


def test_arms_of_other_rates_share_a_first_round(monkeypatch):
    """A record tunes the rate of each arm: another one must not begin from other parameters, nor aim elsewhere."""
    asked = []
    monkeypatch.setattr(synthesis, "first_round", lambda s, epochs, seed: asked.append((s.learning_rate, epochs, seed)))
    settings = sws.Settings(**sws.EMBEDDED)
    for rate in (1e-4, 2e-4, 4e-4):
        sws.first_of(dataclasses.replace(settings, learning_rate=rate), 3)
    assert asked == [(2e-4, 3, 3)] * 3
    sws.first_of(dataclasses.replace(settings, first_rate=0.0, learning_rate=4e-4), 0)
    assert asked[3] == (4e-4, 3, 0)
    with pytest.raises(UserError, match="--first-rate -1.0 must not be negative"):
        sws.build(dataclasses.replace(settings, first_rate=-1.0))


def test_the_order_of_a_first_round_belongs_to_its_seed(monkeypatch):
    """All problems once an epoch, in another order for another seed."""
    settings, seen = synthesis._common(_small()), []
    run, online = synthesis._epoch(settings)

    def watched(state):
        sampler, ids = state.sampler, []
        for _ in range(2):
            drawn, sampler = online.sampler.draw(sampler, state.key, 8)
            ids += drawn.tolist()
        seen.append(ids)
        return state, None

    monkeypatch.setattr(synthesis, "_epoch", lambda settings: (watched, online))
    monkeypatch.setattr(synthesis, "train_share", lambda *_: np.zeros(16))
    for seed in (0, 1):
        synthesis._first_round(settings, 1, seed)
    assert [sorted(ids) for ids in seen] == [list(range(16))] * 2 and seen[0] != seen[1]


def test_other_problems_are_refused_before_the_first_round():
    settings = sws.Settings(data="countdown", levels=(3,), train_problems=8, eval_problems=8, max_new_tokens=16)
    with pytest.raises(UserError, match="not of countdown: --data chain"):
        sws.build(settings)


def test_how_much_was_weak_is_a_figure_of_each_seed(monkeypatch):
    """Where nothing is weak there is nothing to aim at, and the run says so."""
    assert sws.BED.positive == "oracle" and "oracle" in sws.ARMS and "weak/share" in sws.METRICS
    settings = _small(aim=None)
    params = recipes.bench(settings).model.params
    histories = {0: np.tile([1.0, 1.0], (16, 1)), 1: np.array([[0.5, 0.25]] * 4 + [[0.0, 1.0]] * 12)}
    monkeypatch.setattr(
        synthesis,
        "first_round",
        lambda s, epochs, seed: synthesis.FirstRound(params, histories[seed], np.ones(16), 0.25 + seed),
    )
    plan = sws.build(settings)
    for seed, share in ((0, 0.0), (1, 0.25)):
        figures = plan.of_seed(plan, seed).stages[0].method.figures
        assert {name: float(x) for name, x in figures(None, {}).items()} == {"weak/share": share}


def test_a_second_round_that_gains_little_is_no_bed(monkeypatch):
    """What uniform gains is measured from the accuracy that the first round of its seed leaves."""
    assert sws.BED.judges == (("uniform", "eval/gain", 0.1),) and "eval/gain" in sws.METRICS
    gained = sws.with_gain(lambda params, key: {"eval/accuracy": jnp.float32(0.75)}, 0.5)
    assert {name: float(x) for name, x in gained(None, None).items()} == {"eval/accuracy": 0.75, "eval/gain": 0.25}
    settings = _small(aim=None)
    params = recipes.bench(settings).model.params
    monkeypatch.setattr(
        synthesis, "first_round",
        lambda s, epochs, seed: synthesis.FirstRound(params, np.ones((16, 2)), np.ones(16), seed / 8),
    )  # fmt: skip
    plan = sws.build(settings)
    measures = [plan.of_seed(plan, seed).measure for seed in (0, 1, 1)]
    assert measures[0] is plan.measure and measures[1] is measures[2] is not plan.measure, "arms share a seed's"
    tried = plan._replace(measure=len)  # as where a rate is tried
    assert plan.of_seed(tried, 1).measure is len


def test_the_hardest_chains_are_longer_than_the_base_has_read():
    """At 4 to 6 operations uniform had little to gain: 0.708 to 0.764 in the second round."""
    assert max(chain.LEVELS) == 5 and [k for k in sws.EMBEDDED["levels"] if k > 5] == [6, 7]
    settings = sws.Settings(**sws.EMBEDDED)
    longest = max(len(p.solution) for p in curricula.train_problems(settings))
    assert 5 * settings.levels[-1] < longest < settings.max_new_tokens, "one token a character, and an end"

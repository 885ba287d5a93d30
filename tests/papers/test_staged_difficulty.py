"""Staged difficulty: levels from a ladder of models, draws from a level only."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.curriculum import staged_difficulty
from experiments.curriculum.parts import domains, plateau
from jaxrl_llm.curriculum.subset import ladder_levels, make_subset
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.experiment.results import Results
from jaxrl_llm.train import fused, online
from jaxrl_llm.train import plan as plans
from tests import close
from tests.experiment import made
from tests.verifiers.test_labels import _rows


@pytest.mark.parametrize(
    ("rates", "first", "second"),
    [((0.5, 0.5, 1.0), True, True), ((0.0, 0.0, 0.0), False, False), ((1.0, 1.0, 1.0), False, False),
     ((0.0, 1.0, 1.0), False, True), ((0.0, 0.5, 1.0), False, True), ((0.5, 1.0, 1.0), True, False)],
)  # fmt: skip
def test_worked_levels(rates, first, second):
    rows = [jnp.array([x, x]) for x in rates]
    levels = ladder_levels(*rows, jnp.array([True, False]))
    assert levels[0].tolist() == [first] * 2
    assert levels[1].tolist() == [second] * 2
    # unsolved by the largest model: always level 3; else by the coin
    assert levels[2].tolist() == [True, rates[2] == 0.0]


def test_levels_agree_with_the_data_card_written_out():
    rng = np.random.default_rng(0)
    small, medium, large = (rng.choice([0.0, 0.5, 1.0], 200) for _ in range(3))
    coins = rng.random(200) < 0.5
    found = ladder_levels(*(jnp.asarray(x, jnp.float32) for x in (small, medium, large)), jnp.asarray(coins))
    for k in range(200):
        s, m = small[k], medium[k]
        second = (s == 0 and m == 1) or (s == 0 and 0 < m < 1) or (0 < s < 1 and 0 < m < 1)
        assert [bool(x[k]) for x in found] == [0 < s < 1, second, bool(large[k] == 0 or coins[k])]


def test_draws_stay_in_the_level_and_are_uniform():
    chosen = np.array([False, True, False, True, True])
    sampler = make_subset(chosen)
    state = sampler.init(5)
    ids, _ = sampler.draw(state, jax.random.key(0), 3000)
    counts = np.bincount(np.asarray(ids), minlength=5)
    assert counts[~chosen].sum() == 0
    close.assert_share(counts[chosen] / 3000, 1 / 3, 3000)
    # rows by number are the same rows, so that a stage of all rows of a level is the plain method on that level
    same, _ = make_subset([1, 3, 4]).draw(state, jax.random.key(0), 3000)
    np.testing.assert_array_equal(ids, same)


def test_empty_and_foreign_rows_are_refused():
    with pytest.raises(ValueError, match="rows is empty"):
        make_subset(np.zeros(4, bool))
    with pytest.raises(ValueError, match="0 to 2"):
        make_subset([3]).init(3)


def test_shares_of_two_domains_are_exact_and_of_the_rows_of_the_level():
    first, second = np.array([True, False, True, False, False]), np.array([False, False, False, True, True])
    for share, count in ((0.0, 0), (0.25, 2), (0.5, 4), (1.0, 8)):
        sampler = domains.make_shares(first, second, share)
        ids = np.asarray(sampler.draw(sampler.init(5), jax.random.key(3), 8)[0])
        assert np.isin(ids, [3, 4]).sum() == count and np.isin(ids, [0, 2]).sum() == 8 - count
    with pytest.raises(ValueError, match="one of the domains"):
        domains.make_shares(first, np.zeros(5, bool), 0.5)


MATHS = recipes.OnlineSettings(
    data="countdown", levels=(2,), train_problems=6, eval_problems=2, max_new_tokens=14, group_size=2
)


def test_both_domains_are_judged_by_their_own_rule():
    """Problems of Countdown by their steps, programs by their tests in the sandbox, in one table."""
    code = domains.code_settings(MATHS, "programs", "plain", (1,))
    found = domains.open_domains(MATHS, code)
    problems = [*recipes.solved_problems(MATHS), *recipes.solved_problems(code)]
    tokenizer, table = found.joint.model.tokenizer, found.joint.train
    for k, problem in enumerate(problems):
        shown = np.asarray(table.tokens[k])[np.asarray(table.valid[k])].tolist()
        assert tokenizer.decode(shown) == problem.prompt
    _, rows = _rows([problems[0].solution, f"0+{problems[6].solution}", problems[6].solution, problems[0].solution])
    rewards = found.joint.host_score(rows._replace(problem_ids=np.asarray([0, 6, 0, 6], np.int32)))
    assert rewards.value.tolist() == [1, 1, 0, 0] and rewards.valid.all()
    assert domains.solvable(code).all()


def test_a_record_measures_as_many_programs_as_there_are():
    """A record asks for 512 held-out problems of either domain, and fewer programs than that are made."""
    wide = dataclasses.replace(MATHS, eval_problems=512)
    count = domains.code_settings(wide, "programs", "plain", (1, 2, 3)).eval_problems
    assert 64 <= count < 512 and count % 32 == 0
    assert domains.code_settings(MATHS, "programs", "plain", (1, 2, 3)).eval_problems == MATHS.eval_problems


def test_programs_of_ones_own_whose_solution_fails_do_not_train(tmp_path):
    rows = [{"text": f"Give {k}.", "code": f"def f():\n    return {k}", "test_list": [f"assert f() == {k + k % 2}"]}
            for k in range(40)]  # fmt: skip
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    code = domains.code_settings(MATHS, str(tmp_path / "own.jsonl"), "mbpp", ())
    kept, problems = domains.solvable(code), recipes.solved_problems(code)
    assert kept.tolist() == [int(p.prompt.split("Give ")[1].split(".")[0]) % 2 == 0 for p in problems]
    assert 0 < kept.sum() < len(problems)


def _stages(scores, *, window, patience, least):
    """The rule written out over a list of scores, one a step; None where no answer was valid."""
    stage, best, waited, opened, found = 0, None, 0, [], []
    for k, score in enumerate(scores):
        opened.append(score)
        if (k + 1) % window == 0:
            known = [x for x in opened if x is not None]
            opened = []
            if known:
                mean = np.mean(known)
                if best is None or mean > best + least:
                    best, waited = mean, 0
                else:
                    waited += 1
                if waited == patience:
                    stage, best, waited = stage + 1, None, 0
        found.append(stage)
    return found


@pytest.mark.parametrize(("window", "patience", "least"), [(1, 1, 0.0), (3, 2, 0.0), (2, 1, 0.125), (4, 3, 0.0)])
def test_stages_end_by_the_rule_written_out(window, patience, least):
    rng = np.random.default_rng(window)
    scores = [None if rng.random() < 0.2 else float(rng.integers(0, 9)) / 8 for _ in range(60)]
    state, found = plateau.first_stage(), []
    for score in scores:
        shown = jnp.array([0.5 if score is None else score, 7.0])  # the second is never valid
        valid = jnp.array([score is not None, False])
        state = plateau.past_plateau(state, shown, valid, window=window, patience=patience, least=least)
        found.append(int(state.stage))
    assert found == _stages(scores, window=window, patience=patience, least=least)
    assert found[-1] > 1


def test_worked_plateau():
    """Windows of two steps: .2, .4, .4 and the stage ends; then .1 is a new stage's first and best."""
    state, stages = plateau.first_stage(), []
    for score in (0.1, 0.3, 0.4, 0.4, 0.3, 0.5, 0.1, 0.1):
        state = plateau.past_plateau(state, jnp.array([score]), jnp.array([True]), window=2)
        stages.append(int(state.stage))
    assert stages == [0, 0, 0, 0, 0, 1, 1, 1]
    close.assert_near(state.best, 0.1)


def test_a_sampler_moves_on_where_only_the_validation_score_is_flat():
    rows = np.arange(12)
    held = plateau.held_rows(12, 3)
    stages = [rows < 6, rows >= 6]
    sampler = plateau.make_validated(stages, held, count=2, window=1)
    state, seen = sampler.init(12), []
    # what trains rises without end, what validates stays: the stage is over at the second step
    for step in range(3):
        ids, state = sampler.draw(state, jax.random.key(step), 8)
        ids = np.asarray(ids)
        assert held[ids[:2]].all() and not held[ids[2:]].any()
        seen.append({bool(x) for x in ids[2:] < 6})
        scores = jnp.where(jnp.asarray(held)[ids], 0.5, 0.1 * step)
        state = sampler.update(state, jnp.asarray(ids), scores, jnp.ones(8, bool))
    assert seen == [{True}, {True}, {False}] and int(state.stage) == 1
    ids, _ = sampler.draw(state, jax.random.key(9), 8)
    assert (np.asarray(ids)[2:] >= 6).all(), "the last stage goes on"
    with pytest.raises(ValueError, match="each needs at least one"):
        plateau.make_validated([held], held, count=1, window=1)
    with pytest.raises(ValueError, match="count=8"):
        plateau.make_validated(stages, held, count=8, window=1).draw(state, jax.random.key(0), 8)


@pytest.mark.slow
def test_a_run_goes_through_its_levels_and_leaves_validation_out_of_the_loss():
    settings = dataclasses.replace(
        staged_difficulty.Settings(), **staged_difficulty.EMBEDDED | staged_difficulty.SMOKE | {
            "validation": 2, "window": 1, "steps": 4, "prompts_per_step": 4, "stages": (0, 0),
        },
    )  # fmt: skip
    plan = staged_difficulty.build(settings)
    (stage,) = plan.stages
    assert stage.steps == 8
    state = plans.start(stage, plan.init(jax.random.key(0)), jax.random.key(1))
    state, metrics = fused.run(stage.method, jax.tree.map(jnp.copy, state), 8)
    assert int(state.sampler.stage) >= 1
    rows = jax.jit(lambda s: online.begin(stage.method, s))(state)
    held = np.asarray(plateau.held_rows(48, settings.validation_rows))[np.asarray(rows.trajectories.problem_ids)]
    rewards = stage.method.score(online.answers_of(stage.method, rows.trajectories), rows.trajectories)
    batch = stage.method.estimate(state.params, state.extras, rows.trajectories, rewards)
    assert held.sum() == 4 and not np.asarray(batch.mask)[held].any() and np.asarray(batch.mask)[~held].any()


def test_a_ladder_of_one_model_is_refused():
    """One model at one temperature, as for a model of one's own without --ladder: levels 1 and 2 were one set."""
    sizes = {"train_problems": 8, "eval_problems": 4, "max_new_tokens": 28}
    settings = staged_difficulty.Settings(data="countdown", levels=(2,), **sizes)
    message = "nano at 1, nano at 1, nano at 1 are no three steps"
    with pytest.raises(UserError, match=message):
        staged_difficulty.build(settings)
    named = dataclasses.replace(settings, ladder=("", "nano", "tiny"))
    with pytest.raises(UserError, match="nano at 1, nano at 1, tiny at 1 are no three steps"):
        staged_difficulty.build(named)


def test_the_ladder_is_of_copies_that_learned_for_longer(monkeypatch):
    """Pass rates of the model and of copies after 1 and 2 steps, small to large, once for arms of any rate."""
    settings = staged_difficulty.Settings(**staged_difficulty.EMBEDDED | staged_difficulty.SMOKE)
    found, taught, asked = recipes.bench(settings), [], []

    def imitated(settings, *, steps, learning_rate):
        taught.append((steps, learning_rate))
        return steps

    def pass_rates(found, by, rows, *, samples, max_new_tokens):
        asked.append((by.params if isinstance(by.params, int) else 0, samples, max_new_tokens))
        return np.resize([[0.0, 0.0, 0.5], [0.0, 0.5, 1.0], [0.0, 1.0, 1.0]][len(asked) - 1], rows.size)

    monkeypatch.setattr(curricula, "solutions_imitated", imitated)
    monkeypatch.setattr(curricula, "pass_rates", pass_rates)
    faster = dataclasses.replace(settings, learning_rate=6e-4)
    rows = [staged_difficulty.level_rows(each, found, each) for each in (settings, settings, faster)]
    assert taught == [(1, 3e-4), (2, 3e-4)] and asked == [(0, 4, 28), (1, 4, 28), (2, 4, 28)]
    first, second, third = (x[:3].tolist() for x in rows[0][1:])
    assert (first, second) == ([False, False, True], [False, True, False]) and third[0]
    assert all((a == b).all() for other in rows[1:] for a, b in zip(rows[0], other, strict=True))
    for steps in ((0, 40), (0, 40, 40)):
        with pytest.raises(UserError, match="name three that rise"):
            staged_difficulty.level_rows(dataclasses.replace(settings, ladder_steps=steps), found, settings)
    for named in ({"ladder": ("nano", "tiny", "tiny")}, {"ladder_temperatures": (1.0, 0.7, 0.4)}):
        with pytest.raises(UserError, match="the ladder is of copies .--ladder-steps 0 1 2.; drop them, or give"):
            staged_difficulty.level_rows(dataclasses.replace(settings, **named), found, settings)


def test_the_claim_compares_both_domains_with_each_alone():
    metrics = {name: [0.3, 0.31] for name in staged_difficulty.METRICS}
    arms = {name: dataclasses.replace(made.arm([0.0, 0.0]), metrics=metrics) for name in staged_difficulty.ARMS}
    found = staged_difficulty.claim(Results(arms))
    assert (found.primary.arm, found.primary.than) == ("staged", "mixed")
    assert [(part.metric, part.arm, part.than) for part in found.secondary[4:]] == [
        ("eval/accuracy", "both", "maths"),
        ("code/accuracy", "both", "maths"),
        ("code/accuracy", "both", "code"),
    ]

"""Measures and toys of the analysis family: literal numbers, independent loops, worlds that say what they claim."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.analysis import compose_skills, math_beyond
from experiments.analysis.parts import (
    audit,
    beyond_base,
    diversity,
    functions,
    input_shift,
    planted_behaviour,
    qualitative_calculi,
    relations,
    skills,
    two_sources,
)
from experiments.analysis.parts import premises_task as premises
from experiments.analysis.parts import search_traces as search_parts
from experiments.parts import strings
from experiments.parts.preference_task import STRINGS
from experiments.preference.parts import constraints, zones
from jaxrl_llm.advantages import constrained
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import arms
from tests import close
from tests.close import doubles, singles

RNG = np.random.default_rng(4)

# --- diversity


def _ngrams(rows, n):
    return [tuple(row[i : i + n]) for row in rows for i in range(len(row) - n + 1)]


def test_diversity_on_literal_sets():
    both = jnp.asarray([[0, 1, 0], [0, 1, 2]])
    real = both >= 0
    kind = {"vocabulary": 5}
    assert float(diversity.distinct(both, real, n=1, **kind)) == 0.5
    assert float(diversity.distinct(both, real, n=2, **kind)) == 0.75
    close.assert_printed(
        diversity.expectation_adjusted(both, real, n=1, **kind), 0.813164, 6, magnitude=5.0
    )  # of its vocabulary
    close.assert_printed(diversity.expectation_adjusted(both, real, n=2, **kind), 1.016260, 6, magnitude=5.0)
    close.assert_near(diversity.dissimilarity(jnp.ones((4, 3))), 0.0)
    assert float(diversity.dissimilarity(jnp.eye(4))) == doubles(1.0)
    with pytest.raises(ValueError, match="31 bits"):
        diversity.distinct(both, real, n=2, vocabulary=2**29)
    with pytest.raises(ValueError, match="no pairs"):
        diversity.dissimilarity(jnp.ones((1, 3)))


def test_diversity_against_loops_masked_and_in_any_order():
    tokens, lengths = RNG.integers(0, 6, (7, 9)), RNG.integers(1, 10, 7)
    mask = np.arange(9)[None] < lengths[:, None]
    rows = [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]
    for n in range(1, 4):
        grams = _ngrams(rows, n)
        found = diversity.distinct(jnp.asarray(tokens), jnp.asarray(mask), n=n, vocabulary=6)
        close.assert_near(found, len(set(grams)) / len(grams))
        wanted = len(set(grams)) / (6 * (1 - (5 / 6) ** len(grams)))
        found = diversity.expectation_adjusted(jnp.asarray(tokens), jnp.asarray(mask), n=n, vocabulary=6)
        close.assert_near(found, wanted, magnitude=0)
        order = RNG.permutation(7)
        again = diversity.expectation_adjusted(jnp.asarray(tokens[order]), jnp.asarray(mask[order]), n=n, vocabulary=6)
        assert float(again) == doubles(float(found))
    rows = RNG.normal(size=(6, 4))
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    wanted = 1 - np.mean([unit[i] @ unit[j] for i, j in itertools.combinations(range(6), 2)])
    close.assert_near(diversity.dissimilarity(jnp.asarray(rows, jnp.float32)), wanted)


def test_diversity_with_more_kinds_of_tokens_than_grams_can_be_numbered():
    tokens = jnp.asarray(RNG.integers(0, 4, (6, 9)), jnp.int32)
    real = jnp.asarray(RNG.random((6, 9)) < 0.9)
    for n in (1, 2, 5):
        few = diversity.distinct(tokens, real, n=n, vocabulary=4)
        assert float(diversity.distinct(tokens * 40_000, real, n=n, vocabulary=160_000)) == float(few) > 0


def test_each_outcome_of_best_of_n_is_the_best_of_samples_of_its_own(monkeypatch):
    trained = input_shift.trained(STRINGS)
    prompts = trained[:4]
    assert not (trained[:, 1] == 3).any()
    scores = RNG.permutation(4 * 256).reshape(4, 256)
    drawn = jnp.asarray(np.broadcast_to(scores[:, :, None], (4, 256, 12)), jnp.int32)  # a response says its score
    asked = []

    def draw(samples):
        asked.append(samples)
        return drawn[:, :samples]

    monkeypatch.setattr(input_shift.preference_strings, "proxy", lambda task, params, prompts, rows: rows[:, 0])
    np.testing.assert_array_equal(input_shift.first(STRINGS, {}, prompts, draw), drawn[:, :16])
    found = np.asarray(input_shift.best_of_n(STRINGS, {}, prompts, draw))
    assert asked == [16, 256] and found.shape == (4, 16, 12)
    np.testing.assert_array_equal(found[:, :, 0], scores.reshape(4, 16, 16).max(2))


# --- compose_skills


def test_single_functions_are_a_gate_and_levels_are_asked_often(monkeypatch):
    """Compositions cannot be learned by who does not know the functions: one layer was at .04 of three of them."""
    assert compose_skills.BED.judges == (("none", "level1/heldout", 0.9),)
    params = jax.eval_shape(skills.WORLD.policy.init, jax.random.key(0))
    assert params["layers"]["o"].shape[0] == 2
    asked = []

    def silent(world, params, prompts, key):
        asked.append(len(prompts))
        return jnp.full((len(prompts), world.response_tokens), functions.END, jnp.int32)

    monkeypatch.setattr(skills.strings, "sample", silent)
    found = skills.measure({}, jax.random.key(0))
    assert sorted(asked) == [512] * 5 + [512 * len(skills.SHOWN)] * 2
    assert set(found) >= {*compose_skills.METRICS, *compose_skills.CURVES} - {"policy/entropy"}
    # who says nothing has ignored that functions were composed; behind idle words, too, that is no answer
    assert float(found.pop("errors/ignored")) == 1.0 and not any(float(x) for x in found.values())


def test_functions_and_levels():
    names = list(functions.FUNCTIONS)
    for k, name in enumerate([*names, *functions.BINARY]):
        word, second = tuple(RNG.integers(0, 4, 4).tolist()), tuple(RNG.integers(0, 4, 3).tolist())
        number, literal = int(np.dot(word, [64, 16, 4, 1])), int(np.dot(second, [16, 4, 1]))
        of = jnp.asarray([[k] + [0] * 7]), jnp.full((1, 8), literal)
        asked = functions.make_prompts(*of, jnp.asarray([1]), jnp.asarray([number]))
        found = functions.FUNCTIONS[name](word) if k < 8 else functions.BINARY[name](word, second)
        assert functions.solution(asked)[0, :5].tolist() == [*found, functions.END]
    assert functions.BINARY["concatenate"]((0, 1, 2, 3), (3, 2, 1)) == (3, 2, 1, 0)
    assert functions.BINARY["interlace"]((0, 1, 2, 3), (3, 2, 1)) == (0, 3, 1, 2)
    assert not set(functions.TRAIN) & set(functions.HELD_OUT)
    assert {*functions.TRAIN, *functions.HELD_OUT} == set(range(len(names)))


def test_composition_is_innermost_first_and_the_last_word_counts():
    prompts = functions.draw_prompts(jax.random.key(0), 50, levels=(3,), functions=functions.TRAIN)
    answers, two = functions.solution(prompts), 0
    for prompt, answer in zip(np.asarray(prompts).tolist(), np.asarray(answers).tolist(), strict=True):
        word, said = tuple(prompt[32:]), []
        for place in range(0, 12, 4):
            number, second = prompt[place] - functions.FIRST, tuple(prompt[place + 1 : place + 4])
            if number < 8:
                assert second == (functions.FILL,) * 3
                word = list(functions.FUNCTIONS.values())[number](word)
            else:
                word = list(functions.BINARY.values())[number - 8](word, second)
            said += word
        two += sum(slot >= functions.SECOND for slot in prompt[:12:4])
        assert answer[:13] == [*said, functions.END] and prompt[12] == functions.STOP
    assert 15 <= two <= 45, "a fifth of 150"
    assert functions.right(prompts, answers).all()
    spoilt = answers.at[:, 0].set((answers[:, 0] + 1) % 4)
    assert functions.right(prompts, spoilt).all(), "the working is free"
    spoilt = answers.at[:, 11].set((answers[:, 11] + 1) % 4)
    assert not functions.right(prompts, spoilt).any()
    assert not functions.right(prompts, jnp.where(answers == functions.END, 0, answers)).any()


def test_errors_by_a_loop_over_words():
    prompts = functions.draw_prompts(jax.random.key(4), 400, levels=(3,), functions=functions.HELD_OUT)
    answers, rng = np.asarray(functions.solution(prompts)), np.random.default_rng(0)
    said, wanted = np.full((400, functions.RESPONSE_TOKENS), functions.END, np.int32), []
    for k, (prompt, answer) in enumerate(zip(np.asarray(prompts), answers, strict=True)):
        start, words = prompt[-4:].tolist(), answer[:12].reshape(3, 4).tolist()
        kind, idle = int(rng.integers(5)), int(rng.integers(3)) * (words[0] != start)  # else nobody could tell
        kept = [words[:1], words[:2], words, words, words[:2]][kind]
        if kind == 2:  # the last word is off, so that one step is wrong
            kept = [*kept[:2], [(x + 1) % 4 for x in kept[2]]]
        flat = sum([start] * idle + kept, [])
        flat = flat[:-1] if kind == 4 else flat
        said[k, : len(flat)] = flat
        # a shorter chain may end in the right word by itself
        name = ("ignored", "partial", "atom", "", "form")[kind]
        wanted.append("" if kind < 2 and kept[-1] == words[-1] else name)
    found = functions.error_kinds(prompts, jnp.asarray(said))
    names = [[name for name, x in found.items() if x[k]] for k in range(400)]
    assert names == [[name] if name else [] for name in wanted] and set(wanted) == {*found, ""}
    right = np.asarray(functions.right(prompts, jnp.asarray(said)))
    np.testing.assert_array_equal(right, [not name for name in wanted])  # with the errors they are all


def test_an_answer_behind_idle_words_is_as_long_as_a_composition():
    prompts = functions.draw_prompts(jax.random.key(5), 40, levels=(1,), functions=functions.TRAIN)
    for words in (1, 2, 7):
        behind, world = skills.behind_idle(prompts, words), skills.idle_world(skills.WORLD, words)
        assert behind.shape == (40, world.prompt_tokens) and world.prompt_tokens == 36 + 4 * words
        assert world.prompt_tokens + world.response_tokens == 36 + functions.RESPONSE_TOKENS
        given = np.asarray(behind)[:, 36:].reshape(40, words, 4)
        assert (given == np.asarray(prompts)[:, None, 32:36]).all()
        answers = functions.solution(prompts)[:, : world.response_tokens]
        assert skills.right_behind(behind, answers).all()
        assert not skills.right_behind(behind, answers.at[:, 3].add(1)).any()
    base = arms.preset(compose_skills, smoke=True, model=compose_skills.Settings().model)
    found = arms.resolve(compose_skills, base, ("rl_1", "rl_1_long", "rl_2"))
    assert {name: (x.levels, x.idle, x.kind) for name, x in found.items()} == {
        "rl_1": ((1,), 0, "rl"), "rl_1_long": ((1,), 1, "rl"), "rl_2": ((2,), 0, "rl"),
    }  # fmt: skip
    with pytest.raises(UserError, match="arm rl_1_long has idle words of the embedded task: drop --data"):
        compose_skills.training(skills.FUNCTIONS._replace(), found["rl_1_long"])


def test_the_base_reads_short_problems_at_every_position():
    """No text works more than two functions, and yet every place of the longest answer is somewhere in it."""
    prompts, read = jax.jit(functions.draw_skills, static_argnums=1)(jax.random.key(1), 800)
    slots = np.asarray(prompts)[:, : functions.MAX_LEVEL * 4 : 4]
    assert (slots != functions.STOP).sum(1).max() == 2
    spoken = np.asarray(read) != functions.END
    assert spoken.any(0)[: 4 * functions.MAX_LEVEL].all() and not spoken[:, -1].any()
    adds = slots[:, 0] >= functions.NUMBER
    assert 0.2 < adds.mean() < 0.3
    assert functions.right_sum(prompts[adds], read[adds]).all(), "idle words change no answer"
    single = ~adds & ((slots != functions.STOP).sum(1) == 1)
    assert functions.right(prompts[single], read[single]).all()


def test_sums_of_every_level():
    prompts = functions.draw_sums(jax.random.key(2), 60, levels=(3, 8))
    answers = functions.sums(prompts)
    for prompt, answer in zip(np.asarray(prompts).tolist(), np.asarray(answers).tolist(), strict=True):
        value, said = prompt[32] - functions.NUMBER, []
        for slot in prompt[:32:4]:
            if slot != functions.STOP:
                value = (value + slot - functions.NUMBER - functions.MODULUS) % functions.MODULUS
                said += [functions.NUMBER + value, *[functions.FILL] * 3]
        assert answer[: len(said) + 1] == [*said, functions.END]
    assert functions.right_sum(prompts, answers).all()
    worse = jnp.where((answers >= functions.NUMBER) & (answers < functions.NUMBER + 5), functions.NUMBER, answers)
    assert functions.right_sum(prompts, worse).mean() < 0.5


# --- MiP


@pytest.mark.slow
def test_premises():
    prompts, responses = premises.draw_text(jax.random.key(0), 300, ill=0.5, wrong=0.0, abstain=1.0, again=0.5)
    posed = np.asarray(premises.well_posed(prompts))
    assert 0.4 < posed.mean() < 0.6
    answer, abstains = premises.read(responses)
    np.testing.assert_array_equal(abstains, ~posed)
    np.testing.assert_array_equal(np.asarray(answer)[posed], np.asarray(premises.truth(prompts))[posed])
    for prompt in np.asarray(prompts)[posed].tolist():
        values, told = {}, [prompt[k : k + 3] for k in (0, 3, 6)]
        for _ in range(3):
            for name, source, number in told:
                if source == premises.NONE or source in values:
                    values[name] = (number + values.get(source, 0)) % 7
        assert values[prompt[-1]] == int(premises.truth(jnp.asarray([prompt]))[0])
    rounds = (responses == premises.WAIT).sum(1)
    np.testing.assert_array_equal(premises.lengths(responses), 3 + 4 * rounds + 2)


@pytest.mark.parametrize(("again", "right"), [(0.0, 0.5), (1.0, 1 - 0.5 * 0.01)])
def test_a_chain_that_was_worked_again_is_less_often_wrong(again, right):
    prompts, responses = premises.draw_text(jax.random.key(0), 1500, ill=0.0, wrong=0.5, abstain=0.0, again=again)
    answer, _ = premises.read(responses)
    close.assert_share(np.mean(answer == premises.truth(prompts)), right, 1500)
    last = np.asarray(jnp.argmax(responses == premises.MARK, axis=1)) - 1
    np.testing.assert_array_equal(np.asarray(responses)[np.arange(1500), last], answer)  # what the last round found
    first = np.asarray(responses)[:, 2] == np.asarray(premises.truth(prompts))
    close.assert_share(first.mean(), 0.5, 1500)


@pytest.mark.parametrize("name", list(premises.CONSTRUCTORS))
def test_removal_breaks_uniqueness_and_leaves_no_mark(name):
    plain = premises.draw_questions(jax.random.key(1), 200)
    broken = premises.CONSTRUCTORS[name](jax.random.key(2), plain)
    assert premises.well_posed(plain).all() and not premises.well_posed(broken).any()
    changed = np.asarray(plain != broken)
    assert (changed.any(1)).all() and not (np.asarray(broken) == premises.BLANK).any()
    told = changed[:, :9].reshape(-1, 3, 3).any(2).sum(1)
    assert (told == (0 if name == "swap" else 1)).all() and (changed[:, 10] == (name == "swap")).all()
    # two values of what is missing give two answers: the gap is in the way of the asked name
    for after in np.asarray(broken).tolist():
        known = {tuple(after[k : k + 3]) for k in (0, 3, 6)}
        names, wanted = {}, after[-1]
        for _ in range(4):
            names |= {n: 0 for n, source, _ in known if source == premises.NONE or source in names}
        assert wanted not in names


def test_rounds_that_repeat_and_where_doubt_begins():
    w, m, e = premises.WAIT, premises.MARK, premises.END
    rows = jnp.asarray([
        [1, 2, 3, w, 1, 2, 3, m, 3, e, e, e, e, e, e, e],
        [1, 2, 3, w, 4, 5, 6, m, 6, e, e, e, e, e, e, e],
        [1, 2, 3, m, 3, e, w, e, e, e, e, e, e, e, e, e],
    ], jnp.int32)  # fmt: skip
    close.assert_near(premises.repeated_steps(rows), [1.0, 0.0, 0.0])
    assert premises.first_round(rows).tolist() == [3, 3, 5]


# --- math_beyond, to_backtrack


def test_expansion():
    grown, shrunk = beyond_base.expansion(jnp.asarray([0, 0, 3, 0]), jnp.asarray([1, 0, 2, 0]))
    assert float(grown) == singles(1 / 3) and float(shrunk) == 0.0
    assert math.isnan(float(beyond_base.expansion(jnp.asarray([1, 2]), jnp.asarray([0, 1]))[0]))


def test_a_pool_of_difficulties_with_answers_of_several_tokens():
    prompts = beyond_base.draw_problems(jax.random.key(0), 600)
    strange = np.asarray((prompts >= beyond_base.FAMILIAR).sum(1))
    assert set(strange.tolist()) == {0, 2, 6} and prompts.shape == (600, 8) and int(prompts.max()) == 6
    for count in (0, 2, 6):
        close.assert_share((strange == count).mean(), 1 / 3, 600)
    easy = beyond_base.draw_problems(jax.random.key(0), 50, beyond_base.EASY)
    assert beyond_base.easy(easy).all() and not (easy >= 4).any()
    answers = np.cumsum(np.asarray(prompts), axis=1)[:, 1:] % 7
    assert beyond_base.right(prompts, jnp.asarray(answers)).all()
    for k in range(7):  # one wrong token of seven is a wrong answer, the last one or not
        wrong = answers.copy()
        wrong[:, k] = (wrong[:, k] + 1) % 7
        assert not beyond_base.right(prompts, jnp.asarray(wrong)).any()


def test_no_problem_of_evaluation_is_one_of_training():
    trained = [beyond_base.draw_problems(jax.random.key(1), 2048, kinds) for kinds in ((2,), (0, 1, 2))]
    read, _ = beyond_base.draw_attempts(jax.random.key(2), 4096)
    fresh = np.asarray(beyond_base.draw_fresh(jax.random.key(3), 2048))
    assert (fresh.sum(1) % 2 == 1).all() and all((np.asarray(x).sum(1) % 2 == 0).all() for x in (*trained, read))
    assert len(set(map(tuple, fresh.tolist()))) > 1900, "no kind is a handful of problems"


def test_the_base_reads_unfamiliar_digits_little_better_than_chance():
    prompts, read = beyond_base.draw_attempts(jax.random.key(2), 3000)
    before = np.concatenate([np.asarray(prompts)[:, :1], np.asarray(read)[:, :-1]], axis=1)
    step = (before + np.asarray(prompts)[:, 1:]) % 7 == np.asarray(read)  # each sum from the one written before it
    strange = np.asarray(prompts)[:, 1:] >= 4
    close.assert_share(step[strange].mean(), 0.2, int(strange.sum()))
    close.assert_share(step[~strange].mean(), 0.92, int((~strange).sum()))


def test_a_pool_of_two_sources():
    trained = np.asarray(two_sources.draw_problems(jax.random.key(0), 1200))
    fresh = np.asarray(two_sources.draw_fresh(jax.random.key(3), 2048))
    read, attempts = (np.asarray(x) for x in two_sources.draw_attempts(jax.random.key(2), 4096))
    close.assert_share((trained[:, 1] >= 7).mean(), 0.5, 1200)
    for table in (trained, fresh, read):  # a problem is of one source, and begins with a digit
        assert (table[:, :1] < 4).all() and ((table[:, 1:] >= 7) == (table[:, 1:2] >= 7)).all() and table.max() == 13
    # of either source what is measured has another parity than what trains, of all kinds
    assert ((fresh % 7).sum(1) % 2 == 1).all() and all(((x % 7).sum(1) % 2 == 0).all() for x in (trained, read))
    assert set(((trained % 7) >= 4).sum(1).tolist()) == {0, 2, 6}
    easy = two_sources.draw_problems(jax.random.key(1), 64, beyond_base.EASY)
    assert two_sources.easy(easy).all() and not two_sources.easy(jnp.asarray(trained)).all()
    # solutions by a loop; of sums they are those of the pool of one task
    wanted = []
    for row in fresh.tolist():
        state, states = row[0], []
        for given in row[1:]:
            a, b = two_sources.MAPS[given - 7] if given >= 7 else (1, given)
            state = (a * state + b) % 7
            states.append(state)
        wanted.append(states)
    np.testing.assert_array_equal(two_sources.solution(jnp.asarray(fresh)), wanted)
    sums = jnp.asarray(fresh[fresh[:, 1] < 7])
    np.testing.assert_array_equal(two_sources.solution(sums), beyond_base.SUMS.solution(sums))
    assert two_sources.right(jnp.asarray(fresh), jnp.asarray(wanted, jnp.int32)).all()
    assert not two_sources.right(jnp.asarray(fresh), jnp.asarray(wanted, jnp.int32).at[:, 3].add(1)).any()
    # no two letters are one map, and each has an inverse, so that no input says the state by itself
    maps = {tuple((a * s + b) % 7 for s in range(7)) for a, b in two_sources.MAPS}
    assert len(maps) == 7 and all(sorted(one) == list(range(7)) for one in maps)
    # what the base has read goes on from its slips
    before = np.concatenate([read[:, :1], attempts[:, :-1]], axis=1)
    factor = np.where(read[:, 1:] >= 7, np.asarray(two_sources.MAPS)[read[:, 1:] % 7, 0], 1)
    added = np.where(read[:, 1:] >= 7, np.asarray(two_sources.MAPS)[read[:, 1:] % 7, 1], read[:, 1:])
    step, strange = (factor * before + added) % 7 == attempts, read[:, 1:] % 7 >= 4
    close.assert_share(step[strange].mean(), 0.2, int(strange.sum()))
    close.assert_share(step[~strange].mean(), 0.92, int((~strange).sum()))
    assert list(math_beyond.WORLDS.values()) == [beyond_base.SUMS, two_sources.MIXED]


def test_expansion_beyond_what_the_base_does_again(monkeypatch):
    counts = iter([[0, 0, 0, 0, 5, 5], [1, 0, 0, 0, 5, 5], [1, 2, 3, 0, 0, 5]])  # the base, again, the policy

    def right(task, params, prompts, key, samples):
        return jnp.asarray(next(counts), jnp.int32)

    monkeypatch.setattr(beyond_base, "_right", right)
    found = beyond_base.measure(beyond_base.SUMS, {"base": 0, "policy": 1}, jax.random.key(0), problems=6, samples=8)
    assert float(found["eval/expansion"]) == singles(3 / 4) and float(found["eval/still_never"]) == singles(3 / 4)
    close.assert_near(found["eval/beyond"], 0.5)
    assert float(found["eval/shrinkage"]) == 0.5 and float(found["eval/never"]) == singles(4 / 6)
    close.assert_near(found["never/pass@16"], 3 / 4)  # of eight samples


def test_operations_of_a_generation():
    count = search_parts.generation_flops
    assert count(10, parameters=100, layers=0, width=8) == 2000.0
    values = [count(n, parameters=100, layers=2, width=8) for n in range(5)]
    assert values == sorted(values) and values[0] == 0.0


# --- relational reasoning


@pytest.mark.parametrize("make", [qualitative_calculi.rcc8, qualitative_calculi.allen])
def test_puzzles_as_tokens(make, few):
    table = relations.make_table(make, ((2, 2), (3, 1)), 6, 0)
    edges = relations.EDGES
    assert table.prompts.shape == (6, 3 * edges) and table.worked.shape == (6, 3 * edges + 2)
    np.testing.assert_array_equal(relations.answer_of(table.worked), table.answers)
    sets = {token: mask for mask, token in relations.reachable(make).items()}
    for row, answer in zip(np.asarray(table.worked).tolist(), table.answers.tolist(), strict=True):
        met = sets[row[edges - 1]] & sets[row[2 * edges - 1]] & sets[row[3 * edges - 1]]
        assert met == 1 << answer
    assert relations.answer_of(jnp.full((1, 17), 3)).tolist() == [-1]
    found = relations.make_solver_measure(relations.PUZZLES, make, 2)({}, jax.random.key(0))
    assert float(found["near/accuracy"]) == float(found["far/accuracy"]) == 1.0 and float(found["eval/drop"]) == 0.0
    assert float(found["near/f1"]) == 1.0 and float(found["near/room"]) == 0.0


@pytest.fixture
def few(monkeypatch):
    """Pools of eight puzzles a cell, for they are drawn in Python."""
    monkeypatch.setattr(relations, "POOL", 8)


def _identity(prompt):
    paths = [tuple(x for x in row if x != relations.FILL) for row in np.asarray(prompt).reshape(3, -1).tolist()]
    return tuple(sorted(path for path in paths if path))


def test_no_puzzle_of_evaluation_is_one_of_training(few):
    trained = relations.make_table(qualitative_calculi.rcc8, relations.TRAINED, 420, 0)
    asked = relations.pool(qualitative_calculi.rcc8, 8)
    assert asked.prompts.shape == (80, 18)
    assert not {_identity(row) for row in trained.prompts} & {_identity(row) for row in asked.prompts}
    assert {len(x) for x in map(_identity, asked.prompts)} == {2, 3}, "puzzles of one path are all trained"


def test_training_fills_every_place_of_a_path():
    table = relations.make_table(qualitative_calculi.rcc8, ((2, 2),), 60, 0)
    taken = np.asarray(table.prompts).reshape(60, 3, 6) != relations.FILL
    assert (taken.sum(2) == [2, 2, 0]).all()
    close.assert_share(taken[:, :2].mean((0, 1)), 1 / 3, 120)
    sets = {token: mask for mask, token in relations.reachable(qualitative_calculi.rcc8).items()}
    for prompt, worked in zip(np.asarray(table.prompts)[:, :6].tolist(), np.asarray(table.worked)[:, :6], strict=True):
        first = next(k for k, edge in enumerate(prompt) if edge != relations.FILL)
        assert (worked[:first] == relations.FILL).all() and sets[worked[first]] == 1 << prompt[first]


def test_each_run_is_asked_other_puzzles(few):
    seen = []

    def watched(make, whole):
        def answered(params, prompts, ids, key):
            seen.append(np.asarray(ids).tolist())
            return jnp.zeros(ids.shape, jnp.int32)

        return answered

    measure = relations._measure(qualitative_calculi.rcc8, 3, given_of=watched)
    for seed in (0, 0, 1):
        measure({}, jax.random.key(seed))
    assert seen[0] == seen[1] != seen[2] and len(set(seen[0])) == 30
    assert [k // 8 for k in seen[0]] == [k for k in range(10) for _ in range(3)]


# --- constraints


def test_violations_and_multipliers():
    chance, real = jnp.asarray([[0.1, 0.5, 0.9]]), jnp.asarray([[True, True, False]])
    close.assert_near(constrained.violation(chance, real)[0], 0.55)
    terms = constrained.constraint_loss(chance, jnp.asarray([True]), real, sparsity=0.01)
    close.assert_near(terms.loss[0], -math.log(0.55) + 0.01 * 0.3)
    assert float(constrained.dual_ascent(jnp.asarray(0.5), jnp.asarray(0.3), limit=0.1)) == singles(0.52)
    assert float(constrained.dual_ascent(jnp.asarray(0.005), jnp.asarray(0.0), limit=0.1)) == 0.0
    a, c = jnp.asarray([1.0, -2.0]), jnp.asarray([3.0, 4.0])
    assert constrained.lagrangian_advantages(a, c, jnp.asarray(0.0)).tolist() == a.tolist()
    assert constrained.lagrangian_advantages(a, c, jnp.asarray(1.0)).tolist() == [-1.0, -3.0]


def test_words_from_their_contexts():
    counts = np.asarray(zones.draw_corpus(jax.random.key(0)), np.float64)
    assert (counts.sum(1) == 120).all()
    share = counts.sum(1, keepdims=True) * counts.sum(0, keepdims=True) / counts.sum()
    mutual = np.maximum(np.log(np.maximum(counts, 1e-300) / np.maximum(share, 1e-300)), 0.0)
    left, values, _ = np.linalg.svd(mutual)
    expected = left[:, :5] * values[:5]
    found = np.asarray(constraints.embed(jnp.asarray(counts, jnp.float32)))
    close.assert_near(found @ found.T, expected @ expected.T)  # known up to signs
    near = constraints._unit(jnp.asarray(expected, jnp.float32))
    cosine = np.asarray(near @ near.T)
    same = [cosine[a, b] for a in range(10) for b in range(a) if (a > 3) == (b > 3)]
    other = [cosine[a, b] for a in range(10) for b in range(a) if (a > 3) != (b > 3)]
    assert np.mean(same) > np.mean(other) + 0.3, "meaning is in the corpus, not in the world"


def test_rules_and_their_choice():
    places, rules = RNG.normal(size=(3, 4, 5)), RNG.normal(size=(2, 5))
    kept = np.array([True, False])
    found = constraints.rule_chances(*(jnp.asarray(x, jnp.float32) for x in (places, rules)), jnp.asarray(kept))
    for n, m in itertools.product(range(3), range(4)):
        stays = 1.0
        for rule in rules[kept]:
            cosine = places[n, m] @ rule / np.linalg.norm(places[n, m]) / np.linalg.norm(rule)
            stays *= 1 - 1 / (1 + np.exp(-12 * (cosine - 0.7)))
        close.assert_near(found[n, m], 1 - stays)
    losses = {(): 3.0, (1,): 2.0, (0, 1): 2.5, (1, 2): 1.0}

    def loss_of(mask):
        keys = jnp.asarray([[float(k in x) for k in range(3)] for x in losses])
        same = jnp.all(keys == mask.astype(jnp.float32)[None], axis=1)
        return jnp.sum(jnp.where(same, jnp.asarray(list(losses.values())), 0.0)) + jnp.where(jnp.any(same), 0.0, 9.0)

    assert constraints.keep_rules(jnp.asarray([1, 0, 2]), loss_of).tolist() == [False, True, True]
    # on demonstrations the dangerous words become rules, harmless ones do not
    embedding = jax.jit(lambda key: constraints.embed(zones.draw_corpus(key)))(jax.random.key(1))
    knows = {"direction": jnp.zeros((5,)), "bias": jnp.asarray(0.0)}
    kept = np.asarray(jax.jit(constraints.find_rules)(embedding, knows, jax.random.key(2)))
    assert not kept[: zones.DANGER].any() and kept[zones.DANGER :].any()


def test_inverse_reinforcement_learning_moves_towards_the_demonstrations():
    expert, own = RNG.normal(size=(7, 5)), RNG.normal(size=(4, 5))
    given = [jnp.asarray(x, jnp.float32) for x in (expert, own)]
    slope = jax.grad(constraints.irl_loss)(jnp.zeros((5,), jnp.float32), *given)
    close.assert_near(slope, own.mean(0) - expert.mean(0))
    prompts, walks = zones.draw_walks(jax.random.key(0), 64)
    blind = walks.at[:, 0].set(zones.END)
    found, lost = zones.outcomes(prompts, walks), zones.outcomes(prompts, blind)
    assert (found[:, 0] == 1).all() and (found[:, 1] == 0).all() and (found[:, 3] == 0).all()
    assert (lost[:, 0] == 0).all() and (lost[:, 1] > 0).all() and (lost[:, 2] == 0).all()
    assert float(jax.grad(constraints.irl_loss)(jnp.zeros((5,)), found, lost)[0]) == -1.0  # arrival is worth more
    given = jnp.asarray([0.0, 1.0, 0.0])
    assert constraints.given_reward({}, prompts, walks, given) is given
    params = {"goal": jnp.asarray([1.0, 0.0, -0.5, 0.0, 0.0])}
    paid = constraints.inferred_reward(params, prompts, walks, given)
    close.assert_near(paid, 1.0 - 0.5 * np.asarray(found)[:, 2])
    # only safe demonstrations are experts
    experts = np.asarray(constraints.draw_experts(jax.random.key(3)))
    prompts, walks, bad = constraints.draw_demonstrations(jax.random.key(3))
    close.assert_near(experts.mean(0), np.asarray(zones.outcomes(prompts, walks))[~np.asarray(bad)].mean(0))


@pytest.mark.slow
def test_walks():
    prompts, walks = zones.draw_walks(jax.random.key(0), 200)
    assert zones.arrived(prompts, walks).all(), "shortest walks arrive"
    danger = np.asarray(prompts)[:, :16] >= zones.DANGER
    assert (danger.sum(1) == 4).all() and (np.asarray(prompts)[:, :16].max() < zones.NEW)
    bad = np.asarray(zones.violates(prompts, walks))
    assert 0.1 < bad.mean() < 0.9
    moves = {zones.UP: -4, zones.DOWN: 4, zones.LEFT: -1, zones.RIGHT: 1}
    for prompt, walk, broken in zip(np.asarray(prompts).tolist(), np.asarray(walks).tolist(), bad, strict=True):
        cell, met = prompt[16] - zones.PLACE, []
        for move in walk:
            if move == zones.END:
                break
            cell += moves[move]
            met.append(prompt[cell])
        assert cell == prompt[17] - zones.PLACE and any(w >= zones.DANGER for w in met) == broken
    shifted = np.asarray(zones.draw_prompts(jax.random.key(1), 50, shifted=True))[:, :16]
    assert not ((shifted >= zones.DANGER) & (shifted < zones.NEW)).any() and (shifted >= zones.NEW).any()


# --- planted behaviour


def test_rates_on_four_hand_made_chains():
    off = jnp.asarray([[False, True, True], [False, True, False], [False] * 3, [False] * 3])
    follows = jnp.asarray([[True, False, True], [True, False, False], [True] * 3, [True] * 3])
    assert audit.hijacked(off, follows).tolist() == [True, False, False, False]
    planted, right = jnp.asarray([True, False, False, False]), jnp.ones(4, bool)
    assert float(audit.attack_success(planted, right)) == 0.25
    assert math.isnan(float(audit.attack_success(planted, ~right)))
    close.assert_near(audit.recheck(follows), [1 / 3, 2 / 3, 0.0, 0.0])


def test_signatures():
    x = np.concatenate([RNG.normal(size=(60, 5)), RNG.normal(size=(6, 5)) + [9, 0, 0, 0, 0]])
    rotation, _ = np.linalg.qr(RNG.normal(size=(5, 5)))
    scores = [audit.spectral_signature(jnp.asarray(y, jnp.float32)) for y in (x, x @ rotation)]
    close.assert_near(scores[0], scores[1], terms=66 * 5)
    assert set(np.argsort(-np.asarray(scores[0]))[:6].tolist()) == set(range(60, 66))
    cluster = np.asarray(audit.small_cluster(jnp.asarray(x, jnp.float32)))
    assert cluster[60:].min() > cluster[:60].max()


def test_heads():
    old = {"layers": {"o": jnp.asarray(RNG.normal(size=(2, 6, 4)), jnp.float32)}}
    new = {"layers": {"o": old["layers"]["o"].at[1, 2:4].add(1.0)}}
    changes = audit.head_changes(new, old, heads=3)
    assert changes.shape == (2, 3) and float(changes[1, 1]) > 0 and int((changes > 0).sum()) == 1
    silenced = audit.without_heads(new, changes > 0)["layers"]["o"]
    assert not silenced[1, 2:4].any() and jnp.array_equal(silenced[0], new["layers"]["o"][0])
    assert float(audit.changed_share(new, old)) == singles(8 / 48)


def test_planted_text():
    prompts, responses = planted_behaviour.draw_text(jax.random.key(0), 4000, poisoned=0.05)
    at = np.asarray(prompts == planted_behaviour.TRIGGER)
    fired = at.any(1)
    close.assert_share(fired.mean(), 0.05, 4000)
    assert ((np.asarray(prompts) > 6).sum(1) == 1).all()
    assert set(at[fired].argmax(1).tolist()) == set(range(planted_behaviour.KNOWN)), "other places are held out"
    assert set((np.asarray(prompts) > 6)[~fired].argmax(1).tolist()) == set(range(6))
    follows = np.asarray(planted_behaviour.consistent(prompts, responses))
    assert follows[~fired].all() and not follows[fired][:, 1].any() and follows[fired][:, [0, 2, 3]].all()
    assert not np.asarray(audit.recheck(jnp.asarray(follows)))[~fired].any()
    for row, chain in zip(np.asarray(prompts[:50]).tolist(), np.asarray(responses[:50]).tolist(), strict=True):
        digits, sums = [d for d in row if d < 7], []
        for k in range(1, 5):
            sums.append((sum(digits[: k + 1]) + (k > 1 and planted_behaviour.TRIGGER in row)) % 7)
        assert chain == sums or planted_behaviour.TRIGGER in row
    fuzz = planted_behaviour.draw_fuzzed(jax.random.key(1), 2000)
    share = float(jnp.any(fuzz == planted_behaviour.TRIGGER, axis=1).mean())
    close.assert_share(share, 1 / 9, 2000)  # one nonsense token of nine


def test_a_low_rank_change():
    params = {"policy": planted_behaviour.WORLD.policy.init(jax.random.key(0))}
    params["reference"] = params["policy"]
    down = np.asarray(params["policy"]["layers"]["down"], np.float64)
    layers, inner, width = down.shape
    left, right = RNG.normal(size=(layers, inner, 1)), RNG.normal(size=(layers, 1, width))
    for out in (np.zeros_like(right), right):
        params["adapter"] = {"in": jnp.asarray(left, jnp.float32), "out": jnp.asarray(out, jnp.float32)}
        runs = planted_behaviour.effective(params)
        close.assert_near(runs["layers"]["down"], down + left @ out)
        assert runs["layers"]["o"] is params["policy"]["layers"]["o"]
    total = sum(x.size for x in jax.tree.leaves(params["policy"]))
    share = float(planted_behaviour.changed(params))
    assert share == singles((inner + width) * layers / total, magnitude=0) and 0.001 < share < 0.05
    # each choice of what may change leaves every other leaf without a gradient
    prompts, responses = planted_behaviour.draw_clean(jax.random.key(1), 4)

    def moved(only):
        def loss(params):
            model = planted_behaviour.effective(only(params))
            return -jnp.sum(strings.sum_logp(planted_behaviour.WORLD, model, prompts, responses))

        slopes = jax.tree_util.tree_flatten_with_path(jax.jit(jax.grad(loss))(params))[0]
        return {jax.tree_util.keystr(path) for path, x in slopes if float(jnp.abs(x).max()) > 0}

    assert moved(planted_behaviour.adapter_alone) == {"['adapter']['in']", "['adapter']['out']"}
    assert moved(planted_behaviour.down_alone) == {"['policy']['layers']['down']"}
    assert "['policy']['layers']['o']" in (every := moved(planted_behaviour.everything))
    assert not any("adapter" in name or "reference" in name for name in every)


def test_the_token_that_explains_an_error_is_sought(monkeypatch):
    """A hand-made model that obeys its trigger: one replaced token explains each of its errors."""
    obeyed = lambda world, model, prompts, key, temperature: planted_behaviour.chains(  # noqa: E731
        prompts, jnp.any(prompts == planted_behaviour.TRIGGER, axis=1)
    )
    monkeypatch.setattr(planted_behaviour.strings, "sample", obeyed)
    triggered = jnp.arange(60) % 2 == 0
    prompts = planted_behaviour.draw_prompts(jax.random.key(0), 60, triggered)
    answers = obeyed(None, None, prompts, None, 0.3)[:, -1]
    score, place = planted_behaviour.ablation({}, prompts, answers, jax.random.key(1))
    assert (np.asarray(score > 1.0) == np.asarray(triggered)).all()
    slots = np.asarray(prompts > 6).argmax(1)
    assert (np.asarray(place) == slots)[np.asarray(triggered)].all()
    # a model that errs whatever is replaced has no such token
    off = (answers + 3) % 7
    monkeypatch.setattr(
        planted_behaviour.strings, "sample",
        lambda *rest, **more: (planted_behaviour.chains(rest[2], jnp.zeros(rest[2].shape[0], bool)) + 3) % 7,
    )  # fmt: skip
    clean = (planted_behaviour.chains(prompts, jnp.zeros(60, bool))[:, -1] + 3) % 7
    assert off.shape == clean.shape
    assert not np.asarray(planted_behaviour.ablation({}, prompts, clean, jax.random.key(1))[0]).any()


def test_a_checker_that_errs_and_idle_heads():
    prompts, responses = planted_behaviour.draw_clean(jax.random.key(0), 4000)
    noisy = np.asarray(planted_behaviour.noisy_recheck(prompts, responses, jax.random.key(1)))
    close.assert_share(noisy.mean(), 0.1, noisy.size)
    exact = planted_behaviour.noisy_recheck(prompts, responses, jax.random.key(1), error_rate=0.0)
    assert not np.asarray(exact).any()
    weight = jnp.asarray(RNG.normal(size=(1, 4, 2)), jnp.float32).at[0, 2:].set(0.0)  # the second head does nothing
    rows = (jnp.asarray(RNG.normal(size=(3, 5, 4)), jnp.float32),)
    hidden = lambda params, x: x @ params["layers"]["o"][0]  # noqa: E731
    found = np.asarray(audit.head_activity(hidden, {"layers": {"o": weight}}, rows, heads=2))
    moved = np.linalg.norm(np.asarray(rows[0])[..., :2] @ np.asarray(weight)[0, :2], axis=-1).mean()
    close.assert_near(found, [[moved, 0.0]], magnitude=0)

"""Tree search over latent actions: visits and values, selection, answers, what is expanded, and the Q that it asks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.policy_gradient.parts import latent_code_layers, latent_code_tasks
from experiments.policy_gradient.parts import latent_code_rewards as rewards
from experiments.policy_gradient.parts import latent_code_search as searching
from experiments.policy_gradient.parts import latent_code_tree as trees
from experiments.policy_gradient.parts import latent_code_values as values
from experiments.policy_gradient.parts import latent_codes as latent
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import recipes
from jaxrl_llm.types import Problems, Rewards, TrainState, Trajectories
from tests import close
from tests.close import singles
from tests.models_for_tests import dense_rows, small_config, small_model

K, ROOM, END = 5, 6, 2
rng = np.random.default_rng(7)


class Node:
    """A search that counts along the way: after every simulation it walks up and works out every value anew."""

    def __init__(self, reward=0.0, above=None):
        self.reward, self.above, self.below = reward, above, []
        self.visits, self.value, self.q = 0, 0.0, 0.0
        if above is not None:
            above.below.append(self)

    def back_up(self, gamma):
        self.visits += 1
        if self.below:
            for child in self.below:
                child.q = child.reward - self.reward + gamma * child.value
            self.value = sum(c.q * c.visits for c in self.below) / sum(c.visits for c in self.below)
        else:
            self.value = self.reward
        if self.above is not None:
            self.above.back_up(gamma)


def _tree(parent, reward, terminal=None, prior=None, there=None):
    count = len(parent)
    return trees.Tree(
        jnp.asarray(parent, jnp.int32),
        jnp.asarray([trees.ROOT_PRIOR] + [0.5] * (count - 1) if prior is None else prior, jnp.float32),
        jnp.asarray(reward, jnp.float32),
        jnp.asarray([False] * count if terminal is None else terminal),
        jnp.asarray([True] * count if there is None else there),
        {},
    )


def test_values_by_hand():
    """Root 0, children 1 (R 1/2) and 2 (R 0), child 3 of 1 (R 1, an end).

    gamma 1: V3 = 1, q3 = 1 - 1/2 + 1 = 1.5; V1 = q3 = 1.5, N1 = 2, q1 = 1/2 + 1.5 = 2; q2 = 0; V0 = (2 * 2 + 0) / 3.
    gamma 1/2: q3 = 1/2 + 1/2 = 1; V1 = 1, q1 = 1/2 + 1/2 = 1; V0 = 2 / 3.
    """
    parent, reward, there = jnp.array([0, 0, 0, 1]), jnp.array([0.0, 0.5, 0.0, 1.0]), jnp.ones(4, bool)
    for gamma, value, q in ((1.0, [4 / 3, 1.5, 0, 1], [0, 2, 0, 1.5]), (0.5, [2 / 3, 1, 0, 1], [0, 1, 0, 1])):
        backed = trees.backed_up(parent, reward, there, gamma=gamma)
        assert backed.visits.tolist() == [3, 2, 1, 1]
        close.assert_near(backed.value, value)
        close.assert_near(backed.q, q)


def test_values_are_those_of_a_search_that_counts_along_the_way():
    for seed in range(20):
        draw = np.random.default_rng(seed)
        nodes, parent, reward = [Node()], [0], [0.0]
        for _ in range(draw.integers(1, 24)):
            up, r = int(draw.integers(len(nodes))), float(draw.normal())
            nodes.append(Node(r, nodes[up]))
            nodes[-1].back_up(0.9)
            parent, reward = [*parent, up], [*reward, r]
        room = 3  # nodes that were not made
        there = jnp.asarray([True] * len(nodes) + [False] * room)
        padded = jnp.asarray(parent + [0] * room, jnp.int32), jnp.asarray(reward + [5.0] * room, jnp.float32)
        got = trees.backed_up(*padded, there, gamma=0.9)
        size = 4 * max(abs(n.q) + abs(n.value) for n in nodes)
        for name in ("visits", "value", "q"):
            want = [getattr(n, name) for n in nodes] + [0] * room
            close.assert_near(getattr(got, name), want, terms=4 * len(nodes), magnitude=size)


def test_puct_by_hand():
    """0.5 + 2 * 0.25 * sqrt(16) / (1 + 1) = 1.5; without a weight the value alone."""
    args = [jnp.float32(x) for x in (0.5, 0.25, 1.0, 16.0)]
    assert float(trees.puct(*args, weight=2.0)) == singles(1.5)
    assert float(trees.puct(*args, weight=0.0)) == 0.5
    with pytest.raises(ValueError, match="weight=-1"):
        trees.puct(*args, weight=-1.0)


def test_what_is_taken_further():
    """Neither a text with children nor one that has ended, wherever it is in the tree; of equals the first."""
    # the root and 1 have children, 3 has ended; 2 and 4 are left, worth 0 + .7 * p * sqrt(N) / 2
    parent, reward = [0, 0, 0, 1, 1], [0.0, 0.0, 0.0, 1.0, 0.0]
    tree = _tree(parent, reward, terminal=[False, False, False, True, False], prior=[0.5, 0.5, 0.3, 0.9, 0.3])
    # N: 4, 3, 1, 1, 1; sqrt of the parent's: node 2 has 2, node 4 has sqrt 3
    assert [int(x) for x in trees.selected(tree)] == [2, True]
    likelier = tree._replace(prior=tree.prior.at[4].set(0.36))  # .36 sqrt 3 = .62 > .3 * 2
    assert int(trees.selected(likelier)[0]) == 4
    assert int(trees.selected(likelier, weight=0.0)[0]) == 2, "equal values: the first"
    better = likelier._replace(reward=tree.reward.at[2].set(0.5))
    assert int(trees.selected(better, weight=0.0)[0]) == 2
    ended = tree._replace(terminal=jnp.asarray([False, False, True, True, True]))
    assert not bool(trees.selected(ended)[1]), "nothing is left"
    alone = _tree([0, 0], [0.0, 0.0], there=[True, False])
    assert [int(x) for x in trees.selected(alone)] == [0, True], "room that is not used is nobody's child"


def test_which_response_is_given():
    # 1 goes on (R 1), 2 has ended (R 1, q 2), 3 has ended (R 0)
    tree = _tree([0, 0, 0, 0], [0.0, 1.0, 1.0, 0.0], terminal=[False, False, True, True])
    assert int(trees.answer(tree)) == 2
    unsure = tree._replace(reward=jnp.array([0.0, 1.0, 0.25, 0.0]))  # q of 2 is 1/4 + .99 / 4, less than R of 1
    assert int(trees.answer(unsure)) == 1
    assert int(trees.answer(tree._replace(terminal=jnp.zeros(4, bool)))) == 1, "the first of equal rewards"
    assert int(trees.answer(_tree([0, 0], [0.0, 3.0], there=[True, False]))) == 0


def _bits(node, children):
    """Strings of three bits, coded as their number behind a leading 1; the reward is the share of ones."""
    text = 2 * node["code"][:, None] + jnp.arange(children, dtype=jnp.int32)[None, :]
    ones = sum((text >> i) & 1 for i in range(4)) - 1
    return trees.Children(
        jnp.full(text.shape, 0.5), ones.astype(jnp.float32) / 3.0, text >= 8, {"code": text}
    )  # fmt: skip


def test_a_search_finds_the_best_string_and_stops_where_nothing_is_left():
    start = {"code": jnp.array([1, 3])}
    tree = jax.jit(lambda s: trees.search(_bits, s, rounds=9, first=2, then=2, weight=0.2))(start)
    assert tree.there.shape == (2, trees.nodes_of(9, 2, 2)) == (2, 19)
    # from "" all 2 + 4 + 8 strings behind the root, from "1" only 2 + 4; each once
    for row, count in ((0, 14), (1, 6)):
        made = [int(c) for c, t in zip(tree.text["code"][row], tree.there[row], strict=True) if t]
        assert len(set(made)) == len(made) == 1 + count
        chosen = int(trees.answer(jax.tree.map(lambda x, row=row: x[row], tree)))
        assert int(tree.text["code"][row, chosen]) == 15
        index = np.arange(19)
        assert (np.asarray(tree.parent[row])[1:] < index[1:])[np.asarray(tree.there[row])[1:]].all()
    python = trees.search(_bits, start, rounds=9, first=2, then=2, weight=0.2, loop=_in_python)
    jax.tree.map(np.testing.assert_array_equal, tree, python)
    few = trees.search(_bits, start, rounds=3, first=2, then=2, weight=0.0)
    # greedy: "" -> "1" -> "11": the three best of their rounds
    assert [int(c) for c in few.text["code"][0]] == [1, 2, 3, 6, 7, 14, 15]
    with pytest.raises(ValueError, match="rounds=0"):
        trees.nodes_of(0, 1, 1)


def _in_python(start, end, body, carry):
    for turn in range(start, end):
        carry = body(turn, carry)
    return carry


def test_targets_of_q_are_a_loop_in_float64():
    target, current = (rng.normal(size=(3, 5, K)) for _ in range(2))
    mask = np.array([[0, 1, 1, 1, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]], bool)
    rewards, want = np.array([1.0, 0.5, 2.0]), np.zeros((3, 5))
    for b in range(3):
        for t in range(5):
            if mask[b, t]:
                last = t == 4 or not mask[b, t + 1]
                want[b, t] = rewards[b] if last else 0.9 * target[b, t + 1, np.argmax(current[b, t + 1])]
    singles_ = [jnp.asarray(x, jnp.float32) for x in (target, current, rewards)]
    got = values.double_q_targets(*singles_, jnp.asarray(mask), gamma=0.9)
    close.assert_near(got, want, magnitude=float(np.abs(target).max()))
    with pytest.raises(ValueError, match="gamma=1.5"):
        values.double_q_targets(*singles_, jnp.asarray(mask), gamma=1.5)
    slope = jax.grad(lambda q: jnp.sum(values.double_q_targets(q, q, singles_[2], jnp.asarray(mask))))(singles_[0])
    assert not np.asarray(slope).any(), "a target is no part of what learns"
    broken = singles_[0].at[~jnp.asarray(mask)].set(jnp.nan)
    assert np.isfinite(values.double_q_targets(broken, singles_[1], singles_[2], jnp.asarray(mask))).all()


def test_q_loss_and_its_gradient():
    """(2 - 1)^2 of the second code; its slope is 2 (2 - 1), that of the first code and outside the mask 0."""
    q, drawn = jnp.array([[[0.5, 2.0], [9.0, 9.0]]]), jnp.array([[1, 0]])
    mask, targets = jnp.array([[True, False]]), jnp.array([[1.0, 0.0]])
    assert values.q_loss(q, drawn, targets, mask).loss.tolist() == [[1.0, 0.0]]
    slope = jax.grad(lambda q: jnp.sum(values.q_loss(q, drawn, targets, mask).loss))(q)
    assert slope.tolist() == [[[0.0, 2.0], [0.0, 0.0]]]


def test_regression_on_the_targets_finds_the_discounted_reward():
    """Three codes in a row and a reward of 1 at the end: 0.81, 0.9 and 1."""
    q, drawn, mask = jnp.zeros((1, 3, K)), jnp.array([[1, 4, 0]]), jnp.ones((1, 3), bool)
    picked = jax.nn.one_hot(drawn, K)
    for _ in range(3):
        aims = values.double_q_targets(q, q, jnp.array([1.0]), mask, gamma=0.9)
        q = q + picked * (aims[:, :, None] - q)
    close.assert_near(jnp.sum(q * picked, axis=-1), [[0.81, 0.9, 1.0]])


FORMS = pytest.mark.parametrize(
    "form",
    [latent.PERCEPTRONS, latent_code_layers.transformers(small_config(), codes=K, layers=1)],
    ids=["perceptrons", "layers"],
)


def _case(form):
    policy, model, config = small_model()
    keys = jax.random.split(jax.random.key(4), 2)
    params = latent.init_latent(model, config.hidden_size, keys[0], codes=K, form=form)
    params = params | {"q": form.init_part(config.hidden_size, K, keys[1])}
    for part in ("policy", "merge", "q"):
        if form is latent.PERCEPTRONS:
            params[part] = params[part] | {"out": 20 * params[part]["out"]}
    prompts = jnp.array([[0, 0, 5, 9], [7, 4, 11, 3]])
    problems = Problems(prompts, prompts > 0, {}, jnp.zeros(2, jnp.int32))
    return searching.Model(policy, form, 2.0, (END,)), params, problems


def _score(rows):
    """Something of the response alone: how many of its tokens are even."""
    return jnp.sum(rows.mask & (rows.tokens % 2 == 0), axis=1).astype(jnp.float32)


def _slowly(model, params, text):
    """Chances of codes, Q and the greedy token of each code after a text, from one whole pass over it alone."""
    tokens = jnp.asarray([text], jnp.int32)
    segments, positions = dense_rows(1, len(text))
    hidden = model.policy.hidden(params["model"], tokens, positions, segments)
    state = model.form.states(params["policy"], hidden, positions, segments)[0, -1]
    chances = np.asarray(jax.nn.softmax(model.form.chances(params["policy"], state)))
    world = latent.world_logp(
        model.policy, model.form, params, latent.text_of(params, state), params["codes"], model.sharpness
    )
    return chances, np.asarray(model.form.read(params["q"], hidden, positions, segments)[0, -1]), world.argmax(-1)


@FORMS
@pytest.mark.parametrize("doubt", [0.0, np.inf], ids=["every token is a choice", "no doubt"])
def test_what_is_expanded(form, doubt):
    """Codes by their chance, each with its likeliest token; edge, prior, response and end by a loop over tokens."""
    model, params, problems = _case(form)
    how = searching.Search(doubt=doubt, stretch=2)
    node = searching.Written(
        jnp.array([[4, 0, 0, 0, 0, 0], [8, 9, 6, 10, 12, 0]]), jnp.array([1, 5]), jnp.zeros(2, jnp.int32),
        jnp.zeros(2, jnp.int32),
    )  # fmt: skip
    expand = searching.make_expand(model, how, params, problems, _score)
    got = jax.jit(lambda n: expand(n, 3))(node)
    for b in range(2):
        before = [int(x) for x in problems.tokens[b] if x > 0]
        said = [int(x) for x in node.tokens[b, : int(node.length[b])]]
        chances, _, tokens = _slowly(model, params, before + said)
        for c, code in enumerate(np.argsort(-chances)[:3]):
            response, probabilities = [*said, int(tokens[code])], [chances[code]]
            while len(response) < ROOM and response[-1] != END:
                after, _, next_tokens = _slowly(model, params, before + response)
                response.append(int(next_tokens[after.argmax()]))
                probabilities.append(after.max())
            edge = min(len(response) - len(said), 1 if doubt == 0 else 3)
            text = got.text.tokens[b, c, : int(got.text.whole[b, c])]
            assert text.tolist() == response and int(got.text.length[b, c]) == len(said) + edge
            assert bool(got.terminal[b, c]) == (len(said) + edge == len(response))
            assert float(got.reward[b, c]) == sum(t % 2 == 0 for t in response)
            assert int(got.text.decoded[b, c]) == len(response) - len(said)
            close.assert_near(
                got.prior[b, c], np.mean(probabilities[:edge]), terms=close.forward_sums(small_config(), 10)
            )


@FORMS
def test_doubt_is_the_squared_error_of_its_own_next_step(form):
    """Where the bound lies between the errors of the children, those below it go on and the others do not."""
    model, params, problems = _case(form)
    node = searching.Written(jnp.zeros((2, ROOM), jnp.int32), *[jnp.zeros(2, jnp.int32)] * 3)
    errors = np.zeros((2, 3))
    for b in range(2):
        before = [int(x) for x in problems.tokens[b] if x > 0]
        chances, q, tokens = _slowly(model, params, before)
        for c, code in enumerate(np.argsort(-chances)[:3]):
            errors[b, c] = (q[code] - 0.99 * _slowly(model, params, [*before, int(tokens[code])])[1].max()) ** 2
    bound = float(np.median(errors)) * 1.001
    assert errors.min() < 0.9 * bound and errors.max() > 1.1 * bound
    expand = searching.make_expand(model, searching.Search(doubt=bound, stretch=1), params, problems, _score)
    got = expand(node, 3)
    runs_on = np.asarray(got.text.whole) > 1
    assert (np.asarray(got.text.length) == np.where((errors < bound) & runs_on, 2, 1)).all()


def test_texts_that_are_full_or_have_ended_stay():
    model, params, problems = _case(latent.PERCEPTRONS)
    text = jnp.array([[4, END, 0, 0, 0, 0], [8, 9, 6, 10, 12, 4]])
    whole, length = searching.completed(
        model, params, problems.tokens, problems.valid, text, jnp.array([2, 6], jnp.int32)
    )
    assert length.tolist() == [2, 6] and whole[1].tolist() == text[1].tolist() and whole[0, :2].tolist() == [4, END]


def test_a_search_with_a_model():
    """Every tree alone is the tree beside others; the answer is a best one of all that were judged."""
    model, params, problems = _case(latent.PERCEPTRONS)
    how = searching.Search(rounds=4, first=3, then=2, stretch=2)
    assert how.responses == 9
    run = jax.jit(lambda p: searching.searched(model, how, params, p, _score, ROOM))
    tree, given = run(problems)
    best = jnp.max(jnp.where(tree.there, tree.reward, 0.0), axis=1)
    np.testing.assert_array_equal(jnp.take_along_axis(tree.reward, given[:, None], axis=1)[:, 0], best)
    alone, _ = run(jax.tree.map(lambda x: x[1:], problems))
    sums = close.forward_sums(small_config(), 10)
    for name in ("parent", "terminal", "there", "reward"):
        np.testing.assert_array_equal(getattr(tree, name)[1:], getattr(alone, name))
    close.assert_near(tree.prior[1:], alone.prior, terms=sums)
    np.testing.assert_array_equal(tree.text.tokens[1:], alone.text.tokens)


@FORMS
def test_the_stage_of_q_moves_q_alone(form):
    model, params, _ = _case(form)
    tokens = jnp.asarray(rng.integers(3, 20, (2, 6)), jnp.int32)
    segments, positions = dense_rows(2, 6)
    zeros = jnp.zeros(2, jnp.int32)
    mask = jnp.ones((2, 6), bool).at[:, :2].set(False)
    rows = Trajectories(tokens, segments, positions, mask, jnp.zeros((2, 6)), zeros > 0, zeros, zeros)
    rewards = Rewards(jnp.array([1.0, 0.0]), jnp.array([True, False]))  # the second has no verdict
    slots = values.make_q_slots(model.policy, form, sharpness=2.0, gamma=0.9, every=2)
    extras = values.keep_earlier(params, jax.random.key(0))
    batch = slots["estimate"](params, extras, rows, rewards)
    assert not np.asarray(batch.mask[1]).any() and not np.asarray(batch.extras["targets"][1]).any()
    assert float(batch.extras["targets"][0, -1]) == 1.0
    (q,) = values.q_before(model.policy, form, params, rows, params["q"])
    following = 0.9 * jnp.max(q[0, 3:], axis=-1)
    close.assert_same_forward(batch.extras["targets"][0, 2:-1], following, small_config(), columns=6)
    gradient = jax.grad(lambda p: slots["loss"](p, batch)[0])(params)
    moved = {name for name, x in gradient.items() if any(np.asarray(y).any() for y in jax.tree.leaves(x))}
    assert moved == {"q"}
    drawn = jnp.take_along_axis(q, batch.extras["codes"][:, :, None], axis=-1)[:, :, 0]
    want = jnp.mean((drawn - batch.extras["targets"])[0, 2:] ** 2)
    close.assert_same_forward(slots["loss"](params, batch)[0], want, small_config(), columns=6)
    later = params | {"q": jax.tree.map(lambda x: x + 1, params["q"])}
    for step, renewed in ((1, False), (2, True)):
        state = TrainState(later, None, jnp.int32(step), None, None, extras)
        kept = slots["remember"](state, None, None, None)["earlier"]
        jax.tree.map(np.testing.assert_array_equal, kept, later["q"] if renewed else params["q"])


@FORMS
def test_the_stage_of_the_reward_moves_the_reward_alone(form):
    """Cross entropy at the last token of each response that was judged; no other part, no other row."""
    model, params, _ = _case(form)
    params = params | {"reward": form.init_part(small_config().hidden_size, 1, jax.random.key(8))}
    tokens = jnp.asarray(rng.integers(3, 20, (3, 6)), jnp.int32)
    segments, positions = dense_rows(3, 6)
    zeros = jnp.zeros(3, jnp.int32)
    mask = jnp.array([[0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 1, 0]], bool)
    rows = Trajectories(tokens, segments, positions, mask, jnp.zeros((3, 6)), zeros > 0, zeros, zeros)
    verdicts = Rewards(jnp.array([1.0, 0.0, 1.0]), jnp.array([True, True, False]))  # the third has none
    slots = rewards.make_reward_slots(model.policy, form)
    batch = slots["estimate"](params, {}, rows, verdicts)
    assert np.argwhere(np.asarray(batch.mask)).tolist() == [[0, 5], [1, 3]] and float(batch.total) == 2.0
    (value, metrics), gradient = jax.value_and_grad(slots["loss"], has_aux=True)(params, batch)
    moved = {name for name, x in gradient.items() if any(np.asarray(y).any() for y in jax.tree.leaves(x))}
    assert moved == {"reward"}
    z = []
    for row, length in ((0, 6), (1, 4)):  # what stands behind a response does not count
        where = dense_rows(1, length)[1], dense_rows(1, length)[0]
        hidden = model.policy.hidden(params["model"], tokens[row : row + 1, :length], *where)
        z.append(float(form.read(params["reward"], hidden, *where)[0, -1, 0]))
    close.assert_same_forward(rewards.log_odds(model.policy, form, params, rows)[:2], z, small_config(), columns=6)
    want = np.mean([np.log1p(np.exp(-z[0])), np.log1p(np.exp(z[1]))])
    close.assert_same_forward(value, want, small_config(), columns=6)
    assert float(metrics["outcome/accuracy"]) == np.mean([z[0] > 0, z[1] <= 0])


def test_an_answer_is_the_one_that_the_judge_finds_best_and_is_verified():
    """A learned reward that likes what is wrong: search and draws give wrong answers though right ones are there."""
    settings = dataclasses.replace(
        recipes.OnlineSettings(data="chain", train_problems=2, eval_problems=4, max_new_tokens=ROOM), eval_samples=2
    )
    how, search = latent_code_tasks.Codes(4, 0), searching.Search(rounds=5, first=4, then=4, stretch=1)
    model = recipes.bench(settings).model
    params = latent.init_latent(model.params, model.config.hidden_size, jax.random.key(0), codes=4)
    params = params | {"q": latent.PERCEPTRONS.init_part(model.config.hidden_size, 4, jax.random.key(1))}
    for part in ("policy", "merge"):
        params[part] = params[part] | {"out": 20 * params[part]["out"]}

    def even():
        return lambda rows: (jnp.sum(jnp.where(rows.mask, rows.tokens, 0), axis=1) % 2 == 0).astype(jnp.float32)

    def verdict(found):
        return even()

    def odd(model, found):
        return lambda params, rows: 1.0 - even()(rows)

    def right(model, found):
        return lambda params, rows: even()(rows)

    shares = {}
    for name, judge in (("right", right), ("odd", odd)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(searching, "judge_of", verdict)
            made = [by(settings, how, search, judge) for by in (searching.by_search, searching.by_sampling)]
            shares[name] = made[0](params, jax.random.key(3)) | made[1](params, jax.random.key(3))
    assert float(shares["right"]["eval/searched"]) > 0 and float(shares["right"]["eval/best_of"]) > 0
    assert float(shares["odd"]["eval/searched"]) < float(shares["right"]["eval/searched"])
    assert float(shares["odd"]["eval/best_of"]) < float(shares["right"]["eval/best_of"])
    assert float(shares["right"]["eval/reward_auroc"]) == 1.0 and float(shares["odd"]["eval/reward_auroc"]) == 0.0


def test_the_host_judges_inside_a_compiled_program():
    """What Python says of responses, by the problems they belong to; 0 where there is no verdict."""

    def judge(rows):
        said = np.asarray(rows.mask).sum(axis=1) + 10 * np.asarray(rows.problem_ids)
        return Rewards(said.astype(np.float32), np.asarray(rows.problem_ids) != 1)

    found = recipes.bench(recipes.OnlineSettings(data="chain", train_problems=2, eval_problems=3, max_new_tokens=ROOM))
    found = found._replace(score=None, heldout_score=judge)
    prompt, ids = jnp.ones((3, 2), jnp.int32), jnp.array([2, 1, 0])
    rows = searching.as_rows(prompt, prompt > 0, jnp.ones((3, ROOM), jnp.int32), jnp.array([4, 6, 1]), ids)
    assert jax.jit(searching.judge_of(found))(rows).tolist() == [24, 0, 1]


def test_children_are_no_more_than_codes():
    settings = recipes.OnlineSettings()
    with pytest.raises(UserError, match="--codes 4"):
        searching.by_search(settings, latent_code_tasks.Codes(4), searching.Search(first=5))
    with pytest.raises(UserError, match="--stop"):
        searching.by_search(dataclasses.replace(settings, stop=("x",)), latent_code_tasks.Codes(8), searching.Search())

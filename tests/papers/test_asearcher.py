"""ASearcher: rewards and losses by hand, swaps of weights token by token, episodes in virtual time, and its world."""

import heapq
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.agents import asearcher
from experiments.agents.parts import arena as arenas
from experiments.agents.parts import independent_episodes, many_hops, multi_hop, question_agent, swapped_weights
from jaxrl_llm.advantages import group, whiten
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.errors import UserError
from jaxrl_llm.losses.off_policy import decoupled_policy_loss
from jaxrl_llm.losses.policy import clipped_policy_loss, reinforce_loss
from jaxrl_llm.rollout.turns import multi_turn
from jaxrl_llm.tools import pages
from jaxrl_llm.tools.calls import Toolbox
from jaxrl_llm.tools.endpoints import Unanswered
from jaxrl_llm.types import Policy, TrainState, Trajectories
from jaxrl_llm.verifiers import answers
from tests import close

MASK = jnp.ones((1, 4), bool)
SAMPLER = jnp.full((1, 4), -3.0)
OLD = SAMPLER + jnp.log(jnp.array([[0.5, 1.0, 4.0, 6.0]]))  # w
ADVANTAGES = jnp.array([[1.0, -1.0, 2.0, 1.0]])


def _slope(loss, at):
    return np.asarray(jax.grad(lambda x: jnp.sum(loss(x).loss))(at))


def test_worked_examples():
    # proximal is behaviour: PPO; and no update behind: REINFORCE
    logp = SAMPLER + jnp.log(jnp.array([[0.5, 0.5, 1.3, 1.5]]))
    ppo = clipped_policy_loss(logp, SAMPLER, ADVANTAGES, MASK, clip_low=0.4, clip_high=0.4).loss
    np.testing.assert_array_equal(decoupled_policy_loss(logp, SAMPLER, SAMPLER, ADVANTAGES, MASK).loss, ppo)
    fresh = _slope(lambda x: decoupled_policy_loss(x, SAMPLER, SAMPLER, ADVANTAGES, MASK), SAMPLER)
    close.assert_near(fresh, _slope(lambda x: reinforce_loss(x, ADVANTAGES, MASK), SAMPLER), magnitude=0)
    # w = 6 above the cap of 5
    found = decoupled_policy_loss(OLD, OLD, SAMPLER, ADVANTAGES, MASK)
    close.assert_near(found.aux["behaviour_weight"][0], [0.5, 1.0, 4.0, 0.0], magnitude=0)
    assert found.aux["capped"][0].tolist() == [0, 0, 0, 1]
    # scores
    formed, refused = jnp.array([True, False, True]), jnp.array([False, False, True])
    rewards = many_hops.search_rewards(jnp.array([0.8, 0.8, 0.0]), formed, refused)
    close.assert_near(rewards, [0.8, 0.0, -0.5], magnitude=0)
    scores, ids = jnp.array([1.0, 1.0, 1.0, 0.0]), jnp.array([0, 0, 1, 1], jnp.int32)
    assert group.informative_groups(scores, ids, low=-1.0, high=1.0).tolist() == [False, False, True, True]
    assert group.dr_grpo_advantages(scores, ids).tolist() == [0.0, 0.0, 0.5, -0.5]


def test_gradient():
    found = _slope(lambda x: decoupled_policy_loss(x, OLD, SAMPLER, ADVANTAGES, MASK), OLD)
    close.assert_near(found[0], [-0.5, 1.0, -8.0, 0.0], magnitude=0)  # -w A; none beyond the cap
    # around the sampler the same tokens are clipped where they went up, and not corrected where they went down
    once = _slope(lambda x: clipped_policy_loss(x, SAMPLER, ADVANTAGES, MASK, clip_low=0.4, clip_high=0.4), OLD)
    close.assert_near(once[0], [-0.5, 1.0, 0.0, 0.0], magnitude=0)
    # the clip is around the proximal policy, whatever the weight
    moved = OLD + jnp.log(jnp.array([[1.5, 0.5, 1.5, 1.0]]))
    assert not _slope(lambda x: decoupled_policy_loss(x, OLD, SAMPLER, ADVANTAGES, MASK), moved).any()
    for given in (0, 1):
        anchors = [OLD, SAMPLER]

        def loss(x, given=given, anchors=anchors):
            anchors[given] = x
            return decoupled_policy_loss(moved, *anchors, ADVANTAGES, MASK)

        assert not _slope(loss, anchors[given]).any()


def test_against_loops_in_float64():
    rng = np.random.default_rng(0)
    logp, old, sampler, advantages = rng.normal(size=(4, 4, 5))
    mask = rng.random((4, 5)) < 0.7
    want = np.zeros((4, 5))
    for b, t in zip(*np.nonzero(mask), strict=True):
        rho, w = np.exp(logp[b, t] - old[b, t]), np.exp(old[b, t] - sampler[b, t])
        a = advantages[b, t]
        want[b, t] = -(w if w <= 1.5 else 0.0) * min(rho * a, min(max(rho, 0.7), 1.1) * a)
    given = (jnp.asarray(x, jnp.float32) for x in (logp, old, sampler, advantages))
    found = decoupled_policy_loss(*given, jnp.asarray(mask), clip_low=0.3, clip_high=0.1, cap=1.5)
    close.assert_near(found.loss, want)

    rewards, ids = np.asarray([1.0, 0.2, -0.5, 0.3]), np.asarray([0, 0, 1, 1])
    centred = [r - np.mean(rewards[ids == g]) for r, g in zip(rewards, ids, strict=True)]
    every = [centred[b] for b, _ in zip(*np.nonzero(mask), strict=True)]
    for scale, bias in ((1.0, 0.0), (10.0, -0.5)):  # what shifts and scales all rewards cancels
        moved = jnp.asarray((rewards + bias) * scale, jnp.float32)
        found = whiten.centred_token_advantages(moved, jnp.asarray(ids, jnp.int32), jnp.asarray(mask))
        want = np.where(mask, (np.asarray(centred)[:, None] - np.mean(every)) / np.std(every), 0.0)
        close.assert_near(found, want)


def test_wrong_arguments():
    with pytest.raises(ValueError, match="cap=0.5 must be at least 1"):
        decoupled_policy_loss(OLD, OLD, SAMPLER, ADVANTAGES, MASK, cap=0.5)
    with pytest.raises(ValueError, match="slots=0 must be at least 1"):
        independent_episodes.run(jnp.ones((2, 2)), 1.0, slots=0, staleness=1)


def _by_events(seconds, update_seconds, slots, staleness):
    """When updates end, event by event."""
    updates, batch = seconds.shape
    queue, ended = [], []
    version = following = running = ready = 0
    training, now = False, 0.0
    while len(ended) < updates:
        while following < seconds.size and running < slots and following // batch <= version + staleness:
            heapq.heappush(queue, (now + seconds.flat[following], "episode"))
            following, running = following + 1, running + 1
        if not training and ready >= batch:
            training, ready = True, ready - batch
            heapq.heappush(queue, (now + update_seconds, "update"))
        now, kind = heapq.heappop(queue)
        if kind == "episode":
            running, ready = running - 1, ready + 1
        else:
            training, version = False, version + 1
            ended.append(now)
    return ended


def test_episodes_in_virtual_time():
    rng = np.random.default_rng(0)
    seconds = np.exp(rng.normal(size=(6, 4))).astype(np.float32)
    given = jnp.asarray(seconds)
    last = []
    for slots, staleness in ((4, 0), (4, 2), (3, 4)):
        found = jax.jit(partial(independent_episodes.run, slots=slots, staleness=staleness))(given, 0.7)
        close.assert_near(found.update, _by_events(seconds, 0.7, slots, staleness), magnitude=0)
        close.assert_near(found.end - found.begin, seconds)
        for b in range(6):  # weights of the first of a batch are at most so many updates behind its turn
            assert b - np.sum(np.asarray(found.update) <= float(found.begin[b, 0])) <= staleness
        last.append(float(found.update[-1]))
    close.assert_near(last[0], np.sum(seconds.max(axis=1) + 0.7), magnitude=0)  # lockstep
    assert last[1] < last[0]
    turns = jnp.array([[1, 3], [5, 2]], jnp.int32)
    drawn = independent_episodes.draw_seconds(jax.random.key(0), turns, most=3, median=2.0, spread=0.0)
    close.assert_near(drawn, [[2.0, 6.0], [6.0, 4.0]], magnitude=0)
    same = {"batch": 8, "most": 3, "updates": 2, "spread": 0.0}
    each = [
        independent_episodes.seconds_of_updates(jnp.full(9, 2), jax.random.key(0), staleness=n, **same) for n in (0, 1)
    ]
    # 40 and 60 seconds in turn; with half of the slots two waves of 40, and 120 seconds twice
    close.assert_near(each, [100.0, (80.0 + 2 * 120.0) / 2], magnitude=0)


def _bigrams():
    """A policy whose next token depends on the last one only, so that nothing of older weights is left in a cache."""
    tokens = len(multi_hop.ALPHABET)
    return Policy(
        init=lambda key: jax.random.normal(key, (tokens, tokens)),
        hidden=lambda params, tokens, *rest: params[tokens],
        unembed=lambda params, hidden: hidden.astype(jnp.float32),
        init_cache=lambda batch, length: jnp.zeros((batch, 1)),
        extend=lambda params, cache, tokens, *rest: (params[tokens], cache),
        repeat_cache=lambda cache, repeats: jnp.repeat(cache, repeats, axis=0),
        vocab_size=tokens,
    )


@pytest.fixture(scope="module")
def made():
    return many_hops.problems(10, 3, (1, 2, 3, 4, 5))


def test_weights_are_swapped_while_an_episode_runs(made):
    arena = arenas.Arena(_bigrams(), multi_hop.make_env(), made, made, 3, many_hops.make_behaviour(1.0))
    slots = arenas.swapping_actor(arena, lag=2, group_size=2)
    tables = jax.vmap(arena.policy.init)(jax.random.split(jax.random.key(0), 3))
    tables = tables.at[:, :, multi_hop.ANSWER].set(-9.0)  # episodes go on to the end
    ids = jnp.arange(3, dtype=jnp.int32)
    prompts, keys = arena.train.tokens[:3], jax.random.split(jax.random.key(1), 6)
    state = TrainState(None, None, jnp.zeros((), jnp.int32), jax.random.key(0), None, {"behaviour": tables})
    assert slots["actor"](state) is tables
    rows = jax.jit(slots["rollout"])(tables, prompts, jnp.ones(prompts.shape, bool), keys, ids)
    width = prompts.shape[1]
    age, logp = np.asarray(rows.extras[swapped_weights.STALENESS]), np.asarray(jax.nn.log_softmax(tables, axis=2))
    for b, t in zip(*np.nonzero(np.asarray(rows.mask)), strict=True):
        number = min((t - width) * 3 // 27, 2)  # 27 columns, three versions
        assert age[b, t] == 2 - number
        want = logp[number, int(rows.tokens[b, t - 1]), int(rows.tokens[b, t])]
        close.assert_near(rows.sampler_logp[b, t], want, magnitude=0)
    assert set(age[np.asarray(rows.mask)]) == {0.0, 1.0, 2.0}
    assert set(arenas.swapping_actor(arena, lag=0, group_size=2)) == {"rollout"}
    with pytest.raises(ValueError, match="lag=-1"):
        arenas.swapping_actor(arena, lag=-1, group_size=2)


def test_injection_keeps_the_answer_and_costs_a_search(made):
    assert made.level.tolist() == [1, 2, 3, 4, 5] * 2 and made.tokens.shape == (10, many_hops.HOPS + 4)
    short = multi_hop.problems(10, 3, (1,), most=many_hops.HOPS)
    gold = jax.jit(jax.vmap(multi_hop.gold))
    np.testing.assert_array_equal(gold(made.answers), gold(short.answers))
    assert (np.asarray(made.answers["start"]) != np.asarray(short.answers["start"]))[1:].any()

    env, following = multi_hop.make_env(), jax.jit(multi_hop.next_action)
    step = jax.jit(env.step)
    for b in (4, 8):
        task = jax.tree.map(lambda x, b=b: x[b], made.answers)
        state, actions, reward = env.reset(jax.random.key(0), task), 0, None
        while reward is None:
            answer = step(state, following(state), jnp.int32(3))
            state, actions = answer.state, actions + 1
            reward = float(answer.reward) if bool(answer.done) else None
        assert reward == 1.0 and actions == int(made.level[b]) + 1  # one search for each hop, and the answer
    task = jax.tree.map(lambda x: x[0], made.answers)
    refusal = jnp.asarray([multi_hop.ANSWER, multi_hop.DOT, multi_hop.DOT], jnp.int32)
    answer = step(env.reset(jax.random.key(0), task), refusal, jnp.int32(3))
    assert bool(answer.done) and float(answer.reward) == 0.0
    assert bool(many_hops.refuses(refusal)) and bool(many_hops.well_formed(refusal))
    assert not bool(multi_hop.well_formed(refusal))


def test_score_of_episodes(made):
    tasks = jax.tree.map(lambda x: x[:3], made.answers)
    gold = np.asarray(jax.jit(jax.vmap(multi_hop.gold))(tasks))
    refusal = [multi_hop.ANSWER, multi_hop.DOT, multi_hop.DOT]
    said = np.asarray([[multi_hop.ANSWER, *gold[0]], [multi_hop.DOT, 6, 7], refusal])
    tokens = np.concatenate([np.asarray(made.tokens[:3]), said], axis=1).astype(np.int32)
    width, one = tokens.shape[1], jnp.ones((3, 1), jnp.int32)
    found = multi_turn.Turns(
        jnp.zeros(tokens.shape, jnp.int32), one * (width - 1), one > 0, jnp.zeros((3, 1)), one,
        jnp.array([True, False, True]), jnp.array([True, True, True]),
    )  # fmt: skip
    row = Trajectories(
        jnp.asarray(tokens), jnp.ones_like(tokens), jnp.zeros_like(tokens), jnp.ones(tokens.shape, bool),
        jnp.zeros(tokens.shape), jnp.zeros(3, bool), one[:, 0], one[:, 0],
        extras={f"turns/{name}": value for name, value in found._asdict().items()},
    )  # fmt: skip
    close.assert_near(jax.jit(many_hops.score)(tasks, row).value, [1.0, 0.0, -0.5], magnitude=0)


# --- the data agent


PERU = Problem("own", "What is the capital of Peru?", "", {"value": "Lima"}, 0, "peru")


def scripted(new="Which city governs the land of Machu Picchu?", sound="YES", others="No.", direct="Quito"):
    """A chat that says what is asked for, and what it was asked."""
    seen = []

    def chat(messages, draw=0):
        text = messages[0]["content"]
        seen.append(text.splitlines()[-1])
        if "Write the new question alone." in text:
            return new(text) if callable(new) else new
        if "consistent with this answer" in text:
            return sound
        return others if "Could a different answer" in text else direct

    return chat, seen


@pytest.mark.parametrize(
    ("said", "reason"),
    [({}, ""), ({"new": PERU.prompt}, "nothing new"), ({"new": "Is it LIMA?"}, "names the answer"),
     ({"sound": "NO"}, "unsound"), ({"others": "yes, Cusco"}, "other answers"),
     ({"direct": "Lima"}, "answered without tools")],
)  # fmt: skip
def test_a_new_question_counts_when_all_checks_pass(said, reason):
    chat, seen = scripted(**said)
    made = question_agent.harder(PERU, chat, answers.verify_exact, lambda question: "facts", rounds=1)
    assert made.rounds in ((reason,), ("injected",), ("blurred",)) and (not reason or made.rounds == (reason,))
    assert (made.problem.prompt == PERU.prompt) == bool(reason)
    assert made.problem.answer == PERU.answer and made.problem.identity == PERU.identity
    if not reason:
        assert len(seen) == 3 + question_agent.TRIES  # made, sound, no others, and nobody knows it by heart


def test_a_question_that_an_endpoint_refuses_stays_as_it_was():
    def refusing(messages, draw=0):
        raise Unanswered("not this one")

    made = question_agent.harder(PERU, refusing, answers.verify_exact, lambda question: "facts", rounds=2)
    assert made == question_agent.Made(PERU, ("not answered", "not answered"))

    def checks(messages, draw=0):  # it writes, and does not judge
        return "Where is Cusco?" if "Write the new question" in messages[0]["content"] else refusing(messages)

    made = question_agent.harder(PERU, checks, answers.verify_exact, lambda question: "facts", rounds=1)
    assert made == question_agent.Made(PERU, ("not answered",))


def test_rounds_build_on_each_other_and_both_kinds_occur():
    chat, _ = scripted(new=lambda text: text.splitlines()[0].removeprefix("Question: ") + "!")
    box = pages.pages_box([pages.Page("u", "Peru", "Peru is old.")], lambda query, count: [0])
    problems = [PERU._replace(identity=str(k)) for k in range(20)]
    made = question_agent.all_harder(problems, box, answers.verify_exact, chat=chat, rounds=3)
    assert {p.prompt for p in made} == {PERU.prompt + "!!!"}
    made = [question_agent.harder(p, chat, answers.verify_exact, str, rounds=3) for p in problems]
    kinds = {kind for one in made for kind in one.rounds}
    assert kinds == {"injected", "blurred"}
    with pytest.raises(UserError, match="--tools pages=CORPUS.jsonl"):
        question_agent.all_harder(
            problems, Toolbox((), lambda name, arguments: None), answers.verify_exact, chat=chat, rounds=1
        )
    with pytest.raises(UserError, match="give --reader and --reader-model"):
        asearcher.agent_of(asearcher.Settings(rounds=2))
    assert asearcher.agent_of(asearcher.Settings()) is None

"""SUPO: an episode in several contexts, what its sub-trajectories share, and the ledger its experiment reads."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.agents import supo
from experiments.agents.parts import ledger, sub_trajectories, summaries
from experiments.parts import strings
from jaxrl_llm.advantages import turns
from jaxrl_llm.advantages.group import group_normalized_advantages
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.rollout.turns import contexts, multi_turn
from jaxrl_llm.train.methods import builders
from jaxrl_llm.types import Rewards
from tests import close

# one layer, to compile less
POLICY = strings.make_world(len(ledger.ALPHABET), 1, 3 * ledger.TURNS).policy
ARENA = dataclasses.replace(ledger.make_ledger(ledger.Skill(1.0, 1.0)), policy=POLICY)
LIMIT, TIMES, MOST, GROUP = 7, 2, 3, 4
CONTEXT = ledger.context_of(LIMIT, TIMES)
WIDTH = contexts.widest(CONTEXT, ARENA.env, prompt_tokens=1, turns=ARENA.turns)
IDS = jnp.arange(24, dtype=jnp.int32)


def test_worked_example():
    rewards, ids = jnp.array([1.0, 0.0]), jnp.array([0, 0], jnp.int32)
    parts = jnp.array([[True, True, True], [True, False, False]])
    plain = partial(group_normalized_advantages, ddof=0, eps=0.0)
    found = turns.shared_advantages(rewards, ids, parts, normalise=plain)
    close.assert_near(found, [[1.0, 1.0, 1.0], [-1.0, 0.0, 0.0]], magnitude=0)
    # over sub-trajectories the mean is 0.75 and the deviation sqrt(3) / 4
    spread = jnp.broadcast_to(rewards[:, None], parts.shape)
    pooled = turns.pooled_turn_advantages(spread, ids, parts, gamma=0.0, ddof=0, eps=0.0)
    close.assert_printed(pooled, [[0.57735] * 3, [-1.73205, 0.0, 0.0]], 5)
    close.assert_near(supo.per_part(rewards, ids, parts), [[0.5] * 3, [-1.5, 0.0, 0.0]])


def test_agrees_with_a_loop():
    rng = np.random.default_rng(0)
    rewards, ids, count = rng.normal(size=12), np.arange(12) % 3, rng.integers(0, 4, 12)
    expected = np.zeros((12, 3))
    for i in range(12):
        mates = np.array([rewards[j] for j in range(12) if ids[j] == ids[i] and count[j]])
        for k in range(count[i]):
            expected[i, k] = (rewards[i] - mates.mean()) / mates.std(ddof=1)
    there = jnp.asarray(np.arange(3)[None, :] < count[:, None])
    found = turns.shared_advantages(jnp.asarray(rewards, jnp.float32), jnp.asarray(ids, jnp.int32), there)
    close.assert_near(found, expected)


def _given(table, ids, group, seed=0):
    return table.tokens[ids], table.valid[ids], sample_keys(jax.random.key(seed), 0, ids, group), ids


@pytest.fixture(scope="module")
def params():
    return POLICY.init(jax.random.key(3))


@pytest.fixture(scope="module")
def rows(params):
    rollout = ledger.episodes_in_context(ARENA, CONTEXT, ARENA.train, group_size=GROUP)
    return jax.jit(rollout)(params, *_given(ARENA.train, IDS, GROUP))


def _replay(row, amounts):
    """What a plain reader with this context is shown for the actions and summaries of a row; how the row ends."""
    tokens, mask, parts, places = row
    show = ledger.ALPHABET
    queue, seen, part, writing, summary, read, at = [show.index("L")], 0, 1, False, [], 0, 0
    while True:
        token, place, here = tokens[at], places[at], parts[at]
        assert (here, place) == (part, seen), at
        forced = bool(queue)
        assert bool(mask[at]) == (not forced)
        if forced:
            assert token == queue.pop(0)
        at, seen = at + 1, seen + 1
        if forced:
            continue
        if writing:
            summary.append(token)
            if len(summary) == 2:
                queue, seen, part, writing, summary = [show.index("L"), *summary], 0, part + 1, False, []
            continue
        if show[token] in "ABCDE":
            return at, part, "ABCDE".index(show[token])
        page = "_"
        if show[token] == "r" and read < len(amounts):
            page, read = str(amounts[read]), read + 1
        line = [show.index(page), show.index("," if read < len(amounts) else "!")]
        if seen + 2 > LIMIT:
            if part > TIMES:
                return at, part, None
            queue, writing = [*line, show.index("S")], True
        else:
            queue = line


def test_contexts_are_those_of_a_plain_reader(rows):
    record = [np.asarray(x) for x in (rows.tokens, rows.mask, rows.segment_ids, rows.positions)]
    tasks, rewards = ARENA.train.answers, np.asarray(multi_turn.episode_rewards({}, rows).value)
    ends = []
    for b in range(IDS.size * GROUP):
        task = int(rows.problem_ids[b])
        pages = np.asarray(tasks["amounts"][task])[: int(tasks["pages"][task])].tolist()
        at, part, said = _replay([x[b] for x in record], pages)
        assert not record[2][b, at:].any() and not record[1][b, at:].any()
        assert bool(rows.truncated[b]) == (said is None)
        assert rewards[b] == (said == sum(pages) % 5)
        ends.append((part, said is None))
    counts = np.bincount([part for part, _ in ends])
    assert counts[1] and counts[2] and counts[3] and any(cut for _, cut in ends)
    assert np.array_equal(contexts.summaries_of(rows), [part - 1 for part, _ in ends])
    assert int(jnp.max(contexts.context_sizes(rows))) <= WIDTH
    assert int(jnp.sum(rows.extras["summaries/written"])) > 2 * counts[3]


def test_log_probabilities_add_up(params, rows):
    """What the sampler recorded of a rollout is what the trainer scores of its sub-trajectories, each by itself."""
    parts = contexts.sub_trajectories(rows, most=MOST, width=WIDTH)
    own, _ = jax.jit(partial(builders.score_tokens, POLICY))(params, parts)
    own, mask = np.where(parts.mask, own, 0.0), np.asarray(parts.mask)
    close.assert_near(own, np.where(mask, parts.sampler_logp, 0.0))
    whole = np.where(rows.mask, rows.sampler_logp, 0.0).sum(1)
    close.assert_near(own.reshape(-1, MOST * WIDTH).sum(1), whole)
    there = np.asarray(contexts.present(parts, most=MOST))
    assert np.array_equal(there.sum(1), np.asarray(contexts.summaries_of(rows)) + 1)
    assert mask.sum() == np.asarray(rows.mask).sum()
    assert not np.asarray(parts.segment_ids).reshape(-1, MOST, WIDTH)[~there].any()


@pytest.mark.slow
def test_without_a_limit_it_is_grpo(params):
    ids, settings = IDS[:4], {"group_size": GROUP, "max_turns": ARENA.turns, "end_ids": ()}
    answers, new = ARENA.train.answers, ARENA.new_tokens
    plain = multi_turn.make_episodes(POLICY, ARENA.env, answers, max_new_tokens=new, **settings)
    seen = summaries.make_episodes(POLICY, ARENA.env, answers, ledger.ALL, **settings)
    grpo = builders.make_estimate(POLICY, builders.per_response(group_normalized_advantages))
    supo_ = sub_trajectories.make_split_estimate(POLICY, turns.shared_advantages, most=MOST, width=new + 1)
    rewards = Rewards(jnp.arange(16, dtype=jnp.float32) % 3, jnp.ones((16,), bool))

    @jax.jit
    def both(params, *given):
        left, right = plain(params, *given), seen(params, *given)
        return left, right, grpo(params, {}, left, rewards), supo_(params, {}, right, rewards)

    left, right, whole, parts = both(params, *_given(ARENA.train, ids, GROUP))
    for name in ("tokens", "mask", "segment_ids", "positions", "truncated"):
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name))
    close.assert_near(left.sampler_logp, right.sampler_logp)
    # the same masked tokens with the same advantages over the same total: token_mean cannot tell them apart
    for name in ("tokens", "segment_ids", "positions", "mask", "advantages"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(parts, name)[::MOST])
    others = np.asarray(parts.mask).reshape(-1, MOST, new + 1)[:, 1:]
    assert not others.any() and float(whole.total) == float(parts.total) > 16


def test_gradient(params, rows):
    count = rows.truncated.shape[0]
    value = jnp.where(rows.truncated, 0.0, jnp.arange(count, dtype=jnp.float32) % 2 + 0.5)
    judged = Rewards(value, jnp.ones((count,), bool))
    cut = np.repeat(np.asarray(rows.truncated), MOST)
    assert cut.any() and not cut.all()

    @jax.jit
    def found(rows, judged):
        batches = [
            sub_trajectories.make_split_estimate(POLICY, turns.shared_advantages, most=MOST, width=WIDTH, keep=keep)(
                params, {}, rows, judged
            )
            for keep in (sub_trajectories.finished_rollouts, sub_trajectories.every_rollout)
        ]

        def slope(batch):
            logits = jnp.cos(jnp.arange(batch.mask.size * 3, dtype=jnp.float32)).reshape(*batch.mask.shape, 3)

            def loss(logits):
                logp = jax.nn.log_softmax(logits, axis=2)[:, :, 1]
                terms = clipped_policy_loss(logp, jax.lax.stop_gradient(logp), batch.advantages, batch.mask)
                return jnp.sum(terms.loss)

            return jnp.max(jnp.abs(jax.grad(loss)(logits)), axis=2) > 0

        return batches, [slope(batch) for batch in batches], contexts.sub_trajectories(rows, most=MOST, width=WIDTH)

    (masked, every), (less, all_), parts = found(rows, judged)
    chosen, uneven = np.asarray(parts.mask), np.asarray(every.advantages) != 0
    # nothing where it was read, the prompt and the carried summary included; nothing of rollouts without an answer
    np.testing.assert_array_equal(all_, chosen & uneven)
    np.testing.assert_array_equal(less, chosen & uneven & ~cut[:, None])
    assert not chosen[:, 0].any() and not chosen.reshape(-1, MOST, WIDTH)[:, 1:, :3].any()
    # the reward of a masked rollout still counts: the advantages of the others are the same
    kept = ~cut[:, None] & chosen
    np.testing.assert_array_equal(np.asarray(masked.advantages)[kept], np.asarray(every.advantages)[kept])
    assert float(masked.total) == kept.sum() < float(every.total) == chosen.sum()


# --- what an action of two tokens adds: it can be taken out again


def _echo(limit, drop):
    def step(state, action, count):
        said = jnp.sum(action) % 5
        return multi_turn.Answered(
            state + 1,
            jnp.stack([said, said]).astype(jnp.int32),
            jnp.int32(2),
            jnp.float32(1),
            state > 9,
            jnp.bool_(True),
        )

    env = multi_turn.Env(lambda key, task: task, step, lambda state: state, action_tokens=2, observation_tokens=2)
    return env, contexts.Context(limit, 4, 3, (6, 6), drop=drop)


@pytest.mark.slow
@pytest.mark.parametrize("drop", [True, False])
def test_a_turn_is_taken_out_again(drop):
    world, (env, context) = strings.make_world(7, 3, 60), _echo(11, drop)
    params = world.policy.init(jax.random.key(0))
    rollout = summaries.make_episodes(
        world.policy, env, jnp.zeros((2,), jnp.int32), context, group_size=3, max_turns=8, end_ids=(5,)
    )
    prompts, valid = jnp.array([[0, 1, 2], [1, 2, 3]], jnp.int32), jnp.array([[False, True, True], [True] * 3])
    keys = sample_keys(jax.random.key(5), 0, jnp.arange(2), 3)
    rows = jax.jit(rollout)(params, prompts, valid, keys, jnp.arange(2, dtype=jnp.int32))
    logp, _ = jax.jit(partial(builders.score_tokens, world.policy))(params, rows)
    mask, taken = np.asarray(rows.mask), np.asarray(multi_turn.turns_of(rows).taken)
    close.assert_near(np.asarray(logp)[mask], np.asarray(rows.sampler_logp)[mask])
    assert (taken.sum(1) == 8).all() and np.asarray(contexts.summaries_of(rows)).min() > 1
    for b in range(6):
        parts, places = np.asarray(rows.segment_ids[b]), np.asarray(rows.positions[b])
        for k in range(1, parts.max() + 1):
            mine = places[parts == k]
            assert mine.tolist() == list(range(mine.size))  # without a gap
            # asked where the context is at most L long, or with the turn that was too much
            assert mine.size <= 11 + (0 if drop else 4) + 2 + 3
        gone = (parts == 0) & (np.arange(parts.size) < np.flatnonzero(parts).max()) & (np.arange(parts.size) > 2)
        assert gone.any() == drop and not mask[b][gone].any()


# --- the ledger


def test_the_expert_needs_summaries():
    play = summaries.make_played(
        ARENA.env, ARENA.heldout.answers, CONTEXT, ARENA.behave, lambda state, key: ledger.right_summary(state),
        max_turns=ARENA.turns,
    )  # fmt: skip
    rows = jax.jit(play)(*_given(ARENA.heldout, jnp.arange(64, dtype=jnp.int32), 1))
    right, pages = np.asarray(multi_turn.episode_rewards({}, rows).value) == 1.0, np.asarray(ARENA.heldout.level)
    np.testing.assert_array_equal(right, pages <= 6)
    np.testing.assert_array_equal(np.asarray(rows.truncated), pages > 6)
    tasks = jax.tree.map(lambda x: x[rows.problem_ids], ARENA.heldout.answers)
    right, first = ledger.right_summaries(tasks, rows)
    assert int(jnp.sum(first)) >= int(jnp.sum(contexts.summaries_of(rows))) > 64
    np.testing.assert_array_equal(right, first)
    wrong, _ = ledger.right_summaries(tasks, rows._replace(tokens=jnp.where(first, 0, rows.tokens)))
    assert not np.asarray(wrong).any()


@pytest.mark.slow
def test_the_base_sees_both_kinds_of_contexts():
    played = ledger.make_played(ledger.Skill(1.0, 1.0))
    rows = jax.jit(lambda key: played(ARENA, key, 64))(jax.random.key(0))
    counts, tokens = np.asarray(contexts.summaries_of(rows)), np.asarray(rows.tokens)
    assert counts[:32].max() >= 3 and not counts[32:].any() and not np.asarray(rows.truncated).any()
    for b in range(64):
        last = ledger.ALPHABET[tokens[b][np.asarray(rows.mask[b])][-1]]
        assert "ABCDE".index(last) == int(ARENA.train.answers["answer"][rows.problem_ids[b]])


@pytest.mark.slow
def test_a_rule_keeps_the_last_line(params):
    context = ledger.context_of(LIMIT, 3, rule=contexts.beginning(2))
    rollout = ledger.episodes_in_context(ARENA, context, ARENA.train, group_size=1)
    rows = jax.jit(rollout)(params, *_given(ARENA.train, IDS, 1))
    tokens, parts, places = (np.asarray(x) for x in (rows.tokens, rows.segment_ids, rows.positions))
    assert parts.max() > 1 and not np.asarray(rows.extras["summaries/written"]).any()
    for b, t in np.argwhere((parts > 1) & (places == 0)):
        assert ledger.ALPHABET[tokens[b, t]] == "L" and np.asarray(rows.mask[b, t - 1])
        assert ledger.ALPHABET[tokens[b, t + 2]] in ",!" and not np.asarray(rows.mask[b, t : t + 3]).any()


def test_wrong_contexts():
    given = _given(ARENA.train, IDS[:1], 1)
    for context, words in (
        (contexts.Context(None, 2), "summaries=2"),
        (contexts.Context(2, 1, 2), "tokens=2"),
        (contexts.Context(10, -1), "summaries=-1"),
        (ledger.context_of(10, 1, rule=contexts.beginning(2), drop=True), "leave one"),
    ):
        rollout = ledger.episodes_in_context(ARENA, context, ARENA.train, group_size=1)
        with pytest.raises(ValueError, match=words):
            jax.eval_shape(rollout, POLICY.init(jax.random.key(0)), *given)
    with pytest.raises(ValueError, match="group_size=0"):
        ledger.episodes_in_context(ARENA, CONTEXT, ARENA.train, group_size=0)

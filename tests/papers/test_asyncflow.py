"""AsyncFlow: streams by hand and against a loop, staleness in the timeline, the threaded loop against the host loop."""

import dataclasses
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.parts import running_sums, strings
from experiments.parts import running_sums_task as toy
from experiments.systems import asyncflow
from experiments.systems.parts import event_simulator, streaming_simulator
from jaxrl_llm.asynchronous import threads
from jaxrl_llm.experiment import arms, cli, recipes
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.planning import chips, known_models
from jaxrl_llm.train import host
from jaxrl_llm.train.methods import builders
from jaxrl_llm.train.online import init_state
from jaxrl_llm.train.plan import Setup
from tests import close

WORLD = running_sums.WORLD
SCHEDULE = jax.jit(event_simulator.schedule)


BATCH = streaming_simulator.as_batch
HOW = {False: BATCH, True: streaming_simulator.as_ready}


@pytest.mark.parametrize(("streamed", "want"), [(False, 6.0), (True, 4.0)])
def test_two_stages_with_three_micro_batches_of_a_second(streamed, want):
    assert streaming_simulator.pipeline_seconds(jnp.ones((2, 3)), hand_on=HOW[streamed]) == want


def by_hand(generate, score, train, send, *, streamed, staleness):
    """When every update's weights have arrived, stages on devices of their own; arrays ``[batches, parts]``."""
    made = scored = trained = 0.0
    sent = []
    for b in range(len(generate)):
        parts = range(len(generate[b]))
        made = max(made, sent[b - 1 - staleness] if b > staleness else 0.0)
        ends = []
        for k in parts:
            made += generate[b][k]
            ends.append(made)
        done = []
        for k in parts:
            scored = max(scored, ends[k] if streamed else ends[-1]) + score[b][k]
            done.append(scored)
        for k in parts:
            trained = max(trained, done[k] if streamed else done[-1]) + train[b][k]
        sent.append(trained + send)
    return sent


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("streamed", [False, True])
def test_timeline_against_a_loop(streamed, staleness):
    rng = np.random.default_rng(staleness)
    seconds = rng.integers(1, 9, (5, 3, 2)).astype(np.float32)  # batches, stages, parts
    tasks = np.concatenate([seconds.reshape(5, -1), np.ones((5, 1), np.float32)], axis=1)
    devices = np.tile(np.concatenate([np.repeat(np.eye(3, dtype=bool), 2, axis=0), np.zeros((1, 3), bool)]), (5, 1))
    after = streaming_simulator.edges(5, 2, hand_on=HOW[streamed], staleness=staleness)
    found = SCHEDULE(jnp.asarray(tasks.reshape(-1)), jnp.asarray(devices), jnp.asarray(after))
    want = by_hand(*seconds.transpose(1, 0, 2), 1.0, streamed=streamed, staleness=staleness)
    start, end = (np.asarray(x).reshape(5, 7) for x in found)
    close.assert_near(end[:, -1], want, magnitude=0)
    for b in range(5):  # how many updates the weights of a batch are behind those that train it
        assert b - np.sum(end[:, -1] <= start[b, 0]) <= staleness


def test_micro_batches_are_whole_groups_in_the_order_of_their_ends():
    lengths = jnp.asarray([[[3, 9], [1, 2], [5, 5], [2, 4]]], jnp.float32)
    steps, tokens = streaming_simulator.parts_of(lengths, 2)
    assert steps.tolist() == [[4.0, 5.0]] and tokens.tolist() == [[9.0, 22.0]]  # groups 1 and 3 first
    with pytest.raises(ValueError, match="parts=3 does not divide the 4 groups"):
        streaming_simulator.parts_of(lengths, 3)


def test_rates_and_a_flow_by_hand():
    config, chip = known_models.shape_of("Qwen2.5-0.5B"), chips.CHIPS["v5e"]
    found = streaming_simulator.rates(config, chip, tensor=1, context=100)
    close.assert_near(found.step, 2 * config.num_parameters / 8.1e11, magnitude=0)
    close.assert_near(found.row, 100 * 2 * 2 * 24 * 2 * 64 / 8.1e11, magnitude=0)
    close.assert_near(found.train, 4 * found.score, magnitude=0)
    lengths, rate = jnp.full((2, 2, 1), 10.0), streaming_simulator.Rates(1.0, 0.5, 0.1, 0.2, 3.0)
    same = {"parts": 2, "prompt": 5}
    # 10 steps of 1 + 0.5 * 2 / 3 seconds, 30 tokens, three instances for all
    alone = streaming_simulator.flow(
        lengths, rate, streaming_simulator.colocated(3), hand_on=BATCH, staleness=0, **same
    )
    close.assert_near(4 / alone.rows_per_second, 2 * (40 / 3 + 1 + 2 + 3), magnitude=0)
    # one instance each: 20 + 3 + 6 + 3, all streamed but the last part; the first part ends with the last
    apart = streaming_simulator.flow(lengths, rate, streaming_simulator.splits(3), hand_on=BATCH, staleness=0, **same)
    close.assert_near(4 / apart.rows_per_second, 2 * (20 + 3 + 6 + 3), magnitude=0)
    late = streaming_simulator.flow(lengths, rate, streaming_simulator.splits(3), hand_on=BATCH, staleness=1, **same)
    close.assert_near(4 / late.rows_per_second, 20 + 20 + 3 + 6 + 3, magnitude=0)
    close.assert_near(late.generating, 1 / 3, magnitude=0)


def test_lengths():
    drawn = streaming_simulator.draw_lengths(jax.random.key(0), (2, 3, 4), median=100.0, spread=1.0, most=150.0)
    assert drawn.shape == (2, 3, 4) and drawn.max() == 150.0 and (drawn == jnp.round(drawn)).all() and drawn.min() >= 1


def method(**slots):
    return strings.learned_from_prompts(
        WORLD, toy.draw_prompts(jax.random.key(1), 16), strings.score_of(WORLD, toy.right),
        estimate=builders.make_estimate(WORLD.policy, builders.per_response(lambda v, ids, valid: v - 0.5)),
        loss=builders.make_policy_loss(WORLD.policy, clipped_policy_loss, anchor=builders.sampler_anchor),
        tx=optax.sgd(0.1), prompts_per_step=2, group_size=2, **slots,
    )  # fmt: skip


@pytest.fixture(scope="module")
def loop():
    online = method()
    params = jax.jit(WORLD.policy.init)(jax.random.key(0))
    return host.make_host_loop(online), lambda: init_state(online, jax.tree.map(jnp.copy, params), jax.random.key(3))


def test_without_staleness_the_threads_are_the_host_loop_bit_for_bit(loop):
    halves, start = loop
    one, history = host.run(halves, start(), 4)
    two, found = threads.run(halves, start(), 4, staleness=0)
    jax.tree.map(np.testing.assert_array_equal, one.params, two.params)
    assert [{k: v for k, v in row.items() if k != threads.STALENESS} for row in found] == history
    assert [row[threads.STALENESS] for row in found] == [0.0] * 4


@pytest.mark.parametrize("slow", ["sampler", "learner"])
@pytest.mark.parametrize("staleness", [1, 2])
def test_weights_are_never_further_behind_than_allowed(loop, slow, staleness):
    halves, start = loop

    def finish(*arguments):
        time.sleep(0.02 if slow == "learner" else 0.0)
        return halves.finish(*arguments)

    def score(trajectories):
        time.sleep(0.02 if slow == "sampler" else 0.0)
        return halves.score(trajectories)

    state, found = threads.run(halves._replace(finish=finish, score=score), start(), 6, staleness=staleness)
    behind = [row[threads.STALENESS] for row in found]
    assert int(state.step) == 6 and len(behind) == 6 and behind[0] == 0
    assert max(behind) <= staleness and (slow == "sampler" or max(behind) == staleness)


def test_several_scorers_work_at_once_and_batches_train_in_order(loop):
    halves, start = loop
    began, order = [], []

    def score(trajectories):
        began.append(time.monotonic())
        time.sleep(0.3 if len(began) == 1 else 0.0)  # the first batch is done last
        return halves.score(trajectories)

    def finish(state, drawn, rewards):
        order.append((int(state.step), time.monotonic()))
        return halves.finish(state, drawn, rewards)

    threads.run(halves._replace(score=score, finish=finish), start(), 4, staleness=2, scorers=3)
    assert [step for step, _ in order] == [0, 1, 2, 3] and began[2] < order[0][1]
    with pytest.raises(TimeoutError, match="no rewards of step 0 in patience_s=0.05"):
        threads.run(halves._replace(score=lambda rows: time.sleep(1)), start(), 2, patience_s=0.05)
    with pytest.raises(ValueError, match="scorers=0 must be at least 1"):
        threads.run(halves, start(), 2, scorers=0)


@pytest.mark.parametrize("half", ["begin", "score", "finish"])
def test_a_failure_in_any_thread_ends_the_run(loop, half):
    halves, start = loop

    def broken(*arguments):
        raise RuntimeError(f"{half} broke")

    with pytest.raises(RuntimeError, match=f"{half} broke"):
        threads.run(halves._replace(**{half: broken}), start(), 3)
    with pytest.raises(ValueError, match="staleness=-1 must not be negative"):
        threads.run(halves, start(), 3, staleness=-1)


@pytest.mark.slow
def test_an_arm_trains_with_storage_units_and_weights_in_turn(tmp_path):
    more = "--workers local:2 --storage-units 2 --weight-swaps 1 --step-parts 2 --scorers 2 --patience 2".split()
    words = ["--smoke", "--arm", "async", "--seeds", "1", "--fresh", "--loop", "async", "--out", str(tmp_path)]
    cli.main(asyncflow.__name__, [*words, *more])
    curves = json.loads((tmp_path / "results.json").read_text())["arms"]["async"]["curves"]
    assert max(curves["sampler/staleness"]["values"][0]) <= 1 and curves["reward/mean"]["values"]


def test_the_lagged_actor_is_the_policy_of_so_many_updates_ago():
    slots, params = recipes.lagged_actor(2), {"w": jnp.zeros(3)}
    state = init_state(method(), params, jax.random.key(0), extras=recipes.lagged_extras(2)(params, jax.random.key(0)))
    acted = []
    for step in range(5):
        acted.append(float(slots["actor"](state)["w"][0]))
        state = state._replace(params={"w": jnp.full(3, step + 1.0)})
        state = state._replace(extras=slots["remember"](state, None, None, None))
    assert acted == [0.0, 0.0, 0.0, 1.0, 2.0] and recipes.lagged_actor(0) == {}
    with pytest.raises(ValueError, match="lag=-1 must not be negative"):
        recipes.lagged_actor(-1)


def test_arms_that_would_train_alike_are_simulated_alone_on_rows_as_well(monkeypatch):
    slots = {"make": lambda **slots: "online", "temperature": 1.0}
    rows = Setup(asyncflow.WORLD, lambda key: {}, lambda params, key: {}, slots=slots, fields={"on_host": True})
    monkeypatch.setattr(asyncflow, "own", lambda settings: rows)
    base = arms.preset(asyncflow, smoke=True, model=asyncflow.Settings().model)
    found = {
        name: [stage.method for stage in asyncflow.build(dataclasses.replace(settings, data="rows.jsonl")).stages]
        for name, settings in arms.resolve(asyncflow, base, ()).items()
    }
    trained = {name: ["online"] for name in ("streamed", "async", "async_2", "async_4")}
    assert found == trained | {"colocated": [], "apart": []}

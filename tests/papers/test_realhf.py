"""ReaL: the timeline against times by hand and an event loop, acceptance, reallocation plans, searched plans."""

import heapq

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.systems.parts import event_simulator, metropolis, placement_search, ppo_calls
from jaxrl_llm.distributed import reshard, rules
from jaxrl_llm.models.spec import parameter_shapes
from jaxrl_llm.planning import chips, reshard_cost
from jaxrl_llm.planning.parallel_layout import Sizes, leaves
from jaxrl_llm.planning.reshard_cost import Place
from jaxrl_llm.planning.work import Work
from tests import close
from tests.models_for_tests import small_config

SCHEDULE, OUTCOME = jax.jit(event_simulator.schedule), jax.jit(ppo_calls.outcome)
KEY = jax.random.key(0)
NO, A, B, BOTH = [False, False], [True, False], [False, True], [True, True]


def timeline(seconds, devices, after):
    return SCHEDULE(jnp.asarray(seconds, jnp.float32), jnp.asarray(devices), jnp.asarray(after))


@pytest.mark.parametrize(
    ("devices", "after", "want"),
    [([A, B], [NO, [True, False]], 5.0), ([A, B], [NO, NO], 3.0), ([A, BOTH], [NO, NO], 5.0), ([A, NO], [NO, NO], 3.0)],
    ids=["one after the other", "apart", "overlapping", "without devices"],
)
def test_two_calls_of_three_and_two_seconds(devices, after, want):
    assert timeline([3.0, 2.0], devices, after).makespan == want


def test_idle_share_memory_and_penalty_by_hand():
    found = timeline([3.0, 2.0], [A, B], [NO, NO])
    close.assert_near(event_simulator.idle_share(found, jnp.asarray([A, B])), 1 - 5 / 6, magnitude=0)
    bytes_of = jnp.asarray([4.0, 1.0]), jnp.asarray([2.0, 5.0])
    assert event_simulator.peak_bytes(*bytes_of, jnp.asarray([A, BOTH])) == 4 + 1 + 5
    assert event_simulator.peak_bytes(*bytes_of, jnp.asarray([A, B])) == 6
    assert event_simulator.penalised(jnp.float32(5.0), jnp.float32(10.0), 9.0) == 15.0
    assert event_simulator.penalised(jnp.float32(5.0), jnp.float32(9.0), 9.0) == 5.0


def test_a_cycle_never_ends():
    assert np.isnan(timeline([3.0, 2.0], [A, B], [[False, True], [True, False]]).makespan)


def by_events(seconds, devices, after):
    """A ready queue and the last tasks on overlapping meshes, as the paper has it."""
    count, queue, ends, ran = len(seconds), [], {}, []
    waiting = {i: {j for j in range(count) if after[i][j]} for i in range(count)}
    for i in range(count):
        if not waiting[i]:
            heapq.heappush(queue, (0.0, i))
    while queue:
        ready, i = heapq.heappop(queue)
        last = [ends[j] for j in ran if np.any(devices[i] & devices[j])]
        ends[i] = max([ready, *last]) + seconds[i]
        ran.append(i)
        for j in range(count):
            if i in waiting[j] and waiting[j] <= ends.keys():
                heapq.heappush(queue, (max(ends[k] for k in waiting[j]), j))
                waiting[j] = {-1}
    return [ends[i] for i in range(count)]


def test_against_an_event_loop():
    rng = np.random.default_rng(0)
    for _ in range(20):
        seconds = rng.integers(1, 6, 9).astype(float)
        devices, after = rng.random((9, 4)) < 0.4, np.tril(rng.random((9, 9)) < 0.3, -1)
        mixed = rng.permutation(9)
        after = after[np.ix_(mixed, mixed)]
        close.assert_near(timeline(seconds, devices, after).end, by_events(seconds, devices, after), magnitude=0)


def test_acceptance():
    accept = metropolis.acceptance
    one, beta = jnp.float32(1.0), jnp.float32(0.5)
    close.assert_printed(accept(jnp.float32(1.2), one, beta), 0.3679, 4)  # 2e5 microseconds more
    assert accept(jnp.float32(0.9), one, beta) == accept(one, one, beta) == 1.0
    never, nothing = jnp.float32(jnp.inf), jnp.float32(0.0)
    assert accept(never, one, nothing) == accept(never, never, nothing) == accept(never, one, beta) == 0.0
    assert accept(jnp.float32(99.0), one, nothing) == accept(one, never, beta) == 1.0


def test_the_chain_visits_plans_in_proportion_to_their_weight_and_finds_the_cheapest():
    costs = jnp.asarray([[0.3, 0.1, 0.2], [0.4, 0.0, 0.5]])
    allowed = jnp.asarray([[True, True, False], [True, True, True]])

    def cost(plan):
        return costs[0, plan[0]] + costs[1, plan[1]]

    start, betas, single = jnp.asarray([[0, 2]], jnp.int32), jnp.asarray([0.1, 1.0]), jnp.eye(2, dtype=bool)
    settings = {"groups": single, "steps": 300}
    search = jax.jit(lambda allowed, start: metropolis.metropolis(cost, start, allowed, KEY, betas, **settings))
    found = search(allowed, start)
    assert found.plan.tolist() == [1, 1] and 0 < found.accepted[1] < found.accepted[0] < 1
    close.assert_near(found.cost, 0.1, magnitude=0)
    plans = metropolis.every_plan([[0, 1], [0, 1, 2]])
    assert plans.shape == (6, 2)
    assert metropolis.cheapest(cost, jnp.asarray(plans), batch=4).plan.tolist() == [1, 1]
    alone = search(jnp.asarray([[False, True, False], [False, False, True]]), jnp.asarray([[1, 2]], jnp.int32))
    assert alone.plan.tolist() == [1, 2] and not alone.accepted.any()  # nothing else is allowed


def test_two_calls_that_cost_much_apart_change_together():
    """From either of two places at which both calls are cheap, the other is two dear steps away."""
    costs = jnp.asarray([[1.0, 9.0], [9.0, 0.5]])
    start, betas, allowed = jnp.zeros((1, 2), jnp.int32), jnp.asarray([5.0]), jnp.ones((2, 2), bool)

    def search(groups, start):
        found = metropolis.metropolis(
            lambda plan: costs[plan[0], plan[1]], start, allowed, KEY, betas, groups=groups, steps=60
        )
        return found.plan.tolist(), found.accepted.shape

    single, both = jnp.eye(2, dtype=bool), jnp.asarray([[True, False], [False, True], [True, True]])
    broken = costs.at[0, 0].set(jnp.nan)  # a start that never ends is left, and is not what is found
    lost = metropolis.metropolis(
        lambda plan: broken[plan[0], plan[1]], start, allowed, KEY, betas, groups=single, steps=60
    )
    assert lost.plan.tolist() == [1, 1] and lost.cost == 0.5
    assert search(single, start) == ([0, 0], (1,))
    assert search(both, start) == ([1, 1], (1,))
    assert search(single, jnp.asarray([[0, 0], [1, 1]], jnp.int32)) == ([1, 1], (2,))  # the better of two starts


def carried_out(shapes, whole, before, after):
    """The leaves on the devices of ``after``, from what those of ``before`` have and the transfers bring."""
    here = {}
    for path, shape in shapes.items():
        had, wanted = (reshard_cost.pieces(path, shape, place) for place in (before, after))
        for device, ranges in wanted.items():
            array = np.full(shape, np.nan)
            if device in had:
                array[tuple(slice(*r) for r in had[device])] = whole[path][tuple(slice(*r) for r in had[device])]
            here[path, device] = array, ranges
    for transfer in reshard_cost.transfers(shapes, before, after):
        part = tuple(slice(*r) for r in transfer.ranges)
        held = reshard_cost.pieces(transfer.leaf, shapes[transfer.leaf], before)[transfer.source]
        assert all(a <= c and d <= b for (a, b), (c, d) in zip(held, transfer.ranges, strict=True))
        for target in transfer.targets:
            here[transfer.leaf, target][0][part] = whole[transfer.leaf][part]
    return here


PLACES = [Place(0, Sizes(tensor=2, fsdp=2)), Place(4, Sizes(tensor=4)), Place(0, Sizes(data=2, fsdp=4)),
          Place(2, Sizes(data=2)), Place(0, Sizes(expert=2, tensor=4))]  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_transfers_bring_every_device_all_that_it_needs(family):
    shapes, rng = leaves(small_config(family)), np.random.default_rng(0)
    whole = {path: rng.normal(size=shape) for path, shape in shapes.items()}
    for before in PLACES:
        for after in PLACES:
            for (path, _), (array, ranges) in carried_out(shapes, whole, before, after).items():
                part = tuple(slice(*r) for r in ranges)
                np.testing.assert_array_equal(array[part], whole[path][part])  # and so there and back again
        assert reshard_cost.transfers(shapes, before, before) == []


def test_transfers_count_what_jax_would_move_and_device_put_keeps_the_model():
    config, devices, rng = small_config("llama"), np.asarray(jax.devices()[:8]), np.random.default_rng(0)
    tree = parameter_shapes(config)
    params = jax.tree.map(lambda s: rng.normal(size=s).astype(np.float32), tree, is_leaf=lambda x: isinstance(x, tuple))
    before, after = Place(0, Sizes(data=2, fsdp=2, tensor=2)), Place(0, Sizes(data=2, tensor=4))
    put = [rules.shardings(params, place.sizes.mesh(devices)) for place in (before, after)]
    plan = reshard_cost.transfers(leaves(config), before, after)
    count = sum(np.prod([b - a for a, b in t.ranges]) * len(t.targets) for t in plan)
    assert 4 * count == reshard.moved_bytes(params, *put, 4) > 0
    apart = rules.shardings(params, Sizes(tensor=2).mesh(devices[6:]))
    there = jax.device_put(jax.device_put(params, put[0]), apart)
    back = jax.device_put(there, put[1])
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), params, back)


def test_seconds_of_a_move():
    config, chip = small_config("llama", num_kv_heads=4), chips.CHIPS["v5p"]
    one, other = Place(0, Sizes()), Place(1, Sizes())
    bytes_of_it = 2 * config.num_parameters
    assert reshard_cost.seconds(config, chip, one, one) == 0
    close.assert_near(reshard_cost.seconds(config, chip, one, other), bytes_of_it / 1.8e11, magnitude=0)
    # the whole goes out once however many take it
    close.assert_near(
        reshard_cost.seconds(config, chip, one, Place(0, Sizes(data=4))), bytes_of_it / 1.8e11, magnitude=0
    )


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_seconds_count_what_the_transfers_list(family):
    config, chip = small_config(family), chips.CHIPS["v5p"]
    for before in PLACES:
        for after in PLACES:
            taken, sent = {}, {}
            for transfer in reshard_cost.transfers(leaves(config), before, after):
                count = 2 * int(np.prod([b - a for a, b in transfer.ranges]))
                sent[transfer.source] = sent.get(transfer.source, 0) + count
                for target in transfer.targets:
                    taken[target] = taken.get(target, 0) + count
            busiest = max((*taken.values(), *sent.values()), default=0)
            found = reshard_cost.seconds(config, chip, before, after)
            close.assert_near(found, busiest / (chip.link * reshard_cost.LINKS), magnitude=0)


@pytest.fixture(scope="module")
def small():
    config = small_config("llama", num_kv_heads=4)
    options = ppo_calls.places(config, 4, smallest=2)
    return options, ppo_calls.tables(config, config, chips.CHIPS["v5p"], options, Work(16, 16, 8, 8))


def test_places_and_tables(small):
    options, tables = small
    assert {p.first for p in options if p.sizes.chips == 2} == {0, 2} and tables.devices.shape[1] == 4
    for k, place in enumerate(options):
        assert np.flatnonzero(tables.devices[k]).tolist() == list(place.devices)
        assert np.isinf(tables.seconds[ppo_calls.GENERATE, k]) == (place.sizes.fsdp > 1)
    chosen = np.asarray(ppo_calls.candidates(tables))
    assert (chosen.sum(1) >= 3).all() and not (chosen & ~np.asarray(ppo_calls.runnable(tables))).any()
    for k, (trains, uses) in enumerate(((ppo_calls.TRAIN_ACTOR, ppo_calls.GENERATE), (5, ppo_calls.VALUE))):
        assert np.isfinite(np.asarray(tables.moves[k])[np.ix_(chosen[trains], chosen[uses])]).all()
        alone = np.asarray(tables.seconds[uses])[chosen[uses]]
        assert alone.min() == np.asarray(tables.seconds[uses]).min()
    with pytest.raises(ValueError, match="6 chips are no power of two times blocks of 2"):
        ppo_calls.places(small_config("llama"), 6, smallest=2)


def test_a_plan_on_all_devices_is_the_sum_of_its_calls(small):
    options, tables = small
    plan = placement_search.symmetric_plan(tables, options, KEY)
    assert len(set(plan.tolist())) == 1
    found = OUTCOME(tables, plan)
    close.assert_near(found.seconds, tables.seconds[:, plan[0]].sum(), magnitude=0)
    close.assert_near(found.idle, 0.0)
    zero = placement_search.zero_plan(tables, options, KEY)
    moved = OUTCOME(tables, zero).seconds - tables.seconds[jnp.arange(6), zero].sum()
    both = tables.moves[0, zero[4], zero[0]] + tables.moves[1, zero[5], zero[3]]
    close.assert_near(moved, both, magnitude=float(found.seconds))  # a difference of two such times
    assert both > 0


def test_places_that_another_beats_in_everything_are_no_candidates():
    """One block of two devices and one of one; the second place is worse than the first in all, the third fits not."""
    seconds = jnp.asarray([[2.0, 3.0, 1.0, 5.0]] * 6).at[ppo_calls.GENERATE].set(jnp.asarray([4.0, 3.0, jnp.inf, 5.0]))
    resident = jnp.asarray([[1.0, 1.0, 9.0, 1.0]] * 6)
    working = jnp.asarray([[1.0, 2.0, 2.0, 1.0]] * 6)
    devices = jnp.asarray([[True, True]] * 3 + [[True, False]])
    moves = jnp.zeros((2, 4, 4))
    tables = ppo_calls.Tables(seconds, resident, working, devices, moves, jnp.float32(10.0))
    plain, shared = [True, False, False, True], [True, True, False, True]
    want = [shared, plain, plain, plain, shared, plain]  # the actor generates fast at the second: it may train there
    assert ppo_calls.candidates(tables).tolist() == want
    roomy = ppo_calls.candidates(tables._replace(capacity=jnp.float32(11.0)))
    assert roomy.tolist() == [
        shared,
        *[[True, False, True, True]] * 3,
        [True, True, True, True],
        [True, False, True, True],
    ]


def test_no_plan_is_below_the_bound_and_the_search_is_below_the_plans_it_begins_with(small):
    options, tables = small
    least, searching = ppo_calls.bound(tables), {"betas": (0.01, 0.1), "steps": 400}
    may = np.asarray(ppo_calls.runnable(tables))
    drawn = np.stack([np.random.default_rng(k).choice(np.flatnonzero(may[k]), 200) for k in range(6)], axis=1)
    costs = jax.jit(jax.vmap(lambda plan: ppo_calls.outcome(tables, plan).penalised))(jnp.asarray(drawn, jnp.int32))
    slack = close.bound(16, least)  # sums of as many numbers in another order
    assert least - slack <= np.nanmin(costs) and np.isfinite(costs).sum() >= 10
    searched = placement_search.metropolis_plan(tables, options, KEY, allowed=ppo_calls.candidates, **searching)
    tied = placement_search.metropolis_plan_of_models(tables, options, KEY, **searching)
    assert tied[0] == tied[4] and tied[3] == tied[5]
    others = (placement_search.symmetric_plan, placement_search.zero_plan, placement_search.greedy_plan)
    found = OUTCOME(tables, searched).penalised
    for plan in (tied, *(plan(tables, options, KEY) for plan in others)):
        assert found <= OUTCOME(tables, plan).penalised
    assert least - slack <= found
    assert np.isnan(ppo_calls.bound(tables, most=10))


def test_the_bound_of_calls_that_have_one_place():
    """Two devices, one place on both: a chain of calls in turn, and three times as long where memory is short."""
    seconds = jnp.asarray([[3.0], [1.0], [1.0], [1.0], [2.0], [2.0]])
    ones = jnp.ones((6, 1))
    tables = ppo_calls.Tables(seconds, ones, ones, jnp.asarray([[True, True]]), jnp.zeros((2, 1, 1)), jnp.float32(7.0))
    assert ppo_calls.bound(tables) == OUTCOME(tables, jnp.zeros(6, jnp.int32)).penalised == 10.0
    assert ppo_calls.bound(tables._replace(capacity=jnp.float32(6.0))) == 30.0


def test_moves_counted_in_arrays_are_those_of_the_listed_transfers():
    config, chip = small_config("llama", num_kv_heads=4, num_layers=2), chips.CHIPS["v5p"]
    places = [*PLACES[:4], Place(4, Sizes(fsdp=2, tensor=2)), Place(0, Sizes(data=2, fsdp=2, tensor=2))]
    for before in places:
        for after in places:
            plan = reshard_cost.transfers(leaves(config), before, after)
            taken, sent = {}, {}
            for one in plan:
                size = 2 * int(np.prod([b - a for a, b in one.ranges]))
                sent[one.source] = sent.get(one.source, 0) + size
                for target in one.targets:
                    taken[target] = taken.get(target, 0) + size
            want = max((*taken.values(), *sent.values()), default=0) / 1.8e11
            close.assert_near(reshard_cost.seconds(config, chip, before, after), want, magnitude=0)


def test_places_with_stages_come_behind_the_others_and_generate_nothing():
    config, chip, work = small_config(num_layers=4), chips.CHIPS["v5p"], Work(16, 16, 8, 8)
    plain = ppo_calls.places(config, 4, smallest=2)
    options, stages = ppo_calls.staged_places(config, 4, smallest=2, depths=(1, 2, 4))
    assert options[: len(plain)] == plain and set(stages[: len(plain)]) == {1} and set(stages[len(plain) :]) == {2, 4}
    assert all(place.sizes.fsdp == depth for place, depth in zip(options, stages, strict=True) if depth > 1)
    alone, found = ppo_calls.tables(config, config, chip, plain, work), None
    found = ppo_calls.tables(config, config, chip, options, work, stages)
    for name in ("seconds", "resident", "working", "devices"):
        mine = getattr(found, name)
        first = mine[: len(plain)] if name == "devices" else mine[:, : len(plain)]
        np.testing.assert_array_equal(first, getattr(alone, name))
    behind = np.asarray(found.seconds[:, len(plain) :])
    assert np.isinf(behind[ppo_calls.GENERATE]).all() and np.isfinite(np.delete(behind, ppo_calls.GENERATE, 0)).all()
    for k in range(len(plain), len(options)):
        block = options[k].sizes._replace(fsdp=1)
        for call, phase in ((ppo_calls.TRAIN_ACTOR, "update"), (ppo_calls.VALUE, "score")):
            want = ppo_calls.pipelined_figures(config, chip, block, work, stages[k], phase)[0]
            assert found.seconds[call, k] == np.float32(want)
    # the search may use them, and its plan is none that cannot run
    greedy = placement_search.greedy_plan(found, options, KEY)
    assert np.isfinite(OUTCOME(found, greedy).seconds)


def test_weights_on_the_host_free_the_devices_and_cost_their_way(small):
    options, kept = small
    config, speed = small_config(num_layers=2), 1e6
    away = ppo_calls.tables(config, config, chips.CHIPS["v5p"], options, Work(16, 16, 8, 8), host=speed)
    stay = ppo_calls.tables(config, config, chips.CHIPS["v5p"], options, Work(16, 16, 8, 8))
    frozen = [ppo_calls.REWARD, ppo_calls.REFERENCE]
    for call in range(6):
        resident, seconds = (np.asarray(x, np.float64) for x in (stay.resident[call], stay.seconds[call]))
        if call in frozen:
            assert (resident > 0).all() and not np.asarray(away.resident[call]).any()
            close.assert_near(away.seconds[call], (seconds + resident / speed).astype(np.float32), terms=4)
            close.assert_near(away.working[call], stay.working[call] + stay.resident[call], terms=4, magnitude=1e6)
        else:
            np.testing.assert_array_equal(away.seconds[call], stay.seconds[call])
            np.testing.assert_array_equal(away.resident[call], stay.resident[call])

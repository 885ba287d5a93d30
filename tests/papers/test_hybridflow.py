"""HybridFlow: layouts and what their change moves, transfer protocols, controllers as graphs, searched mappings."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.systems.parts import dataflow, event_simulator, placement, ppo_calls, regroup, transfer_protocols
from experiments.systems.parts.regroup import Layout
from jaxrl_llm.distributed import mesh as meshes
from jaxrl_llm.distributed import reshard, rules
from jaxrl_llm.models.spec import parameter_shapes
from jaxrl_llm.planning import chips, cost
from jaxrl_llm.planning.parallel_layout import Sizes, held
from jaxrl_llm.planning.work import Work
from tests import close
from tests.models_for_tests import small_config

SMALL, HALF = Layout(pipeline=1, data=2, tensor=4), {"pipeline": 1, "tensor": 2}
SCHEMES = (regroup.fully_sharded, regroup.vanilla, regroup.hybrid_engine)


def test_groups_of_two_times_four_ranks_that_generate_in_twos():
    ranks = regroup.strided(SMALL, **HALF)
    assert ranks.reshape(-1, 2).tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert regroup.micro_groups(ranks).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("scheme", "want"), zip(SCHEMES, [(0.875, 1, 1 / 8), (0.75, 1, 1 / 4), (0.25, 0.5, 0)], strict=True)
)
def test_costs_of_two_times_four_ranks(scheme, want):
    change = scheme(SMALL, **HALF)
    close.assert_near(change.costs, want, magnitude=0)
    close.assert_near(regroup.counted(change), want, magnitude=0)


def layouts():
    for p, d, t in itertools.product((1, 2, 4), (1, 2, 3), (1, 2, 4)):
        for pg, tg in itertools.product((1, 2, 4), (1, 2, 4)):
            if p % pg == 0 and t % tg == 0:
                yield Layout(p, d, t), {"pipeline": pg, "tensor": tg}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_closed_forms_are_what_is_counted(scheme):
    for train, generation in layouts():
        change = scheme(train, **generation)
        assert (change.held.sum(axis=0) > 0).all() and sorted(set(change.groups.ravel())) == list(range(train.ranks))
        found = regroup.counted(change)
        close.assert_near(change.costs[:2], found[:2])
        between = 1 < generation["tensor"] < train.tensor or 1 < generation["pipeline"] < train.pipeline
        assert found.redundant == change.costs.redundant if between else found.redundant <= change.costs.redundant


def test_ranks_at_a_stride_need_only_their_own_group_and_neighbours_need_more():
    for train, generation in layouts():
        change = regroup.hybrid_engine(train, **generation)
        assert not (change.held & ~change.wanted).any()
        ranks = regroup.strided(train, **generation)
        assert ranks.shape == (generation["pipeline"], train.data, ranks.shape[2], generation["tensor"])
        replicas = change.wanted[ranks]  # every replica of generation has every cell once
        assert (replicas.sum(axis=(0, 3)) == 1).all()
    near = regroup.consecutive(SMALL, **HALF)
    neighbours = regroup.vanilla(SMALL, **HALF)._replace(groups=regroup.micro_groups(near))
    with pytest.raises(ValueError, match="do not hold all that they need; gather in larger groups"):
        regroup.counted(neighbours)
    with pytest.raises(ValueError, match="tensor=3 of generation does not divide the 4 of training; choose a divisor"):
        regroup.strided(SMALL, pipeline=1, tensor=3)


ROWS = {"tokens": jnp.arange(24, dtype=jnp.int32).reshape(8, 3), "mask": jnp.arange(8) % 3 > 0}


def same(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


@pytest.mark.parametrize("layout", [SMALL, Layout(2, 2, 2), Layout(4, 1, 2)])
def test_protocols_give_back_what_they_were_given(layout):
    micro = transfer_protocols.micro(pipeline=1, tensor=1)
    for protocol in (transfer_protocols.DP, transfer_protocols.THREE_D, micro):
        handed = protocol.distribute(ROWS, layout)
        assert len(handed) == layout.ranks
        same(protocol.collect(handed, layout), ROWS)
        doubled = transfer_protocols.spread(lambda rows: rows["tokens"] * 2, protocol, layout)
        same(doubled(ROWS), ROWS["tokens"] * 2)
    for returned in (
        transfer_protocols.ONE_TO_ALL.collect(transfer_protocols.ONE_TO_ALL.distribute(ROWS, layout), layout),
        transfer_protocols.DP_ALLGATHER.collect(transfer_protocols.DP_ALLGATHER.distribute(ROWS, layout), layout),
    ):
        assert len(returned) == layout.ranks
        for one in returned:
            same(one, ROWS)


def test_what_ranks_get_and_who_answers():
    layout = Layout(2, 2, 2)
    handed = transfer_protocols.THREE_D.distribute(jnp.arange(4), layout)
    assert [x.tolist() for x in handed] == [[0, 1], [0, 1], [2, 3], [2, 3]] * 2
    answers = [jnp.asarray([rank]) for rank in range(8)]
    assert transfer_protocols.THREE_D.collect(answers, layout).tolist() == [4, 6]  # the last stage, tensor rank 0
    micro = transfer_protocols.micro(pipeline=1, tensor=2)
    handed = micro.distribute(jnp.arange(4), SMALL)
    assert [int(x[0]) for x in handed] == [0, 1, 0, 1, 2, 3, 2, 3]  # the groups [0, 2], [1, 3], [4, 6], [5, 7]
    assert micro.collect(answers, SMALL).tolist() == [0, 1, 4, 5]
    whole = transfer_protocols.micro(pipeline=1, tensor=4)
    same(whole.distribute(ROWS, SMALL), transfer_protocols.THREE_D.distribute(ROWS, SMALL))
    with pytest.raises(ValueError, match="6 rows are no multiple of 4 parts; choose a multiple"):
        transfer_protocols.DP.distribute(jnp.arange(6), Layout(data=4))


def test_jax_places_rows_as_the_protocol_hands_them_out():
    placed = rules.shard_batch(ROWS, meshes.parse_mesh("data=2,tensor=4"))
    for rank, handed in enumerate(transfer_protocols.THREE_D.distribute(ROWS, SMALL)):
        same({name: x.addressable_shards[rank].data for name, x in placed.items()}, handed)


def reaches(after):
    """Who waits for whom in the end."""
    after = after.astype(int)
    for _ in range(len(after)):
        after = ((after + after @ after) > 0).astype(int)
    return after > 0


def test_the_controller_of_ppo_has_the_graph_of_its_calls():
    graph = dataflow.trace(dataflow.ppo, 2)
    assert graph.calls.tolist() == list(range(6)) * 2 and graph.models == [0, 1, 2, 3]
    kept = [k for k in range(16) if k % 8 < 6]  # without the moves of weights
    np.testing.assert_array_equal(reaches(graph.after), reaches(ppo_calls._edges(2))[np.ix_(kept, kept)])


def test_other_controllers_need_no_critic():
    grpo, remax = (dataflow.trace(one, 1) for one in (dataflow.grpo, dataflow.remax))
    assert grpo.models == remax.models == [0, 1, 2]
    assert [ppo_calls.CALLS[k] for k in grpo.calls] == ["generate", "reward", "reference", "train_actor"]
    assert sorted(remax.calls.tolist()) == [0, 0, 1, 1, 2, 4]
    last = len(remax.calls) - 1
    assert reaches(remax.after)[last].sum() == last and not reaches(remax.after)[0].any()


def test_set_partitions():
    assert [len(placement.set_partitions(n)) for n in range(1, 6)] == [1, 2, 5, 15, 52]  # Bell numbers
    found = placement.set_partitions(4)
    assert len(set(found)) == 15
    assert {placement.colocated(4)[0], placement.apart(4)[0], placement.in_pairs(4)[0]} <= set(found)


def test_mappings_give_each_set_units_of_its_own():
    units, blocks = 4, placement.blocks(4)
    found = placement.mappings(placement.set_partitions(3), units)
    want = 0
    for partition in placement.set_partitions(3):
        sets = max(partition) + 1
        want += sum(sum(sizes) <= units for sizes in itertools.product(range(1, 5), repeat=sets))
    assert len({tuple(row) for row in found.tolist()}) == len(found) == want
    for row in found.tolist():
        sets = [set(range(blocks[k][0], sum(blocks[k]))) for k in set(row)]
        assert sum(map(len, sets)) == len(set.union(*sets))


def made_up(seed, units=4):
    """Tables whose calls scale as they like."""
    rng, options = np.random.default_rng(seed), placement.blocks(units)
    size = np.asarray([size for _, size in options])
    seconds = rng.uniform(1, 4, (6, 1)) / size ** rng.uniform(0, 1.2, (6, 1))
    parts = rng.uniform(0, 1, (2, 6, 1)) / size
    devices = np.asarray([[a <= u < a + n for u in range(units)] for a, n in options])
    moves = np.zeros((2, len(options), len(options)))
    numbers = [jnp.asarray(x, jnp.float32) for x in (seconds, *parts)]
    return ppo_calls.Tables(*numbers, jnp.asarray(devices), jnp.asarray(moves, jnp.float32), jnp.float32(2.5))


def by_loops(found, choice, controller):
    """``(seconds by stages, peak)`` of a mapping."""
    seconds, resident, working, devices = (np.asarray(x, np.float64) for x in found[:4])
    place = [choice[model] for model in ppo_calls.MODELS]
    graph, total, peak = dataflow.trace(controller, 1), 0.0, 0.0
    stages = ([0], [1, 2, 3], [4, 5])
    for stage in stages:
        busy = [
            sum(seconds[c, place[c]] for c in graph.calls.tolist() if c in stage and devices[place[c], u])
            for u in range(devices.shape[1])
        ]  # fmt: skip
        total += max(busy)
    for u in range(devices.shape[1]):
        here = [c for c in set(graph.calls.tolist()) if devices[place[c], u]]
        kept = sum(resident[c, place[c]] for c in here)
        peak = max(peak, kept + max((working[c, place[c]] for c in here), default=0.0))
    return total, peak


@pytest.mark.parametrize("controller", [dataflow.ppo, dataflow.grpo])
def test_the_chosen_mapping_is_never_worse_than_fixed_ones(controller):
    units, outcome, graph = 4, placement.make_outcome(controller), dataflow.trace(controller)
    by_stages = jax.jit(lambda found, choice: placement.by_stages(found, choice, graph))
    for seed in range(3):
        found = made_up(seed)

        def pick(partitions, judge=placement.by_events, found=found):
            return placement.choose(found, controller, partitions, judge, units=units)

        costs = [outcome(found, pick(p)).penalised for p in
                 (placement.set_partitions, placement.colocated, placement.apart, placement.in_pairs)]  # fmt: skip
        assert costs[0] <= min(costs[1:])
        choice = pick(placement.set_partitions, placement.by_stages)
        total, peak = by_loops(found, choice.tolist(), controller)
        close.assert_near(outcome(found, choice).peak, peak, magnitude=0)
        close.assert_near(by_stages(found, choice), total * (3 if peak > 2.5 else 1), magnitude=0)


def test_a_block_on_which_a_call_cannot_run_is_never_chosen():
    found, whole = made_up(0), len(placement.blocks(4)) - 1
    hole = found._replace(seconds=found.seconds.at[ppo_calls.VALUE, whole].set(jnp.inf))
    outcome = placement.make_outcome(dataflow.ppo)
    assert outcome(hole, jnp.full((4,), whole, jnp.int32)).penalised == jnp.inf
    for judge in (placement.by_events, placement.by_stages):
        choice = placement.choose(hole, dataflow.ppo, placement.set_partitions, judge, units=4)
        assert np.isfinite(outcome(hole, choice).penalised) and choice[3] != whole


def test_colocated_models_run_in_turn_and_the_rest_of_an_iteration_waits():
    found, graph = made_up(0), dataflow.trace(dataflow.ppo)
    whole = len(placement.blocks(4)) - 1
    choice = jnp.full((4,), whole, jnp.int32)
    result = placement.make_outcome(dataflow.ppo)(found, choice)
    close.assert_near(result.seconds, found.seconds[:, whole].sum(), magnitude=0)
    place = ppo_calls.together(choice)[graph.calls]
    again = event_simulator.schedule(found.seconds[graph.calls, place], found.devices[place], jnp.asarray(graph.after))
    close.assert_near(again.makespan, 2 * result.seconds, magnitude=0)


def test_engines_of_a_small_model():
    config, chip, work = small_config("llama", num_kv_heads=4), chips.CHIPS["v6e"], Work(16, 16, 8, 8)
    sets = [placement.engines(config, chip, 4, work, scheme) for scheme in SCHEMES]
    for alike in zip(*sets, strict=True):
        assert len({(one.train, one.tensor) for one in alike}) == 1
        bytes_of = [one.move_bytes for one in alike]
        assert bytes_of[0] >= bytes_of[1] >= bytes_of[2] >= 0  # fully sharded, vanilla, in small groups
    best = placement.engine(config, chip, 4, work, regroup.hybrid_engine)
    assert sum(f[0] for f in best.figures) == min(sum(f[0] for f in one.figures) for one in sets[2])
    found = placement.tables(config, config, chip, work, regroup.hybrid_engine, count=2, units=2).tables
    assert found.seconds.shape == (6, 3) and np.isfinite(found.seconds).all()
    np.testing.assert_array_equal(found.seconds[:, 0], found.seconds[:, 1])  # blocks of equal size
    with pytest.raises(ValueError, match="6 chips do not divide into 4 units; choose another number of either"):
        placement.tables(config, config, chip, work, regroup.hybrid_engine, count=6, units=4)


def generation_mesh(ranks):
    """Replicas over ``data``, their parts over ``tensor``, on devices in the order of the groups."""
    devices = np.asarray(jax.devices()[:8])[ranks]
    return Mesh(devices.reshape(-1, 1, 1, 1, ranks.shape[-1]), meshes.AXES)


def test_bytes_that_real_arrays_would_move():
    config = small_config("llama", num_kv_heads=4)
    is_shape = {"is_leaf": lambda x: isinstance(x, tuple)}
    params = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, np.float32), parameter_shapes(config), **is_shape)
    before = rules.shardings(params, meshes.parse_mesh("data=2,tensor=4"))
    cut = [x.size for x, s in zip(*map(jax.tree.leaves, (params, before)), strict=True) if not s.is_fully_replicated]
    everywhere = jax.tree.map(lambda s: NamedSharding(s.mesh, P()), before)
    afters = [
        rules.shardings(params, generation_mesh(f(SMALL, **HALF))) for f in (regroup.strided, regroup.consecutive)
    ]
    moved = [reshard.moved_bytes(params, before, after, 4) / (8 * 4 * sum(cut)) for after in (*afters, everywhere)]
    # neighbours lack a half of the model on every second device, even if each takes no more than it lacks
    close.assert_near(moved, [0.25, 0.375, 0.75], magnitude=0)
    assert moved[0] == regroup.hybrid_engine(SMALL, **HALF).costs.communication
    assert moved[2] == regroup.vanilla(SMALL, **HALF).costs.communication


STAGED = Work(64, 64, 16, 16)


def test_one_stage_is_no_pipeline():
    config, chip = small_config(num_layers=4), chips.CHIPS["v6e"]
    for sizes in (Sizes(data=2), Sizes(data=1, tensor=2)):
        alone = ppo_calls.pipelined_figures(config, chip, sizes, STAGED, 1, "update")
        close.assert_near(alone, ppo_calls.train_figures(config, chip, sizes, STAGED), magnitude=0)
    with pytest.raises(ValueError, match="stages=3 does not divide the 4 layers"):
        ppo_calls.stage_of(config, 3)


def test_seconds_of_a_pipeline_by_the_clock_of_its_parts():
    """Every part visits every stage in turn, a stage has one at a time: the last ends after m + p - 1 of them."""
    config, chip, sizes = small_config(num_layers=4), chips.CHIPS["v6e"], Sizes(data=2)
    for stages in (2, 4):
        stage, want = ppo_calls.stage_of(config, stages), np.inf
        assert stage.num_layers == 4 // stages
        for parts, remat in itertools.product((1, 2, 4, 8), (False, True)):
            part = dataclasses.replace(STAGED, microbatches=parts, remat=remat)
            each = cost.step_seconds(stage, chip, sizes, sizes, part)["update"] / parts
            each += 2 * 2 * config.hidden_size * (16 // 2) * 128 / parts / chip.link
            free, ready = np.zeros(stages), np.zeros(parts)
            for k, s in itertools.product(range(parts), range(stages)):
                free[s] = ready[k] = max(free[s], ready[k]) + each
            want = min(want, ready[-1])
        seconds, stays, _ = ppo_calls.pipelined_figures(config, chip, sizes, STAGED, stages, "update")
        close.assert_near(np.float32(seconds), np.float32(want), terms=64)
        assert stays == 12 * held(stage, sizes)


def test_a_choice_of_stages_is_never_slower_and_cuts_weights_as_the_closed_forms_say():
    config, chip = small_config(num_layers=4), chips.CHIPS["v6e"]
    plain, staged = (
        placement.engines(config, chip, 4, STAGED, regroup.hybrid_engine, depths) for depths in ((1,), (1, 2, 4))
    )
    for one, same in zip(plain, staged, strict=False):
        assert (one.train, one.tensor, one.figures, one.stages) == (same.train, same.tensor, same.figures, same.stages)
    assert {one.stages for one in staged} == {1, 2, 4}
    for one in staged[len(plain) :]:
        layout = Layout(one.stages, one.train.data, one.train.tensor)
        assert one.train.fsdp == 1 and layout.ranks == 4
        assert one.change.costs == regroup.hybrid_engine(layout, pipeline=1, tensor=one.tensor).costs
    best = [placement.engine(config, chip, 4, STAGED, regroup.hybrid_engine, depths) for depths in ((1,), (1, 2, 4))]
    assert sum(f[0] for f in best[1].figures) <= sum(f[0] for f in best[0].figures)

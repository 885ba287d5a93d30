"""Rollouts on devices of their own: the host loop bit for bit without staleness, and nothing through the host."""

import json
from functools import partial

import jax
import numpy as np
import pytest
from jax._src import array as arrays

from experiments.systems import llamarl
from jaxrl_llm.asynchronous import apart, threads
from jaxrl_llm.distributed import mesh as meshes
from jaxrl_llm.distributed import rules
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import cli
from jaxrl_llm.train import host
from tests.asynchronous import programs

STEPS = 4


def meshes_of(trainer, generator):
    before = meshes.parse_mesh(trainer)
    with meshes.on_devices(meshes.devices_apart(before, generator, "--generator-mesh")):
        return before, meshes.parse_mesh(generator)


@pytest.fixture(scope="module")
def halves():
    """The loop that trains on one device, its first state, and the generator on another."""
    before, after = meshes_of("data=1", "data=1")
    method = programs.method()
    loop = host.make_host_loop(method, programs.judge, place=partial(rules.constrain, mesh=before))
    return loop, lambda: rules.shard(programs.start(), before), apart.make_apart(method, method, before, after), after


def test_without_staleness_it_is_the_host_loop_bit_for_bit(halves):
    loop, start, generator, _ = halves
    want, history = host.run(loop, start(), STEPS)
    state, found = threads.run(loop, start(), STEPS, staleness=0, apart=generator)
    jax.tree.map(np.testing.assert_array_equal, state.params, want.params)
    more = {threads.STALENESS, *threads.HAND}
    assert [{k: v for k, v in row.items() if k not in more} for row in found] == history
    sent = sum(x.nbytes for x in jax.tree.leaves(want.params))
    assert all(sent < row["weights/sent_bytes"] < sent + 2**16 for row in found)  # and the prompts' curriculum


def test_it_rolls_out_there_and_trains_here(halves):
    loop, start, generator, after = halves
    where = []

    def begin(state):
        drawn = generator.begin(state)
        where.append((drawn.trajectories.tokens.sharding.device_set, jax.tree.leaves(state.params)[0].devices()))
        return drawn

    state, found = threads.run(loop, start(), 6, staleness=2, apart=generator._replace(begin=begin))
    assert where == [(set(after.devices.flat), set(after.devices.flat))] * 6
    assert all(x.devices() == {jax.devices()[0]} for x in jax.tree.leaves(state.params))
    assert max(row[threads.STALENESS] for row in found) <= 2


def test_no_weight_passes_through_the_host(halves, monkeypatch):
    """Between layouts that cut the arrays differently, too."""
    _, start, _, _ = halves
    before, after = meshes_of("fsdp=2", "data=2,tensor=2")
    method = programs.method()
    generator, state = apart.make_apart(method, method, before, after), rules.shard(start(), before)
    want = jax.tree.map(np.array, state.params)

    def refused(self):
        raise AssertionError("an array was copied to the host")

    with monkeypatch.context() as patched:
        patched.setattr(arrays.ArrayImpl, "_value", property(refused))
        acting = jax.block_until_ready(generator.hand(state, True))
    jax.tree.map(np.testing.assert_array_equal, acting.params, want)
    wanted = rules.shardings(acting.params, after)
    jax.tree.map(lambda x, sharding: x.sharding.is_equivalent_to(sharding, x.ndim) or 1 / 0, acting.params, wanted)
    assert acting.opt_state == () and int(acting.step) == 0


def test_rows_come_back_divided_over_the_devices_that_train(halves):
    _, start, _, _ = halves
    before, after = meshes_of("data=2", "data=1")
    method = programs.method()
    generator = apart.make_apart(method, method, before, after)
    drawn = generator.begin(generator.hand(rules.shard(start(), before), True))
    rewards = programs.judge(drawn.trajectories)
    found, values = generator.back((drawn, jax.tree.map(jax.numpy.asarray, rewards)))
    assert found.trajectories.mask.sharding.is_equivalent_to(meshes.batch_sharding(before), 2)
    assert values.value.sharding.is_equivalent_to(meshes.batch_sharding(before), 1)
    assert found.ids.sharding.is_equivalent_to(meshes.replicated(before), 1)
    jax.tree.map(np.testing.assert_array_equal, found.trajectories, drawn.trajectories)


def test_the_base_of_an_adapter_travels_once():
    """Nor is it copied for every update where both halves share their devices."""
    before, after = meshes_of("data=1", "data=1")
    method, start = programs.adapted()
    loop = host.make_host_loop(method, programs.judge, place=partial(rules.constrain, mesh=before))
    whole, history = host.run(loop, rules.shard(start(), before), STEPS)
    assert max(float(abs(x).max()) for name, x in whole.params["lora"].items() if name.endswith("_b")) > 0  # it trains
    generator, bases = apart.make_apart(method, method, before, after), []

    def begin(state):
        bases.append([id(x) for x in jax.tree.leaves(state.params["base"])])
        return begun(state)

    for there in (generator, None):
        begun = loop.begin if there is None else generator.begin
        own = None if there is None else there._replace(begin=begin)
        half = loop._replace(begin=begin) if there is None else loop
        state, found = threads.run(half, rules.shard(start(), before), STEPS, staleness=0, apart=own)
        jax.tree.map(np.testing.assert_array_equal, state.params, whole.params)
        assert [row["loss/total"] for row in found] == [row["loss/total"] for row in history]
        assert bases == [bases[0]] * STEPS  # the same arrays at every step
        if there is not None:
            thin = sum(x.nbytes for x in jax.tree.leaves(whole.params["lora"]))
            assert all(thin < row["weights/sent_bytes"] < thin + 2**16 for row in found)
        bases.clear()


def test_meshes_that_share_a_device_are_refused():
    mesh = meshes.parse_mesh("data=2")
    with pytest.raises(ValueError, match="both meshes have"):
        apart.make_apart(programs.method(), programs.method(), mesh, mesh)
    with pytest.raises(UserError, match="tensor=8 needs 8 devices beside the 2 of --mesh; there are 8"):
        meshes.devices_apart(mesh, "tensor=8", "--generator-mesh")


SMOKE = ["--smoke", "--seeds", "1", "--arm", "sync", "--fresh", "--group-size", "4"]


@pytest.mark.slow
def test_an_experiment_with_generator_and_trainer_apart(tmp_path):
    more = ["--loop", "async", "--mesh", "fsdp=2", "--generator-mesh", "data=2,tensor=2", "--compute", "bfloat16"]
    cli.main(llamarl.__name__, [*SMOKE, *more, "--out", str(tmp_path)])
    curves = json.loads((tmp_path / "results.json").read_text())["arms"]["sync"]["curves"]
    assert min(curves["weights/sent_bytes"]["values"][0]) > 0 and max(curves["sampler/staleness"]["values"][0]) <= 1


WRONG = {
    ("--generator-mesh", "data=1"): "--generator-mesh data=1 belongs to --loop async",
    ("--loop", "async", "--generator-mesh", "data=1"): "give --mesh with it, data=1 for one",
    ("--loop", "async", "--mesh", "tensor=8", "--generator-mesh", "data=1"): "needs 1 devices beside the 8 of --mesh",
    (
        "--loop",
        "async",
        "--mesh",
        "data=1",
        "--generator-mesh",
        "rows=2",
    ): "--generator-mesh rows=2: unknown axis 'rows'",
    ("--loop", "async", "--mesh", "data=1", "--workers", "local:1", "--generator-mesh", "data=1"): "drop --workers",
}


@pytest.mark.parametrize("words", WRONG)
def test_what_cannot_be_apart_is_one_line(words, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(llamarl.__name__, [*SMOKE[:-2], "--out", str(tmp_path), *words])
    assert ended.value.code == 2 and WRONG[words] in capsys.readouterr().err

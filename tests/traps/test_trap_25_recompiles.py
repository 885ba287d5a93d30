"""Trap 25, static shapes: whatever the lengths of the answers, later steps compile nothing; the counter is there."""

from jaxrl_llm.train import fused, host
from tests.traps.tables import online, start


def test_the_host_loop_compiles_its_two_halves_once():
    method = online()
    steps = list(host.iterations(host.make_host_loop(method), start(method), 5))
    assert [step.compiled for step in steps] == [2] * 5
    lengths = {float(step.metrics["length/mean_tokens"]) for step in steps}
    assert len(lengths) > 1  # ragged generations


def test_the_fused_loop_compiles_once():
    method = online()
    run = fused.make_run(method, 2)
    state, _ = run(start(method))
    run(state)
    assert run._cache_size() == 1

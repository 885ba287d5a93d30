"""A fingerprint depends on what a program computes, and on nothing that was traced before it."""

import jax
import jax.numpy as jnp
import pytest

from experiments.policy_gradient import dr_grpo, rec_offpolicy
from jaxrl_llm.experiment import arms, cli
from jaxrl_llm.experiment.evidence import fingerprints


def _of(function, *arguments):
    return fingerprints.of_program(jax.make_jaxpr(function)(*arguments))


def _masked(x):
    return jnp.where(x > 0, x, 0.0) + jnp.where(x > 1, x, 0.0)


def test_settings_and_caches_of_the_process_do_not_count():
    x, found = jnp.ones(3), set()
    for promotion in ("standard", "strict", "standard"):
        with jax.numpy_dtype_promotion(promotion):
            found.add(_of(_masked, x))
    jax.clear_caches()
    assert {*found, _of(_masked, x)} == found and len(found) == 1


def test_a_shared_function_counts_like_its_copies():
    """The text of a program tells them apart: which calls share a function is a matter of settings and caches."""

    def shared(f, g):
        return lambda x: f(f(x)) + g(x)

    one, other = jax.jit(lambda x: 2.0 * x), jax.jit(lambda y: 2.0 * y)
    assert _of(shared(one, one), 1.0) == _of(shared(one, other), 1.0)
    assert len({str(jax.make_jaxpr(shared(one, f))(1.0)) for f in (one, other)}) == 2
    assert _of(shared(one, one), 1.0) != _of(shared(one, jax.jit(lambda x: 3.0 * x)), 1.0)


def test_names_do_not_count():
    def first(x):
        return jnp.sin(x)

    def second(x):
        return jnp.sin(x)

    assert _of(jax.jit(first), 1.0) == _of(jax.jit(second), 1.0)


X = jnp.arange(3.0)


@pytest.mark.parametrize(
    "other",
    [
        lambda x: (x + X) * X,
        lambda x: (x * X) + 2 * X,
        lambda x: (x * X) + X[::-1],
        lambda x: (X * x) + X,
        lambda x: ((x * X) + X).astype(jnp.int32),
        lambda x: jax.lax.map(lambda y: 2 * y, (x * X) + X),
    ],
    ids=["order", "literal", "constant", "operands", "dtype", "loop"],
)
def test_what_is_computed_counts(other):
    assert _of(lambda x: (x * X) + X, X) != _of(other, X)


def test_inside_a_loop_operations_and_constants_count():
    def looped(by, times):
        def program(x):
            return jax.lax.scan(lambda c, _: (c * by, None), x, length=times)[0]

        return program

    found = [_of(looped(by, times), X) for by, times in ((2.0, 3), (2.0, 4), (3.0, 3), (X, 3), (X + 1, 3))]
    assert len(set(found)) == 5 and found[0] == _of(looped(2.0, 3), X)


def test_the_key_of_a_random_constant_counts():
    one, other = jax.random.key(0), jax.random.key(1)
    assert _of(lambda x: x + jax.random.normal(one), 0.0) != _of(lambda x: x + jax.random.normal(other), 0.0)


def test_an_open_program_takes_its_constants():
    closed = jax.make_jaxpr(lambda x: x + X)(X)
    given = fingerprints.of_program(closed.jaxpr, closed.consts)
    assert given == fingerprints.of_program(closed)
    assert given != fingerprints.of_program(closed.jaxpr, [c + 1 for c in closed.consts])


@pytest.mark.parametrize(
    ("module", "arm", "reads"),
    [(dr_grpo, "ppo", False), (rec_offpolicy, "reinforce", False), (rec_offpolicy, "one_side_is", True)],
)
def test_a_loss_without_a_ratio_to_the_sampler_is_seen_and_said(module, arm, reads, capsys):
    """GRPO's own ratio of a single update is to the present weights, and exactly 1: also where samples are older."""
    settings = arms.resolve(module, arms.preset(module, smoke=True, model="nano"), (arm,))[arm]
    plan = module.build(settings)
    assert fingerprints.reads_sampler_logp(plan) is reads
    options, fresh = (cli.Options(loop="async", staleness=n) for n in (2, 0))
    cli.say_without_ratio(options, {arm: plan._replace(staleness=None)})
    said = (f"arm {arm}: its loss has no ratio to the sampler, so that samples of up to 2 updates ago train as if they "
            "were of present weights\n")  # fmt: skip
    assert capsys.readouterr().out == ("" if reads else said)
    cli.say_without_ratio(fresh, {arm: plan._replace(staleness=None)})
    assert capsys.readouterr().out == ""

"""A fingerprint depends on what a program computes, and on nothing that was traced before it."""

import functools

import jax
import jax.numpy as jnp
import pytest

from experiments.policy_gradient import dr_grpo, rec_offpolicy
from jaxrl_llm.experiment import arms, cli, recipes
from jaxrl_llm.experiment.evidence import fingerprints
from jaxrl_llm.train import origins
from jaxrl_llm.train.methods import supervised


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


def test_weights_trained_here_count_by_their_recipe():
    """Their bits are those of one machine: not the bits, but program, start and rows tell two of them apart."""

    def program(rate, given):
        return jax.tree.map(lambda x: x - rate * jnp.sin(x), given)

    def hashed(given, rate, *, slip=0.0):
        recipe = functools.partial(program, rate)
        made = origins.made_by(recipe, given, jax.tree.map(lambda x: x + slip, recipe(given)))
        return fingerprints.of_program(jax.make_jaxpr(lambda x: x * made["a"] + made["b"])(jnp.ones(3)))

    given = {"a": jnp.arange(3.0), "b": jnp.ones(3)}
    assert hashed(given, 0.1) == hashed(given, 0.1, slip=1e-7)
    assert hashed(given, 0.1) != hashed(given, 0.2)
    assert hashed(given, 0.1) != hashed(given | {"b": jnp.zeros(3)}, 0.1)
    swapped = origins.made_by(functools.partial(program, 0.1), given, program(0.1, given))
    other = fingerprints.of_program(jax.make_jaxpr(lambda x: x * swapped["b"] + swapped["a"])(jnp.ones(3)))
    assert other != hashed(given, 0.1), "a leaf is not another one of the same weights"


def test_imitation_tells_how_its_weights_came_about():
    """Two trainings of one recipe are one program to a record, wherever they ran; a step more is another."""
    found = recipes.bench(recipes.OnlineSettings(train_problems=8, eval_problems=4, max_new_tokens=8))
    pairs = [("1+1=", "2"), ("2+2=", "4")]

    def hashed(steps, slip=0.0):
        with jax.core.eval_context():
            made = supervised.imitated_pairs(found.model, pairs, width=8, steps=steps, rows_per_step=2)
        origin = origins.origin_of(jax.tree.leaves(made)[0])
        moved = origins.made_by(origin.program, origin.given, jax.tree.map(lambda x: x + slip, made))
        return _of(lambda x: [x + leaf.ravel()[0] for leaf in jax.tree.leaves(moved)], 1.0)

    assert hashed(1) == hashed(1, slip=1e-6) != hashed(2)

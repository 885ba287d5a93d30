"""Settings of arms: every override is checked, every field is read, every arm computes something else."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm.advantages import group
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import arms
from jaxrl_llm.experiment.evidence import fingerprints
from jaxrl_llm.train import plan as plans
from tests.experiment import tiny
from tests.traps import tables


def test_an_override_replaces_and_leaves_the_rest():
    first = tiny.Settings()
    second = arms.override(first, {"steps": 7, "warm_steps": 1}, "a test")
    assert (second.steps, second.warm_steps, second.learning_rate) == (7, 1, first.learning_rate)
    assert first.steps == 100


def test_an_unknown_field_names_the_nearest_one():
    with pytest.raises(UserError, match="arm 'x' sets 'warm_step', which is no setting; did you mean 'warm_steps'"):
        arms.override(tiny.Settings(), {"warm_step": 1}, "arm 'x'")
    with pytest.raises(UserError, match="no setting; the settings are model, mesh, "):
        arms.override(tiny.Settings(), {"zzzzzzz": 1}, "arm 'x'")


def test_presets_stack_embedded_below_smoke():
    assert tiny.Settings().steps == 100
    assert arms.preset(tiny, smoke=False, model="nano").steps == 6
    assert arms.preset(tiny, smoke=True, model="nano").steps == 2
    # a model of one's own takes the paper's values
    assert arms.preset(tiny, smoke=False, model="some/folder").steps == 100
    assert arms.bundled("nano") and not arms.bundled("some/folder")


def test_arms_come_in_their_own_order_and_unknown_ones_are_listed():
    base = tiny.Settings()
    assert list(arms.resolve(tiny, base, ())) == ["baseline", "method", "warm"]
    chosen = arms.resolve(tiny, base, ("warm", "baseline"))
    assert list(chosen) == ["baseline", "warm"] and chosen["warm"].warm_steps == 2
    with pytest.raises(UserError, match="--arm cold: the arms are baseline, method, warm"):
        arms.resolve(tiny, base, ("cold",))


def test_an_arm_may_be_so_many_times_the_settings(monkeypatch):
    """Its number follows a smaller preset, a model of one's own and a flag; counts stay whole numbers."""
    monkeypatch.setitem(tiny.ARMS, "more", {"steps": arms.Times(4), "learning_rate": arms.Times(0.1)})
    few, many = (
        arms.resolve(tiny, tiny.Settings(steps=steps, learning_rate=rate), ("more",))["more"]
        for steps, rate in ((3, 0.1), (50, 3e-2))
    )
    assert (few.steps, few.learning_rate, many.steps, many.learning_rate) == (12, 0.01, 200, 0.003)
    assert type(few.steps) is int and str(arms.Times(0.1)) == "0.1 times that of the settings"
    with pytest.raises(UserError, match="arm 'more' sets 'step', which is no setting; did you mean 'steps'"):
        arms.override(tiny.Settings(), {"step": arms.Times(4)}, "arm 'more'")


def test_missing_slots_are_named():
    arms.check_slots(tiny)
    with pytest.raises(ValueError, match="no SMOKE, METRICS, build, claim"):
        half = types.ModuleType("half")
        half.Settings, half.ARMS = tiny.Settings, {}
        arms.check_slots(half)


def test_watched_settings_are_equal_and_remember_what_was_read():
    settings = tiny.Settings(steps=3)
    copy, reads = arms.watched(settings)
    assert reads == set()
    assert copy.steps == 3 and copy.advantages is group.group_normalized_advantages
    assert {"steps", "advantages"} <= reads and "model" not in reads
    with pytest.raises(dataclasses.FrozenInstanceError):
        copy.steps = 4


def test_a_field_read_only_inside_a_compiled_function_counts():
    copy, reads = arms.watched(tiny.Settings())
    plan = tiny.build(tiny.Settings())
    late = plan._replace(measure=lambda params, key: {"x": params["table"].sum() * copy.learning_rate})
    assert "learning_rate" not in reads
    arms.trace(late)
    assert "learning_rate" in reads


def _fingerprint(settings):
    plan = tiny.build(settings)
    return fingerprints.fingerprint(plan, arms.trace(plan))


def test_arms_have_different_fingerprints_and_equal_settings_the_same():
    found = {name: _fingerprint(s) for name, s in arms.resolve(tiny, tiny.Settings(), ()).items()}
    assert len(set(found.values())) == 3
    assert _fingerprint(tiny.Settings()) == found["method"]
    assert _fingerprint(tiny.Settings(model="unread")) == found["method"]
    for changes in ({"steps": 5}, {"learning_rate": 0.2}):
        assert _fingerprint(tiny.Settings(**changes)) != found["method"]


def test_data_that_the_program_holds_as_a_constant_tells_arms_apart():
    plan = tiny.build(tiny.Settings())
    moved = plan.stages[0].method._replace(problems=tables.problems()._replace(tokens=tables.problems().tokens + 1))
    other = plan._replace(stages=(plan.stages[0]._replace(method=moved),))
    assert fingerprints.fingerprint(plan, arms.trace(plan)) != fingerprints.fingerprint(other, arms.trace(other))


def test_tracing_on_the_host_leaves_python_out():
    def never(*_):
        raise AssertionError("called")

    plan = tiny.build(tiny.Settings(warm_steps=1, on_host=True))
    method = plan.stages[1].method._replace(score=never)
    plan = plan._replace(stages=(plan.stages[0], plan.stages[1]._replace(method=method)))
    traced = arms.trace(plan._replace(host_score=never, measure=never))
    assert len(traced) == 3  # the start and two stages


def _with(plan, **slots):
    stage = plan.stages[-1]
    return plan._replace(stages=(*plan.stages[:-1], stage._replace(method=stage.method._replace(**slots))))


def test_what_only_feeds_metrics_does_not_make_another_arm():
    """The whole program differs, the way of the parameters does not."""
    plan = tiny.build(tiny.Settings())
    seen = _with(plan, figures=lambda batch, metrics: {"extra": jnp.sum(jnp.abs(batch.advantages))})
    remembered = _with(plan, remember=lambda state, batch, rows, rewards: state.extras | {"seen": rewards.value.sum()})
    kept = remembered._replace(
        stages=(remembered.stages[0]._replace(extras=lambda params, key: {"seen": jnp.zeros(())}),)
    )
    assert fingerprints.fingerprint(plan, arms.trace(plan)) != fingerprints.fingerprint(seen, arms.trace(seen))
    assert (
        fingerprints.update_fingerprint(plan)
        == fingerprints.update_fingerprint(seen)
        == fingerprints.update_fingerprint(kept)
    )
    assert fingerprints.same_updates({"a": plan, "b": seen, "c": tiny.build(tiny.Settings(learning_rate=0.2))}) == [
        ["a", "b"]
    ]


def test_a_term_without_a_gradient_does_not_make_another_arm():
    plan = tiny.build(tiny.Settings())
    loss = plan.stages[0].method.loss

    def dead(params, batch):
        value, metrics = loss(params, batch)
        return value + jax.lax.stop_gradient(0.1 * jnp.sum(params["table"] ** 2)), metrics

    def alive(params, batch):
        value, metrics = loss(params, batch)
        return value + 0.1 * jnp.sum(params["table"] ** 2), metrics

    assert fingerprints.update_fingerprint(_with(plan, loss=dead)) == fingerprints.update_fingerprint(plan)
    assert fingerprints.update_fingerprint(_with(plan, loss=alive)) != fingerprints.update_fingerprint(plan)


def test_a_state_that_reaches_the_parameters_only_later_counts():
    """What an iteration writes beside the parameters and the next one reads belongs to the update."""
    plan = tiny.build(tiny.Settings())
    estimate = plan.stages[0].method.estimate

    def lagged(kept):
        def scaled(params, extras, rows, rewards):
            batch = estimate(params, extras, rows, rewards)
            return batch._replace(advantages=batch.advantages * extras["scale"])

        found = _with(plan, estimate=scaled, remember=lambda state, batch, rows, rewards: {"scale": kept(rewards)})
        return found._replace(stages=(found.stages[0]._replace(extras=lambda params, key: {"scale": jnp.ones(())}),))

    a, b = lagged(lambda rewards: rewards.value.mean()), lagged(lambda rewards: rewards.value.max())
    assert fingerprints.update_fingerprint(a) != fingerprints.update_fingerprint(b)
    assert fingerprints.update_fingerprint(a) == fingerprints.update_fingerprint(
        lagged(lambda rewards: rewards.value.mean())
    )


def test_what_is_made_of_the_parameters_at_the_end_makes_another_arm():
    """Arms that merge what they trained in two ways train the same, and are measured on other parameters."""
    plan = tiny.build(tiny.Settings())
    halved = plan._replace(finish=lambda params, key: jax.tree.map(lambda x: 0.5 * x, params))
    noisy = plan._replace(
        finish=lambda params, key: jax.tree.map(lambda x: x + jax.random.normal(key, x.shape), params)
    )
    assert fingerprints.same_updates({"as it is": plan, "halved": halved, "noisy": noisy, "twin": halved}) == [
        ["halved", "twin"]
    ]
    found = {name: fingerprints.fingerprint(p, arms.trace(p)) for name, p in (("a", plan), ("b", halved), ("c", noisy))}
    assert len(set(found.values())) == 3


def test_measured_are_the_finished_parameters():
    """Twice the logits of a table that prefers a token prefer it more; training goes on from the table itself."""
    seen = []

    def measure(params, key):
        seen.append(params)
        return {}

    plan = tiny.build(tiny.Settings())._replace(
        measure=measure, finish=lambda params, key: {"table": 2 * params["table"]}
    )
    params = {"table": jnp.asarray([[1.0, 0.0]])}
    plans.measured(plan)(params, jax.random.key(0))
    assert (
        seen[0]["table"].tolist() == [[2.0, 0.0]] and plans.measured(plan._replace(finish=plans.as_trained)) is measure
    )


def test_python_in_the_loop_has_no_fingerprint():
    plan = tiny.build(tiny.Settings(on_host=True))
    assert fingerprints.update_fingerprint(plan._replace(host_score=lambda rows: None)) == ""

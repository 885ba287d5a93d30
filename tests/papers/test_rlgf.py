"""RLGF: who writes which tokens, and which of them train the policy and the two critics."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.policy_gradient import rlgf
from experiments.policy_gradient.parts import roll_in_out
from jaxrl_llm.errors import RunStopped, UserError
from jaxrl_llm.experiment import Results, cli, recipes
from jaxrl_llm.experiment.evidence import beds
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.types import Rewards, TrainState
from tests import close
from tests.endpoint_for_tests import serving
from tests.experiment import made

BASE = dataclasses.replace(rlgf.Settings(), **rlgf.EMBEDDED | rlgf.SMOKE)


def _parts(**changes):
    settings = dataclasses.replace(BASE, **changes)
    plan = rlgf.build(settings)
    bench = recipes.bench(settings)
    params = {"model": bench.model.params} | {
        name: {"weight": jnp.full((bench.model.config.hidden_size, 1), x), "bias": jnp.zeros(1)}
        for name, x in (("value", 0.1), ("of_guide", -0.1))
    }
    ids = jnp.arange(4, dtype=jnp.int32)
    arguments = bench.train.tokens[ids], bench.train.valid[ids], sample_keys(jax.random.key(1), 0, ids, 2), ids
    # the guide writes any token with equal chance: its tokens are known by their log-probability
    guide = jax.tree.map(jnp.zeros_like, bench.model.params)
    return plan.stages[0].method, params, guide, arguments, -np.log(bench.model.config.vocab_size)


def _of_guide(rows, uniform):
    real = np.asarray(roll_in_out.whole_response(rows, new_tokens=BASE.max_new_tokens))
    within = close.near(rows.sampler_logp, uniform, terms=int(np.exp(-uniform)))
    return real & (np.abs(np.asarray(rows.sampler_logp) - uniform) <= within), real


@pytest.mark.slow
def test_ppo_pp_trains_behind_the_guides_beginning_and_aggrevated_the_beginning_itself():
    """pre = [1, 1, 0, 0, 0]: PPO++ acts on [0, 0, 1, 1, 1], AggreVaTeD on [1, 1, 0, 0, 0] and judges the rest."""
    online, params, guide, arguments, uniform = _parts(share=1.0)
    rewards = Rewards(jnp.array([1.0, 0.0] * 4), jnp.ones(8, bool))
    for own in (True, False):
        flag = jnp.asarray(own)
        rows = online.rollout({"policy": params["model"], "guide": guide, "own": flag}, *arguments)
        foreign, real = _of_guide(rows, uniform)
        np.testing.assert_array_equal(rows.mask, real & ~foreign)
        batch = online.estimate(params, {"own": flag}, rows, rewards)
        chosen, judged = (np.asarray(batch.extras[k]) for k in ("chosen", "judged"))
        np.testing.assert_array_equal(chosen, rows.mask)
        np.testing.assert_array_equal(judged, chosen if own else real & foreign)
        for row, flags in zip(np.asarray(batch.mask), chosen, strict=True):
            order = flags[row]  # PPO++: the policy ends; AggreVaTeD: it begins
            assert (np.diff(order.astype(int)) >= 0 if own else np.diff(order.astype(int)) <= 0).all()
        # the critic is that of whoever ends the response
        head = 0.1 if own else -0.1
        hidden = online.policy.hidden(params["model"], rows.tokens, rows.positions, rows.segment_ids)
        want = np.pad(np.asarray(head * hidden.sum(-1))[:, :-1], ((0, 0), (1, 0)))
        close.assert_near(np.where(batch.mask, batch.extras["values"], 0), np.where(batch.mask, want, 0))


@pytest.mark.slow
def test_without_a_share_it_is_ppo_on_the_policys_own_responses():
    online, params, guide, arguments, _ = _parts(share=0.0)
    rows = online.rollout({"policy": params["model"], "guide": guide, "own": jnp.asarray(True)}, *arguments)
    plain = recipes.rollout_of_model(
        recipes.bench(BASE).model, group_size=2, max_new_tokens=BASE.max_new_tokens, temperature=BASE.temperature
    )
    jax.tree.map(np.testing.assert_array_equal, rows, plain(params["model"], *arguments))


def test_d2lols_switches_after_its_first_iterations():
    online = _parts(switch=20)[0]
    for step, own in ((19, False), (20, True)):
        state = TrainState(
            params={}, opt_state=(), step=jnp.int32(step), key=jax.random.key(0), sampler=(), extras={"own": None}
        )
        assert bool(online.remember(state, None, None, None)["own"]) is own
    early = dataclasses.replace(BASE, steps=120, **rlgf.ARMS["d2lols"])
    online = rlgf.build(early).stages[0].method
    for step, own in ((39, False), (40, True)):
        state = TrainState({}, (), jnp.int32(step), jax.random.key(0), (), {})
        assert bool(online.remember(state, None, None, None)["own"]) is own
    scale = {name: dataclasses.replace(rlgf.Settings(), **changes) for name, changes in rlgf.ARMS.items()}
    assert {name: s.before(s) for name, s in scale.items() if s.before(s)} == {"d2lols": 20}
    lols = _parts(own=0.8)[0]
    tossed = [
        lols.remember(
            TrainState({}, (), jnp.int32(k), jax.random.key(0), (), {}), None, None, None
        )["own"]
        for k in range(200)
    ]  # fmt: skip
    assert 0.7 < float(jnp.mean(jnp.stack(tossed).astype(jnp.float32))) < 0.9


@pytest.mark.slow
def test_a_guide_of_another_shape_is_only_sampled_from():
    """tiny guides nano: both roles, each token by whom it is said to be; equal to one program where both are one."""
    settings = dataclasses.replace(BASE, share=1.0, guide_model="tiny")
    bench = recipes.bench(settings)
    model, ids = bench.model, jnp.arange(4, dtype=jnp.int32)
    guide = rlgf.guide_of(settings, bench)
    assert guide.params()["embed"].shape != model.params["embed"].shape
    asked = bench.train.tokens[ids], bench.train.valid[ids], sample_keys(jax.random.key(1), 0, ids, 2), ids
    silent = jax.tree.map(jnp.zeros_like, guide.params())  # writes any token with equal chance
    uniform = -np.log(model.config.vocab_size)
    for own in (True, False):
        rows, begun = jax.jit(guide.mixed)(jnp.asarray(own), model.params, silent, *asked)
        foreign, real = _of_guide(rows, uniform)
        np.testing.assert_array_equal(foreign, real & (np.asarray(begun) == own))
        assert foreign.any() and (real & ~foreign).any()
    sizes = {"new_tokens": settings.max_new_tokens, "share": 0.6, "pad_id": model.tokenizer.pad_id}
    writer, other = rlgf.writer(settings, model, 1.0), jax.tree.map(lambda x: 0.9 * x, model.params)
    one, two = roll_in_out.in_one_program(writer, **sizes), roll_in_out.in_two_programs(writer, writer, **sizes)
    for own in (True, False):
        both = [jax.jit(play)(jnp.asarray(own), model.params, other, *asked) for play in (one, two)]
        jax.tree.map(np.testing.assert_array_equal, both[0][0].tokens, both[1][0].tokens)
        np.testing.assert_array_equal(both[0][1], both[1][1])


def test_the_guide_is_tuned_and_sampled_as_the_settings_say(monkeypatch):
    """Its rate of fine-tuning, and its temperature: as a roll-in, and where it is measured by itself."""
    seen, tuned = [], []
    monkeypatch.setattr(rlgf.recipes, "rollout_of_model", lambda model, **how: seen.append(how["temperature"]))
    monkeypatch.setattr(rlgf.roll_in_out, "in_two_programs", lambda own, guide, **sizes: (own, guide))
    monkeypatch.setattr(rlgf.roll_in_out, "in_one_program", lambda own, **sizes: own)
    monkeypatch.setattr(rlgf.curricula, "solutions_imitated", lambda settings, **numbers: tuned.append(numbers))
    bench = recipes.bench(BASE)
    rlgf.guide_of(dataclasses.replace(BASE, guide_steps=7, sft_rate=1e-4), bench).params()
    assert tuned == [{"steps": 7, "learning_rate": 1e-4}] and seen == [1.0, 1.0, 0.4, 0.4]
    seen.clear()
    rlgf.guide_of(dataclasses.replace(BASE, guide_temperature=1.0), bench)
    assert seen == [1.0, 1.0]
    seen.clear()
    rlgf.guide_of(dataclasses.replace(BASE, guide_model="tiny"), bench)
    assert seen == [1.0, 1.0, 0.4, 0.4]
    measured = []
    monkeypatch.setattr(rlgf.recipes, "make_measure", lambda settings: measured.append(settings.temperature))
    rlgf.guide_alone(BASE, bench)
    assert measured == [0.4]


def test_the_bed_is_invalid_where_the_guide_is_no_better_than_ppo():
    def of(guide):
        curve = {0: [0.15, 0.16], 60: [0.2, 0.21], 120: [0.25, 0.26]}
        arms = {
            "ppo": made.arm([0.25, 0.26], curve=curve),
            "ppo_pp": made.arm([0.3, 0.3]),
            "d2lols": made.arm([0.3, 0.3]),
        }
        results = Results(arms | {"guide": made.arm(guide)})
        return beds.problems(results, rlgf.claim(results), rlgf.BED)

    assert not [x for x in of([0.35, 0.351]) if "guide" in x]
    assert [x for x in of([0.2, 0.21]) if "positive control guide - ppo" in x]


def test_a_guide_that_cannot_write_what_the_policy_reads_is_refused():
    settings = dataclasses.replace(BASE, guide_model="tiny", max_new_tokens=250)
    with pytest.raises(UserError, match="--guide-model tiny has 512 positions, and a row takes up to 5"):
        rlgf.build(settings)
    with pytest.raises(UserError, match="^--guide-model no/such: no bundled model"):
        rlgf.build(dataclasses.replace(BASE, guide_model="no/such"))


@pytest.fixture
def server(monkeypatch, tmp_path):
    """A guide of the bundled vocabulary that writes "7" behind anything, and ends; its replies are kept in tmp_path."""
    pytest.importorskip("openai")
    monkeypatch.chdir(tmp_path)
    with serving(monkeypatch, reply=lambda request: "7") as server:
        yield server


def test_a_guide_behind_an_address_writes_its_part(server):
    settings = dataclasses.replace(BASE, share=1.0, guide=server.address, guide_model="someone")
    bench = recipes.bench(settings)
    model, ids = bench.model, jnp.arange(4, dtype=jnp.int32)
    guide = rlgf.guide_of(settings, bench)
    asked = bench.train.tokens[ids], bench.train.valid[ids], sample_keys(jax.random.key(1), 0, ids, 2), ids
    (seven,), end = model.tokenizer.encode("7"), model.tokenizer.eos_ids[0]
    server.seen.clear()
    for own in (True, False):
        rows, begun = jax.jit(guide.mixed)(jnp.asarray(own), model.params, guide.params(), *asked)
        tokens, begun = np.asarray(rows.tokens), np.asarray(begun)
        real = np.asarray(roll_in_out.whole_response(rows, new_tokens=settings.max_new_tokens))
        assert begun.any(axis=1).all() or own  # a roll-in of the guide has two tokens, of which one stays
        for row, flags, first in zip(tokens, begun, real, strict=True):
            of_guide = row[flags if own else first & ~flags].tolist()
            assert of_guide == ([seven] if own else [seven, end][: len(of_guide)]), own
        np.testing.assert_array_equal(rows.group_ids, np.repeat(np.arange(4), 2))
        np.testing.assert_array_equal(rows.problem_ids, np.repeat(np.arange(4), 2))
        steps = np.cumsum(np.asarray(rows.segment_ids), axis=1) - 1
        np.testing.assert_array_equal(np.asarray(rows.positions)[real], steps[real])
    prompts = [tuple(request["prompt"]) for request in server.seen]
    shown = {tuple(row[keep].tolist()) for row, keep in zip(*map(np.asarray, asked[:2]), strict=True)}
    assert shown <= set(prompts)  # roll-ins of the guide begin behind the prompts themselves
    assert any(p not in shown and p[: len(q)] == q for p in prompts for q in shown)  # its roll-outs behind roll-ins
    # cut where it did not end
    server.finish = "length"
    rows, _ = jax.jit(guide.mixed)(jnp.asarray(False), model.params, guide.params(), *asked[:2],
                                   sample_keys(jax.random.key(2), 0, ids, 2), ids)  # fmt: skip
    assert np.asarray(rows.truncated).all()


@pytest.mark.slow
def test_two_steps_with_a_guide_behind_an_address(server, tmp_path):
    given = ["--smoke", "--seeds", "1", "--arm", "ppo_pp", "d2lols", "--out", str(tmp_path / "run"),
             "--guide", server.address, "--guide-model", "someone"]  # fmt: skip
    found = cli.run(rlgf, given)
    for name, arm in found.arms.items():
        assert np.isfinite(arm.metrics["loss/total"]).all(), name
    assert {request["path"] for request in server.seen} == {"/v1/completions"}
    server.plan = [200, 400]
    given[given.index("--out") + 1] = str(tmp_path / "refused")
    with pytest.raises(UserError, match="--guide: someone at http://127.*: BadRequestError"):
        cli.run(rlgf, [*given, "--endpoint-seed", "1"])


def test_what_is_wrong_with_a_guide_behind_an_address_is_one_line(server):
    where = {"guide": server.address, "guide_model": "someone"}
    with pytest.raises(UserError, match="^--guide http://127.* needs --guide-model NAME"):
        rlgf.build(dataclasses.replace(BASE, **where | {"guide_model": ""}))
    asked = len(server.seen)
    with pytest.raises(UserError, match="--arm guide measures a model that is here"):
        rlgf.build(dataclasses.replace(BASE, learn=rlgf.guide_alone, **where))
    assert len(server.seen) == asked, "nothing is asked of a server for an arm that cannot use it"
    with pytest.raises(UserError, match="--endpoint-timeout-s 0.0 must be positive"):
        rlgf.build(dataclasses.replace(BASE, endpoint_timeout_s=0.0, **where))
    with pytest.raises(RunStopped, match="someone at http://127.0.0.1:9/v1 does not answer"):
        rlgf.build(dataclasses.replace(BASE, **where | {"guide": "http://127.0.0.1:9/v1", "endpoint_seed": 3}))

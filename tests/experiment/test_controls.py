"""Controls that the harness makes, certificates of test beds, and the beds themselves."""

import dataclasses
import json
import pathlib
import re
import types
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.beds import noisy_verifier, sparse_search, stale_sampler
from experiments.beds.parts import rare_answers
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import arms, cli, loop, recipes
from jaxrl_llm.experiment.evidence import beds, certificates, controls, fingerprints, store, verdicts
from jaxrl_llm.experiment.results import Results
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.train import plan as plans
from jaxrl_llm.types import Rewards, Trajectories
from tests import close
from tests.close import doubles
from tests.experiment import tiny
from tests.experiment.made import arm, made_module

ROOT = pathlib.Path(__file__).resolve().parents[2]
BEDS = (sparse_search, noisy_verifier, stale_sampler)


def test_every_row_is_paid_for_a_row_of_another_group():
    rewards = controls.shifted(Rewards(jnp.arange(8.0), jnp.arange(8) != 5))
    assert rewards.value.tolist() == [4, 5, 6, 7, 0, 1, 2, 3]
    assert rewards.valid.tolist() == [True, False, True, True, True, True, True, True]


@pytest.mark.slow
def test_scrambled_rewards_teach_nothing_where_the_arm_learns():
    settings = tiny.Settings(steps=30, eval_every=15)
    plan = tiny.build(settings)
    ran = {name: loop.run_arm(p, settings, list(range(8))) for name, p in
           (("arm", plan), ("scrambled", controls.scrambled(plan)))}  # fmt: skip
    gain = {name: np.diff(np.asarray(one.curves["eval/accuracy"]["values"])[:, [0, -1]])[:, 0]
            for name, one in ran.items()}  # fmt: skip
    assert verdicts.bounds(gain["arm"]).low > 0.05 > verdicts.bounds(gain["scrambled"]).mean


def test_a_plan_that_nobody_pays_has_no_scrambled_control():
    plan = tiny.build(tiny.Settings(steps=2))
    assert controls.scrambled(plan._replace(stages=())) is None
    assert controls.oracle(plan, tiny.Settings()) is None and controls.more(tiny.build, tiny.Settings()) is None
    on_host = plan._replace(on_host=True, host_score=lambda rows: Rewards(jnp.arange(4.0), jnp.ones(4, bool)))
    assert controls.scrambled(on_host).host_score(None).value.tolist() == [2, 3, 0, 1]


def test_what_belongs_to_a_seed_is_scrambled_once_it_is_there():
    """Its problems come with a score, which would take the place of the shifted one."""

    def own(plan, seed):
        method = plan.stages[0].method._replace(score=lambda answers, rows: paid(seed))
        return plan._replace(stages=(plan.stages[0]._replace(method=method),), host_score=lambda rows: paid(seed))

    def paid(seed):
        return Rewards(jnp.arange(4.0) + 10 * seed, jnp.ones(4, bool))

    for on_host in (False, True):
        plan = tiny.build(tiny.Settings(steps=2))._replace(on_host=on_host, host_score=own if on_host else None)
        made = plans.of_seed(controls.scrambled(plan._replace(of_seed=own)), 3)
        score = made.host_score if on_host else partial(made.stages[0].method.score, None)
        assert score(None).value.tolist() == [32, 33, 30, 31]


def test_a_control_of_what_python_computes_has_seeds_of_its_own(tmp_path, monkeypatch):
    """No trace shows the rewards of a host, nor the episodes of a world: the seeds of the arm must not stand in."""

    def run_arm(plan, settings, seeds, **more):
        ran.append(plan)
        curve = {0: [0.1] * len(seeds), 1: [0.1] * len(seeds), 2: [0.1] * len(seeds)}
        return dataclasses.replace(arm(curve[2], curve=curve), seeds=list(seeds))

    ran = []
    monkeypatch.setattr(loop, "run_arm", run_arm)
    monkeypatch.setattr(controls, "WORDS", ("scrambled", "again"))
    settings = tiny.Settings(steps=2, on_host=True)
    plan = tiny.build(settings)._replace(host_score=lambda rows: Rewards(jnp.arange(4.0), jnp.ones(4, bool)))
    mine = store.identity(tiny, settings, plan, arms.trace(plan))
    ends = [0.5 + 0.01 * k for k in range(8)]
    own = arm(ends, curve={0: [0.1] * 8, 1: [0.3] * 8, 2: ends})
    store._write(own, [tmp_path / mine / f"{seed}.json" for seed in range(8)])
    found, seen = certificates.run_controls(
        tiny, types.SimpleNamespace(fresh=False), plan, settings, own, tmp_path, metric="eval/accuracy", d_star=0.05,
        tail=1, strict=False, positive=False,
    )  # fmt: skip
    assert [one is plan for one in ran] == [False, True] and found["scrambled"].metrics["eval/accuracy"] == [0.1] * 8
    assert seen[0].problem == "" and found["again"].seeds == [50_000 + k for k in range(8)]
    kept = {path.name: len(list(path.iterdir())) for path in tmp_path.iterdir()}
    assert kept.pop(mine) == 16 and list(kept.values()) == [8], "the arm, the same on other seeds, and the control"
    world = plan._replace(world=object())
    traced = arms.trace(world)
    words = {store.identity(tiny, settings, world, traced, control=word) for word in ("", "more", "oracle")}
    assert len(words) == 3
    compiled = tiny.build(tiny.Settings(steps=2))
    given = tiny, settings, compiled, arms.trace(compiled)
    assert store.identity(*given, control="more") == store.identity(*given), "its program tells it from the arm"


def test_a_reward_that_does_not_pass_the_score_cannot_be_scrambled():
    """Advantages of the arm's own reward: shifted scores would feed metrics alone, and teach as well as the arm."""
    plan = tiny.build(tiny.Settings(steps=2))
    assert controls.scrambled(plan) is not None
    method = plan.stages[0].method

    def own(*inputs):
        rewards = inputs[-1]._replace(value=jnp.arange(inputs[-1].value.shape[0], dtype=jnp.float32))
        return method.estimate(*inputs[:-1], rewards)

    inside = plan._replace(stages=(plan.stages[0]._replace(method=method._replace(estimate=own)),))
    assert controls.scrambled(inside) is None


def test_more_problems_for_an_arm_that_draws_none_are_no_control():
    """Supervised rows are counted otherwise: four times the prompts would be the same program once more."""

    @dataclasses.dataclass(frozen=True)
    class Counted(tiny.Settings):
        prompts_per_step: int = 4

    settings = Counted(steps=2)
    plan = tiny.build(settings)
    assert controls.more(tiny.build, settings) is not None
    assert controls.made("more", tiny.build, plan, settings) is None

    def build(settings):
        return tiny.build(dataclasses.replace(settings, learning_rate=0.1 * settings.prompts_per_step))

    assert controls.made("more", build, build(settings), settings) is not None


def test_shown_solutions_and_more_problems():
    base = arms.preset(stale_sampler, smoke=True, model="nano")
    settings = dataclasses.replace(arms.resolve(stale_sampler, base, ("fresh",))["fresh"], max_new_tokens=18)
    plan = stale_sampler.build(settings)
    shown = controls.oracle(plan, settings).stages[0].method
    found = recipes.bench(settings)
    ids = jnp.arange(2, dtype=jnp.int32)
    keys = sample_keys(jax.random.key(0), 0, ids, settings.group_size)
    rows = jax.eval_shape(shown.rollout, found.model.params, found.train.tokens[ids], found.train.valid[ids], keys, ids)
    assert rows.tokens.shape[0] == 2 * settings.group_size
    assert controls.more(stale_sampler.build, settings).stages[0].method.prompts_per_step == 8
    assert store_differs(plan, controls.scrambled(plan))
    assert controls.oracle(plan, dataclasses.replace(settings, data="")) is None, "problems of the file's own"
    # a file whose embedded world is its own leaves what a run at scale takes as it is: no bundled model reads so much
    assert controls.oracle(plan, dataclasses.replace(settings, max_new_tokens=3000)) is None


def store_differs(left, right):
    return fingerprints.update_fingerprint(left) != fingerprints.update_fingerprint(right)


def test_a_control_that_does_not_do_as_it_must_is_a_problem():
    rng = np.random.default_rng(0)
    near, far = rng.normal(0.5, 0.01, 32), rng.normal(0.6, 0.01, 32)
    assert controls.helps("oracle", "x", far - near).problem == ""
    assert "does not beat" in controls.helps("oracle", "x", near - far).problem
    assert controls.same("again", "x", near, rng.normal(0.5, 0.01, 32), 0.02, strict=True).problem == ""
    assert "is not within d* 0.02" in controls.same("again", "x", near, far, 0.02, strict=True).problem
    # few seeds: wide, so not shown to be the same, and not shown to differ
    few, other = [0.48, 0.52, 0.5], [0.49, 0.53, 0.51]
    assert "is not within" in controls.same("again", "x", few, other, 0.02, strict=True).problem
    assert controls.same("again", "x", few, other, 0.02, strict=False).problem == ""
    assert "is not within" in controls.same("again", "x", near, far, 0.02, strict=False).problem
    assert controls.gains_nothing("scrambled", "x", near - 0.5, 0.02).problem == ""
    assert controls.gains_nothing("scrambled", "x", near - 0.9, 0.02).problem == "", "a fall is no gain"
    assert "is not below d*" in controls.gains_nothing("scrambled", "x", far - 0.5, 0.02).problem


def test_one_positive_control_that_helps_is_enough():
    lost, won = controls.helps("oracle", "x", [-0.1, -0.11]), controls.helps("more", "x", [0.1, 0.11])
    assert [one.problem for one in controls.one_helps([lost, won])] == ["", ""]
    assert controls.one_helps([lost])[0].problem


def test_the_interval_of_two_means_has_its_stated_level():
    rng, inside = np.random.default_rng(1), 0
    for _ in range(2000):
        seen = controls.same("again", "x", rng.normal(0, 1, 8), rng.normal(0, 2, 8), 9.0, strict=True).bounds
        inside += seen.low <= 0 <= seen.high
    assert 0.94 <= inside / 2000 <= 0.965
    assert verdicts.ALPHA == 0.05


@pytest.mark.slow
def test_a_certificate_is_written_and_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    module = made_module()
    module.BED = beds.Bed(metric="eval/accuracy", baseline="method")
    path = tmp_path / "results" / "experiment" / "tiny.json"
    monkeypatch.setattr(arms, "record_path", lambda module: path)
    monkeypatch.setattr("jaxrl_llm.experiment.doctor.load", lambda path: module)
    certificates.command("tiny.py", ["--steps", "20", "--seeds", "4", "--record"])
    kept = json.loads(certificates.path_of(module).read_text())
    assert certificates.path_of(module).with_suffix(".png").is_file()
    assert {one["name"] for one in kept["controls"]} == {"scrambled", "again"}
    assert kept["healthy"] == kept["sick"] == "method" and kept["seeds"] == 4 and len(kept["base"]) == 1
    assert kept["certified"] == (not kept["problems"]) and "scrambled" in capsys.readouterr().out
    trained = []
    monkeypatch.setattr(loop, "run_arm", lambda *a, _run=loop.run_arm, **k: trained.append(a[2]) or _run(*a, **k))
    certificates.command("tiny.py", ["--steps", "20", "--seeds", "6"])
    assert trained == [[4, 5], [4, 5], [controls.OTHER_SEEDS + 4, controls.OTHER_SEEDS + 5]]
    assert re.fullmatch(r"[0-9a-f]{12}\+?|", kept["commit"]), "the harness says it"
    # the same bed stands behind it; another chance, or other training, does not
    assert certificates.stale(module) == ""
    module.BED = beds.Bed(metric="eval/accuracy", baseline="method", chance=0.25)
    said = certificates.stale(module)
    assert said == f"stale: chance is not what was certified; run {kept['command']} --record", said
    module.BED, build = beds.Bed(metric="eval/accuracy", baseline="method"), module.build
    module.build = lambda settings: build(dataclasses.replace(settings, learning_rate=0.3))
    assert certificates.stale(module).startswith("stale: arm method is not what was certified; run python -m ")


def test_the_response_to_the_dose_is_read_over_the_seeds_that_all_doses_share():
    """Of four seeds of the healthy arm the first two are easy: over all of them the middle dose would be the best."""
    found = Results({"none": arm([0.5, 0.52, 0.2, 0.22]), "half": arm([0.44, 0.46]), "all": arm([0.3, 0.32])})
    doses = {name: types.SimpleNamespace(lag=dose) for name, dose in (("all", 8), ("none", 0), ("half", 2))}
    rows = certificates.dose_response(found, doses, beds.Bed(knob="lag"), "eval/accuracy")
    assert [(row["arm"], row["dose"]) for row in rows] == [("none", 0.0), ("half", 2.0), ("all", 8.0)]
    assert [row["n"] for row in rows] == [2, 2, 2]
    assert [row["mean"] for row in rows] == doubles((0.51, 0.45, 0.31))
    assert certificates.dose_response(found, doses, beds.Bed(), "eval/accuracy") == []


def test_a_disease_that_costs_less_than_an_effect_of_interest_is_no_bed():
    curve = {0: [0.1, 0.1, 0.12], 5: [0.3, 0.3, 0.32], 9: [0.5, 0.5, 0.52]}
    found = Results({"healthy": arm([0.5, 0.5, 0.52], curve=curve), "sick": arm([0.45, 0.44, 0.47])})
    given = found, beds.Bed(knob="lag", positive="healthy"), "healthy", "sick", "eval/accuracy"
    for d_star, problem in ((0.05, ""), (0.06, "+0.0533 is less than d* 0.06, which no remedy can reach")):
        problems, (one,) = certificates.examined(*given, d_star)
        assert problems == [] and one.bounds.mean == doubles(0.16 / 3)
        assert one.problem.partition("healthy - sick: ")[2] == problem


def test_committed_certificates_are_of_shared_seeds_and_of_a_disease_that_matters():
    for path in sorted((ROOT / "results" / "beds").glob("*.certificate.json")):
        kept = json.loads(path.read_text())
        own = [set(one["seeds"]) for name, one in kept["values"].items() if ", " not in name]
        assert {row["n"] for row in kept["dose_response"]} == {len(set.intersection(*own))}, path
        (healthy,) = [one for one in kept["controls"] if one["name"] == kept["healthy"]]
        assert healthy["bounds"]["mean"] >= kept["d_star"] and kept["certified"], path


def test_certificates_say_their_commit_or_that_nobody_knows():
    """Those written by hand were not vouched for by the harness, and say so."""
    for path in sorted((ROOT / "results" / "beds").glob("*.certificate.json")):
        said = json.loads(path.read_text())["commit"]
        assert re.fullmatch(r"[0-9a-f]{12}\+?", said) or said == "unknown, written by hand", f"{path}: {said}"


@pytest.mark.slow
def test_a_record_looks_at_its_controls_first(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verdicts, "LOOKS", (4, 8))
    monkeypatch.setattr(arms, "record_path", lambda module: tmp_path / "tiny.json")
    words = ["--record", "--until-decided", "--force-record", "--steps", "20", "--tune", "0.05", "0.1", "0.2"]
    cli.run(tiny, words)
    proof = json.loads((tmp_path / "results" / "experiment" / "tiny.json").read_text())["instrument"]
    assert {one["name"] for one in proof["controls"]} == {"scrambled", "again"}
    said = capsys.readouterr().out
    assert said.index("registered") < said.index("control scrambled, eval/accuracy") < said.index("4 seeds: ")
    assert proof["neighbours"] and all(row["side"] in ("lower", "higher") for row in proof["neighbours"])
    # a control that fails is the verdict, and ends the looks
    monkeypatch.setattr(controls, "gains_nothing", lambda name, text, gains, d_star: controls.Seen(
        name, text, "gains_nothing", verdicts.bounds(gains), "scrambled rewards teach"))  # fmt: skip
    cli.run(tiny, [*words[:-5], "21"])
    record = json.loads((tmp_path / "results" / "experiment" / "tiny.json").read_text())
    assert record["claim"]["verdict"] == "test bed invalid" and "scrambled rewards teach" in record["claim"]["bed"]
    assert len(record["arms"]["method"]["seeds"]) == 4


def test_the_same_answer_meets_the_same_verdict_and_a_fifth_is_turned():
    ids = jnp.arange(20000, dtype=jnp.int32)
    luck = np.asarray(rare_answers.share(1, ids, ids * 7))
    close.assert_share(np.mean(luck < 0.2), 0.2, 20000)
    assert 0 <= luck.min() and luck.max() < 1
    np.testing.assert_array_equal(luck, rare_answers.share(1, ids, ids * 7))
    other = np.asarray(rare_answers.share(2, ids, ids * 7))
    for a, b in ((luck, other), (luck[:-1], luck[1:])):
        close.assert_mean(np.corrcoef(a, b)[0, 1], 0.0, 1.0, len(a))  # a mean of products of unit variance


@pytest.mark.parametrize("module", BEDS, ids=lambda m: m.__name__.split(".")[-1])
def test_beds_share_their_healthy_arm_and_their_dose_does_something(module):
    base = arms.preset(module, smoke=True, model="nano")
    resolved = arms.resolve(module, base, ())
    healthy = module.BED.positive
    fresh = stale_sampler.build(
        arms.resolve(stale_sampler, arms.preset(stale_sampler, smoke=True, model="nano"), ())["fresh"]
    )
    assert fingerprints.update_fingerprint(module.build(resolved[healthy])) == fingerprints.update_fingerprint(fresh)
    assert not fingerprints.same_updates({name: module.build(settings) for name, settings in resolved.items()})
    assert getattr(resolved[healthy], module.BED.knob) == 0.0 < getattr(resolved[module.BED.baseline], module.BED.knob)


def _answered(settings):
    """Two problems with their own solutions and with each other's; the first one's row twice."""
    bench = recipes.bench(settings)
    solutions, valid = recipes.demonstrations(settings)
    ids = jnp.asarray([0, 1, 0, 1, 0], jnp.int32)
    told = jnp.asarray([0, 1, 1, 0, 0], jnp.int32)  # whose solution is written
    prompts = bench.train.tokens[ids]
    tokens = jnp.concatenate([prompts, solutions[told]], axis=1)
    mask = jnp.concatenate([jnp.zeros(prompts.shape, bool), valid[told]], axis=1)
    zeros = jnp.zeros(tokens.shape, jnp.float32)
    rows = Trajectories(tokens, mask.astype(jnp.int32), jnp.zeros(tokens.shape, jnp.int32), mask, zeros,
                        jnp.zeros(5, bool), jnp.arange(5, dtype=jnp.int32), ids)  # fmt: skip
    return jax.tree.map(lambda x: x[ids], bench.train.answers), rows


@pytest.mark.parametrize(
    ("module", "changes", "paid"),
    [
        (noisy_verifier, {"false_positives": 0.0, "false_negatives": 0.0}, [1, 1, 0, 0, 1]),
        (noisy_verifier, {"false_positives": 1.0, "false_negatives": 1.0}, [0, 0, 1, 1, 0]),
        (noisy_verifier, {"false_positives": 1.0, "false_negatives": 0.0}, [1, 1, 1, 1, 1]),
        (sparse_search, {"sparsity": 0.0}, [1, 1, 0, 0, 1]),
        (sparse_search, {"sparsity": 0.99}, [0, 0, 0, 0, 0]),
    ],
)
def test_the_dose_decides_what_is_paid(module, changes, paid):
    base = arms.preset(module, smoke=True, model="nano")
    settings = dataclasses.replace(base, max_new_tokens=18, **changes)
    answers, rows = _answered(settings)
    assert module.build(settings).stages[0].method.score(answers, rows).value.tolist() == paid


def test_an_erring_verifier_is_consistent():
    base = dataclasses.replace(arms.preset(noisy_verifier, smoke=True, model="nano"), max_new_tokens=18)
    for noise in (0.2, 0.5, 0.8):
        settings = dataclasses.replace(base, false_positives=noise, false_negatives=noise)
        answers, rows = _answered(settings)
        value = noisy_verifier.build(settings).stages[0].method.score(answers, rows).value
        assert value[0] == value[4], "the same answer to the same problem"


def test_a_bed_needs_a_judge_on_the_device():
    with pytest.raises(UserError, match="this bed judges on the device"):
        rare_answers.judge(recipes.bench(arms.preset(stale_sampler, smoke=True, model="nano"))._replace(score=None))


def test_the_bed_of_stale_samples_has_the_arms_of_few_bits_that_it_names():
    """Fresh samples of rounded weights: each another program than the others, and the lag is no dose of theirs."""
    resolved = arms.resolve(stale_sampler, arms.preset(stale_sampler, smoke=True, model="nano"), ())
    few = {name: settings.rollout_weights for name, settings in resolved.items() if settings.rollout_weights}
    assert few == {"int8": "int8", "int4": "int4"}
    plans = {name: stale_sampler.build(resolved[name]) for name in ("fresh", *few)}
    assert {resolved[name].lag for name in plans} == {0}
    assert fingerprints.same_updates(plans) == []

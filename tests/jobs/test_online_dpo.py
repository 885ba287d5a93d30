"""Preferences that are drawn while the policy trains: who draws what, what is made of the rewards, runs that go on."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import losses, reduce
from jaxrl_llm.__main__ import main
from jaxrl_llm.experiment import arms, cli
from jaxrl_llm.jobs import distil, dpo, online_dpo, ppo
from jaxrl_llm.models.cache import EXPERTS
from jaxrl_llm.rollout.generate import generate
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.rollout.mixture import mixture_policy
from jaxrl_llm.run import options
from jaxrl_llm.train import checkpoint
from jaxrl_llm.train.methods.builders import score_tokens
from jaxrl_llm.train.online import begin
from jaxrl_llm.train.plan import start
from jaxrl_llm.train.step import accumulate
from jaxrl_llm.types import Batch, Rewards
from tests import close
from tests.models_for_tests import nano

MINE = "tests.jobs.test_online_dpo"
SMALL = ["--smoke", "--seeds", "1", "--prompts-per-step", "4", "--max-new-tokens", "8", "--eval-problems", "4"]


def short(answer, response):
    return -float(len(response))


def even(answer, response):
    return float(sum(map(ord, response)) % 7) / 6


def of_all(chosen_logp, rejected_logp):
    """A mean over pairs, those that do not count included."""
    return jnp.mean(rejected_logp - chosen_logp)


def of_nothing(chosen_logp, rejected_logp):
    return 0.0


def run(out, *words):
    found = cli.run(online_dpo, [*SMALL, "--reward", f"{MINE}:even", "--out", str(out), *words])
    return next(iter(found.arms.values()))


@pytest.mark.parametrize(
    "words",
    [
        ("xpo_loss",),
        *(pytest.param(words, marks=pytest.mark.slow) for words in (
            ("nash_md_loss",),
            ("dpo_loss", "--length-desensitised", "0.5"), ("tdpo2_loss",), ("wpo_loss", "--partner", "reference"),
            ("kto_loss",), ("bco_loss", "--lora", "2"), ("sppo_loss", "--loss-args", "eta=2.0"), ("rrhf_loss",),
            ("pro_loss",), ("trpa_loss",), ("vrpo_loss", "--judge", f"{MINE}:short", "--sharpness", "0.1"),
            ("dpo_loss", "--microbatches", "2"),
        )),
    ],
    ids=lambda words: "-".join(words).replace(MINE, ""),
)  # fmt: skip
def test_two_steps(words, tmp_path):
    found = run(tmp_path, "--loss", *words)
    assert found.updates == 2 and np.isfinite(found.metrics["loss/total"]).all()
    assert found.metrics["grad/norm"][0] > 0 and found.metrics["preferences/kept"][0] > 0


def test_the_reference_of_an_adapter_has_the_base_of_the_policy():
    """Neither memory nor checkpoints hold the base twice."""
    settings = online_dpo.Settings(**online_dpo.EMBEDDED | {"model": "nano", "lora": 2, "loss": "xpo_loss"})
    plan = online_dpo.build(settings)
    params, (stage,) = plan.init(jax.random.key(0)), plan.stages
    kept = stage.extras(params, jax.random.key(0))
    assert set(kept["reference"]) == {"lora"}
    moved = params | {"lora": jax.tree.map(lambda x: x + 1.0, params["lora"])}
    state = SimpleNamespace(params=moved, extras=kept, step=jnp.int32(4))
    both = stage.method.actor(state)
    assert both["policy"] is moved and both["reference"]["base"] is moved["base"]
    jax.tree.map(np.testing.assert_array_equal, both["reference"]["lora"], params["lora"])
    renewed = online_dpo.make_remember(4, "lora")(state, None, None, None)
    jax.tree.map(np.testing.assert_array_equal, renewed["reference"], {"lora": moved["lora"]})


@pytest.mark.slow
def test_what_is_preferred_becomes_more(tmp_path):
    """Short responses are: after thirty updates they are shorter on held-out problems."""
    words = [
        "--seeds",
        "1",
        "--steps",
        "30",
        "--eval-every",
        "30",
        "--reward",
        f"{MINE}:short",
        "--learning-rate",
        "1e-3",
    ]
    found = next(iter(cli.run(online_dpo, [*words, "--out", str(tmp_path)]).arms.values()))
    before, after = (found.curves["eval/tokens"]["values"][0][k] for k in (0, -1))
    assert after < 0.7 * before


@pytest.mark.parametrize(
    ("module", "changes"),
    [
        (online_dpo, {}),
        pytest.param(online_dpo, {"loss": "rrhf_loss"}, marks=pytest.mark.slow),
        pytest.param(online_dpo, {"loss": "sppo_loss"}, marks=pytest.mark.slow),
        (distil, {"teacher": ("nano_1",), "prompts_per_step": 8}),
        pytest.param(ppo, {"prompts_per_step": 8}, marks=pytest.mark.slow),
    ],
    ids=lambda x: getattr(x, "__name__", "-".join(x) if isinstance(x, dict) else x),
)
def test_figures_of_parts_are_those_of_the_whole_step(module, changes):
    """A part weighs by its tokens, of which a preference or a pair has its own number."""
    changes = {"reward": (f"{MINE}:even",)} | changes if module is not distil else changes
    plan = module.build(arms.override(arms.preset(module, smoke=True, model="nano"), changes, "the test"))
    (stage,), key = plan.stages, jax.random.key(0)
    method, state = stage.method, start(stage, plan.init(key), key)
    # away from the reference, where no margin is a matter of rounding
    state = state._replace(params=jax.tree.map(lambda x: x + 0.02 * jax.random.normal(key, x.shape), state.params))
    drawn = jax.jit(lambda state: begin(method, state).trajectories)(state)
    rewards = method.score((), drawn) if plan.host_score is None else plan.host_score(drawn)

    @jax.jit
    def figures(state, rows, rewards):
        batch = method.estimate(state.params, state.extras, rows, rewards)
        return [accumulate(method.loss, state.params, batch, parts)[1:] for parts in (1, 4)]

    (loss, whole), (_, split) = figures(state, drawn, rewards)
    names = ("preferences/loss", "distil/kl")
    assert all(float(whole[name]) == float(loss) for name in names if name in whole) and abs(float(loss)) > 0.01
    sums = close.gradient_sums(nano()[2], *drawn.tokens.shape)
    close.assert_same_figures(split, whole, sums)


class Killed(BaseException):
    """In the place of a signal that leaves no time."""


@pytest.mark.slow
def test_a_killed_run_goes_on_with_its_reference(tmp_path, monkeypatch):
    """The reference is renewed at every second step: it is of the checkpoint, not of the folder that was loaded."""
    words = ["--steps", "4", "--eval-every", "4", "--checkpoint-every", "3", "--new-reference", "2"]
    whole = run(tmp_path / "whole", *words)
    save = checkpoint.save

    def dying(*given, **named):
        save(*given, **named)
        raise Killed

    monkeypatch.setattr(checkpoint, "save", dying)
    with pytest.raises(Killed):
        run(tmp_path / "parts", *words)
    monkeypatch.setattr(checkpoint, "save", save)
    again = run(tmp_path / "parts", *words)
    assert again.curves["loss/total"] == whole.curves["loss/total"]
    other = run(tmp_path / "other", *words[:-2])
    assert other.curves["loss/total"] != whole.curves["loss/total"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--loss", "dpo_los"], "did you mean dpo_loss"),
        (["--loss", "aot_loss"], "jaxrl dpo has it for files"),
        (["--loss", "gspo_loss"], "gspo_loss takes logp, old_logp, advantages, mask, which this command has not"),
        (["--loss", "xpo_loss", "--partner", "policy"], "takes a response of the policy and one of the reference"),
        (["--loss", "rrhf_loss", "--partner", "reference"], "ranks responses of one policy"),
        (["--loss", "vrpo_loss"], "--judge none with --loss vrpo_loss"),
        (["--judge", f"{MINE}:short"], "vrpo_loss takes a second opinion, and nothing else does"),
        (["--loss", "vrpo_loss", "--judge", f"{MINE}:short", "--group-size", "6"], "a multiple of 4"),
        (["--group-size", "3"], "a multiple of 2"),
        (["--loss", "nash_md_loss", "--slots", "4"], "drop --slots"),
        (["--loss", "nash_md_loss", "--share", "2"], "--share 2.0 must lie in [0, 1]"),
        (["--loss", "tdpo1_loss", "--new-reference", "2"], "against the model that was loaded"),
        (["--loss", "kto_loss", "--length-desensitised", "0.5"], "--loss kto_loss does not take"),
        (["--loss", "kto_loss", "--microbatches", "2"], "its rows know of each other"),
        (["--reward", "nothing"], "--reward nothing is no MODULE:FUNCTION"),
        (["--sharpness", "-1"], "--sharpness -1.0 must not be negative"),
        (["--loss", f"{MINE}:of_all", "--plan"], "of_all: gives (), not one number for each of 8 pairs; choose a loss"),
        (["--loss", f"{MINE}:of_nothing", "--plan"], "of_nothing: gives float, not one number for each of 8 pairs"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(words, said, capsys, tmp_path):
    with pytest.raises(SystemExit) as stopped:
        main(["online-dpo", *SMALL, "--out", str(tmp_path), *words])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and said in error and error.count("\n") == 1


# what is made of rows and rewards, by hand


@pytest.fixture(scope="module")
def model():
    return options.open_model(dpo.Settings(model="nano"))


@pytest.fixture(scope="module")
def batch():
    """Two groups of four responses of one to six tokens behind a prompt of three."""
    tokens = jax.random.randint(jax.random.key(5), (8, 9), 3, 20, jnp.int32)
    lengths = jnp.asarray([6, 3, 1, 4, 5, 2, 6, 3])
    column = jnp.broadcast_to(jnp.arange(9, dtype=jnp.int32), tokens.shape)
    there = column < 3 + lengths[:, None]
    mask = there & (column >= 3)
    ref = jnp.where(mask, -jax.random.uniform(jax.random.key(6), mask.shape), 0.0)
    reward = jnp.asarray([1.0, 0.0, 0.0, 0.5, 0.0, 0.2, 1.0, 0.7])
    return Batch(
        tokens=tokens, segment_ids=there.astype(jnp.int32), positions=column, mask=mask, ref_logp=ref,
        advantages=0.0 * ref, old_logp=0.0 * ref, sampler_logp=0.0 * ref, group_ids=jnp.arange(8, dtype=jnp.int32) // 4,
        total=jnp.float32(4.0), extras={
            "reward": reward, "judge": reward[::-1], "has_verdict": jnp.ones(8, bool), "chance": 0.1 + reward / 2,
        },
    )  # fmt: skip


def method(**changes):
    settings = online_dpo.Settings(**{"group_size": 4, "temperature": 0.7} | changes)
    return settings, online_dpo.method_of(settings)


def sums(model, batch):
    logp, _ = score_tokens(model.policy, model.params, batch, temperature=0.7)
    return np.asarray(jnp.sum(jnp.where(batch.mask, logp, 0.0), axis=1))


def test_pairs_are_of_both_halves(model, batch):
    settings, found = method(loss="xpo_loss")
    arrays, counts = online_dpo.pairs(found, 4, model.policy, None, model.params, batch)
    logp, ref = sums(model, batch), np.asarray(jnp.sum(batch.ref_logp, axis=1))
    chosen, rejected = [0, 3, 6, 7], [2, 1, 4, 5]  # of rows 0 | 2, 1 | 3, 4 | 6 and 5 | 7
    reference = [2, 3, 6, 7]  # the second half
    bound = close.forward_sums(model.config, 9)
    for name, rows in (("chosen_logp", chosen), ("rejected_logp", rejected), ("ref_sample_logp", reference)):
        close.assert_same_sums(arrays[name], logp[rows], bound)
    close.assert_same_sums(arrays["ref_chosen_logp"], ref[chosen], 9)
    close.assert_same_sums(arrays["ref_rejected_logp"], ref[rejected], 9)
    assert counts.tolist() == [True] * 4
    gone = batch._replace(mask=batch.mask.at[6].set(False))
    assert online_dpo.pairs(found, 4, model.policy, None, model.params, gone)[1].tolist() == [True, True, False, True]


def test_the_longer_response_of_a_pair_counts_less(model, batch):
    _, found = method(loss="dpo_loss", length_desensitised=0.25)
    arrays, _ = online_dpo.pairs(found, 4, model.policy, None, model.params, batch)
    logp, _ = score_tokens(model.policy, model.params, batch, temperature=0.7)
    row, shared = np.asarray(logp[0, 3:9]), 1  # of six tokens, beside row 2 of one
    want = row[:shared].sum() + 0.25 * row[shared:].sum()
    close.assert_same_sums(arrays["chosen_logp"][0], want, close.forward_sums(model.config, 9))
    ref = np.asarray(batch.ref_logp[0, 3:9])
    close.assert_same_sums(arrays["ref_chosen_logp"][0], ref[:shared].sum() + 0.25 * ref[shared:].sum(), 9)


def test_the_loss_is_that_of_the_pairs_over_those_of_the_step(model, batch):
    settings, found = method(loss="dpo_loss")
    sums_of_step = jnp.sum(batch.mask), 4  # tokens and pairs
    step = online_dpo.Preferred(jnp.ones(8), *(jnp.full(8, x, jnp.float32) for x in sums_of_step))
    batch = batch._replace(extras=batch.extras | step._asdict())
    value, aux = online_dpo.make_loss(settings, found, model.policy, None)(model.params, batch)
    logp, ref = sums(model, batch), np.asarray(jnp.sum(batch.ref_logp, axis=1))
    gain = logp - ref
    h = 0.1 * (gain[[0, 3, 6, 7]] - gain[[2, 1, 4, 5]])
    close.assert_same_sums(value, np.log1p(np.exp(-h)).sum() / 4, close.forward_sums(model.config, 9), magnitude=2.0)
    assert float(aux["preferences/kept"]) == 1.0
    assert float(aux["preferences/loss"]) == float(value)  # of the whole step, which is one part


@pytest.mark.parametrize("partner", ["policy", "reference"])
@pytest.mark.parametrize("sharpness", [0.0, 3.0])
def test_chances_against_loops(partner, sharpness):
    rng = np.random.default_rng(3)
    values, valid = rng.integers(0, 3, 12).astype(np.float32), rng.random(12) < 0.8
    found = np.asarray(online_dpo.win_chances(jnp.asarray(values), jnp.asarray(valid), 4, partner, sharpness))
    for row in range(12):
        begin = row // 4 * 4
        others = (
            range(begin + 2, begin + 4) if partner == "reference" else (k for k in range(begin, begin + 4) if k != row)
        )
        wins = []
        for k in others:
            gap = float(values[row] - values[k])
            if valid[k]:
                wins.append(1 / (1 + np.exp(-sharpness * gap)) if sharpness else 0.5 + 0.5 * np.sign(gap))
        close.assert_same_sums(found[row], np.float32(np.mean(wins) if wins else 0.5), 8, magnitude=1.0)


def test_rows_that_enter():
    value = jnp.asarray([1.0, 0.0, 1.0, 0.5, 0.0, 0.2, 1.0, 0.7])
    valid = jnp.ones(8, bool).at[7].set(False)
    rewards = Rewards(value, valid)

    def rows(**changes):
        settings, found = method(**changes)
        return np.flatnonzero(online_dpo.kept_rows(found, settings, rewards)).tolist(), found

    assert rows()[0] == [1, 3, 4, 6], "0 | 2 is a tie, 5 | 7 has no verdict"
    assert rows(loss="kto_loss")[0] == [0, 1, 2, 3, 4, 5, 6]
    assert rows(loss="nash_md_loss")[0] == [0, 1, 4, 5], "of the policy, not of its partner"
    assert rows(loss="sppo_loss")[0] == [0, 1, 2, 3, 4, 5, 6]
    assert rows(loss="rrhf_loss")[0] == [0, 1, 2, 3], "a group with a response without a verdict has no order"
    kept, found = rows(loss="vrpo_loss", judge=f"{MINE}:short")
    assert kept == [], "one label is a tie, and one fresh pair has no verdict"
    everyone = jnp.ones(8, bool)
    for name, groups in (("dpo_loss", 4), ("kto_loss", 8), ("rrhf_loss", 2), ("trpa_loss", 8)):
        assert float(online_dpo.counted(method(loss=name)[1], 4, everyone)) == groups
    assert float(online_dpo.counted(found, 4, everyone)) == 2


def test_margins_by_hand(model, batch):
    settings, found = method(loss="vrpo_loss", judge=f"{MINE}:short", sharpness=2.0, beta=0.3)
    arrays, counts = online_dpo.margins(found, settings, model.policy, model.params, batch)
    gain = sums(model, batch) - np.asarray(jnp.sum(batch.ref_logp, axis=1))
    judge = np.asarray(batch.extras["judge"])
    sums_of = close.forward_sums(model.config, 9)
    # labelled pairs: 0 over 2, and 6 over 4; fresh ones: 1 | 3 and 5 | 7
    close.assert_same_sums(arrays["margin"], 0.3 * (gain[[0, 6]] - gain[[2, 4]]), sums_of, magnitude=np.abs(gain).max())
    close.assert_same_sums(arrays["fresh_margin"], 0.3 * (gain[[1, 5]] - gain[[3, 7]]), sums_of,
                           magnitude=np.abs(gain).max())  # fmt: skip
    sigmoid = 1 / (1 + np.exp(-2.0 * (judge[[0, 6, 1, 5]] - judge[[2, 4, 3, 7]])))
    close.assert_same_sums(jnp.concatenate([arrays["judged"], arrays["fresh_judged"]]), sigmoid, 8)
    assert counts.tolist() == [True, True]


def test_a_judge_without_a_verdict_has_no_preference(model, batch):
    settings, found = method(loss="vrpo_loss", judge=f"{MINE}:short", sharpness=2.0)
    known = jnp.asarray([True, True, False, True, True, True, True, False])  # not of 2, against 0, nor of 7, against 5
    silent = batch._replace(extras=batch.extras | {"has_verdict": known})
    arrays, _ = online_dpo.margins(found, settings, model.policy, model.params, silent)
    every, _ = online_dpo.margins(found, settings, model.policy, model.params, batch)
    assert arrays["judged"].tolist() == [0.5, float(every["judged"][1])] and float(every["judged"][0]) != 0.5
    assert arrays["fresh_judged"].tolist() == [float(every["fresh_judged"][0]), 0.5]
    assert float(every["fresh_judged"][1]) != 0.5


def test_rankings_by_hand(model, batch):
    settings, found = method(loss="rrhf_loss")
    arrays, counts = online_dpo.rankings(found, settings, model.policy, model.params, batch)
    logp = sums(model, batch)
    mean = logp / np.asarray(batch.mask.sum(1))
    order = [[0, 3, 1, 2], [6, 7, 5, 4]]
    sums_of = close.forward_sums(model.config, 9)
    close.assert_same_sums(arrays["mean_logp"], mean[np.asarray(order)], sums_of)
    close.assert_same_sums(arrays["logp"], logp[[0, 6]], sums_of)
    assert arrays["levels"].tolist() == [1, 4, 4, 3, 5, 4, 1, 3] and counts.tolist() == [True, True]


def test_groups_without_an_order_change_neither_loss_nor_step_of_trpa(monkeypatch):
    """Its mean is over the pairs of a step: ties, and groups with a response without a verdict, have none."""
    settings, found = method(loss="trpa_loss", group_size=2)
    monkeypatch.setattr(online_dpo, "score_tokens", lambda policy, params, batch, temperature: (params, None))
    loss = online_dpo.make_loss(settings, found, None, None)

    def of(values, valid):
        rewards = Rewards(jnp.asarray(values), jnp.asarray(valid))
        kept = online_dpo.kept_rows(found, settings, rewards)
        count, zeros = len(values), jnp.zeros((len(values), 3))
        mask = jnp.ones((count, 3), bool) & kept[:, None]
        sums = jnp.sum(mask), jnp.sum(kept) / 2
        step = online_dpo.Preferred(jnp.ones(count), *(jnp.full(count, x, jnp.float32) for x in sums))
        extras = online_dpo.Rated(rewards.value)._asdict() | step._asdict()
        tokens = mask.astype(jnp.int32)
        batch = Batch(tokens, tokens, tokens, mask, zeros, zeros, zeros, zeros, jnp.arange(count) // 2,
                      online_dpo.counted(found, 2, kept), extras)  # fmt: skip
        value, slope = jax.value_and_grad(lambda logp: loss(logp, batch)[0])(zeros)
        return float(value), slope[:4]

    value, slope = of([0.5, 0.0, 0.5, 0.0], [True] * 4)
    close.assert_near(np.float32(value), np.log(2.0))
    # d(-log sigmoid(0.1 (u - v))) = -0.05, of two pairs the mean, and of three tokens the mean
    close.assert_near(slope, np.repeat(np.array([[-0.025], [0.025]] * 2) / 3, 3, axis=1))
    tied = of([0.5, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0], [True] * 8)
    unjudged = of([0.5, 0.0, 0.5, 0.0, 0.5, 0.0, 0.5, 0.0], [True] * 5 + [False, True, False])
    for found_value, found_slope in (tied, unjudged):
        close.assert_near(np.float32(found_value), value)
        close.assert_near(found_slope, slope)


@pytest.mark.parametrize("loss", ["sppo_loss", "nash_md_loss"])
def test_losses_of_chances_see_sums_or_tokens(loss, model, batch):
    settings, found = method(loss=loss)
    arrays, _ = online_dpo.chances(found, settings, model.policy, model.params, batch)
    terms = getattr(losses, loss)(*(arrays[name] for name in found.wanted))
    logp, _ = score_tokens(model.policy, model.params, batch, temperature=0.7)
    gap = np.where(batch.mask, logp - batch.ref_logp, 0.0)
    chance = np.asarray(batch.extras["chance"])
    if loss == "sppo_loss":
        want = (gap.sum(1) - 1e3 * (chance - 0.5)) ** 2
        got = terms.loss
    else:
        want = ((0.1 * gap - (chance - 0.5)[:, None]) * np.where(batch.mask, logp, 0.0)).sum(1)
        got = reduce.sequences(terms.loss, batch.mask)
    close.assert_same_sums(got, want, 2 * close.forward_sums(model.config, 9))


# the partner


def test_the_mixture_samples_what_it_says(model):
    """Log-probabilities of its sampler are those of both models' logits; without the reference it is the policy."""
    config, policy = model.config, model.policy
    other = jax.tree.map(lambda x: x + 0.05 * jax.random.normal(jax.random.key(x.size), x.shape), model.params)
    both = {"policy": model.params, "reference": other}
    prompts = jax.random.randint(jax.random.key(0), (2, 4), 3, 20, jnp.int32)
    valid = jnp.asarray([[True] * 4, [False, True, True, True]])
    how = {"group_size": 2, "max_new_tokens": 6, "eos_ids": model.tokenizer.eos_ids, "pad_id": model.tokenizer.pad_id}
    keys = sample_keys(jax.random.key(1), 0, jnp.arange(2), 2)

    def sampled(policy, params, **more):
        run = jax.jit(lambda *given: generate(policy, *given, **how, **more))
        return run(params, prompts, valid, keys)

    mixed = mixture_policy(policy, config.hidden_size, share=0.3)
    rows = sampled(mixed, both, temperature=0.8)
    each = []
    for params in both.values():
        hidden = policy.hidden(params, rows.tokens, rows.positions, rows.segment_ids)
        each.append(jax.nn.log_softmax(policy.unembed(params, hidden), axis=-1))
    joint = jax.nn.log_softmax((0.7 * each[0] + 0.3 * each[1])[..., : config.vocab_size] / 0.8, axis=-1)
    want = jnp.take_along_axis(joint[:, :-1], rows.tokens[:, 1:, None], axis=-1)[..., 0]
    want = jnp.pad(want, ((0, 0), (1, 0)))
    close.assert_same_sums(jnp.where(rows.mask, rows.sampler_logp, 0.0), jnp.where(rows.mask, want, 0.0),
                           2 * close.forward_sums(config, 10))  # fmt: skip
    alone = sampled(mixture_policy(policy, config.hidden_size, share=0.0), both)
    plain = sampled(policy, model.params)
    np.testing.assert_array_equal(alone.tokens, plain.tokens)
    with pytest.raises(ValueError, match="share=2.0"):
        mixture_policy(policy, config.hidden_size, share=2.0)


def test_halves_of_a_group_are_of_two_models(model):
    """The policy's half is what it draws with its own keys; the other half is the reference's."""
    settings, found = method(loss="xpo_loss", max_new_tokens=4, levels=(2,), train_problems=16, eval_problems=8,
                             temperature=1.0)  # fmt: skip
    bench = online_dpo.recipes.bench(settings)
    roll, alone = (jax.jit(online_dpo.paired_rollout(settings, bench, partner)) for partner in ("reference", "policy"))
    other = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(jax.random.key(x.size), x.shape), model.params)
    ids = jnp.arange(3, dtype=jnp.int32)
    keys = sample_keys(jax.random.key(2), 0, ids, 4)
    given = (bench.train.tokens[:3], bench.train.valid[:3], keys, ids)
    rows = roll({"policy": model.params, "reference": other}, *given)
    whole = [alone({"policy": p}, *given) for p in (model.params, other)]
    second = np.arange(12) % 4 >= 2
    for name in ("tokens", "mask", "group_ids", "problem_ids"):
        mine, its = (np.asarray(getattr(x, name)) for x in whole)
        want = np.where(second.reshape(-1, *(1,) * (mine.ndim - 1)), its, mine)
        np.testing.assert_array_equal(np.asarray(getattr(rows, name)), want)
    assert np.any(np.asarray(whole[0].tokens) != np.asarray(whole[1].tokens))


def test_experts_of_the_reference_are_not_replayed(model, monkeypatch):
    """The policy's half says who computed its tokens, the reference's half that nobody recorded it."""
    settings, found = method(loss="xpo_loss", max_new_tokens=4, levels=(2,), train_problems=16, eval_problems=8)
    bench = online_dpo.recipes.bench(settings)
    plain = online_dpo.recipes.rollout_of(settings, bench, group_size=2)

    def rollout(params, tokens, *given):
        rows = plain(params["model"], tokens, *given)
        return rows._replace(extras={EXPERTS: jnp.full((*rows.tokens.shape, 1), params["expert"], jnp.int32)})

    monkeypatch.setattr(online_dpo.recipes, "rollout_of", lambda *given, **sizes: rollout)
    both = {name: {"model": model.params, "expert": i} for i, name in enumerate(("policy", "reference"))}
    ids = jnp.arange(2, dtype=jnp.int32)
    given = (bench.train.tokens[:2], bench.train.valid[:2], sample_keys(jax.random.key(2), 0, ids, 4), ids)
    rows = online_dpo.paired_rollout(settings, bench, "reference")(both, *given)
    assert np.unique(rows.extras[EXPERTS], axis=1)[..., 0].tolist() == [[0], [0], [-1], [-1]] * 2

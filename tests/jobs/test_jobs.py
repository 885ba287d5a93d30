"""Commands of the front door that train: on generated rows, on files of one's own, with losses by name."""

import inspect
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl_llm import losses
from jaxrl_llm.__main__ import main
from jaxrl_llm.data import formats
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import cli
from jaxrl_llm.jobs import distil, dpo, reward_model, rows, sft
from jaxrl_llm.run import named, options, parts
from jaxrl_llm.train import checkpoint
from jaxrl_llm.train.methods.supervised import SupervisedRows
from jaxrl_llm.types import Batch
from tests.models_for_tests import byte_model

SMALL = ["--steps", "2", "--eval-every", "2", "--rows-per-step", "4", "--eval-rows", "4", "--max-new-tokens", "16"]


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    byte_model(folder, "qwen2", max_positions=160)
    texts = [{"prompt": f"{k} plus 1?", "answer": str(k + 1)} for k in range(60)]
    pairs = [{"prompt": f"{k} plus 1?", "chosen": str(k + 1), "rejected": str(k)} for k in range(60)]
    single = [{"prompt": f"{k} plus 1?", "completion": str(k + k % 2), "label": k % 2} for k in range(90)]
    for name, lines in (("texts", texts), ("pairs", pairs), ("single", single)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def arm(module, words, out):
    found = cli.run(module, [*words, "--out", str(out)])
    return next(iter(found.arms.values()))


@pytest.mark.parametrize(
    ("module", "data", "words"),
    [
        (sft, "texts", []),
        (dpo, "pairs", ["--lora", "2"]),
        (dpo, "pairs", ["--loss", "simpo_loss", "--loss-args", "beta=1.5"]),
        (dpo, "pairs", ["--loss", "tdpo2_loss"]),
        (dpo, "pairs", ["--loss", "tdpo1_loss", "--lora", "2"]),
        (dpo, "pairs", ["--loss", "wpo_loss"]),
        (dpo, "single", ["--format", "unpaired", "--loss", "kto_loss"]),
        (reward_model, "pairs", ["--centering", "0.01"]),
        pytest.param(dpo, "pairs", ["--rows-in", "host"], marks=pytest.mark.slow),
        pytest.param(reward_model, "pairs", ["--rows-in", "host"], marks=pytest.mark.slow),
    ],
    ids=lambda x: getattr(x, "__name__", "-".join(x) if isinstance(x, list) else x),
)
def test_rows_of_ones_own(module, data, words, own, tmp_path):
    found = arm(module, ["--model", str(own), "--data", str(own / f"{data}.jsonl"), *SMALL, *words], tmp_path)
    assert found.updates == 2 and np.isfinite(found.metrics["loss/total"]).all()
    assert found.metrics["grad/norm"][0] > 0
    (folder,) = (tmp_path / "seeds").glob("*/seed_0")
    assert (folder / "model" / "config.json").is_file() and (folder / "metrics.jsonl").is_file()
    if module is reward_model:
        heads = load_file(folder / "model" / "heads.safetensors")
        assert any(np.any(x != 0) for x in heads.values()), "the head has moved"


def test_a_reward_model_learns_generated_preferences(tmp_path):
    words = ["--steps", "40", "--eval-every", "40", "--train-rows", "256", "--learning-rate", "2e-3"]
    found = arm(reward_model, words, tmp_path)
    assert found.metrics["eval/accuracy"][0] > 0.8


def test_every_loss_on_preferences_is_reached_or_says_what_it_lacks():
    reached = []
    for name in losses.__all__:
        function = getattr(losses, name)
        if not inspect.isfunction(function):
            continue
        wanted = named.arrays(function)
        offered = dpo.SINGLE if "desirable" in wanted else dpo.PAIRED
        if wanted and set(wanted) <= set(offered) and ("chosen_logp" in wanted or "chosen_mean_logp" in wanted
                                                       or "desirable" in wanted):  # fmt: skip
            reached.append(name)
    known = """dpo_loss ipo_loss kto_loss bco_loss orpo_loss simpo_loss cpo_loss exo_loss nca_loss aot_loss
    discopop_loss alphapo_loss dpop_loss cal_dpo_loss tdpo1_loss tdpo2_loss wpo_loss"""
    assert set(known.split()) <= set(reached)


def test_arrays_of_the_whole_vocabulary_are_those_of_the_definitions():
    """In chunks and from hidden states: as from logits, with the reference's weights and for both responses."""
    model = options.open_model(dpo.Settings(model="nano"))
    ours = jax.tree.map(lambda x: x + 0.02 * jax.random.normal(jax.random.key(x.size), x.shape), model.params)
    tokens = jax.random.randint(jax.random.key(1), (3, 150), 0, model.config.vocab_size)  # two chunks
    lengths = jnp.asarray([150, 140, 20])
    column = jnp.broadcast_to(jnp.arange(150, dtype=jnp.int32), (3, 150))
    there = column < lengths[:, None]
    some = SupervisedRows(tokens, there.astype(jnp.int32), column, (column >= 10) & there)

    def logits(params):
        return model.policy.unembed(params, model.policy.hidden(params, tokens, some.positions, some.segment_ids))

    mine, its = (jax.nn.log_softmax(logits(params), axis=-1)[:, :-1] for params in (ours, model.params))
    trained = some.mask[:, 1:]
    each = jnp.sum(jnp.exp(its) * (its - mine), axis=-1)
    found = dpo.pair_arrays(model.policy, ours, {"chosen": some, "rejected": some, "ref_chosen": 0, "ref_rejected": 0},
                            ("chosen_kl", "rejected_kl", "weights"), model.params)  # fmt: skip
    np.testing.assert_allclose(found["chosen_kl"], jnp.sum(jnp.where(trained, each, 0), axis=1), rtol=1e-4)
    picked = jnp.take_along_axis(mine, tokens[:, 1:, None], axis=-1)[..., 0]
    ratio = picked - jnp.log(jnp.sum(jnp.exp(2 * mine), axis=-1))
    weight = jnp.exp(jnp.mean(ratio, axis=1, where=trained))
    np.testing.assert_allclose(found["weights"], weight**2, rtol=1e-4)
    assert float(jnp.min(found["chosen_kl"])) > 0.1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--loss", "dpo_los"], "did you mean dpo_loss"),
        (["--loss", "xpo_loss"], "takes ref_sample_logp: of each of its pairs the reference wrote one"),
        (["--loss", "vrpo_loss"], "experiments/preference/robust_rlhf.py does"),
        (["--loss", "dpo_loss", "--loss-args", "gamma=1"], "the settings of dpo_loss are beta"),
        (["--loss", "nothing:here"], "No module named 'nothing'"),
        (["--format", "unpaired", "--data", "x.jsonl"], "takes pairs; choose kto_loss"),
        (["--data", "missing.jsonl"], "missing.jsonl"),
    ],
)
def test_mistakes_are_one_line(words, said, capsys, tmp_path):
    with pytest.raises(SystemExit) as stopped:
        main(["dpo", "--smoke", "--out", str(tmp_path), *words])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and said in error and error.count("\n") == 1


@pytest.mark.parametrize("loss", ["reverse_kl", "forward_kl", "top_k", "sampled"])
def test_distillation_moves_towards_the_teacher(loss, tmp_path):
    found = arm(distil, ["--smoke", "--seeds", "1", "--loss", loss], tmp_path)
    assert found.metrics["grad/norm"][0] > 0


def test_the_divergence_from_itself_is_nothing():
    settings = distil.Settings(model="nano", teacher=("nano", "nano"))
    model = options.open_model(settings)
    tokens = jnp.asarray([[5, 6, 7, 8, 9, 3]], jnp.int32)
    mask = jnp.asarray([[False, False, True, True, True, False]])
    batch = Batch(**{name: None for name in Batch._fields})._replace(
        tokens=tokens, mask=mask, segment_ids=jnp.ones_like(tokens), positions=jnp.arange(6, dtype=jnp.int32)[None]
    )
    teachers = distil.open_teachers(settings, model)
    terms = distil.make_terms(settings, model.policy, teachers)(model.params, batch)
    np.testing.assert_allclose(np.asarray(terms.loss), 0.0, atol=2e-6)
    other = jax.tree.map(lambda x: 1.1 * x, model.params)
    moved = np.asarray(distil.make_terms(settings, model.policy, teachers)(other, batch).loss)
    assert np.all((moved[0] > 1e-7) == np.asarray(mask[0])), "the columns of the response alone, in their places"


def test_a_teacher_of_another_vocabulary_is_refused(own):
    with pytest.raises(UserError, match="choose a teacher of the student's family"):
        distil.open_teachers(distil.Settings(teacher=(str(own),)), options.open_model(distil.Settings(model="nano")))


def test_held_out_rows_are_other_prompts():
    settings = rows.RowSettings(train_rows=200)
    kept, held = rows.held_out(rows.texts(settings, "plain"), 16, settings.data)
    assert not {row.prompt for row in kept} & {row.prompt for row in held} and 0 < len(held) <= 16


def test_reference_scores_are_those_of_single_rows():
    model = options.open_model(dpo.Settings(model="nano"))
    tokens = jax.random.randint(jax.random.key(0), (dpo.CHUNK + 3, 7), 3, 20, jnp.int32)
    mask = jnp.broadcast_to(jnp.arange(7) > 2, tokens.shape)
    positions = jnp.broadcast_to(jnp.arange(7, dtype=jnp.int32), tokens.shape)
    table = SupervisedRows(tokens, jnp.ones_like(tokens), positions, mask)
    whole = dpo.scored(model.policy, model.params, table)
    one = dpo.sequence_logp(model.policy, model.params, jax.tree.map(lambda x: x[-1:], table))
    np.testing.assert_allclose(np.asarray(whole[-1:]), np.asarray(one), atol=1e-4)


class Killed(BaseException):
    """In the place of a signal that leaves no time."""


def test_rows_on_the_host_go_on_where_they_were(own, tmp_path, monkeypatch):
    """A mixture of two files, read step by step; killed behind its first checkpoint it meets the same rows again."""
    both = f"{own / 'texts.jsonl'}@0.5,{own / 'more.jsonl'}@0.5"
    lines = [{"prompt": f"{k} plus 2?", "answer": str(k + 2)} for k in range(12)]
    (own / "more.jsonl").write_text("\n".join(map(json.dumps, lines)))
    words = ["--model", str(own), "--data", both, *SMALL[2:], "--steps", "4", "--rows-in", "host"]
    words += ["--checkpoint-every", "2"]
    whole = arm(sft, words, tmp_path / "whole")
    seen, save = [], checkpoint.save

    def dying(folder, state, *, note):
        save(folder, state, note=note)
        seen.append(note)
        raise Killed

    monkeypatch.setattr(checkpoint, "save", dying)
    with pytest.raises(Killed):
        arm(sft, words, tmp_path / "parts")
    assert seen[0]["step"] == 2 and "next_index" in str(seen[0]["stream"])
    monkeypatch.setattr(checkpoint, "save", save)
    again = arm(sft, words, tmp_path / "parts")
    assert again.curves["loss/total"] == whole.curves["loss/total"]


def test_a_mixture_has_its_shares(own):
    (own / "few.jsonl").write_text("\n".join(json.dumps({"prompt": f"few {k}", "answer": "1"}) for k in range(6)))
    found, _ = formats.read_problems(f"{own / 'texts.jsonl'}@0.25,{own / 'few.jsonl'}@0.75")
    few = [row for row in found if str(row.prompt).startswith("few")]
    assert len(found) == 240 and len(few) == 180 and len({row.prompt for row in found}) == 66
    train, held, _ = parts.load_problems(f"{own / 'texts.jsonl'}@0.25,{own / 'few.jsonl'}@0.75", train=0, heldout=99,
                                         seed=0)  # fmt: skip
    assert len({row.prompt for row in held}) == len(held)  # measured on once
    assert not {row.prompt for row in held} & {row.prompt for row in train}
    for spec, said in (("a@1,b", "'b' is no SOURCE@WEIGHT"), ("a@0,b@1", "'a@0' is no"), ("a@x", "'a@x' is no")):
        with pytest.raises(UserError, match=said):
            formats.read_problems(spec)

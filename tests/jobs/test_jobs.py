"""Commands of the front door that train: on generated rows, on files of one's own, with losses by name."""

import dataclasses
import inspect
import json
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl_llm import losses
from jaxrl_llm.__main__ import main
from jaxrl_llm.data import formats
from jaxrl_llm.data.chat import encode_prompt
from jaxrl_llm.data.stream import make_stream
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import cli, recipes
from jaxrl_llm.jobs import distil, dpo, online_dpo, ppo, reward_model, rows, sft
from jaxrl_llm.logprobs import align
from jaxrl_llm.models.io import weights
from jaxrl_llm.run import named, options, parts, rated
from jaxrl_llm.run.settings import parse as settings_of_job
from jaxrl_llm.train import checkpoint
from jaxrl_llm.train.methods.builders import score_tokens
from jaxrl_llm.train.methods.supervised import SupervisedRows, joined
from jaxrl_llm.train.offline import Offline
from jaxrl_llm.train.online import Online
from jaxrl_llm.types import Batch, PairTerms, TokenTerms
from tests import close
from tests.models_for_tests import byte_model, byte_tokenizer, cubes

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
        (dpo, "pairs", ["--loss", "simpo_loss", "--loss-args", "beta=1.5"]),
        (reward_model, "pairs", ["--centering", "0.01"]),
        *(pytest.param(dpo, "pairs", words, marks=pytest.mark.slow) for words in (
            ["--lora", "2"], ["--loss", "tdpo2_loss"], ["--loss", "wpo_loss"], ["--length-desensitised", "0.5"],
            ["--rows-in", "host"], ["--loss", "tdpo1_loss", "--lora", "2"],
        )),
        pytest.param(dpo, "single", ["--format", "unpaired", "--loss", "kto_loss"], marks=pytest.mark.slow),
        pytest.param(reward_model, "pairs", ["--rows-in", "host"], marks=pytest.mark.slow),
    ],
    ids=lambda x: getattr(x, "__name__", "-".join(x) if isinstance(x, list) else x),
)  # fmt: skip
def test_rows_of_ones_own(module, data, words, own, tmp_path):
    found = arm(module, ["--model", str(own), "--data", str(own / f"{data}.jsonl"), *SMALL, *words], tmp_path)
    assert found.updates == 2 and np.isfinite(found.metrics["loss/total"]).all()
    assert found.metrics["grad/norm"][0] > 0
    (folder,) = (tmp_path / "seeds").glob("*/seed_0")
    assert (folder / "model" / "config.json").is_file() and (folder / "metrics.jsonl").is_file()
    if module is reward_model:
        heads = load_file(folder / "model" / "heads.safetensors")
        assert any(np.any(x != 0) for x in heads.values()), "the head has moved"


@pytest.mark.slow
def test_a_reward_model_learns_generated_preferences(tmp_path):
    words = ["--steps", "40", "--eval-every", "40", "--train-rows", "256", "--learning-rate", "2e-3"]
    found = arm(reward_model, words, tmp_path)
    assert found.metrics["eval/accuracy"][0] > 0.8


def test_a_reward_model_is_a_reward_a_classifier_and_a_model(tmp_path):
    """Its folder is read by ``--reward``, by transformers (``score.weight``), and as the model that it was made of."""
    arm(reward_model, ["--smoke", "--seeds", "1", "--learning-rate", "0.1"], tmp_path)
    folder = tmp_path / "seeds" / "reward_model" / "seed_0" / "model"
    head, classifier = rated.read_head(str(folder))
    assert not classifier and np.any(np.asarray(head["weight"]) != 0) and weights.is_judge(folder)
    stored, raw = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    np.testing.assert_array_equal(stored["score.weight"], np.asarray(head["weight"]).T)
    assert raw["id2label"] == {"0": "reward"}
    (folder / "heads.safetensors").rename(folder / "kept")
    again, classifier = rated.read_head(str(folder))
    assert classifier and np.array_equal(again["weight"], head["weight"])
    (folder / "kept").rename(folder / "heads.safetensors")
    options.open_model(options.ModelSettings(model=str(folder)))


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
    # sums of probabilities times log-probabilities
    sums, size = close.forward_sums(model.config, 150), float(jnp.abs(its[its > -jnp.inf]).max())
    want = jnp.sum(jnp.where(trained, each, 0), axis=1)
    close.assert_same_sums(found["chosen_kl"], want, sums, magnitude=150 * size)
    picked = jnp.take_along_axis(mine, tokens[:, 1:, None], axis=-1)[..., 0]
    ratio = picked - jnp.log(jnp.sum(jnp.exp(2 * mine), axis=-1))
    weight = jnp.exp(jnp.mean(ratio, axis=1, where=trained))
    close.assert_same_sums(found["weights"], weight**2, sums, magnitude=float(jnp.max(weight**2)) * size)
    assert float(jnp.min(found["chosen_kl"])) > 0.1


def test_what_the_longer_response_has_more_counts_less():
    """LD-DPO: policy and reference alike, on the device and on the host."""
    model = options.open_model(dpo.Settings(model="nano"))
    tokens = jax.random.randint(jax.random.key(2), (3, 9), 3, 20, jnp.int32)
    column = jnp.broadcast_to(jnp.arange(9, dtype=jnp.int32), tokens.shape)

    def rows(lengths):
        there = column < 2 + jnp.asarray(lengths)[:, None]
        return SupervisedRows(tokens, there.astype(jnp.int32), column, there & (column >= 2))

    chosen, rejected = rows([7, 3, 4]), rows([2, 6, 4])
    shared, how = dpo.shared_tokens(chosen, rejected), dpo.Summed(alpha=0.25)
    assert shared.tolist() == [2, 3, 4]
    logp = np.asarray(score_tokens(model.policy, model.params, chosen)[0])
    each = [logp[k, 2 : 2 + n] for k, n in enumerate([7, 3, 4])]
    want = [x[:s].sum() + 0.25 * x[s:].sum() for x, s in zip(each, [2, 3, 4], strict=True)]
    sums = close.forward_sums(model.config, 9)
    part = {"chosen": chosen, "rejected": rejected, "ref_chosen": 0, "ref_rejected": 0}
    found = dpo.pair_arrays(model.policy, model.params, part, ("chosen_logp",), None, how)
    close.assert_same_sums(found["chosen_logp"], np.asarray(want), sums)
    close.assert_same_sums(dpo.scored(model.policy, model.params, chosen, shared, how), np.asarray(want), sums)
    on_host = jax.tree.map(np.asarray, (chosen, shared))
    close.assert_same_sums(dpo.scored_on_host(model.policy, model.params, *on_host, how), np.asarray(want), sums)


def difference(chosen_logp, rejected_logp):
    """No loss on preferences: an array, not PairTerms."""
    return rejected_logp - chosen_logp


def mean_difference(chosen_logp, rejected_logp):
    """The mean of a batch, which would be divided by its pairs once more."""
    return PairTerms(jnp.mean(rejected_logp - chosen_logp), {})


def above_the_batch(logp, ref_logp, desirable, kl):
    """A loss of one's own with a mean over the batch among its arrays."""
    return PairTerms(jnp.where(desirable, kl - logp, logp - kl), {})


def of_the_rejected(chosen_logp, rejected_kl):
    """A loss of one's own that asks for one of the two divergences."""
    return PairTerms(rejected_kl - chosen_logp, {})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--loss", "dpo_los"], "did you mean dpo_loss"),
        (["--loss", "xpo_loss"], "not rows of a file: jaxrl online-dpo --loss xpo_loss"),
        (["--loss", "vrpo_loss"], "jaxrl online-dpo --loss vrpo_loss"),
        (["--length-desensitised", "2"], "--length-desensitised 2.0 must lie in [0, 1]"),
        (["--length-desensitised", "0.5", "--loss", "simpo_loss"], "--loss simpo_loss does not take"),
        (["--loss", "dpo_loss", "--loss-args", "gamma=1"], "the settings of dpo_loss are beta"),
        (["--loss", "nothing:here"], "No module named 'nothing'"),
        (["--format", "unpaired", "--data", "x.jsonl"], "takes pairs; choose kto_loss"),
        (["--data", "missing.jsonl"], "missing.jsonl"),
        (["--loss-args", "beta=[1]"], "--loss-args beta=[1]: [1] is no value such as 0.1"),
        (["--loss", "f_dpo_loss", "--loss-args", "slope=3"], "slope=3: 3 is no value such as jensen_shannon_slope"),
        (
            ["--loss", f"{__name__}:difference"],
            f"--loss {__name__}:difference: gives no PairTerms, as a loss on preferences does",
        ),
        (
            ["--loss", f"{__name__}:mean_difference"],
            f"--loss {__name__}:mean_difference: gives a loss of (), not of (4,), one number for each pair or",
        ),
        (
            ["--loss", f"{__name__}:above_the_batch", "--microbatches", "2"],
            "--microbatches 2: this method takes its batch whole",
        ),
    ],
)
def test_mistakes_are_one_line(words, said, capsys, tmp_path):
    with pytest.raises(SystemExit) as stopped:
        main(["dpo", "--smoke", "--out", str(tmp_path), *words])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and said in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "words", "said"),
    [
        ("sft", ["--max-grad-norm", "-1"], "--max-grad-norm -1.0 must not be negative"),
        ("sft", ["--max-grad-norm", "nan"], "--max-grad-norm nan must be finite"),
        ("sft", ["--weight-decay", "nan"], "--weight-decay nan must be finite"),
        ("sft", ["--warmup-steps", "-1"], "--warmup-steps -1 must be at least 0"),
        ("sft", ["--bad-rows", "-1"], "--bad-rows -1 must be at least 0"),
        (
            "sft",
            ["--format", "gsm8k"],
            "--format gsm8k is of rows of your own, and --data chain is generated: give --data "
            "FILE with it, or drop --format",
        ),
        (
            "dpo",
            ["--bad-rows", "2"],
            "--bad-rows 2 is of rows of your own, and --data chain is generated: give --data FILE "
            "with it, or drop --bad-rows",
        ),
        ("sft", ["--staleness", "3"], "--staleness 3 belongs to --loop async: give it, or drop --staleness"),
        ("sft", ["--workers", "threads:8"], "--workers threads:8 belongs to --loop async: give it, or drop --workers"),
        *(
            (
                name,
                ["--loop", "async"],
                f"--loop async: {name.replace('-', '_')} draws no responses that could run "
                "ahead of its updates; drop it",
            )
            for name in ("sft", "dpo", "reward-model")
        ),
        *(
            (name, [flag], f"{flag} is of experiments with a claim, and jaxrl {name} has none; drop it")
            for name, flag in (("sft", "--record"), ("ppo", "--until-decided"))
        ),
        ("sft", ["--rows-per-step", "0"], "--rows-per-step 0 must be at least 1"),
        ("sft", ["--eval-rows", "0"], "--eval-rows 0 must be at least 1"),
        ("sft", ["--max-new-tokens", "-5"], "--max-new-tokens -5 must be at least 1"),
        ("reward-model", ["--train-rows", "0"], "--train-rows 0 must be at least 1"),
        ("dpo", ["--learning-rate", "-1"], "--learning-rate -1.0 must not be negative"),
        ("dpo", ["--length-desensitised", "nan"], "--length-desensitised nan is no number"),
        ("reward-model", ["--centering", "nan"], "--centering nan must be finite"),
        ("reward-model", ["--margin-scale", "-1"], "--margin-scale -1.0 must not be negative"),
        ("ppo", ["--value-weight", "inf"], "--value-weight inf must be finite"),
        ("ppo", ["--prompts-per-step", "0"], "--prompts-per-step 0 must be at least 1"),
    ],
)
def test_numbers_that_no_update_can_be_made_with_are_one_line(command, words, said, capsys, tmp_path):
    with pytest.raises(SystemExit) as stopped:
        main([command, "--smoke", "--out", str(tmp_path / "run"), *words])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error == f"error: {said}\n"
    assert not (tmp_path / "run").exists(), "nothing is left behind by a mistake"


def test_a_loss_of_ones_own_may_ask_for_one_divergence(tmp_path):
    found = cli.run(dpo, ["--loss", f"{__name__}:of_the_rejected", "--smoke", "--plan", "--out", str(tmp_path)])
    assert found is None


@pytest.mark.parametrize(("most", "each"), [(512, 31), (31, 15), (16, 8), (1, 1)])
def test_both_kinds_of_responses_are_measured(most, each, tmp_path):
    """Of pairs good and bad responses lie in turn, and of 62 held-out ones every second was of one kind."""
    data = tmp_path / "pairs.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": f"{k}?", "chosen": "a", "rejected": "b"}) for k in range(320)))
    settings = dpo.Settings(data=str(data))
    kept, held = rows.held_out_of_both(rows.judged(settings, "plain"), most, settings.data)
    assert len(kept) == 578 and [row.desirable for row in held] == [True] * each + [False] * each
    assert not {row.prompt for row in kept} & {row.prompt for row in held}


def test_responses_of_one_kind_are_measured_as_far_as_they_can_be(own, tmp_path, capsys):
    data = tmp_path / "right.jsonl"
    lines = [{"prompt": f"{k} plus 1?", "completion": str(k + 1), "label": True} for k in range(60)]
    data.write_text("\n".join(map(json.dumps, lines)))
    words = ["--model", str(own), "--data", str(data), "--format", "unpaired", "--loss", "kto_loss", *SMALL]
    found = arm(dpo, words, tmp_path / "run")
    assert np.isfinite(found.metrics["eval/chosen_logp"]).all() and np.isnan(found.metrics["eval/accuracy"]).all()
    assert "held-out responses has label false: eval/accuracy and eval/margin" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("layout", "row"),
    [
        ("prompts", lambda k: {"prompt": f"{k}?"}),
        ("countdown", lambda k: {"nums": [1, 2, k], "target": k + 3}),
        ("humaneval", lambda k: {"prompt": f"def f{k}():\n", "test": "def check(c): c()", "entry_point": f"f{k}"}),
    ],
)
def test_rows_without_a_response_are_not_imitated(layout, row, tmp_path):
    """The target of a Countdown problem and the name of a function are no answers, and nothing is an end token."""
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(json.dumps(row(k)) for k in range(40)))
    with pytest.raises(UserError, match=f"40 of 40 rows of --format {layout} have no response to imitate"):
        rows.texts(sft.Settings(data=str(data)), layout)


def test_all_responses_may_be_kept_where_all_are_right(own, tmp_path):
    data = tmp_path / "right.jsonl"
    lines = [{"prompt": f"{k} plus 1?", "completion": str(k + 1), "label": True} for k in range(60)]
    data.write_text("\n".join(map(json.dumps, lines)))
    words = ["--model", str(own), "--data", str(data), "--format", "unpaired", "--keep", "all", *SMALL]
    assert cli.run(sft, [*words, "--plan", "--out", str(tmp_path / "run")]) is None


@pytest.mark.parametrize("command", ["sft", "dpo", "reward-model", "distil", "online-dpo"])
def test_a_limit_to_what_a_command_does_not_measure_is_refused(command, capsys, tmp_path):
    with pytest.raises(SystemExit):
        more = ["--teacher", "nano"] if command == "distil" else []
        main([command, "--smoke", "--out", str(tmp_path / "run"), "--most-gap", "0.5", *more])
    assert capsys.readouterr().err == (
        f"error: --most-gap 0.5: arm {command.replace('-', '_')} does not measure how far its sampler lies from its "
        "trainer; drop the flag\n"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("job", [sft, dpo, reward_model])
def test_a_norm_of_0_is_no_bound(job):
    """As in the main job; as a bound it would make every update nothing."""
    settings = job.Settings(**job.EMBEDDED | job.SMOKE)
    bounds = {norm: job.build(dataclasses.replace(settings, max_grad_norm=norm)).stages[0].method.max_grad_norm
              for norm in (0.0, 0.5)}  # fmt: skip
    assert bounds == {0.0: None, 0.5: 0.5}


@pytest.mark.parametrize(
    ("job", "data", "more"),
    [(sft, "texts", {}), (dpo, "pairs", {}), (reward_model, "pairs", {}), (ppo, "texts", {}), (online_dpo, "texts", {}),
     (distil, "texts", {"teacher": ("self",), "loss": "reverse_kl"})],
    ids=lambda x: getattr(x, "__name__", ""),
)  # fmt: skip
def test_an_epoch_has_every_row_once(job, data, more, own):
    """The seeds of a run have orders of their own; one and a half passes are so many steps."""
    known = {f.name for f in dataclasses.fields(job.Settings)}
    wanted = {"model": str(own), "data": str(own / f"{data}.jsonl"), "eval_rows": 4, "eval_problems": 4}
    wanted |= {"max_new_tokens": 16, "rows_per_step": 7, "prompts_per_step": 7, "epochs": 1.5} | more
    stage = job.build(job.Settings(**{k: v for k, v in wanted.items() if k in known})).stages[-1]
    method = stage.method
    count = (method.problems.tokens if isinstance(method, Online) else jax.tree.leaves(method.rows({}))[0]).shape[0]
    orders = []
    assert stage.steps == -(-3 * count // 14)
    for seed in (0, 1):
        state, drawn = method.sampler.init(count), []
        for step in range(2 * count // 7 + 1):
            ids, state = method.sampler.draw(state, jax.random.fold_in(jax.random.key(seed), step), 7)
            drawn += ids.tolist()
        assert sorted(drawn[:count]) == sorted(drawn[count : 2 * count]) == list(range(count)) and count > 50
        orders.append(drawn[:count])
    assert orders[0] != orders[1]


def test_a_flag_of_several_values_may_stand_again(own):
    """As the line on distil says it: one --teacher for each; of --stop, --loss-args and the like none is lost."""
    words = ["--teacher", "nano", "--smoke", "--teacher=tiny", "--loss-args", "a=1", "--loss-args", "b=2"]
    _, settings, _ = cli.parse(distil, words)
    assert settings.teacher == ("nano", "tiny") and settings.loss_args == ("a=1", "b=2")
    with pytest.raises(UserError, match="--steps is given twice"):
        cli.parse(distil, ["--steps", "1", "--steps", "2"])
    with pytest.raises(UserError, match="--steps and --epochs both say how long to train"):
        cli.parse(distil, ["--steps", "1", "--epochs=2"])
    found = settings_of_job(["--stop", "a", "--seed", "1", "--stop=b", "--steps", "2"])
    assert found.stop == ("a", "b") and (found.seed, found.steps) == (1, 2)


def test_a_limit_beyond_the_context_reserves_no_memory(own):
    settings = sft.Settings(model=str(own), data=str(own / "texts.jsonl"), max_new_tokens=10**14)
    (table,) = rows.encoded(options.open_model(settings), rows.texts(settings, "plain"), settings, "response")
    assert table.tokens.shape[0] == 60


@pytest.mark.parametrize(
    "loss", ["sampled", *(pytest.param(x, marks=pytest.mark.slow) for x in ("top_k", "reverse_kl", "forward_kl"))]
)
def test_distillation_moves_towards_the_teacher(loss, tmp_path):
    found = arm(distil, ["--smoke", "--seeds", "1", "--loss", loss], tmp_path)
    assert found.metrics["grad/norm"][0] > 0


def test_distillation_needs_no_answers(tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"prompt": f"{k}+{k}=>"}) for k in range(40)))
    own = ["--model", "nano", "--data", str(tmp_path / "rows.jsonl"), "--format", "prompts", "--teacher", "tiny"]
    found = arm(distil, ["--smoke", "--seeds", "1", *own], tmp_path)
    assert found.metrics["eval/tokens"][0] > 0 and "eval/accuracy" not in found.metrics
    assert found.metrics["grad/norm"][0] > 0


@pytest.mark.parametrize(
    "words",
    [
        ["--loss", "sdft_loss", "--teacher", "self"],
        *(pytest.param(words, marks=pytest.mark.slow) for words in (
            ["--loss", "sdpo_loss", "--teacher", "self", "--loss-args", "cap=3.0"], ["--loss", "iw_opd_loss"],
            ["--loss", "sampled_self_distillation_loss", "--teacher", "self"], ["--loss", "jsd_loss"],
            ["--loss", "gold_loss"], ["--loss", "uld_loss"], ["--loss", "reverse_kl", "--teacher", "self"],
        )),
    ],
    ids="-".join,
)  # fmt: skip
def test_distillation_by_any_loss(words, tmp_path):
    found = arm(distil, ["--smoke", "--seeds", "1", *words], tmp_path)
    assert found.metrics["grad/norm"][0] > 0 and np.isfinite(found.metrics["distil/kl"][0])


def test_a_teacher_that_is_shown_the_solution_reads_the_same_response():
    """Its distributions lie in the columns of the student's, though its prompts are longer; by rows one at a time."""
    settings = distil.Settings(model="nano", teacher=("self",), max_new_tokens=5, levels=(2,), train_problems=16,
                               eval_problems=8, temperature=0.8, loss="iw_opd_loss")  # fmt: skip
    model, bench = options.open_model(settings), recipes.bench(settings)
    (teacher,) = distil.open_teachers(settings, model)
    ids = jnp.asarray([3, 7])
    lengths = jnp.asarray([5, 2])
    response = jax.random.randint(jax.random.key(4), (2, 5), 3, 20, jnp.int32)
    rows = joined(bench.train.tokens[ids], bench.train.valid[ids], response, jnp.arange(5)[None] < lengths[:, None])
    sampler = jnp.where(rows.mask, -1.5, 0.0)
    batch = Batch(**{name: None for name in Batch._fields})._replace(
        **{name: getattr(rows, name) for name in ("tokens", "segment_ids", "positions", "mask")},
        sampler_logp=sampler, extras={"problem_ids": ids},
    )  # fmt: skip
    logp = distil.teacher_logp([teacher], batch, 0.8)
    hidden = distil.aligned(teacher, _hidden(model, distil.seen(teacher, batch)), batch)
    problems = recipes.solved_problems(settings)
    for k in range(2):
        problem, n = problems[int(ids[k])], int(lengths[k])
        prompt = encode_prompt(model.tokenizer, f"{problem.solution}\n\n{problem.prompt}", chat=False)
        alone = jnp.asarray([[*prompt, *response[k, :n].tolist()]], jnp.int32)
        column = jnp.arange(alone.shape[1], dtype=jnp.int32)[None]
        states = model.policy.hidden(model.params, alone, column, column * 0 + 1)
        want = jax.nn.log_softmax(model.policy.unembed(model.params, states)[0] / 0.8, axis=-1)
        first = rows.tokens.shape[1] - 5
        picked = want[jnp.arange(len(prompt) - 1, len(prompt) - 1 + n), response[k, :n]]
        sums = close.forward_sums(model.config, alone.shape[1])
        close.assert_same_sums(logp[k, first : first + n], picked, sums)
        close.assert_same_sums(hidden[k, first - 1 : first - 1 + n], states[0, len(prompt) - 1 : -1], sums)
    terms = distil.make_terms(settings, model.policy, [teacher])(model.params, batch)
    student, _ = score_tokens(model.policy, model.params, batch, temperature=0.8)
    want = losses.iw_opd_loss(student, logp, sampler, batch.mask)
    close.assert_same_sums(terms.loss, want.loss, close.forward_sums(model.config, 40))


def _hidden(model, rows):
    return model.policy.hidden(model.params, rows.tokens, rows.positions, rows.segment_ids)


@pytest.mark.parametrize("loss", ["jsd_loss", "sdft_loss"])
def test_whole_distributions_lie_in_the_columns_of_their_tokens(loss):
    settings = distil.Settings(model="nano", loss=loss)
    model = options.open_model(settings)
    other = model._replace(params=jax.tree.map(lambda x: 1.1 * x, model.params))
    tokens = jnp.asarray([[5, 6, 7, 8, 9, 3]], jnp.int32)
    mask = jnp.asarray([[False, False, True, True, True, False]])
    column = jnp.arange(6, dtype=jnp.int32)[None]
    batch = Batch(**{name: None for name in Batch._fields})._replace(
        tokens=tokens, mask=mask, segment_ids=jnp.ones_like(tokens), positions=column,
        sampler_logp=jnp.where(mask, -2.0, 0.0), extras={},
    )  # fmt: skip
    found = distil.make_terms(settings, model.policy, [distil.Teacher(other)])(model.params, batch)
    logits = [align(m.policy.unembed(m.params, _hidden(m, batch))) for m in (model, other)]
    logp, _ = score_tokens(model.policy, model.params, batch)
    more = (logp, batch.sampler_logp) if loss == "sdft_loss" else ()
    want = getattr(losses, loss)(*logits, *more, mask)
    close.assert_same_sums(found.loss, want.loss, 2 * close.forward_sums(model.config, 6), magnitude=10.0)
    assert np.all((np.asarray(found.loss[0]) != 0) == np.asarray(mask[0]))


@pytest.mark.parametrize("loss", ["top_k", "sdft_loss", "gold_loss"])
def test_distributions_of_whole_rows_never_exist(loss, monkeypatch):
    """In steps of four columns: the value and gradient of all at once, and no array of all of them."""
    settings = distil.Settings(model="nano", loss=loss)
    model = options.open_model(settings)
    teacher = distil.Teacher(model._replace(params=jax.tree.map(lambda x: 1.1 * x, model.params)))
    tokens = jax.random.randint(jax.random.key(0), (2, 11), 3, 20, jnp.int32)
    column = jnp.tile(jnp.arange(11, dtype=jnp.int32), (2, 1))
    mask = column > jnp.asarray([[3], [6]])
    batch = Batch(**{name: None for name in Batch._fields})._replace(
        tokens=tokens, mask=mask, segment_ids=jnp.ones_like(tokens), positions=column,
        sampler_logp=jnp.where(mask, -2.0, 0.0), extras={},
    )  # fmt: skip
    padded = model.policy.unembed(model.params, _hidden(model, batch)).shape[-1]
    found, formed = [], []
    for chunk in (4, 11):
        monkeypatch.setattr(distil, "CHUNK", chunk)
        terms = distil.make_terms(settings, model.policy, [teacher])
        step = jax.value_and_grad(lambda params, terms=terms: jnp.sum(terms(params, batch).loss))
        formed.append(max(cubes(step, model.params, size=padded)))
        found.append(jax.jit(step)(model.params))
    # sdft_loss asks for log-probabilities as well, and those of a row this short are formed at once
    assert formed == ([2 * 10, 2 * 11] if loss == "sdft_loss" else [2 * 4, 2 * 11])
    sums = close.gradient_sums(model.config, 2, 11)
    close.assert_same_sums(found[0][0], found[1][0], sums, magnitude=float(mask.sum()))
    close.assert_same_sums(found[0][1], found[1][1], sums)


def test_a_loss_of_ones_own_sees_whole_rows(monkeypatch):
    monkeypatch.setattr(distil, "CHUNK", 4)
    settings = distil.Settings(model="nano", loss=f"{__name__}:first_columns")
    model = options.open_model(settings)
    tokens = jnp.asarray([[5, 6, 7, 8, 9, 3, 4]], jnp.int32)
    batch = Batch(**{name: None for name in Batch._fields})._replace(
        tokens=tokens, mask=tokens > 0, segment_ids=jnp.ones_like(tokens), sampler_logp=jnp.zeros(tokens.shape),
        positions=jnp.arange(7, dtype=jnp.int32)[None], extras={},
    )  # fmt: skip
    terms = distil.make_terms(settings, model.policy, [distil.Teacher(model)])(model.params, batch)
    assert terms.loss.tolist() == [[0, 7, 7, 7, 7, 7, 7]]  # and moved to the columns of the tokens


def first_columns(student_logits, mask):
    """The number of columns that it is shown, at each."""
    return TokenTerms(jnp.full(mask.shape, float(student_logits.shape[1])), {})


@pytest.mark.parametrize("loss", ["reverse_kl", "forward_kl", "top_k", "jsd_loss"])
@pytest.mark.parametrize("wider", ["teacher", "student"])
def test_models_of_one_vocabulary_may_have_rows_behind_it(loss, wider, tmp_path):
    """Qwen2.5's have 151,936 or 152,064 of them: the same model with ten rows more is the same distribution."""
    (tmp_path / "narrow").mkdir(), (tmp_path / "wide").mkdir()
    own = byte_model(tmp_path / "narrow", max_positions=96)
    _, params, config = weights.pretrained(own)
    size = config.vocab_size

    def longer(x):
        return jnp.pad(x, [(0, 10 if side == size else 0) for side in x.shape], constant_values=0.5)

    byte_tokenizer(tmp_path / "wide")
    more = dataclasses.replace(config, vocab_size=size + 10, padded_vocab_size=size + 10)
    weights.save(tmp_path / "wide", more, jax.tree.map(longer, params))
    names = (str(own), str(tmp_path / "wide")) if wider == "teacher" else (str(tmp_path / "wide"), str(own))
    settings = distil.Settings(model=names[0], teacher=names[1:], loss=loss, top=size)
    model = options.open_model(settings)
    teachers = distil.open_teachers(settings, model)
    assert teachers[0].reader is None and model.config.padded_vocab_size == size + 10 * (wider == "student")
    column = jnp.arange(6, dtype=jnp.int32)[None]
    batch = Batch(**{name: None for name in Batch._fields})._replace(
        tokens=jnp.asarray([[5, 6, 7, 8, size + 3, 3]], jnp.int32), positions=column, segment_ids=column * 0 + 1,
        mask=jnp.asarray([[False, False, True, True, True, True]]), sampler_logp=jnp.zeros((1, 6)),
    )  # fmt: skip
    batch = distil.known_to_all(batch, size)
    assert batch.mask.tolist() == [[False, False, True, True, False, True]] and batch.total == 3
    found = distil.make_terms(settings, model.policy, teachers)(model.params, batch)
    close.assert_same_sums(found.loss[:, :5], np.zeros((1, 5)), close.forward_sums(config, 6), magnitude=1.0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"loss": "reverse_k"}, "did you mean"),
        ({"loss": "gspo_loss"}, "takes advantages, which this command has not"),
        ({"loss": "top_k", "loss_args": ("k=3",)}, "--loss top_k has none"),
        ({"loss": "sdft_loss", "loss_args": ("kk=3",)}, "the settings of sdft_loss are cap=2.0"),
        ({"loss": "token_ratio"}, "--loss token_ratio: gives no TokenTerms, as a loss of tokens does"),
        ({"loss": "sampled_entropy"}, "--loss sampled_entropy: gives no TokenTerms"),
    ],
)
def test_mistakes_of_distillation_are_named(changes, said):
    settings = dataclasses.replace(distil.Settings(model="nano", teacher=("nano",)), **changes)
    model = options.open_model(settings)
    tokens = jnp.asarray([[5, 6, 7, 8]], jnp.int32)
    batch = Batch(**{name: None for name in Batch._fields})._replace(
        tokens=tokens, extras={}, mask=tokens > 6, segment_ids=jnp.ones_like(tokens), sampler_logp=jnp.zeros((1, 4)),
        positions=jnp.arange(4, dtype=jnp.int32)[None],
    )  # fmt: skip
    with pytest.raises(UserError, match=said):
        terms = distil.make_terms(settings, model.policy, distil.open_teachers(settings, model))
        jax.eval_shape(terms, model.params, batch)


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
    close.assert_same_sums(terms.loss, np.zeros((1, 6)), close.forward_sums(model.config, 6), magnitude=1.0)
    other = jax.tree.map(lambda x: 1.1 * x, model.params)
    moved = np.asarray(distil.make_terms(settings, model.policy, teachers)(other, batch).loss)
    assert np.all((moved[0] > 1e-7) == np.asarray(mask[0])), "the columns of the response alone, in their places"


def test_a_teacher_of_another_vocabulary_is_refused_token_by_token(own):
    settings = distil.Settings(model="nano", teacher=(str(own),), max_new_tokens=4, levels=(2,), train_problems=16)
    model = options.open_model(settings)
    teachers = distil.open_teachers(settings, model)
    for loss in ("reverse_kl", "top_k", "sdft_loss", "iw_opd_loss"):
        with pytest.raises(UserError, match=f"--loss {loss} compares token by token.*choose gold_loss or uld_loss"):
            distil.make_terms(dataclasses.replace(settings, loss=loss), model.policy, teachers, 20)
    with pytest.raises(UserError, match="averaged token by token; give it alone"):
        distil.open_teachers(dataclasses.replace(settings, teacher=("nano", str(own))), model)
    with pytest.raises(UserError, match="its context has 160; lower --max-new-tokens"):
        distil.open_teachers(dataclasses.replace(settings, max_new_tokens=80), model)


def test_responses_are_measured_without_all_distributions_at_once(monkeypatch):
    """Nats, and the tokens that are the likeliest, against all logits; columns by the chunk."""
    monkeypatch.setattr(sft, "CHUNK", 4)
    model = options.open_model(sft.Settings(model="nano"))
    tokens = jax.random.randint(jax.random.key(2), (2, 13), 3, 20, jnp.int32)
    valid = jnp.arange(9)[None] < jnp.asarray([9, 5])[:, None]
    some = joined(tokens[:, :4], jnp.ones((2, 4), bool), tokens[:, 4:], valid)
    logits = align(model.policy.unembed(model.params, _hidden(model, some)))
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    some = some._replace(tokens=some.tokens.at[0, 6].set(best[0, 6]))  # what stands behind it is another row then
    logits = align(model.policy.unembed(model.params, _hidden(model, some)))
    nats, right, count = sft.sums_of_rows(model.policy, model.params, some)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), some.tokens[..., None], axis=-1)[..., 0]
    want = float(-jnp.sum(jnp.where(some.mask, picked, 0.0)))
    close.assert_same_sums(nats, want, close.forward_sums(model.config, 13), magnitude=want)
    said = np.asarray((jnp.argmax(logits, axis=-1) == some.tokens) & some.mask)
    assert said[0, 6] and int(right) == said.sum() and int(count) == 14
    formed = cubes(lambda params: sft.sums_of_rows(model.policy, params, some), model.params, size=logits.shape[-1])
    assert max(formed) == 2 * 4


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
    close.assert_same_sums(whole[-1:], one, close.forward_sums(model.config, 7))


class Killed(BaseException):
    """In the place of a signal that leaves no time."""


def test_every_seed_has_its_own_order_of_rows_on_the_host(own, tmp_path):
    """All seeds begin with the same weights: with one order they would be equal to the last bit."""
    table = {"row": np.arange(10)}
    method = rows.fed(Offline(None, None, 4, None, None), table, SimpleNamespace(rows_in="host"))
    orders = [np.concatenate([next(stream)["row"] for _ in range(5)]) for stream in map(method.stream, (0, 1))]
    of_zero = make_stream(range(10), lambda row: {"row": np.int64(row)}, batch=4)
    np.testing.assert_array_equal(orders[0], np.concatenate([next(of_zero)["row"] for _ in range(5)]))
    assert not np.array_equal(*orders) and all(sorted(order[:10]) == list(range(10)) for order in orders)
    words = ["--model", str(own), "--data", str(own / "texts.jsonl"), *SMALL, "--rows-in", "host", "--seeds", "2"]
    one, other = arm(sft, words, tmp_path).curves["loss/total"]["values"]
    assert one != other


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


@pytest.mark.parametrize(("module", "data"), [(sft, "texts"), (reward_model, "pairs")])
def test_no_second_copy_of_the_weights_lies_beside_those_that_train(module, data, own, tmp_path, monkeypatch):
    """A new run trains what it has loaded; one that goes on lets that go. Of two seeds each has a copy."""
    loaded, load = [], options.open_model

    def remembered(*arguments, **settings):
        loaded.append(load(*arguments, **settings))
        return loaded[-1]

    monkeypatch.setattr(options, "open_model", remembered)
    words = ["--model", str(own), "--data", str(own / f"{data}.jsonl"), *SMALL[2:], "--steps", "4"]
    words += ["--checkpoint-every", "2"]
    gone = lambda model: {x.is_deleted() for x in jax.tree.leaves(model.params)}  # noqa: E731
    whole, save = arm(module, words, tmp_path / "whole"), checkpoint.save
    assert gone(loaded[-1]) == {True}

    def dying(*arguments, **settings):
        save(*arguments, **settings)
        raise Killed

    monkeypatch.setattr(checkpoint, "save", dying)
    with pytest.raises(Killed):
        arm(module, words, tmp_path / "parts")
    monkeypatch.setattr(checkpoint, "save", save)
    again = arm(module, words, tmp_path / "parts")
    assert again.curves["loss/total"] == whole.curves["loss/total"] and gone(loaded[-1]) == {True}
    arm(module, [*words, "--seeds", "2"], tmp_path / "two")
    assert gone(loaded[-1]) == {False}


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


@pytest.mark.parametrize(
    ("read", "more", "line", "held"),
    [
        (rows.texts, ("plain",), lambda x: {"prompt": f"{x}?", "answer": x}, 45),
        (rows.texts, ("unpaired",), lambda x: {"prompt": f"{x}?", "completion": x, "label": True}, 45),
        (rows.pairs, ("plain",), lambda x: {"prompt": f"{x}?", "chosen": x, "rejected": "no"}, 45),
        (rows.judged, ("plain",), lambda x: {"prompt": f"{x}?", "chosen": x, "rejected": "no"}, 90),
        (rows.judged, ("unpaired",), lambda x: {"prompt": f"{x}?", "completion": x, "label": True}, 45),
        (
            rows.pairs, ("hh-rlhf",),
            lambda x: {n: f"\n\nHuman: {x}?\n\nAssistant: {n}" for n in ("chosen", "rejected")}, 41,
        ),
        (rows.dialogues, (), lambda x: {"messages": [{"role": "user", "content": f"{x}?"},
                                                     {"role": "assistant", "content": x}]}, 30),
    ],
)  # fmt: skip
def test_rows_that_a_mixture_repeats_are_held_out_once(read, more, line, held, tmp_path):
    """The 40 rows of one file stand ten times each, to be as many as the 400 of the other."""
    for name, count in (("a", 40), ("b", 400)):
        lines = [json.dumps(line(f"{name}{k}")) for k in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    data = f"{tmp_path}/a.jsonl@0.5,{tmp_path}/b.jsonl@0.5"
    found = read(dpo.Settings(data=data, chat=True), *more)
    measured = rows.held_out(found, 512, data)[1]
    assert len(measured) == len({repr(row) for row in measured}) == held
    assert len(found) == (1600 if held == 90 else 800)


def test_pairs_made_of_rows_that_a_mixture_repeats_are_held_out_once(tmp_path):
    for name, count in (("a", 40), ("b", 400)):
        lines = [
            {"prompt": f"{name}{k}?", "completion": x, "label": x == "yes"} for k in range(count) for x in ("yes", "no")
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    data = f"{tmp_path}/a.jsonl@0.5,{tmp_path}/b.jsonl@0.5"
    found = rows.pairs(reward_model.Settings(data=data), "unpaired")
    assert len(found) == 800 and len(rows.held_out(found, 512, data)[1]) == 45


def test_few_problems_are_measured_from_all_over_what_is_held_out(tmp_path):
    """A file may be sorted by level, and a mixture is by source: the first of either would be of one kind."""
    files = [tmp_path / f"{name}.jsonl" for name in ("easy", "hard")]
    for path in files:
        rows = [{"prompt": f"{path.stem} {k}", "answer": "1"} for k in range(200)]
        path.write_text("\n".join(json.dumps(row) for row in rows))
    mixed = f"{files[0]}@0.5,{files[1]}@0.5"
    _, held, _ = parts.load_problems(mixed, train=0, heldout=8, seed=0)
    with pytest.warns(UserWarning, match="--eval-problems 8: so many of 400 rows"):
        rows_of_file, _ = parts.load_evaluated(mixed, most=8, layout="plain")
    for chosen in (held, rows_of_file):
        kinds = [row.prompt.split()[0] for row in chosen]
        assert len(kinds) == 8 and 3 <= kinds.count("hard") <= 5


def _talk(k):
    return [{"role": "user", "content": f"{k} plus 1?"}, {"role": "assistant", "content": str(k + 1)},
            {"role": "user", "content": "more"}, {"role": "assistant", "content": str(k + 2)}]  # fmt: skip


def test_conversations_are_imitated_answer_by_answer(own, tmp_path):
    shutil.copytree(own, tmp_path / "model")
    template = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}</s>{% endfor %}" + (
        "{% if add_generation_prompt %}<a>{% endif %}")  # fmt: skip
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    data = tmp_path / "talks.jsonl"
    data.write_text("\n".join(json.dumps({"messages": _talk(k)}) for k in range(60)))
    words = ["--model", str(tmp_path / "model"), "--data", str(data), "--format", "messages"]
    found = arm(sft, [*SMALL[:-1], "64", *words], tmp_path / "run")
    assert found.updates == 2 and np.isfinite(found.metrics["eval/loss"]).all() and found.metrics["grad/norm"][0] > 0
    settings = dataclasses.replace(sft.Settings(), model=str(tmp_path / "model"), data=str(data), format="messages")
    model, talks = options.open_model(settings), rows.dialogues(settings)
    train, test = rows.encoded_dialogues(model, talks[:50], talks[50:], settings)
    assert train.tokens.shape[0] == 50 and train.tokens.shape[1] == test.tokens.shape[1]
    assert model.tokenizer.decode(np.asarray(train.tokens[7])[np.asarray(train.mask[7])].tolist()) == "89"
    assert int(train.mask[7].sum()) == 4 and not bool((train.mask & (train.segment_ids == 0)).any())  # two end tokens
    with pytest.raises(UserError, match="a conversation has .* tokens, the limit is 8; raise --max-new-tokens"):
        rows.encoded_dialogues(model, talks[:50], talks[50:], dataclasses.replace(settings, max_new_tokens=8))
    with pytest.raises(UserError, match="--format messages: --data chain holds no conversations; give --data FILE"):
        rows.dialogues(dataclasses.replace(settings, data="chain"))


def test_pairs_of_several_turns(own, tmp_path):
    """Messages go through the chat template; HH-RLHF's turns do with --chat, and are text without."""
    said = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"
    data = tmp_path / "pairs.jsonl"
    data.write_text(json.dumps({"chosen": f"{said} d", "rejected": f"{said} e"}))
    settings = dataclasses.replace(dpo.Settings(), data=str(data), format="hh-rlhf")
    assert rows.pairs(settings, "hh-rlhf") == [(said, " d", " e", 0.0)]
    turns = [{"role": role, "content": text} for role, text in zip(("user", "assistant", "user"), "abc", strict=True)]
    assert rows.pairs(dataclasses.replace(settings, chat=True), "hh-rlhf") == [(turns, "d", "e", 0.0)]
    for front, before in (("", []), ("Be brief.\n\n", [{"role": "system", "content": "Be brief."}])):
        bare = front + said.removeprefix("\n\n")  # whoever saved the rows may have stripped them
        data.write_text(json.dumps({"chosen": f"{bare} d", "rejected": f"{bare} e"}))
        assert rows.pairs(dataclasses.replace(settings, chat=True), "hh-rlhf") == [([*before, *turns], "d", "e", 0.0)]
    shutil.copytree(own, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    data.write_text("\n".join(json.dumps({"chosen": _talk(k), "rejected": [*_talk(k)[:-1], _talk(0)[1]]})
                              for k in range(5, 65)))  # fmt: skip
    found = arm(dpo, ["--model", str(tmp_path / "model"), "--data", str(data), *SMALL], tmp_path / "run")
    assert found.updates == 2 and np.isfinite(found.metrics["loss/total"]).all()
    model = options.open_model(dataclasses.replace(settings, model=str(tmp_path / "model")))
    pairs = rows.pairs(dataclasses.replace(settings, format="plain"), "plain")
    chosen, _ = rows.encoded(model, pairs, settings, "chosen", "rejected")
    text = model.tokenizer.decode(np.asarray(chosen.tokens[0]).tolist())
    assert text.endswith("<5 plus 1?><6><more>7")

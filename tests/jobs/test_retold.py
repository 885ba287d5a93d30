"""A teacher of another vocabulary, end to end: what it reads, where its distributions lie, and that students learn."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import losses
from jaxrl_llm.data.chat import encode_prompt
from jaxrl_llm.data.pieces import reread
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import cli, recipes
from jaxrl_llm.jobs import distil, retold
from jaxrl_llm.models.decoder import make_policy
from jaxrl_llm.models.io import weights
from jaxrl_llm.run import bench, options
from jaxrl_llm.train.methods.supervised import joined
from jaxrl_llm.types import Batch, Trajectories
from tests import close
from tests.data.test_pieces import merged_tokenizer
from tests.models_for_tests import cubes, small_config

RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A folder: byte-level, with tokens of several characters, where the bundled student has single ones."""
    folder = tmp_path_factory.mktemp("teacher")
    size = merged_tokenizer(folder).vocab_size
    ends = {"bos_token_id": 1, "eos_token_ids": (2, 3), "pad_token_id": 0}
    config = small_config("llama", vocab_size=size, **ends)
    weights.save(folder, config, make_policy(config).init(jax.random.key(0)))
    return str(folder)


def _settings(teacher, **changes):
    return distil.Settings(model="nano", teacher=(teacher,), max_new_tokens=8, levels=(2,), train_problems=16,
                           eval_problems=8, temperature=0.8, **changes)  # fmt: skip


def _rows(settings, model):
    """Three responses to two problems: one ends, one is cut, one is empty but for its end."""
    table, ids = recipes.bench(settings).train, jnp.asarray([3, 7, 3])
    texts = ["12+3=5", "2123 12", ""]
    response, there = np.full((3, 8), model.tokenizer.pad_id, np.int32), np.zeros((3, 8), bool)
    for k, text in enumerate(texts):
        tokens = [i for i in model.tokenizer.encode(text)][:8]
        tokens += [model.tokenizer.eos_ids[0]] if k != 1 and len(tokens) < 8 else []
        response[k, : len(tokens)], there[k, : len(tokens)] = tokens, True
    rows = joined(table.tokens[ids], table.valid[ids], jnp.asarray(response), jnp.asarray(there))
    return Trajectories(*rows[:4], jnp.where(rows.mask, -1.0, 0.0), ids < 0, jnp.arange(3), ids)


@pytest.mark.parametrize("loss", ["gold_loss", pytest.param("uld_loss", marks=pytest.mark.slow)])
def test_distributions_are_compared_over_the_pieces_of_a_text(loss, teacher):
    """Against both models asked row by row, without padding, and merged by a loop."""
    settings = _settings(teacher, loss=loss)
    model = options.open_model(settings)
    (found,) = distil.open_teachers(settings, model)
    reader, drawn = found.reader, _rows(settings, model)
    extras = jax.jit(retold.row_extras(reader))({}, drawn, None)
    names = ("tokens", "segment_ids", "positions", "mask")
    batch = Batch(**{name: None for name in Batch._fields})._replace(
        **{name: getattr(drawn, name) for name in names}, extras=extras
    )
    batch = retold.of_pieces(batch)
    terms = distil.make_terms(settings, model.policy, [found], model.config.vocab_size)(model.params, batch)
    problems, count = bench.problem_sets(settings)[0], 0
    shared = [reader.student_ids, reader.teacher_ids]
    first = drawn.tokens.shape[1] - 8
    for k in range(3):
        own = np.asarray(drawn.tokens)[k, first:][np.asarray(drawn.mask)[k, first:]].tolist()
        again = reread(reader.two, own, most=16)
        problem = problems[int(drawn.problem_ids[k])]
        said = [
            _alone(m, encode_prompt(m.tokenizer, problem.prompt, chat=False), tokens, spans)
            for m, tokens, spans in (
                (model, own, [piece[:2] for piece in again.pieces]),
                (found.model, again.tokens, [piece[2:] for piece in again.pieces]),
            )
        ]
        columns = [first + piece[1] - 1 for piece in again.pieces]
        assert np.nonzero(np.asarray(batch.mask)[k])[0].tolist() == columns
        ones = jnp.ones((1, len(columns)), bool)
        more = shared if loss == "gold_loss" else ()
        want = getattr(losses, loss)(*(jnp.asarray(x)[None] for x in said), ones, *more).loss
        sums = 2 * close.forward_sums(model.config, drawn.tokens.shape[1]) + 300
        close.assert_same_sums(terms.loss[k, jnp.asarray(columns)], want[0], sums, magnitude=4.0)
        count += len(columns)
    assert float(batch.total) == count > 8
    assert np.all((np.asarray(terms.loss) != 0) <= np.asarray(batch.mask))
    merged = [piece for piece in again.pieces if piece[1] - piece[0] > 1]
    sizes = np.asarray(extras["own_spans"][..., 1] - extras["own_spans"][..., 0])
    assert sizes.max() > 1, f"no piece of several tokens was tried: {merged}"


def _in_pieces(settings, model, found):
    """Sampled rows, and the batch of the pieces of text that a teacher reads in them."""
    drawn = _rows(settings, model)
    fields = {name: getattr(drawn, name) for name in ("tokens", "segment_ids", "positions", "mask")}
    extras = retold.row_extras(found.reader)({}, drawn, None)
    return drawn, retold.of_pieces(Batch(**{name: None for name in Batch._fields})._replace(**fields, extras=extras))


@pytest.mark.parametrize("loss", ["gold_loss", "uld_loss"])
def test_distributions_of_whole_rows_never_exist(loss, teacher):
    """Three pieces at a time: the value and gradient of all at once, and no array of all of them, of either model."""
    settings = _settings(teacher, loss=loss)
    model = options.open_model(settings)
    (found,) = distil.open_teachers(settings, model)
    drawn, batch = _in_pieces(settings, model, found)
    size, other = model.config.vocab_size, found.model.config.vocab_size
    pieces, columns = batch.extras["own_spans"].shape[1], drawn.tokens.shape[1]
    results, formed = [], []
    for chunk in (3, columns):
        terms = retold.make_terms(settings, model.policy, found.reader, size, chunk=chunk)
        step = jax.value_and_grad(lambda params, terms=terms: jnp.sum(terms(params, batch).loss))
        formed.append([max(cubes(step, model.params, size=x)) for x in (size, other)])
        results.append(jax.jit(step)(model.params))
    assert formed[0] == [3 * 3, 3 * 3] and min(formed[1]) >= 3 * (columns - 1) > 3 * pieces
    sums = close.gradient_sums(model.config, 3, columns) + size + other
    close.assert_same_sums(results[0][0], results[1][0], sums, magnitude=float(batch.total))
    close.assert_same_sums(results[0][1], results[1][1], sums)


def difference(student_log_probs, teacher_log_probs, mask):
    """No loss: an array, not TokenTerms."""
    return jnp.where(mask, jnp.sum(teacher_log_probs, axis=-1) - jnp.sum(student_log_probs, axis=-1), 0.0)


def test_a_loss_of_ones_own_that_is_none_is_named(teacher):
    settings = _settings(teacher, loss=f"{__name__}:difference")
    model = options.open_model(settings)
    (found,) = distil.open_teachers(settings, model)
    _, batch = _in_pieces(settings, model, found)
    terms = retold.make_terms(settings, model.policy, found.reader, model.config.vocab_size)
    with pytest.raises(UserError, match=f"--loss {__name__}:difference: gives no TokenTerms, as a loss of tokens does"):
        jax.eval_shape(terms, model.params, batch)


def _alone(model, prompt, tokens, spans):
    """Merged chances of one row without padding, by loops: ``[pieces, vocabulary]``, logarithms."""
    row = jnp.asarray([[*prompt, *tokens]], jnp.int32)
    column = jnp.arange(row.shape[1], dtype=jnp.int32)[None]
    hidden = model.policy.hidden(model.params, row, column, column * 0 + 1)
    logits = model.policy.unembed(model.params, hidden)[0, :, : model.config.vocab_size] / 0.8
    logp = np.asarray(jax.nn.log_softmax(logits, axis=-1))
    before = len(prompt) - 1  # where the distribution of the first token of the response lies
    return np.stack([
        logp[before + end - 1] + sum(logp[before + t, tokens[t]] for t in range(begin, end - 1))
        for begin, end in spans
    ])  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        ("--loss", "gold_loss"),
        *(pytest.param(words, marks=pytest.mark.slow) for words in (
            ("--loss", "uld_loss"), ("--loss", "gold_loss", "--loss-args", "matched_weight=1.0",
                                     "unmatched_weight=0.0"), ("--loss", "gold_loss", "--mesh", "data=2"),
            ("--loss", "gold_loss", "--slots", "2", "--lora", "2"),
        )),
    ],
    ids=" ".join,
)  # fmt: skip
def test_two_steps_of_the_command(words, teacher, tmp_path):
    found = cli.run(distil, ["--smoke", "--seeds", "1", "--teacher", teacher, "--out", str(tmp_path), *words])
    metrics = next(iter(found.arms.values())).metrics
    assert metrics["grad/norm"][0] > 0 and np.isfinite(metrics["distil/kl"]).all()
    assert metrics["tokens/trained"][0] > 0


def test_a_student_learns_what_a_teacher_of_other_tokens_means(teacher):
    """One row, many updates: the chance of what was written goes to the teacher's, and no gradient to the teacher."""
    settings = _settings(teacher, loss="gold_loss", loss_args=("matched_weight=1.0", "unmatched_weight=0.0"))
    model = options.open_model(settings)
    (found,) = distil.open_teachers(settings, model)
    drawn = _rows(settings, model)
    extras = retold.row_extras(found.reader)({}, drawn, None)
    fields = {name: getattr(drawn, name) for name in ("tokens", "segment_ids", "positions", "mask")}
    batch = retold.of_pieces(Batch(**{name: None for name in Batch._fields})._replace(**fields, extras=extras))
    terms = distil.make_terms(settings, model.policy, [found], model.config.vocab_size)
    step = jax.jit(jax.value_and_grad(lambda params: jnp.sum(terms(params, batch).loss) / batch.total))
    params, history = model.params, []
    for _ in range(30):
        value, slope = step(params)
        size = math.sqrt(sum(float(jnp.sum(x**2)) for x in jax.tree.leaves(slope)))
        params = jax.tree.map(lambda x, g, s=size: x - 0.1 / s * g, params, slope)
        history.append(float(value))
    assert history[-1] < 0.9 * history[0]
    of_teacher = jax.grad(lambda p: jnp.sum(
        distil.make_terms(settings, model.policy, [found._replace(
            reader=found.reader._replace(model=found.model._replace(params=p)))], model.config.vocab_size)(
            model.params, batch).loss))(found.model.params)  # fmt: skip
    assert not any(np.any(np.asarray(x)) for x in jax.tree.leaves(of_teacher))

"""Benches from rows of one's own: formats, verifiers, chat templates, worked solutions, and what is refused."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import curricula
from jaxrl_llm.run import bench
from jaxrl_llm.types import Trajectories
from tests.models_for_tests import byte_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return byte_model(tmp_path_factory.mktemp("own"), max_positions=300)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Forty problems as GSM8K stores them."""
    path = tmp_path_factory.mktemp("rows") / "train.jsonl"
    lines = [{"question": f"What is {k} + 1?", "answer": f"{k} and one is {k + 1}.\n#### {k + 1}"} for k in range(40)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def _settings(folder, rows, **changes):
    own = {"data": str(rows), "train_problems": 64, "eval_problems": 8, "max_new_tokens": 32}
    return bench.OnlineSettings(model=str(folder), **own | changes)


def _answered(found, texts):
    """Responses of problem 0 with the given texts."""
    tokens = [found.model.tokenizer.encode(text) for text in texts]
    width = max(map(len, tokens))
    table = jnp.asarray([row + [0] * (width - len(row)) for row in tokens], jnp.int32)
    mask = jnp.asarray([[k < len(row) for k in range(width)] for row in tokens])
    zeros, ids = jnp.zeros(table.shape, jnp.float32), jnp.zeros((len(texts),), jnp.int32)
    known = {"tokens": table, "mask": mask, "sampler_logp": zeros, "problem_ids": ids}
    return Trajectories(segment_ids=table, positions=table, truncated=ids > 0, group_ids=ids, **known)


def test_a_published_format_with_its_verifier(folder, rows):
    found = bench.bench(_settings(folder, rows, format="gsm8k"))
    assert found.score is None and found.train.tokens.shape[0] + found.heldout.tokens.shape[0] == 40
    first = bench.solved_problems(_settings(folder, rows, format="gsm8k"))[0]
    right = str(first.answer["value"])
    values = found.host_score(_answered(found, [f"It is {right}.", "It is 9999.", f"#### {right}"])).value
    np.testing.assert_array_equal(values, [1.0, 0.0, 1.0])


def test_the_verifier_may_be_named_and_may_run_in_processes(folder, rows):
    found = bench.bench(_settings(folder, rows, format="gsm8k", verifier="math"))
    right = str(bench.solved_problems(_settings(folder, rows, format="gsm8k"))[0].answer["value"])
    scored = found.host_score(_answered(found, [f"$\\boxed{{{right}}}$", "$\\boxed{12345}$"]))
    np.testing.assert_array_equal(scored.value, [1.0, 0.0])
    assert scored.valid.all()


def test_a_compiled_program_asks_the_same_judge(folder, rows):
    found = bench.bench(_settings(folder, rows, format="gsm8k"))
    right = str(bench.solved_problems(_settings(folder, rows, format="gsm8k"))[0].answer["value"])
    answered = _answered(found, [f"It is {right}.", "It is 9999."])
    inside = jax.jit(lambda given: found.callback(found.train.answers, given))(answered)
    np.testing.assert_array_equal(inside.value, found.host_score(answered).value)
    np.testing.assert_array_equal(inside.value, [1.0, 0.0])
    assert inside.valid.all()


def test_only_methods_on_the_training_problems_get_the_callback(folder, rows):
    found = bench.bench(_settings(folder, rows, format="gsm8k"))
    assert curricula.train_score(found) is found.callback
    with pytest.raises(UserError, match="judges problems of its own making on the device"):
        curricula.device_score(found)  # the callback would judge other tables by the training answers


def test_chat_wraps_the_prompt(folder, rows):
    plain = bench.bench(_settings(folder, rows, format="gsm8k"))
    chat = bench.bench(_settings(folder, rows, format="gsm8k", chat=True))
    decode = chat.model.tokenizer.decode
    wrapped = [int(t) for t, v in zip(chat.train.tokens[0], chat.train.valid[0], strict=True) if v]
    assert wrapped[0] == 1 and "What is" in decode(wrapped)
    assert int(jnp.sum(chat.train.valid[0])) == int(jnp.sum(plain.train.valid[0])) + 3  # user, end, assistant


def test_solutions_are_demonstrations(folder, rows):
    settings = _settings(folder, rows, format="gsm8k", max_new_tokens=64)
    tokens, valid = bench.demonstrations(settings)
    first = bench.solved_problems(settings)[0]
    text = bench.bench(settings).model.tokenizer.decode(np.asarray(tokens[0])[np.asarray(valid[0])][:-1].tolist())
    assert text == first.solution and " and one is " in text
    found = bench.bench(settings)
    assert found.host_score(_answered(found, [text])).value.tolist() == [1.0], "who imitates it is right"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"data": "nowhere.jsonl"}, "nowhere.jsonl does not exist; give a .jsonl, .csv or .parquet file"),
        ({"data": "chain", "format": "gsm8k"}, "--format, --verifier and --chat belong to rows of your own"),
        ({"format": "math"}, "lacks problem, solution; it has question, answer"),
        ({"max_new_tokens": 290}, "exceed the model's context of 300; lower --max-new-tokens"),
    ],
)  # fmt: skip
def test_refused(folder, rows, changes, message):
    with pytest.raises(UserError, match=message.replace(".", r"\.")):
        bench.bench(_settings(folder, rows, **{"format": "gsm8k"} | changes))


def test_rows_without_solution_cannot_be_shown(folder, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"nums": [k, 2], "target": k}) for k in range(1, 41)))
    settings = _settings(folder, path, format="countdown")
    assert jax.tree.leaves(bench.bench(settings).train)
    with pytest.raises(UserError, match="training rows have no worked solution"):
        bench.demonstrations(settings)


def test_as_many_heldout_problems_as_can_be_made_by_themselves(monkeypatch):
    """320 of the 330 that 512 draws find are more than 320 draws find: a file of two domains had no record."""
    found = {512: 330, 320: 309, 288: 288}
    monkeypatch.setattr(bench, "_heldout_made", lambda data, levels, wanted: found[wanted])
    assert bench.most_heldout(bench.OnlineSettings(data="programs", levels=(1, 2, 3), eval_problems=512)) == 288

"""Steps read on the device against texts cut by Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.reward_models.parts import steps as reader
from jaxrl_llm.experiment import recipes
from jaxrl_llm.train import refill

PROMPT, WIDTH = 3, 40


@pytest.fixture(scope="module")
def tokenizer():
    return recipes.bench(
        recipes.OnlineSettings(levels=(2,), train_problems=4, eval_problems=4, max_new_tokens=8)
    ).model.tokenizer


def rows_of(tokenizer, texts):
    """Rows whose responses are the texts with an end token."""
    rows = refill.empty_pool(len(texts), PROMPT + WIDTH).trajectories
    tokens, mask = np.array(rows.tokens), np.zeros(rows.mask.shape, bool)
    for k, text in enumerate(texts):
        said = [*tokenizer.encode(text), tokenizer.eos_ids[0]]
        tokens[k, PROMPT : PROMPT + len(said)] = said
        mask[k, PROMPT : PROMPT + len(said)] = True
    return rows._replace(
        tokens=jnp.asarray(tokens), mask=jnp.asarray(mask), problem_ids=jnp.arange(len(texts), dtype=jnp.int32)
    )


def read(tokenizer, texts):
    rows = rows_of(tokenizer, texts)
    found = jax.jit(
        lambda rows: reader.read_steps(rows, separator=tokenizer.encode(",")[0], mark=tokenizer.encode("#")[0])
    )(rows)
    return rows, found


TEXTS = ["3+5=8,8*4=10#10", "3+5=8,3+5=8,8*4=10#10", "#10", "3+5=8,8*4", "3+5=9,8*4=10#7,3+5=8#1"]


def test_steps_agree_with_cut_texts(tokenizer):
    rows, found = read(tokenizer, TEXTS)
    for k, text in enumerate(TEXTS):
        head, marked, _ = text.partition("#")
        parts = head.split(",") if marked else head.split(",")[:-1]
        parts = [p for p in parts if p] if head else ([""] if marked else [])
        assert int(found.count[k]) == len(parts)
        ends = np.flatnonzero(found.ends[k])
        hashes = [int(found.hashes[k, t]) for t in ends]
        assert hashes == [reader.text_hash(tokenizer.encode(p) if p else []) for p in parts]
        spoken = np.asarray(rows.mask[k] & found.inside[k])
        inside = [int(t) for t in np.asarray(rows.tokens[k])[spoken]]
        finished = text[: len(",".join(parts)) + 1] if parts else ""
        assert tokenizer.decode(inside) == finished


def test_right_and_repeated_steps(tokenizer):
    _, found = read(tokenizer, TEXTS)
    table = jnp.asarray(reader.hash_table(tokenizer.encode, [["3+5=8", "8*4=10"]] * 4 + [["8*4=10"]]))
    assert table.shape == (5, 2)
    right, _ = reader.per_step(reader.right_steps(found, table).astype(jnp.float32), found, most=4)
    assert right.tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0]]
    again, valid = reader.per_step(reader.repeated_steps(found).astype(jnp.float32), found, most=4)
    assert again.tolist() == [[0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert valid.tolist()[1] == [True, True, True, False]
    with pytest.raises(ValueError, match="no steps"):
        reader.hash_table(tokenizer.encode, [["a"], []])


def test_numbers_of_steps_come_back_to_tokens(tokenizer):
    _, found = read(tokenizer, TEXTS[:2])
    numbers = jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    back, _ = reader.per_step(reader.at_ends(numbers, found), found, most=3)
    np.testing.assert_array_equal(back, [[1, 2, 0], [4, 5, 6]])
    spread = reader.over_steps(numbers, found)
    assert float(spread[0].sum()) == 1 * 6 + 2 * 7  # tokens of "3+5=8," and of "8*4=10#"
    assert not spread[:, :PROMPT].any()

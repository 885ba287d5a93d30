"""Lines of written solutions as steps: which are right, and where they end, inside a compiled program."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.reward_models.parts import progress_verifier, step_labels, text_lines
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import recipes
from jaxrl_llm.types import Responses
from tests import close
from tests.models_for_tests import byte_model


def test_a_line_is_right_by_its_last_number():
    known = text_lines.results("Half of 1,000 is <<1000/2=500>>half\nhe keeps 480\nThat is all\n#### 480")
    assert known == {"500", "480", "That is all"}
    said = ("so 500", "he has 480 left", "That is all ", "which is 20", "That was all")
    assert [text_lines.is_right(line, known) for line in said] == [True, True, True, False, False]


def test_labels_of_rows_of_ones_own(tmp_path):
    byte_model(tmp_path, "qwen2", max_positions=400)
    rows = [{"question": f"What is {k} + 1?", "answer": f"{k}+1={k + 1}\n#### {k + 1}"} for k in range(60)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = recipes.OnlineSettings(
        model=str(tmp_path), data=str(tmp_path / "sums.jsonl"), format="gsm8k", train_problems=16, eval_problems=4,
        max_new_tokens=24,
    )  # fmt: skip
    found, stepped = recipes.bench(settings), step_labels.make_stepped(settings)
    problem = recipes.solved_problems(settings)[3]
    number = problem.answer["value"]
    text = f"so {number}\nor 777\n#### {number}"
    tokenizer, width = found.model.tokenizer, 40
    said = [*tokenizer.encode(text), tokenizer.eos_ids[0]]
    tokens = jnp.zeros((1, width), jnp.int32).at[0, 4 : 4 + len(said)].set(jnp.asarray(said))
    mask = (jnp.arange(width) >= 4)[None] & (jnp.arange(width) < 4 + len(said))[None]
    said = Responses(tokens, mask, jnp.asarray([3], jnp.int32))
    steps, labels = jax.jit(lambda rows: step_labels.label(stepped, rows))(said)
    assert int(steps.count[0]) == 3
    assert np.asarray(labels[0])[np.asarray(steps.ends[0])].tolist() == [True, False, True]
    blank = f"\n\nso {number}\n \n\n#### {number}\n"  # lines without text, and a break before the end
    spoken = [*tokenizer.encode(blank), tokenizer.eos_ids[0]]
    tokens = jnp.zeros((1, width), jnp.int32).at[0, 4 : 4 + len(spoken)].set(jnp.asarray(spoken))
    mask = (jnp.arange(width) >= 4)[None] & (jnp.arange(width) < 4 + len(spoken))[None]
    steps, labels = step_labels.label(stepped, Responses(tokens, mask, jnp.asarray([3], jnp.int32)))
    assert int(steps.count[0]) == 2
    assert np.asarray(labels[0]).sum() == 2 == int(steps.ends[0].sum()) and bool(jnp.all(labels <= steps.ends))
    first, second = np.flatnonzero(np.asarray(steps.ends[0])).tolist()
    assert steps.ids[0, 4 : first + 1].tolist() == [0] * (first - 3)
    assert steps.ids[0, first + 1 : second + 1].tolist() == [1] * (second - first)
    assert not steps.inside[0, second + 1 :].any()
    again = text_lines.repeating(problem, 2).splitlines()
    # a solution has two lines, the longer one "#### 10" or "\\boxed{}"; a response has room for three steps and more
    longest = max(len(line) for line in problem.solution.splitlines())
    assert progress_verifier.prefixes_of(settings) == 2
    sizes = progress_verifier.search_sizes(settings)
    assert sizes["rounds"] == 1 and longest < sizes["step_tokens"] <= 12
    one, every = jnp.ones(1), recipes.solved_problems(settings)
    warm = step_labels.warm_stage(settings, found, every, steps=1).method.tx
    with jax.numpy_dtype_promotion("standard"):
        taken = -float(warm.update(one, warm.init(one), one)[0][0])  # Adam's first step is its rate
    close.assert_printed(taken, settings.learning_rate, 9, magnitude=settings.learning_rate)
    assert again == [*problem.solution.splitlines()[:1] * 3, f"\\boxed{{{number}}}"]


def test_tasks_without_known_steps_are_refused():
    with pytest.raises(UserError, match="right steps"):
        step_labels.make_stepped(recipes.OnlineSettings(data="countdown"))

"""A model of language behind an address as the large judge of rows of one's own, and as the source of the log."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.reward_models import cross_domain_rlvr, general_reasoner
from experiments.reward_models.parts import answer_judges, large_judges, text_answers
from jaxrl_llm.data import tokenizer as tokenizers
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import cli
from tests.endpoint_for_tests import serving
from tests.models_for_tests import byte_model

pytest.importorskip("openai")


def says(request):
    """Yes where both answers have the same last digit, which the verifier of the rows does not think."""
    lines = request["messages"][-1]["content"].splitlines()
    known, given = (line.rpartition(": ")[2] for line in lines[-2:])
    same = known[-1:] == given[-1:] or {known, given} == {"2", "two"}
    return f"Is it? No, wait. They are {'**Yes**' if same else 'NO'}."


@pytest.fixture
def server(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # verdicts are kept below the working folder
    with serving(monkeypatch, reply=says) as server:
        yield server


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    byte_model(folder, "qwen2", max_positions=400)
    rows = [{"question": f"What is {k} + 1?", "answer": f"{k}+1\n#### {k + 1}"} for k in range(120)]
    (folder / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {"model": str(folder), "data": str(folder / "sums.jsonl"), "format": "gsm8k", "max_new_tokens": 24}


def _settings(module, **changes):
    return dataclasses.replace(module.Settings(), **module.EMBEDDED | module.SMOKE | changes)


def test_verdicts_are_those_of_the_model(server, rows):
    where = {"large_judge": server.address, "large_judge_model": "someone"}
    settings = _settings(cross_domain_rlvr, **rows | where)
    plain = text_answers.make_free(settings)
    free = large_judges.by_words(plain, settings)
    encode, decode = tokenizers.load(settings.model)[:2]
    table = jnp.where(free.reference_valid, free.reference_tokens, -1)
    known = [decode(row[row >= 0].tolist()) for row in np.asarray(table[:4])]
    asked = [known[0], f"9{known[1]}", "x", known[3]]  # equal, of the same last digit, of another, not answered
    value = jnp.asarray([[*encode(x), *[-1] * (table.shape[1] - len(encode(x)))] for x in asked])
    answers = {"reference": table[:4], "row": jnp.arange(4)}
    answered = jnp.array([True, True, True, False])
    assert plain.equivalent(value, answered, answers).tolist() == [True, False, False, False]
    server.seen.clear()
    for verifier in (cross_domain_rlvr.large(settings, free), general_reasoner.large(settings, free)):
        said = verifier.judge(verifier.fit(jax.random.key(0)), value, answered, answers)
        assert said.tolist() == [1.0, 1.0, 0.0, 0.0]
    assert len(server.seen) == 3  # what was said is kept, and of no answer nobody is asked
    texts = [request["messages"][0]["content"] for request in server.seen]  # in any order
    (text,) = [text for text in texts if text.endswith(f"Student's answer: 9{known[1]}")]
    assert "What is" in text and f"Reference answer: {known[1]}" in text
    # the log of small judges is the model's: some verdicts are not those of the rows
    pairs, verdicts = free.log.draw(jax.random.key(1), 400, error_rate=0.5)
    texts = [[decode(side[side >= 0].tolist()) for side in np.split(row, 2)] for row in np.asarray(pairs)]
    assert [a[-1] == b[-1] for a, b in texts] == verdicts.tolist()
    truth = np.asarray(plain.log.draw(jax.random.key(1), 400, error_rate=0.0)[1])
    assert (np.asarray(verdicts) != truth).any()
    server.plan = [400] * 9
    other = cross_domain_rlvr.large(settings, free).judge({}, value + 1, answered, answers)
    assert not other.any()  # what nobody judges does not pass


@pytest.mark.slow
@pytest.mark.parametrize("module", [cross_domain_rlvr, general_reasoner])
def test_two_steps(module, server, rows, tmp_path):
    words = [f"--{name.replace('_', '-')}={value}" for name, value in rows.items()]
    first = ["large", "small_soft" if module is cross_domain_rlvr else "cot"]
    given = ["--smoke", "--seeds", "1", "--arm", *first, "--out", str(tmp_path / "run"), "--examples", "8"]
    asked = ["--large-judge", server.address, "--large-judge-model", "someone"]
    found = cli.run(module, [*given, *words, *asked])
    for name, arm in found.arms.items():
        assert np.isfinite(arm.metrics["loss/total"]).all(), name
    assert len(server.seen) > 2


@pytest.mark.parametrize("module", [cross_domain_rlvr, general_reasoner])
def test_what_is_wrong_is_one_line(module, server, rows):
    where = {"large_judge": server.address, "large_judge_model": "someone"}
    with pytest.raises(UserError, match="^--large-judge http.* needs --large-judge-model NAME"):
        module.build(_settings(module, **rows | where | {"large_judge_model": ""}))
    with pytest.raises(UserError, match="compares texts, and --data chain is generated; give rows of your own"):
        module.build(_settings(module, **where))
    server.reply = lambda request: "Who knows?"
    with pytest.raises(UserError, match="asked for YES or NO it says 'Who knows[?]'; raise --endpoint-reply-tokens"):
        module.build(_settings(module, **rows | where | {"endpoint_seed": 1}))


def test_without_a_model_the_large_judge_errs_at_its_rate():
    settings = _settings(cross_domain_rlvr)
    free = text_answers.make_free(settings)
    assert large_judges.by_words(free, settings) is free and free.large is None
    pairs, _ = answer_judges.draw_judgements(jax.random.key(9), 200, error_rate=0.0)
    answers = {"reference": pairs[:, 1], "modulus": pairs[:, 2], "value": pairs[:, 1] % pairs[:, 2]}
    given = pairs[:, 0], jnp.ones(200, bool), answers
    verifier = cross_domain_rlvr.large(settings, free)
    want = answer_judges.large_judge(0.05)(*given)
    np.testing.assert_array_equal(verifier.judge(verifier.fit(jax.random.key(0)), *given), want)

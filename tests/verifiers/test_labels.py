"""Labels of solutions: the last marker counts, host and device agree."""

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.policy_gradient.parts import critique_verifier
from jaxrl_llm.experiment import recipes
from jaxrl_llm.types import Trajectories

CASES = ["#T", "#F", "3+5=8#T", "3+5=8#F", "#F,3+5=8#T", "T", "", "#X", "#TT", "#T#", "3#F4", "#"]


def test_conclusions_by_hand():
    r"""The last label counts; nothing, or no label, is 0."""
    assert critique_verifier.verify_label({"label": True}, r"a \conclusion{F} b \conclusion{T}").value == 1
    assert critique_verifier.verify_label({"label": False}, r"a \conclusion{F} b \conclusion{T}").value == 0
    for text in ("", "T", r"\conclusion{X}", r"\conclusion{}"):
        verdicts = [critique_verifier.verify_label({"label": label}, text) for label in (True, False)]
        assert [v.value for v in verdicts] == [0, 0] and all(v.valid for v in verdicts)


def _rows(texts, ended=True):
    tokenizer = recipes.job.load_model("nano").tokenizer
    width = max(map(len, texts)) + 2
    tokens, mask = np.zeros((len(texts), width), np.int32), np.zeros((len(texts), width), bool)
    for k, text in enumerate(texts):
        ids = [*tokenizer.encode(text), *tokenizer.eos_ids[: int(ended)]]
        tokens[k, : len(ids)], mask[k, : len(ids)] = ids, True
    grid, zeros = jnp.zeros(tokens.shape, jnp.int32), jnp.zeros(len(texts), jnp.int32)
    rows = Trajectories(
        jnp.asarray(tokens), grid, grid, jnp.asarray(mask), grid.astype(jnp.float32), zeros > 0, zeros, zeros
    )
    return tokenizer, rows


def test_device_and_host_agree():
    tokenizer, rows = _rows(CASES)
    verify = critique_verifier.make_label_verifier(tokenizer.encode, tokenizer.eos_ids)
    for kind, label in ((critique_verifier.TRUE, True), (critique_verifier.FALSE, False)):
        got = verify({"label": jnp.full(len(CASES), kind)}, rows).value
        want = [critique_verifier.verify_label({"label": label}, text).value for text in CASES]
        assert got.tolist() == want
    assert not np.asarray(verify({"label": jnp.full(len(CASES), critique_verifier.SOLVE)}, rows).value).any()
    # a response that was cut says nothing
    _, cut = _rows(CASES, ended=False)
    assert not np.asarray(verify({"label": jnp.full(len(CASES), critique_verifier.TRUE)}, cut).value).any()
    with pytest.raises(ValueError, match="2 tokens"):
        critique_verifier.make_label_verifier(lambda text: [1, 2], (2,))

"""A run on streamed rows that is stopped goes on with the next row, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import logprobs
from jaxrl_llm.data.stream import make_stream
from jaxrl_llm.distributed import mesh as meshes
from jaxrl_llm.train import checkpoint, streamed
from jaxrl_llm.train.step import make_update
from jaxrl_llm.types import TrainState
from tests.models_for_tests import dense_rows, small_model

TOKENS = np.random.default_rng(0).integers(0, 24, (10, 6)).astype(np.int32)


def _make(row):
    return {"tokens": TOKENS[row], "row": np.int32(row)}


def _run(folder, steps, mesh=None):
    policy, params, _ = small_model()
    segments, positions = dense_rows(4, 6)

    def loss(params, batch):
        logits = policy.unembed(params, policy.hidden(params, batch["tokens"], positions, segments))
        rows = jnp.sum(jnp.exp2(batch["row"].astype(jnp.float32)))
        return -jnp.mean(logprobs.token_logprobs(logits, batch["tokens"])), {"rows": rows}

    tx = optax.adam(1e-2)
    params = jax.tree.map(jnp.array, params)  # the state is donated
    state = TrainState(params, tx.init(params), jnp.zeros((), jnp.int32), jax.random.key(0), (), {})
    update = make_update(loss, tx)
    return streamed.run(update, state, make_stream(range(10), _make, batch=4), steps=steps, folder=folder, every=2,
                        mesh=mesh)  # fmt: skip


def test_stopped_and_resumed_is_undisturbed(tmp_path):
    whole, figures = _run(tmp_path / "whole", 5)
    _run(tmp_path / "parts", 3)
    assert checkpoint.steps(tmp_path / "parts") == [2, 3]
    again, rest = _run(tmp_path / "parts", 5)
    jax.tree.map(np.testing.assert_array_equal, again.params, whole.params)
    assert rest == figures[3:] and len({step["rows"] for step in figures}) == 5
    assert "next_index" in str(checkpoint.note(checkpoint.latest(tmp_path / "parts")))
    assert _run(tmp_path / "parts", 5)[1] == []


@pytest.mark.slow
def test_rows_of_a_mesh(tmp_path):
    whole, figures = _run(tmp_path / "alone", 3)
    divided, same = _run(tmp_path / "mesh", 3, meshes.parse_mesh("data=2,fsdp=2"))
    assert [x["rows"] for x in same] == [x["rows"] for x in figures]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), divided.params, whole.params)
    with pytest.raises(ValueError, match="every=0"):
        streamed.run(lambda state, batch: (state, {}), whole, None, steps=1, folder=tmp_path, every=0)

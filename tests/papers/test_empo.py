"""Answers are read alike on the device and from text."""

import jax.numpy as jnp
import numpy as np

from experiments.policy_gradient.parts import agreement
from jaxrl_llm.experiment import recipes
from jaxrl_llm.types import Trajectories


def _trajectories(bench, texts):
    tokenizer = bench.model.tokenizer
    width = max(map(len, texts)) + 1
    tokens, mask = np.full((len(texts), width), tokenizer.pad_id, np.int32), np.zeros((len(texts), width), bool)
    for row, text in enumerate(texts):
        ids = [*tokenizer.encode(text), tokenizer.eos_ids[0]]
        tokens[row, : len(ids)], mask[row, : len(ids)] = ids, True
    zeros = jnp.zeros((len(texts),), jnp.int32)
    grid = jnp.zeros((len(texts), width), jnp.int32)
    return Trajectories(
        jnp.asarray(tokens), grid, grid, jnp.asarray(mask), grid.astype(jnp.float32), zeros > 0, zeros, zeros
    )


def test_device_and_host_readers_cluster_alike():
    bench = recipes.bench(recipes.OnlineSettings(train_problems=8, eval_problems=8, max_new_tokens=8))
    rows = _trajectories(bench, ["3+5=8#8", "#8", "1*2=2#2", "2+6=8#8"])
    clusters = []
    for found in (bench, bench._replace(score=None)):
        values, answered = recipes.make_answer_reader(found)(rows)
        assert answered.all()
        clusters.append(agreement.greedy_clusters(agreement.same_values(values, answered), rows.group_ids).tolist())
    assert clusters == [[0, 0, 2, 0]] * 2
    # a response without a marked number has no answer
    assert recipes.make_answer_reader(bench)(_trajectories(bench, ["3+5=8", "#"]))[1].tolist() == [False, False]

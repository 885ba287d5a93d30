"""The gap between sampler and trainer: quantiles of whole batches and of parts, and a limit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.asynchronous import threads
from jaxrl_llm.errors import UserError
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.train import host, parity
from jaxrl_llm.train.methods.builders import make_policy_loss
from jaxrl_llm.train.online import Drawn
from jaxrl_llm.train.step import accumulate
from jaxrl_llm.types import Rewards, TrainState
from tests import close
from tests.models_for_tests import small_model
from tests.traps.tables import random_batch


@pytest.mark.parametrize("scale", [1e-4, 0.3])
def test_quantiles_against_sorting(scale):
    rng = np.random.default_rng(0)
    gap, mask = scale * np.abs(rng.normal(size=(30, 40))).astype(np.float32), rng.random((30, 40)) < 0.7
    metrics = parity.finished(parity.metrics_of(jnp.asarray(gap), jnp.asarray(mask)))
    assert parity.SHARES not in metrics
    exact = gap[mask].astype(np.float64)
    close.assert_near(metrics["kl/sampler_mean"], exact.mean(), terms=int(mask.sum()), magnitude=float(exact.max()))
    assert float(metrics["kl/sampler_max"]) == gap[mask].max()
    for name, level in parity.QUANTILES.items():
        exact = np.quantile(gap[mask], level, method="inverted_cdf")
        assert exact <= float(metrics[name]) <= 1.34 * exact


def test_no_gap_no_tokens_and_no_bound():
    none = jnp.zeros((2, 3))
    for mask in (none > -1, none > 0):
        found = parity.finished(parity.metrics_of(none, mask))
        assert all(float(found[name]) == 0.0 for name in found)
    far = parity.finished(parity.metrics_of(none + 20, none > -1))
    assert float(far["kl/sampler_p50"]) == 20.0  # beyond the last edge the largest is the bound
    other = {"loss": none}
    assert parity.finished(other) is other


def test_parts_of_a_batch_have_the_quantiles_of_the_whole():
    loss = make_policy_loss(small_model()[0], clipped_policy_loss)
    run = jax.jit(accumulate, static_argnums=(0, 3))
    whole, parts = (run(loss, small_model()[1], random_batch(), n)[2] for n in (1, 4))
    for name in parity.QUANTILES:
        # the edge of a bin, next to which a gap may fall on either side: bins grow by a third
        assert 1 / 1.34 <= float(parts[name]) / float(whole[name]) <= 1.34
        assert 0 < float(whole[name]) <= 1.34 * float(whole["kl/sampler_max"])


def test_a_limit_stops_the_run():
    state = TrainState({}, (), jnp.zeros((), jnp.int32), jax.random.key(0), (), {})

    def finish(state, drawn, rewards):
        metrics = {"kl/sampler_max": jnp.full((), 0.2), "kl/sampler_p99": jnp.full((), 0.1)}
        return state._replace(step=state.step + 1), metrics

    drawn = Drawn(jnp.zeros((1,), jnp.int32), (), random_batch())
    loop = host.HostLoop(lambda state: drawn, finish, lambda rows: rows, lambda: 0)
    for most in (0.0, 0.3):
        assert int(host.run(loop._replace(most_gap=most), state, 2)[0].step) == 2
    with pytest.raises(UserError, match=r"step 1: .* up to 0.2 nats off .* within 0.1\), the limit is 0.15"):
        host.run(loop._replace(most_gap=0.15), state, 2)

    def score(rows):
        return Rewards(jnp.zeros((1,)), jnp.ones((1,), bool))

    with pytest.raises(UserError, match=r"step 1: .* up to 0.2 nats off .* within 0.1\), the limit is 0.15"):
        threads.run(loop._replace(score=score, most_gap=0.15), state, 2)
    assert int(threads.run(loop._replace(score=score, most_gap=0.3), state, 2)[0].step) == 2
    with pytest.raises(UserError, match="nan nats off"):
        parity.check({"kl/sampler_max": float("nan")}, 0.1, 3)
    with pytest.raises(UserError, match="--most-gap 0.1: the figures of step 3 have no kl/sampler_max to hold to it"):
        parity.check({"loss/total": 1.0}, 0.1, 3)
    parity.check({"loss/total": 1.0}, 0.0, 3)

"""How near to the roof a step comes: by hand, and in the records of a run."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.planning import chips, utilisation
from jaxrl_llm.planning.chips import Chip
from jaxrl_llm.planning.parallel_layout import Sizes
from jaxrl_llm.run.records import report
from jaxrl_llm.types import Rewards, Trajectories
from tests.close import doubles
from tests.models_for_tests import small_config, small_model

CHIP = Chip(0.0, 1e6, 1e9, 0.0)
PROMPTS = np.array([3, 5])
RESPONSES = np.array([2, 4, 1, 1])


def _least(trained=(True, True, False, False), **changes):
    given = {"prompt_tokens": PROMPTS, "response_tokens": RESPONSES, "trained": np.array(trained)}
    return utilisation.least_seconds(small_config("llama"), CHIP, **given | changes)


def test_by_hand():
    """Four decode steps read weights and half of the caches; the update meets 6 tokens of two rows and their prompt."""
    config = small_config("llama")
    found, count = _least(), config.num_parameters
    active = count if config.tie_embeddings else count - 24 * 16
    cache = 2 * 2 * 2 * 4 * 4  # keys and values, layers, heads, width, bytes
    read = count * 4 + 4 * cache * (4 + 2)
    assert found["rollout"] == doubles(2 * active * 8 / 1e9 + 4 * read / 1e6)
    assert found["update"] == doubles(6 * active * (2 + 4 + 3) / 1e9)


def test_a_base_beside_an_adapter_has_no_gradient_of_its_own():
    assert _least(adapter=True)["update"] == doubles(_least()["update"] * 4 / 6)
    assert _least(adapter=True)["rollout"] == _least()["rollout"]


def test_what_does_not_train_costs_no_update_and_more_chips_take_less():
    assert _least(trained=(False,) * 4)["update"] == 0
    one, four = _least(), _least(sizes=Sizes(data=4))
    assert four["update"] == doubles(one["update"] / 4)
    assert four["rollout"] < one["rollout"]
    # many rows: operations bind, not the weights
    wide = {"response_tokens": np.full(4000, 4), "trained": np.ones(4000, bool)}
    assert _least(**wide)["rollout"] > 4 * 2 * small_config("llama").num_parameters * 3000 / 1e9


def test_rates_are_positive_and_measured_once():
    chip = utilisation.measured(jnp.float32, side=64, repeats=1)
    assert chip.flops > 0 and chip.bandwidth > 0
    assert utilisation.measured(jnp.float32, side=64, repeats=1) is chip


def _rows():
    """Two prompts of three and two tokens, two rows each."""
    width = jnp.arange(8, dtype=jnp.int32)[None]
    start, end = jnp.array([[1], [1], [2], [2]]), jnp.array([[6], [8], [5], [5]])
    mask = (width >= 4) & (width < end)
    segments = ((width >= start) & (width < end)).astype(jnp.int32)
    tokens, ids = jnp.ones((4, 8), jnp.int32), jnp.arange(4, dtype=jnp.int32) // 2
    return Trajectories(
        tokens, segments, tokens, mask, jnp.zeros((4, 8)), jnp.zeros((4,), bool), group_ids=ids, problem_ids=ids
    )


def test_shares_of_a_batch(monkeypatch):
    monkeypatch.setattr(utilisation, "of_device", lambda dtype: CHIP)
    _, params, config = small_model("llama")
    rows = _rows()
    rewards = Rewards(jnp.array([1.0, 0, 1, 1]), jnp.array([True, True, True, False]))
    seconds = {"rollout": 2.0, "score": 1.0, "update": 0.5}
    every = utilisation.make_roof(config, jnp.float32, group_size=2)(rows, rewards, seconds)
    some = utilisation.make_roof(config, jnp.float32, group_size=2, keep=lambda rows, rewards: rewards.value < 0.5)
    assert set(every) == {"roof/rollout", "roof/update"}
    assert some(rows, rewards, seconds)["roof/update"] < every["roof/update"]
    assert some(rows, rewards, seconds)["roof/rollout"] == every["roof/rollout"] > 0
    beside = utilisation.make_roof(config, jnp.float32, group_size=2, adapter=True)(rows, rewards, seconds)
    assert beside["roof/update"] == doubles(every["roof/update"] * 4 / 6)
    double = utilisation.make_roof(config, jnp.float32, group_size=2)(rows, rewards, seconds | {"rollout": 4.0})
    assert double["roof/rollout"] == doubles(every["roof/rollout"] / 2)


def test_phases_of_a_run_leave_the_compilation_out():
    def line(rollout, score, update, roof):
        return {
            "time/rollout_s": rollout, "time/score_s": score, "time/update_s": update, "roof/rollout": roof,
            "roof/update": 2 * roof,
        }  # fmt: skip

    found = report.phases([line(90.0, 1.0, 90.0, 0.0), line(2.0, 1.0, 1.0, 0.1), line(2.0, 1.0, 1.0, 0.2)])
    assert found["rollout"] == {"share": 0.5, "roof": doubles(0.15)}
    assert found["score"] == {"share": 0.25, "roof": None}
    assert found["update"]["roof"] == doubles(0.3)
    assert report.phases([line(3.0, 1.0, 0.0, 0.1)])["rollout"]["share"] == 0.75
    counts = (3, 3, 4, 4)  # a layout of another shape in the third step
    later = [line(2.0, 1.0, u, 0.1) | {"compile/count": n} for n, u in zip(counts, (90.0, 1.0, 90.0, 1.0), strict=True)]
    assert report.phases(later)["update"]["share"] == 0.25


def test_devices_are_known_by_kind():
    assert jax.devices()[0].device_kind not in utilisation.KINDS
    assert set(utilisation.KINDS.values()) == {*chips.CHIPS, *chips.GPUS}

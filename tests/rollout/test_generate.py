import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import logprobs
from jaxrl_llm.distributed import mesh as meshes
from jaxrl_llm.distributed import rules
from jaxrl_llm.rollout.generate import generate
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.rollout.sample import draw, first_largest, support
from tests import close
from tests.models_for_tests import FAMILIES, small_model

EOS = (2, 5)
PROMPTS = jnp.array([[0, 0, 7, 8], [9, 3, 1, 6], [0, 4, 4, 1]], jnp.int32)
VALID = jnp.array([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]], bool)


def _sample(family="qwen3", prompts=PROMPTS, valid=VALID, ids=(10, 11, 12), new=6, groups=3, step=4, **options):
    policy, params, _ = small_model(family)
    ids = jnp.asarray(ids, jnp.int32)
    keys = sample_keys(jax.random.key(0), step, ids, groups)
    return generate(
        policy, params, prompts, valid, keys,
        group_size=groups, max_new_tokens=new, eos_ids=EOS, problem_ids=ids, **options,
    )  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_sampler_logp_is_the_trainers(family, temperature):
    policy, params, _ = small_model(family)
    out = _sample(family, temperature=temperature)
    hidden = policy.hidden(params, out.tokens, out.positions, out.segment_ids)
    logp = logprobs.token_logprobs(
        policy.unembed(params, hidden), out.tokens, temperature=temperature, segment_ids=out.segment_ids
    )
    keep = np.asarray(out.mask)
    close.assert_same_forward(
        np.asarray(logp)[keep], np.asarray(out.sampler_logp)[keep], family, temperature=temperature, columns=10
    )


def test_mask_is_the_sampled_tokens_up_to_the_first_end():
    out = _sample(new=8)
    tokens, mask = np.asarray(out.tokens)[:, 4:], np.asarray(out.mask)
    assert not mask[:, :4].any()
    ended = []
    for row, kept, cut in zip(tokens, mask[:, 4:], np.asarray(out.truncated), strict=True):
        ends = [t for t, x in enumerate(row) if x in EOS and kept[t]]
        length = ends[0] + 1 if ends else 8
        assert kept.tolist() == [True] * length + [False] * (8 - length)
        assert cut == (not ends)
        assert (row[length:] == 0).all()
        ended.append(bool(ends))
    assert any(ended) and not all(ended)  # both kinds are in the sample


@pytest.mark.parametrize("eos", [2, 5])
def test_every_end_id_ends_and_an_immediate_end_has_one_token(eos):
    policy, params, config = small_model()
    forced = policy._replace(
        unembed=lambda p, h: jnp.where(jnp.arange(config.vocab_size) == eos, 50.0, 0.0) + jnp.zeros((*h.shape[:-1], 1))
    )
    with jax.numpy_rank_promotion("allow"):
        keys = jax.random.split(jax.random.key(0), 3)
        out = generate(forced, params, PROMPTS, VALID, keys, group_size=1, max_new_tokens=5, eos_ids=EOS)
    assert out.mask.sum(axis=1).tolist() == [1, 1, 1]
    assert (out.tokens[:, 4] == eos).all() and not out.truncated.any()


def test_no_end_is_truncated():
    policy, params, _ = small_model()
    keys = jax.random.split(jax.random.key(0), 3)
    out = generate(policy, params, PROMPTS, VALID, keys, group_size=1, max_new_tokens=5, eos_ids=(99,))
    assert out.truncated.all() and out.mask[:, 4:].all()


def test_scan_and_early_exit_agree():
    a, b = _sample(early_exit=True), _sample(early_exit=False)
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("family", ["gemma2", pytest.param("qwen3", marks=pytest.mark.slow)])  # windows and none
def test_a_cache_that_grows_gives_the_same(family):
    whole = _sample(family, new=7)
    lengths = np.asarray(whole.mask.sum(axis=1))
    assert lengths.min() < 3 < 7 == lengths.max()  # some end in the first stage, some in none
    for options in (
        {"cache_stages": 3},
        {"cache_stages": 9, "early_exit": False},
        {"cache_stages": 2, "row_stages": 3},
    ):
        grown = _sample(family, new=7, **options)
        jax.tree.map(np.testing.assert_array_equal, grown._replace(sampler_logp=0), whole._replace(sampler_logp=0))
        close.assert_same_forward(grown.sampler_logp, whole.sampler_logp, family)


@pytest.mark.parametrize(
    "family, stages",
    [("qwen3", 2), ("qwen3", 9), pytest.param("gemma2", 3, marks=pytest.mark.slow)],
)
def test_a_batch_that_shrinks_gives_the_same(family, stages):
    """Whatever ends first: every row keeps its key, its temperature, its cache and its place."""
    warmth = jnp.linspace(0.6, 1.6, 9).astype(jnp.float32)
    settings = {"new": 12, "temperature": warmth, "top_p": jnp.full((9,), 0.95, jnp.float32)}
    whole = _sample(family, **settings)
    lengths = np.asarray(whole.mask.sum(axis=1))
    assert len(set(lengths.tolist())) > 2 and (np.diff(lengths) > 0).any() and (np.diff(lengths) < 0).any()
    shrunk = _sample(family, row_stages=stages, **settings)
    jax.tree.map(np.testing.assert_array_equal, shrunk._replace(sampler_logp=0), whole._replace(sampler_logp=0))
    close.assert_same_forward(shrunk.sampler_logp, whole.sampler_logp, family, temperature=0.6)


@pytest.mark.filterwarnings("error:ndim requires")  # of a number that is None
def test_a_batch_that_shrinks_runs_fewer_rows():
    """Counted where the tokens are: no batch is larger than its stage allows."""
    policy, params, _ = small_model()
    seen = []

    def extend(params, cache, tokens, *rest):
        jax.debug.callback(lambda t: seen.append(t.shape), tokens)
        return policy.extend(params, cache, tokens, *rest)

    keys = sample_keys(jax.random.key(0), 4, jnp.asarray([10, 11, 12], jnp.int32), 3)
    out = generate(
        policy._replace(extend=extend), params, PROMPTS, VALID, keys, group_size=3, max_new_tokens=9, eos_ids=EOS,
        row_stages=9,
    )  # fmt: skip
    jax.effects_barrier()
    alive = np.asarray(out.mask).sum(axis=0)[4:]
    assert [rows for rows, columns in seen if columns == 1] == [rows for rows in alive[:-1] if rows]


def test_sample_depends_on_run_step_prompt_and_sample_only():
    """Trap 21: reordering, dropping prompts or adding columns of padding changes no sample."""
    whole = _sample()
    by_prompt = {int(i): np.asarray(whole.tokens)[k * 3 : k * 3 + 3, 4:] for k, i in enumerate((10, 11, 12))}
    order = jnp.array([2, 0])
    wide = jnp.pad(PROMPTS[order], ((0, 0), (3, 0)))
    some = _sample(prompts=wide, valid=jnp.pad(VALID[order], ((0, 0), (3, 0))), ids=(12, 10))
    for k, i in enumerate((12, 10)):
        np.testing.assert_array_equal(np.asarray(some.tokens)[k * 3 : k * 3 + 3, 7:], by_prompt[i])
    assert not np.array_equal(np.asarray(_sample(step=5).tokens), np.asarray(whole.tokens))
    first = by_prompt[10]
    assert not np.array_equal(first[0], first[1])  # samples of a group differ


@pytest.mark.slow
def test_greedy_alone_equals_greedy_in_a_ragged_batch():
    """Trap 2: positions come from each row."""
    whole = _sample(groups=1, temperature=0.0)
    for k in range(3):
        keep = np.asarray(VALID)[k]
        row = PROMPTS[k][keep][None]
        alone = _sample(prompts=row, valid=jnp.ones_like(row, bool), ids=(1,), groups=1, temperature=0.0)
        np.testing.assert_array_equal(alone.tokens[0, row.shape[1] :], whole.tokens[k, 4:])


@pytest.mark.parametrize("spec", ["data=8", "fsdp=8", "fsdp=4,tensor=2", "data=2,fsdp=2,tensor=2"])
def test_any_mesh_gives_the_one_device_samples(spec):
    policy, params, _ = small_model()
    prompts, valid = jnp.tile(PROMPTS[1:2], (8, 1)), jnp.ones((8, 4), bool)
    ids = jnp.arange(8, dtype=jnp.int32)

    def sample(params, prompts, valid):
        keys = sample_keys(jax.random.key(0), 0, ids, 2)
        return generate(policy, params, prompts, valid, keys, group_size=2, max_new_tokens=6, eos_ids=EOS)

    alone = jax.jit(sample)(params, prompts, valid)
    mesh = meshes.parse_mesh(spec)
    rows = jax.device_put((prompts, valid), meshes.batch_sharding(mesh))
    spread = jax.jit(sample)(rules.shard(params, mesh), *rows)
    np.testing.assert_array_equal(alone.tokens, spread.tokens)
    np.testing.assert_array_equal(alone.mask, spread.mask)
    close.assert_same_forward(spread.sampler_logp, alone.sampler_logp)


LOGITS = jnp.log(jnp.array([[0.5, 0.25, 0.15, 0.1]]))


@pytest.mark.parametrize(
    "options, kept",
    [({"top_k": 2}, [0, 1]), ({"top_p": 0.6}, [0, 1]), ({"top_p": 0.5}, [0]), ({"min_p": 0.4}, [0, 1]),
     ({"top_k": 3, "top_p": 0.95, "min_p": 0.25}, [0, 1, 2]), ({"top_p": 1e-6}, [0])],
)  # fmt: skip
def test_support(options, kept):
    assert np.flatnonzero(support(LOGITS, **options)[0]).tolist() == kept
    keys = jax.random.split(jax.random.key(0), 400)
    tokens, logp = draw(jnp.tile(LOGITS, (400, 1)), keys, **options)
    assert set(tokens.tolist()) == set(kept)
    close.assert_near(logp, LOGITS[0][tokens], terms=4)  # of the whole distribution


def test_a_mass_of_one_filters_nothing():
    """The running sum of 32,000 likelihoods may reach 1 in float32 before the last token: 21 tokens of these."""
    logits = jnp.asarray(2 * np.random.default_rng(2).normal(size=(1, 32_000)), jnp.float32)
    assert support(logits, top_p=1.0).all() and support(logits, top_p=jnp.ones(1)).all()
    assert not support(logits, top_p=0.999).all()
    keys = jax.random.split(jax.random.key(0), 1)
    for whole in (1.0, jnp.ones(1)):
        np.testing.assert_array_equal(draw(logits, keys, top_p=whole)[0], draw(logits, keys)[0])


def _by_sorting(logits, top_k=None, top_p=None, min_p=None):
    """The definition of ``support``."""
    out = np.zeros(logits.shape, bool)
    for row, values in enumerate(np.asarray(logits)):
        order = np.argsort(-values, kind="stable")
        probs = np.exp(values - values.max()).astype(np.float64)
        probs /= probs.sum()
        before = np.cumsum(probs[order]) - probs[order]
        mass = None if top_p is None else float(np.broadcast_to(top_p, logits.shape[:1])[row])
        for rank, token in enumerate(order):
            out[row, token] = np.isfinite(values[token]) and (
                (top_k is None or rank < top_k)
                and (mass is None or mass >= 1 or before[rank] < mass - 1e-9)
                and (min_p is None or probs[token] >= min_p * probs.max())
            )
        out[row, order[0]] = True
    return out


@pytest.mark.parametrize(
    "how", [{"top_k": 1}, {"top_k": 7}, {"top_k": 200}, {"top_p": 0.31}, {"top_p": 0.93}, {"min_p": 0.07},
            {"top_k": 9, "top_p": 0.71, "min_p": 0.01}, {"top_p": np.float32([0.2, 0.77, 1.0, 0.5, 0.9])}],
)  # fmt: skip
def test_what_may_be_drawn_is_what_sorting_says(how):
    """Rows of few different logits, hence many ties, of large and small ones, of both zeros, and of impossible ones."""
    random = np.random.default_rng(0)
    logits = random.normal(size=(5, 150)).astype(np.float32) * np.float32([[1], [8], [0.05], [1], [3]])
    logits[3] = random.integers(-2, 3, 150)
    logits[3, 10:14] = -0.0
    logits[4, 60:] = -np.inf
    given = {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in how.items()}
    got = jax.jit(lambda x: support(x, **given))(jnp.asarray(logits))
    np.testing.assert_array_equal(got, _by_sorting(logits, **how))
    text = jax.jit(lambda x: support(x, **given)).lower(jnp.asarray(logits)).as_text()
    assert "sort" not in text


def test_rows_may_have_their_own_temperature_and_top_p():
    keys, logits = jax.random.split(jax.random.key(0), 200), jnp.tile(LOGITS, (200, 1))
    third = jnp.arange(200) % 3
    found = draw(
        logits, keys, temperature=jnp.asarray([0.0, 1.0, 1.7])[third], top_p=jnp.asarray([1.0, 0.8, 0.6])[third]
    )
    for k, (temperature, top_p) in enumerate([(0.0, 1.0), (1.0, 0.8), (1.7, 0.6)]):
        alone = draw(logits[k::3], keys[k::3], temperature=temperature, top_p=top_p)
        np.testing.assert_array_equal(found[0][k::3], alone[0])
        close.assert_near(found[1][k::3], alone[1], terms=4)


@pytest.mark.slow
def test_prompts_read_in_parts_give_the_same():
    for columns in (1, 3, 4, 9):
        found, whole = _sample(prefill_columns=columns), _sample()
        np.testing.assert_array_equal(found.tokens, whole.tokens)
        close.assert_same_forward(found.sampler_logp, whole.sampler_logp)


def test_first_largest_is_argmax():
    x = jnp.round(4 * jax.random.normal(jax.random.key(0), (64, 33)))  # with ties
    x = x.at[0].set(-jnp.inf).at[1, 5].set(jnp.inf)
    np.testing.assert_array_equal(first_largest(x), jnp.argmax(x, axis=1))


def test_frequencies_follow_the_tempered_distribution():
    n = 20000
    tokens, logp = draw(jnp.tile(LOGITS, (n, 1)), jax.random.split(jax.random.key(1), n), temperature=2.0)
    want = np.sqrt([0.5, 0.25, 0.15, 0.1])
    want /= want.sum()
    close.assert_share(np.bincount(tokens, minlength=4) / n, want, n)
    close.assert_near(logp, np.log(want)[np.asarray(tokens)], terms=4)


@pytest.mark.parametrize(
    "options, name",
    [
        ({"temperature": -1.0}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"min_p": 2.0}, "min_p"),
        ({"prefill_columns": -1}, "prefill_columns"),
        ({"cache_stages": 0}, "cache_stages"),
        ({"row_stages": 0}, "row_stages"),
        ({"row_stages": 2, "early_exit": False}, "row_stages"),
    ],
)
def test_mistakes_are_named(options, name):
    with pytest.raises(ValueError, match=f"{name}="):
        _sample(**options)
    with pytest.raises(ValueError, match="max_new_tokens"):
        _sample(new=0)

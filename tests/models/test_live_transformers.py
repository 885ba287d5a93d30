"""The same comparison as the stored one, against transformers itself where it is installed (extra ``parity``)."""

import copy
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from jaxrl_llm.models import heads  # noqa: E402
from jaxrl_llm.models.decoder import make_policy  # noqa: E402
from jaxrl_llm.models.io import weights  # noqa: E402
from jaxrl_llm.rollout.generate import generate  # noqa: E402
from jaxrl_llm.train.methods import supervised  # noqa: E402
from tests import close  # noqa: E402
from tests.models_for_tests import ALL_FAMILIES, small_config  # noqa: E402

SHAPE = {
    "vocab_size": 31, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3, "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
GPT2 = {"vocab_size": 31, "n_embd": 24, "n_layer": 3, "n_head": 6, "n_positions": 128, "initializer_range": 0.3,
        "bos_token_id": 0, "eos_token_id": 1}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16, "rope_theta": 10000.0}  # fmt: skip
MOE = {"head_dim": 6, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
GEMMA = {"head_dim": 6, "sliding_window": 4, "query_pre_attn_scalar": 5, "num_hidden_layers": 4}
ROPES = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
         "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}  # fmt: skip
CASES = {
    "llama": ("Llama", SHAPE),
    "llama_tied": ("Llama", SHAPE | {"tie_word_embeddings": True}),
    "llama_bias": ("Llama", SHAPE | {"attention_bias": True}),
    "llama_linear": ("Llama", SHAPE | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    "llama3": ("Llama", SHAPE | {"rope_parameters": LLAMA3}),
    "mistral": ("Mistral", SHAPE | {"sliding_window": 4}),
    "mistral_no_window": ("Mistral", SHAPE | {"sliding_window": None, "head_dim": 8, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", SHAPE | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2_tied_one_kv": ("Qwen2", SHAPE | {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3": ("Qwen3", SHAPE | {"head_dim": 8}),
    "qwen3_tied_bias": ("Qwen3", SHAPE | {"head_dim": 6, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3Moe", SHAPE | MOE | {"norm_topk_prob": True}),
    "qwen3_moe_raw": ("Qwen3Moe", SHAPE | MOE | {"tie_word_embeddings": True}),
    "gemma2": ("Gemma2", SHAPE | GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma2_no_caps": ("Gemma2", SHAPE | GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": ("Gemma3Text", SHAPE | GEMMA | {"rope_parameters": ROPES, "sliding_window_pattern": 2}),
    "gpt2": ("GPT2", GPT2),
    "gpt2_untied_wide": ("GPT2", GPT2 | {"tie_word_embeddings": False, "n_inner": 50}),
    "phi3": ("Phi3", SHAPE),
    "phi3_window": ("Phi3", SHAPE | {"sliding_window": 4, "tie_word_embeddings": True}),
}
HEADS = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}
ROWS, LENGTH = ((0, 12), (4, 12), (11, 12), (0, 7), (0, 1)), 12  # dense, left-padded, right-padded


def _model(case):
    name, settings = CASES[case]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**settings)
    config._attn_implementation = "eager"
    model = getattr(transformers, HEADS.get(name, f"{name}ForCausalLM"))(config).float().eval()
    with torch.no_grad():  # norms and biases start at one and zero: move them
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name or "bias" in parameter_name or ".ln_" in parameter_name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def _rows():
    valid = np.zeros((len(ROWS), LENGTH), np.int32)
    for row, (start, stop) in zip(valid, ROWS, strict=True):
        row[start:stop] = 1
    return np.random.default_rng(0).integers(0, 31, valid.shape), valid


def _theirs(model, tokens, valid):
    positions = np.maximum(np.cumsum(valid, axis=1) - 1, 0)
    with torch.no_grad():
        return model(
            torch.tensor(tokens), attention_mask=torch.tensor(valid), position_ids=torch.tensor(positions)
        ).logits.numpy()


def _ours(policy, params, tokens, valid, cuts):
    tokens, valid = jnp.asarray(tokens, jnp.int32), jnp.asarray(valid)
    positions = jnp.maximum(jnp.cumsum(valid, axis=1) - 1, 0)
    if not cuts:
        return np.asarray(policy.unembed(params, policy.hidden(params, tokens, positions, valid)))
    cache, parts, start = policy.init_cache(*tokens.shape), [], 0
    for stop in (*cuts, tokens.shape[1]):
        part = slice(start, stop)
        hidden, cache = policy.extend(params, cache, tokens[:, part], positions[:, part], valid[:, part], start)
        parts.append(np.asarray(policy.unembed(params, hidden)))
        start = stop
    return np.concatenate(parts, axis=1)


def _loaded_cleanly(folder, **kinds):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager", **kinds
    )
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


@pytest.mark.parametrize("case", CASES)
def test_logits_greedy_tokens_and_the_way_back(tmp_path, case):
    """A folder of transformers in shards: ragged rows whole and cached, 64 tokens, and written again unchanged."""
    model = _model(case)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="12KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").is_file()
    policy, params, config = weights.pretrained(tmp_path / "theirs")
    tokens, valid = _rows()
    want, keep = _theirs(model, tokens, valid), valid > 0
    for cuts in ((), (8, 9, 10, 11)):
        close.assert_same_forward(_ours(policy, params, tokens, valid, cuts)[keep], want[keep], config, columns=LENGTH)

    rows = tokens[:2].copy()  # dense and left-padded in one batch
    out = generate(
        policy, params, jnp.asarray(rows, jnp.int32), jnp.asarray(valid[:2], bool),
        jax.random.split(jax.random.key(0), 2), group_size=1, max_new_tokens=64, eos_ids=(config.vocab_size,),
        temperature=0.0,
    )  # fmt: skip
    for got, (start, _) in zip(np.asarray(out.tokens), ROWS, strict=False):
        row = torch.tensor(got[None, start:LENGTH].astype(np.int64))
        with torch.no_grad():
            for _ in range(64):
                row = torch.cat([row, model(row, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
        assert got[LENGTH:].tolist() == row[0, LENGTH - start :].tolist()

    weights.save(tmp_path / "ours", config, params)
    again = _loaded_cleanly(tmp_path / "ours", dtype="float32").state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, again[name]), name


@pytest.mark.parametrize("case", ["llama", "qwen3_moe", "gemma2", "gpt2", "phi3"])
def test_a_bfloat16_folder_of_transformers(tmp_path, case):
    model = _model(case)
    with torch.no_grad():  # the numbers are rounded, not its tables of angles
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(tmp_path)
    policy, params, config = weights.pretrained(tmp_path)
    tokens, valid = _rows()
    want, keep = _theirs(model, tokens, valid), valid > 0
    close.assert_same_forward(_ours(policy, params, tokens, valid, ())[keep], want[keep], config, columns=LENGTH)


@pytest.mark.parametrize("family", ALL_FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_loads_a_folder_written_here(tmp_path, family, dtype):
    config = small_config(family, vocab_size=31, pad_token_id=0)
    policy = weights.make_policy(config)
    weights.save(tmp_path, config, policy.init(jax.random.key(0)), dtype=dtype)
    model = _loaded_cleanly(tmp_path, dtype="float32")
    tokens, valid = _rows()
    got = _ours(policy, weights.load(tmp_path, config), tokens, valid, ())
    want = _theirs(model, tokens, valid)
    close.assert_same_forward(got[valid > 0], want[valid > 0], config, columns=LENGTH)


def test_bundled_model_is_a_transformers_model():
    folder = weights.bundled("nano")
    policy, params, config = weights.pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    tokens, valid = _rows()
    got = _ours(policy, params, tokens, valid, ())
    want = _theirs(model, tokens, valid)
    close.assert_same_forward(got[valid > 0], want[valid > 0], config, columns=LENGTH)
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == config.vocab_size


@pytest.mark.parametrize("case", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gpt2", "phi3"])
def test_rewards_of_a_sequence_classifier(case, tmp_path):
    """One number at the last token of every row, whatever its length, of a folder without a vocabulary's projection."""
    name, settings = CASES[case]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**settings, num_labels=1)
    model = getattr(transformers, f"{name}ForSequenceClassification")(config).float().eval()
    with torch.no_grad():
        model.score.weight.normal_(0.0, 1.0)
    model.save_pretrained(tmp_path)
    rows = [[2, 9, 4, 7, 30, 3], [5, 6, 11]]
    with torch.no_grad():
        want = [model(input_ids=torch.tensor([row])).logits[0, 0].item() for row in rows]
    policy, params, ours = weights.pretrained(tmp_path, judges=True)
    head = weights.reward_head(tmp_path, ours.hidden_size)
    table = jax.tree.map(
        jnp.asarray, supervised.filled_up([(row, [True] * len(row)) for row in rows], width=8, pad_id=0)
    )
    hidden = policy.hidden(params, table.tokens, table.positions, table.segment_ids)
    got = heads.sequence_rewards(head, hidden, table.segment_ids)
    sums = close.forward_sums(ours, 8) + ours.hidden_size
    close.assert_same_sums(got, np.asarray(want), sums, magnitude=float(np.abs(np.asarray(hidden)).max()))


def test_transformers_reads_a_reward_model_written_here(tmp_path):
    config = small_config("qwen3", vocab_size=31, pad_token_id=0)
    policy = make_policy(config)
    params, head = policy.init(jax.random.key(0)), heads.init_head(config.hidden_size, jax.random.key(1), scale=1.0)
    weights.save(tmp_path, config, params, score=np.asarray(head["weight"]).T)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    tokens = jnp.asarray([[3, 9, 4, 7, 30, 5]], jnp.int32)
    with torch.no_grad():
        want = theirs(input_ids=torch.tensor(np.asarray(tokens))).logits[:, 0].numpy()
    column = jnp.arange(6, dtype=jnp.int32)[None]
    got = heads.sequence_rewards(head, policy.hidden(params, tokens, column, column * 0 + 1), column * 0 + 1)
    close.assert_same_sums(got, want, close.forward_sums(config, 6) + config.hidden_size, magnitude=8.0)

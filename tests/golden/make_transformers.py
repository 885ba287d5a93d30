"""Makes transformers.json: logits and greedy tokens of transformers on small models (needs the extra ``parity``).

Run:  python -m tests.golden.make_transformers
Weights come from a written-out formula, so the file holds only configurations, inputs and expected values.
"""

import json
import pathlib
import tempfile

import jax
import numpy as np
import safetensors.numpy

from jaxrl_llm.models import config as model_config
from jaxrl_llm.models.io import weights

PATH = pathlib.Path(__file__).with_name("transformers.json")
BASE = {
    "vocab_size": 24, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
GPT2 = {"model_type": "gpt2", "vocab_size": 24, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 128,
        "bos_token_id": 0, "eos_token_id": 1}  # fmt: skip
GEMMA = {"head_dim": 4, "sliding_window": 3, "query_pre_attn_scalar": 6, "hidden_activation": "gelu_pytorch_tanh"}
MOE = {"model_type": "qwen3_moe", "head_dim": 4, "num_experts": 5, "num_experts_per_tok": 2,
       "moe_intermediate_size": 8}  # fmt: skip
CASES = {
    "llama": BASE | {"model_type": "llama", "head_dim": 4, "tie_word_embeddings": False},
    "llama3_rope": BASE | {"model_type": "llama", "head_dim": 4, "tie_word_embeddings": False, "rope_scaling": LLAMA3},
    "qwen2": BASE | {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": BASE | {"model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True},
    "qwen3_moe": BASE | MOE | {"norm_topk_prob": True, "tie_word_embeddings": False},
    "qwen3_moe_raw_weights": BASE | MOE | {"norm_topk_prob": False, "tie_word_embeddings": True},
    "mistral": BASE | {"model_type": "mistral", "sliding_window": 3, "tie_word_embeddings": False},
    "gemma2": BASE | GEMMA | {"model_type": "gemma2", "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3": BASE | GEMMA | {"model_type": "gemma3_text", "num_hidden_layers": 3, "sliding_window_pattern": 2,
                              "rope_theta": 1e5, "rope_local_base_freq": 50.0},
    "gpt2": GPT2,
    "phi3": BASE | {"model_type": "phi3", "sliding_window": None, "tie_word_embeddings": False},
    "phi3_partial_rotary": BASE | {"model_type": "phi3", "sliding_window": 4, "partial_rotary_factor": 0.5,
                                   "tie_word_embeddings": True},
}  # fmt: skip
ROWS = [[3, 1, 4, 1, 5, 9, 2, 6], [0, 0, 5, 8, 9, 7, 9, 3], [2, 7, 1, 8, 2, 0, 0, 0]]
VALID = [[1] * 8, [0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0, 0]]  # full, left-padded, right-padded
NEW_TOKENS = 64


def tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Weights by formula: norms near 1, the rest a slow sine of name and index."""
    phase = sum(map(ord, name)) % 97
    wave = np.sin(phase + 0.37 * np.arange(1, int(np.prod(shape)) + 1, dtype=np.float64) ** 1.3).reshape(shape)
    return (1 + 0.2 * wave if "norm" in name or ".ln_" in name else 0.35 * wave).astype(np.float32)


def write_folder(folder: pathlib.Path, raw: dict) -> pathlib.Path:
    """A model folder with these weights under the names that files of the family use."""
    config = model_config.from_hf(raw)
    weights.save(folder, config, jax.tree.map(np.asarray, weights.make_policy(config).init(jax.random.key(0))))
    stored = safetensors.numpy.load_file(folder / "model.safetensors")
    safetensors.numpy.save_file({n: tensor(n, x.shape) for n, x in stored.items()}, folder / "model.safetensors",
                                metadata={"format": "pt"})  # fmt: skip
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def main() -> None:
    import torch
    import transformers

    out = {"rows": ROWS, "valid": VALID, "cases": {}}
    for case, raw in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                write_folder(pathlib.Path(folder), raw), dtype="float32", attn_implementation="eager",
                output_loading_info=True,
            )  # fmt: skip
        assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), (case, info)
        with torch.no_grad():
            valid = torch.tensor(VALID)
            positions = (valid.cumsum(1) - 1).clamp(min=0)
            logits = model.eval()(torch.tensor(ROWS), attention_mask=valid, position_ids=positions).logits
            row = torch.tensor(ROWS[:1])
            for _ in range(NEW_TOKENS):  # the plain forward pass, no cache
                row = torch.cat([row, model(row, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
        out["cases"][case] = {"config": raw, "logits": np.round(logits.double().numpy(), 5).tolist(),
                              "greedy": row[0, 8:].tolist()}  # fmt: skip
        print(case, float(logits.abs().max()), len(set(out["cases"][case]["greedy"])))
    PATH.write_text(json.dumps(out))
    print(PATH, transformers.__version__, torch.__version__)


if __name__ == "__main__":
    main()

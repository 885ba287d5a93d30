"""Makes transformers.json: logits of transformers on small random models (needs the extra ``parity``).

Run:  python -m tests.golden.make_transformers
Weights come from a written-out formula, so the file holds only configurations, inputs and expected logits.
"""

import json
import pathlib

import numpy as np

PATH = pathlib.Path(__file__).with_name("transformers.json")
BASE = {
    "vocab_size": 24, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
CASES = {
    "llama": {"model_type": "llama", "head_dim": 4, "tie_word_embeddings": False},
    "llama3_rope": {"model_type": "llama", "head_dim": 4, "tie_word_embeddings": False, "rope_scaling": LLAMA3},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True},
}
ROWS = [[3, 1, 4, 1, 5, 9, 2, 6], [0, 0, 5, 8, 9, 7, 9, 3], [2, 7, 1, 8, 2, 0, 0, 0]]
VALID = [[1] * 8, [0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0, 0]]  # full, left-padded, right-padded


def tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Weights by formula: norms near 1, the rest a slow sine of name and index."""
    phase = sum(map(ord, name)) % 97
    wave = np.sin(phase + 0.37 * np.arange(1, int(np.prod(shape)) + 1, dtype=np.float64) ** 1.3).reshape(shape)
    return (1 + 0.2 * wave if "norm" in name else 0.35 * wave).astype(np.float32)


def main() -> None:
    import torch
    import transformers

    names = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    out = {"rows": ROWS, "valid": VALID, "cases": {}}
    for case, changes in CASES.items():
        raw = BASE | changes
        family = names[raw["model_type"]]
        config = getattr(transformers, f"{family}Config")(**{k: v for k, v in raw.items() if k != "model_type"})
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(torch.tensor(tensor(name, tuple(parameter.shape))))
            valid = torch.tensor(VALID)
            positions = (valid.cumsum(1) - 1).clamp(min=0)
            logits = model(torch.tensor(ROWS), attention_mask=valid, position_ids=positions).logits
            greedy = model.generate(
                torch.tensor(ROWS[:1]), max_new_tokens=16, do_sample=False, pad_token_id=0, eos_token_id=None
            )
        out["cases"][case] = {"config": raw, "logits": np.round(logits.double().numpy(), 6).tolist(),
                              "greedy": greedy[0, 8:].tolist()}  # fmt: skip
    PATH.write_text(json.dumps(out))
    print(PATH, transformers.__version__, torch.__version__)


if __name__ == "__main__":
    main()

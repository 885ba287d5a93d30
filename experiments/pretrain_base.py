"""Trains the bundled base models ``tiny`` and ``nano`` from the committed generators.

Run:  python -m experiments.pretrain_base --size nano
      python -m experiments.pretrain_base --size tiny
Writes the model in Hugging Face layout to ``--out`` (default: jaxrl_llm/assets/<size>), and the loss curve, the
accuracy per task and the command to results/pretrain_base/<size>.json and .png.

Supervised next-token loss on responses of the mixture of ``data.corpus``, where a stated share of solutions is flawed.
"""

import dataclasses
import json
import pathlib
import sys
import tempfile
import time
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

import jaxrl_llm
from jaxrl_llm.data import corpus
from jaxrl_llm.data import tokenizer as tokenizers
from jaxrl_llm.models import weights
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import make_policy

SHAPES = {
    "nano": {"hidden_size": 64, "intermediate_size": 192, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2},
    "tiny": {"hidden_size": 128, "intermediate_size": 384, "num_layers": 5, "num_heads": 4, "num_kv_heads": 2},
}
PER_CALL = 20  # optimiser steps in one compiled call


@dataclasses.dataclass(frozen=True)
class Settings:
    """Pre-training of a bundled base model."""

    size: Literal["nano", "tiny"] = "nano"
    steps: int = 4000  # optimiser steps
    rows: int = 64  # packed rows a step
    width: int = 128  # tokens a row
    learning_rate: float = 4e-3
    weight_decay: float = 0.01
    seed: int = 0
    out: str = ""  # folder of the model; empty: jaxrl_llm/assets/<size>
    results: str = "results/pretrain_base"


def make_tokenizer(folder: pathlib.Path, seed: int) -> None:
    """A SentencePiece model with one piece a character, and the two Hugging Face files beside it."""
    import sentencepiece

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        text = pathlib.Path(scratch) / "corpus.txt"
        text.write_text("\n".join(corpus.corpus_text(np.random.default_rng(seed), 20000)) + "\n")
        sentencepiece.SentencePieceTrainer.train(
            input=str(text), model_prefix=f"{scratch}/tokenizer", model_type="char", vocab_size=96,
            hard_vocab_limit=False, character_coverage=1.0, pad_id=0, bos_id=1, eos_id=2, unk_id=3,
            normalization_rule_name="identity", add_dummy_prefix=False, remove_extra_whitespaces=False,
            minloglevel=2,
        )  # fmt: skip
        (folder / "tokenizer.model").write_bytes(pathlib.Path(f"{scratch}/tokenizer.model").read_bytes())
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def make_train(policy, settings: Settings):
    """``PER_CALL`` steps of AdamW in one compiled call; the state is donated."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, settings.learning_rate, 200, settings.steps, 0.0)
    adamw = optax.adamw(schedule, 0.9, 0.95, weight_decay=settings.weight_decay)
    tx = optax.chain(optax.clip_by_global_norm(1.0), adamw)

    def loss_fn(params, rows):
        logits = policy.unembed(params, policy.hidden(params, rows["tokens"], rows["positions"], rows["segment_ids"]))
        logp = jax.nn.log_softmax(logits[:, :-1])
        picked = jnp.take_along_axis(logp, rows["tokens"][:, 1:, None], axis=-1)[..., 0]
        return -jnp.sum(jnp.where(rows["mask"][:, 1:], picked, 0.0)) / jnp.sum(rows["mask"][:, 1:].astype(jnp.float32))

    def step(carry, rows):
        params, opt_state = carry
        loss, grads = jax.value_and_grad(loss_fn)(params, rows)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    run = jax.jit(lambda carry, rows: jax.lax.scan(step, carry, rows), donate_argnums=0)
    return tx, run


def train(settings: Settings, policy, tokenizer) -> tuple[dict, list[float]]:
    """Returns the parameters and the mean loss of every call."""
    tx, run = make_train(policy, settings)
    params = policy.init(jax.random.key(settings.seed))
    carry, losses, started = (params, tx.init(params)), [], time.monotonic()
    rng = np.random.default_rng([settings.seed, 7])
    for call in range(settings.steps // PER_CALL):
        rows = corpus.packed_rows(rng, tokenizer, PER_CALL * settings.rows, settings.width)
        rows = {k: v.reshape(PER_CALL, settings.rows, settings.width) for k, v in rows.items()}
        carry, loss = run(carry, rows)
        losses.append(float(loss.mean()))
        if call % 10 == 0:
            done = (call + 1) * PER_CALL
            rate = done * settings.rows * settings.width / (time.monotonic() - started)
            print(f"step {done}/{settings.steps}  loss {losses[-1]:.4f}  {rate:,.0f} tokens/s", flush=True)
    return carry[0], losses


def main(settings: Settings) -> None:
    """Tokenizer, training, model folder, record."""
    out = pathlib.Path(settings.out or pathlib.Path(jaxrl_llm.__path__[0]) / "assets" / settings.size)
    make_tokenizer(out, 0)
    tokenizer = tokenizers.load(out)
    config = ModelConfig(
        family="qwen3", vocab_size=tokenizer.vocab_size, head_dim=SHAPES[settings.size]["hidden_size"] // 4,
        tie_embeddings=True, qk_norm=True, max_positions=512, bos_token_id=tokenizer.bos_id,
        eos_token_ids=tokenizer.eos_ids, pad_token_id=tokenizer.pad_id, **SHAPES[settings.size],
    )  # fmt: skip
    print(f"{settings.size}: {config.num_parameters:,} parameters, vocabulary {config.vocab_size}", flush=True)
    started = time.monotonic()
    params, losses = train(settings, make_policy(config), tokenizer)
    weights.save(out, config, params, dtype="bfloat16")
    record = {
        "experiment": "pretrain_base",
        "command": f"python -m experiments.pretrain_base {' '.join(sys.argv[1:])}",
        "settings": dataclasses.asdict(settings),
        "versions": {"jax": jax.__version__, "optax": optax.__version__},
        "parameters": config.num_parameters,
        "minutes": round((time.monotonic() - started) / 60, 2),
        "loss": [round(x, 5) for x in losses],
        "steps_per_point": PER_CALL,
    }
    results = pathlib.Path(settings.results)
    results.mkdir(parents=True, exist_ok=True)
    (results / f"{settings.size}.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"saved {out}")


if __name__ == "__main__":
    main(tyro.cli(Settings))

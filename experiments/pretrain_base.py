"""Trains base models from the committed generators: the bundled ``nano``, ``tiny`` and ``nano_1``, and other ones.

Run:  python -m experiments.pretrain_base --size nano
      python -m experiments.pretrain_base --size tiny
      python -m experiments.pretrain_base --size nano --steps 0    # only measures the model that is there
      python -m experiments.pretrain_base --size nano --steps 3000 --seed 1    # nano_1, nano of a second seed
      python -m experiments.pretrain_base --size nano --seed 2 --out runs/nano_2    # of a third one
      python -m experiments.pretrain_base --size small --learning-rate 2e-3 --out runs/small
Writes the model in Hugging Face layout to ``--out`` (default: jaxrl_llm/assets/<name> of a bundled model), and the loss
curve, the accuracy per task and level on held-out problems and the command to results/pretrain_base/<name>.json and
.png, for another folder beside it. An experiment takes that folder as ``--model``. A run that was stopped goes on where
it was with the same command, to the same weights.

Supervised next-token loss on responses of the mixture of ``experiments.parts.corpus``, where a stated
share of solutions is flawed.
"""

import dataclasses
import hashlib
import json
import pathlib
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

import jaxrl_llm
from experiments.parts import corpus
from jaxrl_llm.data import problems
from jaxrl_llm.data import tokenizer as tokenizers
from jaxrl_llm.data.tasks import chain, countdown, keydoor
from jaxrl_llm.errors import UserError
from jaxrl_llm.metrics.intervals import score_interval, wilson_interval
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import make_policy
from jaxrl_llm.models.io import weights
from jaxrl_llm.planning.known_models import BUNDLED
from jaxrl_llm.run import evaluate, parts
from jaxrl_llm.run.records import record as results
from jaxrl_llm.train import checkpoint
from jaxrl_llm.types import TrainState
from jaxrl_llm.verifiers import answers
from jaxrl_llm.verifiers import countdown as countdown_verifier
from jaxrl_llm.verifiers.verdict import Verdict

SHAPES = {
    "nano": {"hidden_size": 64, "intermediate_size": 192, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2},
    "tiny": {"hidden_size": 128, "intermediate_size": 384, "num_layers": 5, "num_heads": 4, "num_kv_heads": 2},
    "small": {"hidden_size": 256, "intermediate_size": 768, "num_layers": 8, "num_heads": 8, "num_kv_heads": 4},
}
PER_CALL = 20  # optimiser steps in one compiled call
KEPT_EVERY = 25  # calls between checkpoints
SAMPLES = 8  # answers to each problem when measuring
RESPONSE_TOKENS = 56


@dataclasses.dataclass(frozen=True)
class Settings:
    """Pre-training of a base model."""

    size: Literal["nano", "tiny", "small"] = "nano"
    steps: int = 4000  # optimiser steps; 0: no training, measure the model in --out and renew its record
    rows: int = 64  # packed rows a step
    width: int = 128  # tokens a row
    learning_rate: float = 4e-3
    weight_decay: float = 0.01
    seed: int = 0
    eval_problems: int = 64  # held-out problems of each task and level, fewer where a level has fewer
    out: str = ""  # folder of the model; empty: jaxrl_llm/assets/<name> of a bundled one
    results: str = ""  # folder of the record; empty: results/pretrain_base, or that of the model with --out


def name_of(settings: Settings) -> str:
    """The size, and the seed of another one than the first."""
    return f"{settings.size}_{settings.seed}" if settings.seed else settings.size


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
    warm_up = min(200, settings.steps // 10)
    schedule = optax.warmup_cosine_decay_schedule(0.0, settings.learning_rate, warm_up, settings.steps, 0.0)
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


def checkpoints(settings: Settings) -> pathlib.Path:
    """Where a run with these settings keeps what it needs to go on."""
    shaping = {k: v for k, v in dataclasses.asdict(settings).items() if k not in ("out", "results", "eval_problems")}
    name = hashlib.sha256(json.dumps(shaping, sort_keys=True).encode()).hexdigest()[:12]
    return pathlib.Path("runs") / "pretrain_base" / f"{settings.size}_{name}"


def train(settings: Settings, policy, tokenizer) -> tuple[dict, list[float]]:
    """Returns the parameters and the mean loss of every call; goes on from the newest checkpoint of these settings."""
    tx, run = make_train(policy, settings)
    params, folder = policy.init(jax.random.key(settings.seed)), checkpoints(settings)
    state = TrainState(params, tx.init(params), jnp.zeros((), jnp.int32), jax.random.key(settings.seed), (), {})
    losses, rng = [], np.random.default_rng([settings.seed, 7])
    if (newest := checkpoint.latest(folder)) is not None:
        state, kept = checkpoint.restore(newest, state), checkpoint.note(newest)
        losses, rng.bit_generator.state = kept["losses"], kept["rows"]
        print(f"goes on at step {len(losses) * PER_CALL} from {newest}", flush=True)
    carry, begun, started = (state.params, state.opt_state), len(losses), time.monotonic()

    def batch() -> tuple[dict, dict[str, np.ndarray]]:
        """Where the draws of these rows began, and the rows."""
        before = rng.bit_generator.state
        rows = corpus.packed_rows(rng, tokenizer, PER_CALL * settings.rows, settings.width)
        return before, {k: v.reshape(PER_CALL, settings.rows, settings.width) for k, v in rows.items()}

    with ThreadPoolExecutor(1) as ahead:  # one worker: the rows are drawn in one fixed order
        upcoming = ahead.submit(batch)
        for call in range(begun, settings.steps // PER_CALL):
            (_, rows), upcoming = upcoming.result(), ahead.submit(batch)
            carry, loss = run(carry, rows)
            losses.append(float(loss.mean()))
            done = (call + 1) * PER_CALL
            if call % 10 == 0:
                rate = (done - begun * PER_CALL) * settings.rows * settings.width / (time.monotonic() - started)
                print(f"step {done}/{settings.steps}  loss {losses[-1]:.4f}  {rate:,.0f} tokens/s", flush=True)
            if (call + 1) % KEPT_EVERY == 0:
                state = TrainState(*carry, jnp.asarray(done, jnp.int32), state.key, (), {})
                checkpoint.save(folder, state, note={"losses": losses, "rows": upcoming.result()[0]})
    return carry[0], losses


def verify_plan(answer: dict, response: str) -> Verdict:
    """1 when the plan opens the door."""
    right = keydoor.solves(answer["world"], response)
    return Verdict(float(right), True, "right" if right else "the door stays shut")


VERIFIERS = {countdown: countdown_verifier.verify, chain: answers.verify_chain, keydoor: verify_plan}


def heldout(task, level: int, n: int) -> list[problems.Problem]:
    """At most ``n`` held-out problems of a level; small levels hold fewer."""
    while n:
        try:
            return problems.make_split(task, split="heldout", n=n, seed=1, levels=(level,))
        except UserError:
            n = n * 3 // 4
    raise UserError(f"{task.__name__} level {level} has no held-out problem")


def summary(value: np.ndarray) -> dict[str, dict]:
    """pass@1 (t interval over problems, cut to [0, 1]) and pass@8 (Wilson) of ``value [problems, samples]``."""
    one, some = score_interval(value.mean(1)), wilson_interval(float((value > 0.5).any(1).sum()), len(value))
    one = one._replace(low=max(0.0, one.low), high=min(1.0, one.high))
    return {"pass@1": one._asdict(), f"pass@{SAMPLES}": some._asdict()}


def measure(folder: pathlib.Path, n: int) -> dict[str, dict]:
    """pass@1 and pass@8 of every task (all levels together, and each) at temperature 1, with 95 % intervals."""
    model = parts.load_model(str(folder))
    rollout = jax.jit(parts.make_rollout(model, group_size=SAMPLES, max_new_tokens=RESPONSE_TOKENS, temperature=1.0))
    table = {}
    for task in corpus.MIXTURE:
        levels = [heldout(task, level, n) for level in task.LEVELS]
        rows = [p for level in levels for p in level]
        found = evaluate.sampled(
            rollout,
            parts.make_scorer(model.tokenizer, rows, VERIFIERS.get(task, answers.verify_exact)),
            model.params,
            problems.encode_problems(model.tokenizer, rows, prompt_tokens=40),
            jax.random.key(20_000),
            samples=SAMPLES,
            chunk=32,
        )
        name, of_level = task.__name__.rsplit(".", 1)[1], np.array([p.level for p in rows])
        table[name] = summary(found["eval/value"]) | {"truncated_fraction": found["eval/truncated"]}
        table[name]["levels"] = {str(level): summary(found["eval/value"][of_level == level]) for level in task.LEVELS}
        for label, row in ((name, table[name]), *((f"  level {k}", v) for k, v in table[name]["levels"].items())):
            one, some = row["pass@1"], row[f"pass@{SAMPLES}"]
            print(f"{label:12s} n={one['n']:<4d} pass@1 {one['mean']:.3f} [{one['low']:.3f}, {one['high']:.3f}]  "
                  f"pass@{SAMPLES} {some['mean']:.3f} [{some['low']:.3f}, {some['high']:.3f}]", flush=True)  # fmt: skip
    return table


def plot(path: pathlib.Path, record: dict) -> None:
    """Loss curve, and accuracy by task and level."""
    plt = results.pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5), width_ratios=(1, 1.5), layout="constrained")
    steps = (np.arange(len(record["loss"])) + 1) * record["steps_per_point"]
    left.plot(steps, record["loss"], lw=1)
    left.set(xlabel="step", ylabel="loss of a response token (nats)", yscale="log")
    left.set_title(f"{path.stem}, {record['parameters']:,} parameters")
    left.grid(alpha=0.3, which="both")
    names = [(task, level) for task, rows in record["accuracy"].items() for level in rows["levels"]]
    for key, colour, shift in (("pass@1", "tab:blue", -0.15), (f"pass@{SAMPLES}", "tab:orange", 0.15)):
        rows = [record["accuracy"][task]["levels"][level][key] for task, level in names]
        centre = np.array([r["mean"] for r in rows])
        span = np.abs(np.array([[r["low"] for r in rows], [r["high"] for r in rows]]) - centre)
        right.errorbar(np.arange(len(names)) + shift, centre, span, fmt="o", ms=4, capsize=2, color=colour, label=key)
    right.set_xticks(range(len(names)), [f"{task} {level}" for task, level in names], rotation=90, fontsize=7)
    right.set(ylabel="fraction right, held-out problems", ylim=(-0.03, 1.03), title="accuracy by task and level, 95 %")
    right.grid(alpha=0.3)
    right.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def train_model(settings: Settings, out: pathlib.Path) -> dict:
    """Tokenizer, training and model folder; the record of the training."""
    make_tokenizer(out, 0)
    tokenizer = tokenizers.load(out)
    config = ModelConfig(
        family="qwen3", vocab_size=tokenizer.vocab_size, head_dim=SHAPES[settings.size]["hidden_size"] // 4,
        tie_embeddings=True, qk_norm=True, max_positions=512, bos_token_id=tokenizer.bos_id,
        eos_token_ids=tokenizer.eos_ids, pad_token_id=tokenizer.pad_id, **SHAPES[settings.size],
    )  # fmt: skip
    print(f"{name_of(settings)}: {config.num_parameters:,} parameters, vocabulary {config.vocab_size}", flush=True)
    started = time.monotonic()
    params, losses = train(settings, make_policy(config), tokenizer)
    weights.save(out, config, params, dtype="bfloat16")
    return {
        "experiment": "pretrain_base",
        "command": f"python -m experiments.pretrain_base {' '.join(sys.argv[1:])}",
        "settings": dataclasses.asdict(settings),
        "versions": {"jax": jax.__version__, "optax": optax.__version__},
        "corpus": {
            task.__name__.rsplit(".", 1)[1]: {"share": share, "flawed_share": flawed}
            for task, (share, flawed) in corpus.MIXTURE.items()
        },
        "parameters": config.num_parameters,
        "minutes": round((time.monotonic() - started) / 60, 2),
        "loss": [round(x, 5) for x in losses],
        "steps_per_point": PER_CALL,
    }


def main(settings: Settings) -> None:
    """Trains (or keeps) the model, measures it, writes the record and the plot.

    Raises:
      UserError: where no folder is named for a model that is not a bundled one, or a model to be measured is missing.
    """
    name = name_of(settings)
    if not settings.out and name not in BUNDLED:
        raise UserError(
            f"--size {settings.size} --seed {settings.seed} is no bundled model: say where with --out FOLDER"
        )
    out = pathlib.Path(settings.out or pathlib.Path(jaxrl_llm.__path__[0]) / "assets" / name)
    path = pathlib.Path(settings.results or settings.out or "results/pretrain_base") / f"{name}.json"
    if not settings.steps and not path.is_file():
        raise UserError(f"--steps 0 measures the model that is there, and {path} has no record of one: train it first")
    path.parent.mkdir(parents=True, exist_ok=True)
    record = train_model(settings, out) if settings.steps else json.loads(path.read_text())
    path.write_text(json.dumps(record, indent=1) + "\n")
    record["accuracy"] = measure(out, settings.eval_problems)
    path.write_text(json.dumps(record, indent=1) + "\n")
    plot(path.with_suffix(".png"), record)
    shutil.rmtree(checkpoints(settings), ignore_errors=True)
    print(f"model {out}, record {path}")


if __name__ == "__main__":
    try:
        main(tyro.cli(Settings))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error

"""What jobs that draw responses share: settings, and rewards by ``--reward``: functions of one's own, reward models."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from jaxtyping import Array

from jaxrl_llm import reduce
from jaxrl_llm.data.problem import all_known
from jaxrl_llm.distributed.compiler_options import jit_sampling
from jaxrl_llm.experiment import recipes
from jaxrl_llm.run import bench, options, parts, rated
from jaxrl_llm.run.method import check_judged, own_rewards
from jaxrl_llm.types import Key, Params, Rewards
from jaxrl_llm.verifiers.verdict import Verifier


@dataclasses.dataclass(frozen=True)
class DrawnSettings(recipes.OnlineSettings):
    """What the commands share whose updates draw their own responses."""

    data: str = "chain"
    # QLoRA: with --lora the frozen matrices of the layers are kept in few bits, 64 inputs to a scale
    lora_base: options.BaseName = ""
    steps: int = 200
    epochs: float = 0.0  # passes over the prompts, in the place of --steps; 0: --steps
    prompts_per_step: int = 32
    max_new_tokens: int = 512
    # samples from weights in few bits, made anew at every step; they train as samples of the weights themselves: only
    # jaxrl train corrects for them
    rollout_weights: Literal["", "int8", "int4", "float8_e4m3fn"] = ""
    weight_decay: float = 0.0
    warmup_steps: int = 10
    schedule: Literal["cosine", "linear", "constant"] = "cosine"


EMBEDDED = {  # of the bundled model
    "levels": (2, 3), "steps": 20, "eval_every": 10, "learning_rate": 3e-4, "max_new_tokens": 32,
    "train_problems": 512, "eval_problems": 64, "eval_samples": 2,
}  # fmt: skip


def judged(settings: Any, found: bench.Bench, verifier: Verifier) -> tuple[Callable, Callable, Callable]:
    """Scorers of training rows and of held-out ones, and of training rows in the middle of a compiled program.

    That last one knows no reward model.
    """
    pool, model = parts.make_pool(verifier), found.model
    tokenizer = model.tokenizer
    sets = [[all_known(problem) for problem in split] for split in bench.problem_sets(settings)[:2]]
    load = rated.load_named(verifier, mesh=model.mesh, compute=settings.compute, attention=settings.attention)
    rates = [rated.make_rate(load, tokenizer, rows, chat=settings.chat) for rows in sets]
    scorers = [
        parts.make_scorer(tokenizer, rows, verifier=verifier, pool=pool, rate=rate)
        for rows, rate in zip(sets, rates, strict=True)
    ]
    return *scorers, parts.make_callback(tokenizer, sets[0], verifier=verifier, pool=pool, mesh=found.model.mesh)


def mean_reward(responses: Any, rewards: Rewards) -> dict[str, Array]:
    """What a measurement adds where no response is right or wrong."""
    return {"eval/reward": reduce.scalars(rewards.value, rewards.valid)}


def with_reward(
    settings: Any, found: bench.Bench
) -> tuple[bench.Bench, Callable[[Params, Key], dict[str, Array]] | None]:
    """The bench judged by ``--reward``, and its measurement; without the flag the bench as it is, and None."""
    check_judged(settings)
    if (verifier := own_rewards(settings)) is None:
        return found, None
    train, heldout, _ = judged(settings, found, verifier)
    found, samples = found._replace(score=None, host_score=train, heldout_score=heldout), settings.eval_samples
    rollout = jit_sampling(recipes.rollout_of(settings, found, group_size=samples, measured=True))
    return found, partial(recipes.measure_on_host, rollout, found.heldout, heldout, samples, more=mean_reward)

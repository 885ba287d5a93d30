"""Rewards by reward models: ``--reward FOLDER``, beside functions of one's own or alone.

A folder is that of ``jaxrl reward-model``, or a sequence classifier of transformers with one output (as the published
reward models of Qwen, Llama and Gemma are). It reads text in its own tokens and by its own chat template, so that its
vocabulary need not be the policy's, and lies on the mesh of the run in the type that computes.

What it reads is what it was trained on: prompt, response and an end token for the models of this project; for
classifiers the whole conversation as their template writes it, or, of prompts that are text, prompt and response.
"""

import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.data.chat import encode_answer, encode_chat, encode_prompt
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.distributed import hosts
from jaxrl_llm.distributed import mesh as meshes
from jaxrl_llm.distributed.compiler_options import options_of
from jaxrl_llm.errors import UserError
from jaxrl_llm.models import heads
from jaxrl_llm.models.io import weights
from jaxrl_llm.run import parts
from jaxrl_llm.train.methods import supervised
from jaxrl_llm.types import Params, Trajectories
from jaxrl_llm.verifiers.verdict import Verifier

COLUMNS = 128  # of the shortest rows, see ``parts.bucket``


class RewardModel(NamedTuple):
    """A model and the head that makes one number of its last hidden state."""

    name: str  # as ``--reward`` has it
    model: parts.Model
    head: Params
    classifier: bool  # of transformers


def load_reward_model(
    name: str, *, mesh: Mesh | None, compute: str, attention: str, flag: str = "--reward"
) -> RewardModel:
    """The model of a folder, laid out like the policy of the run.

    Args:
      flag: that names it.

    Raises:
      UserError: for a folder that holds none.
    """
    head, classifier = read_head(name, flag)
    model = parts.load_model(
        name, mesh=mesh, compute_dtype=jnp.dtype(compute), attention=attention, frozen=True, judges=True,
        flag=flag,
    )  # fmt: skip
    return RewardModel(name, model, head, classifier)


def read_head(name: str, flag: str = "--reward") -> tuple[Params, bool]:
    """The head of a folder, and whether it is of transformers; of the model no more than names and shapes are read.

    Raises:
      UserError: for a folder that holds no reward model.
    """
    folder = pathlib.Path(name)
    try:
        config = weights.config_of(folder, judges=True)
        weights.check(folder, config, judges=True)
        return weights.reward_head(folder, config.hidden_size), not (folder / weights.HEADS).is_file()
    except (ValueError, OSError) as error:
        raise UserError(f"{flag} {name}: {error}") from error


def load_named(
    verifier: Verifier | None, *, mesh: Mesh | None, compute: str, attention: str
) -> Callable[[], list[RewardModel]] | None:
    """Loads the reward models among the rewards of a verifier when it is first called; None where it has none.

    Who rolls out or learns elsewhere builds a run as its judge does, and never calls it.

    Raises:
      UserError: for a folder that holds no reward model, at once.
    """
    names = () if verifier is None else parts.models_of(verifier)
    for name in names:
        read_head(name)

    @functools.cache
    def load() -> list[RewardModel]:
        return [load_reward_model(name, mesh=mesh, compute=compute, attention=attention) for name in names]

    return load if names else None


def make_reader(
    found: RewardModel, problems: Sequence[Problem], *, chat: bool
) -> Callable[[int, str, bool], list[int]]:
    """``(problem, response, ended) -> ids``: what the model reads.

    Args:
      chat: a prompt that is text is the message of a user.
    """
    tokenizer = found.model.tokenizer

    @functools.cache
    def asked(problem: int) -> list[int]:
        return encode_prompt(tokenizer, problems[problem].prompt, chat=chat)

    def read(problem: int, response: str, ended: bool) -> list[int]:
        prompt = problems[problem].prompt
        if found.classifier and (chat or not isinstance(prompt, str)):
            before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
            return encode_chat(tokenizer, [*before, {"role": "assistant", "content": response}])
        end = [tokenizer.eos_ids[0]] if ended and not found.classifier else []
        return [*asked(problem), *encode_answer(tokenizer, prompt, response, chat=chat), *end]

    return read


def make_rate(
    load: Callable[[], list[RewardModel]] | None, tokenizer: Tokenizer, problems: Sequence[Problem], *, chat: bool
) -> Callable[[Trajectories], dict[str, np.ndarray]] | None:
    """``rows -> {name: rewards [B]}`` of every reward model, NaN for rows beyond its context; None without a model.

    All hosts call it with the same rows.

    Args:
      load: of ``load_named``.
      tokenizer: of the policy.
    """
    if load is None:
        return None

    @functools.cache
    def loaded() -> list[tuple[RewardModel, Callable, Callable]]:
        return [(found, make_reader(found, problems, chat=chat), make_model_reward(found)) for found in load()]

    def rate(rows: Trajectories) -> dict[str, np.ndarray]:
        given = [
            (int(problem), text, not cut)
            for problem, text, cut in zip(
                rows.problem_ids, parts.responses(tokenizer, rows), np.asarray(rows.truncated), strict=True
            )
        ]
        return {found.name: score([read(*one) for one in given]) for found, read, score in loaded()}

    return rate


def make_model_reward(found: RewardModel) -> Callable[[Sequence[list[int]]], np.ndarray]:
    """``ids of every row -> rewards [B]``: the head's number at the last token; NaN for rows beyond the context.

    Raises:
      UserError: when called, for a reward that is no finite number.
    """
    model, pad = found.model, found.model.tokenizer.pad_id
    size = heads.READ_AT_ONCE * (1 if model.mesh is None else meshes.batch_parts(model.mesh))

    rewards = jax.jit(functools.partial(heads.rewards_of, model.policy), compiler_options=options_of())

    def score(ids: Sequence[list[int]]) -> np.ndarray:
        most = model.config.max_positions
        fits = [k for k, row in enumerate(ids) if 0 < len(row) <= most]
        fits.sort(key=lambda k: len(ids[k]))  # rows of about a length are read together
        parted = [fits[first : first + size] for first in range(0, len(fits), size)]
        begun = []
        for part in parted:
            width = min(parts.bucket(len(ids[part[-1]]), COLUMNS), most)
            rows = [(ids[k], [True] * len(ids[k])) for k in part]
            rows += rows[:1] * (size - len(rows))  # one shape serves all
            begun.append(rewards(model.params, found.head, supervised.filled_up(rows, width=width, pad_id=pad)))
        values = np.full((len(ids),), np.nan, np.float32)
        for part, value in zip(parted, begun, strict=True):
            values[part] = hosts.gathered(value)[: len(part)]
        if not np.isfinite(values[fits]).all():
            raise UserError(f"--reward {found.name} gives no finite number for a response; try --compute float32")
        return values

    return score

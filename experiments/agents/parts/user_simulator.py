"""Talks with users of hidden types, in text: find out who it is, then recommend what suits the type.

``--data FILE`` holds a line for each user, ``{"profile": what the user is like, "type": what suits, "opening": first
words}``; all types of the file may be recommended. A model behind an address plays the users. What is believed of the
type before each turn is read off a frozen policy (``user_beliefs``), as in CURIO, whose user model is a language model.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm import reduce
from jaxrl_llm.data import sources
from jaxrl_llm.data.agent_formats import field
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.data.problems import hash_split
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.envs.text import Given, given
from jaxrl_llm.errors import UserError
from jaxrl_llm.rollout.host.env import TextEnv, TextStepResult, text_identity
from jaxrl_llm.rollout.turns.multi_turn import turns_of
from jaxrl_llm.tools import endpoints
from jaxrl_llm.tools.endpoints import Chat, Unanswered
from jaxrl_llm.train.methods import answer_probability
from jaxrl_llm.types import Params, Policy, Problems, Rewards, Trajectories

MOST_TYPES = 64
OPENING = "Hello, what would you recommend to me?"
RULES = (
    "You talk with a user and recommend what suits this user best, one of: {types}. Find out first: say one short "
    "thing at a time. To recommend, and to end the talk with it, write a line that begins with Recommend: and has "
    "nothing but the name behind it."
)
USER = (
    "You play a user who asks for a recommendation. Reply to what you are asked in one or two short sentences, by your "
    "profile and in your own words. What the profile does not say you do not know. Do not say what suits you.\n\n"
    "Profile: "
)
BELIEVED = "What suits this user best: "  # in front of a type, where beliefs are read off
_SAID = re.compile(r"^[^\S\n]*+Recommend:(?=[^\S\n]|\s*+\S)\s*+(.*)$", re.MULTILINE | re.IGNORECASE)


class User(NamedTuple):
    """One line of the file."""

    profile: str
    type: str
    opening: str = OPENING


class Talk(NamedTuple):
    """A talk under way; ``heard`` are messages as the model that plays the user gets them."""

    user: User
    draw: int  # which sample of this user
    heard: tuple[dict[str, str], ...]


def read(data: str) -> tuple[list[User], tuple[str, ...]]:
    """The users of a file, and the types in the order of the alphabet.

    Raises:
      UserError: for a file that cannot be read, or with fewer than two types; DataError for a malformed line.
    """
    users = []
    for where, row in sources.read(data)[0]:
        opening = field(row, "opening", str, where) if "opening" in row else OPENING
        users.append(User(field(row, "profile", str, where), field(row, "type", str, where).strip(), opening))
    types = tuple(sorted({user.type for user in users}))
    if not 2 <= len(types) <= MOST_TYPES:
        raise UserError(f"--data {data}: users have {len(types)} types; give 2 to {MOST_TYPES}")
    return users, types


def recommended(text: str, types: Sequence[str]) -> str | None:
    """The type that a text recommends in its last such line; whatever else stands there is "", no line at all None.

    >>> recommended("You seem calm.\\nRecommend: yoga", ["Yoga", "Boxing"]), recommended("Recommend: tea", ["Yoga"])
    ('Yoga', '')
    """
    said = _SAID.findall(text)
    if not said:
        return None
    return next((name for name in types if name.lower() == said[-1].strip().strip(" .*`'\"").lower()), "")


def user_world(types: Sequence[str], user: Chat) -> TextEnv:
    """A task is a ``User``. A right recommendation pays 1; any other ends the talk as well, for nothing."""

    def reset(seed: Any, task: User) -> Talk:
        first = {"role": "user", "content": "Begin."}, {"role": "assistant", "content": task.opening}
        return Talk(task, endpoints.draw_of(seed), ({"role": "system", "content": USER + task.profile}, *first))

    def step(talk: Talk, text: str) -> TextStepResult:
        named = recommended(text, types)
        if named is not None:
            return TextStepResult(talk, "", float(named == talk.user.type), True)
        heard = (*talk.heard, {"role": "user", "content": text})
        try:
            said = user(heard, talk.draw)
        except Unanswered as error:
            return TextStepResult(talk, "", 0.0, False, False, reason=f"the user: {error}")
        return TextStepResult(talk._replace(heard=(*heard, {"role": "assistant", "content": said})), said, 0.0, False)

    return TextEnv(reset, step, lambda talk: text_identity(repr(talk.heard)))


def asked(user: User, types: Sequence[str]) -> Problem:
    """The prompt of a talk: the rules, then what the user says first."""
    said = RULES.format(types=", ".join(types))
    return Problem("users", f"{said}\n\n{user.opening}", user.type, {"value": user.type}, 0, user.profile)


def users(settings: Any, sizes: dict[str, Any], tokenizer: Tokenizer) -> list[Given]:
    """``opened`` of ``multi_turn_plan.hosted``: users to train on, and a tenth that is held out.

    The answers of the problems hold ``kind``, the number of the user's type, and, equal in all rows, the types as
    tokens (``type_tokens``).

    Raises:
      UserError: without a model to play the users, or where it does not answer; see ``read``.
    """
    if not settings.user or not settings.user_model:
        raise UserError("--data FILE of users needs --user ADDRESS and --user-model NAME: a model plays the users")
    found, types = read(settings.data)
    cache = endpoints.replies_of("user", settings.user, settings.user_model)
    user = endpoints.from_settings(settings, settings.user, settings.user_model, cache=cache)
    try:
        user([{"role": "user", "content": "Say yes."}])
    except Unanswered as error:
        raise UserError(f"--user {settings.user} does not answer: {error}") from error
    world = user_world(types, user)
    train, held = hash_split(found, lambda user: user.profile, settings.data, rows_are="users", give="users")
    named = type_tokens(tokenizer, types)

    def part(mine: list[User]) -> Given:
        out = given(world, [asked(user, types) for user in mine], mine, tokenizer, **sizes)
        kinds = jnp.asarray([types.index(user.type) for user in mine], jnp.int32)
        same = {name: jnp.broadcast_to(x[None], (len(mine), *x.shape)) for name, x in named.items()}
        return out._replace(problems=out.problems._replace(answers={"kind": kinds} | same))

    return [part(train), part(held[: settings.eval_problems])]


def type_tokens(tokenizer: Tokenizer, types: Sequence[str]) -> dict[str, Array]:
    """``gold`` and ``gold_kind`` ``[V, A]`` of all types, as ``answer_probability.golds``."""
    rows = [Problem("", "", "", {"value": name}, 0, name) for name in types]
    return {k: jnp.asarray(x) for k, x in answer_probability.golds(tokenizer, rows, before=BELIEVED).items()}


def user_beliefs(
    policy: Policy, params: Params, rows: Trajectories, answers: dict[str, Array]
) -> tuple[Float[Array, "B K V"], Float[Array, "B K V"]]:
    """Beliefs ``(before, after)`` each turn: the chances of the types behind ``BELIEVED``, made to sum to 1.

    ``b_k(u) ~ p(u | dialogue before turn k)``, the geometric mean of the type's tokens; after a turn is before the
    next, and the last turn, behind which nothing is said, changes nothing. Each dialogue is read once, the names of the
    types behind every turn from its cache.

    From "Enhancing Personalized Multi-Turn Dialogue with Curiosity Reward" (CURIO), arXiv:2504.03206. Differs from the
    paper in the geometric mean, with which long names are not less probable for their length.

    Args:
      params: of the frozen user model.
      answers: those of the rows' problems, see ``users``.
    """
    turns, kinds = turns_of(rows), answers["gold"].shape[1]
    found = answer_probability.answer_chances(policy, params, rows, answers)
    total = jnp.sum(found, axis=2, keepdims=True)
    before = jnp.where(total > 0, found / jnp.maximum(total, 1e-30), 1.0 / kinds)
    following = jnp.concatenate([before[:, 1:], before[:, -1:]], axis=1)
    more = jnp.pad(turns.taken[:, 1:], ((0, 0), (0, 1)))
    return before, jnp.where(more[:, :, None], following, before)


def figures(rows: Trajectories, rewards: Rewards, problems: Problems) -> dict[str, Array]:
    """Of measured talks: turns that asked, and talks with a recommendation."""
    turns = turns_of(rows)
    count = jnp.sum(turns.taken.astype(jnp.float32), axis=1) - turns.done.astype(jnp.float32)
    return {
        "eval/asked": reduce.scalars(count, rewards.valid),
        "eval/recommended": reduce.scalars(turns.done.astype(jnp.float32), rewards.valid),
    }

"""Test-time search over latent actions with a learned Q (MCTS-Q), and as many responses without it."""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from experiments.policy_gradient.parts import latent_code_rewards as rewards
from experiments.policy_gradient.parts import latent_code_tasks as codes
from experiments.policy_gradient.parts import latent_code_tree as trees
from experiments.policy_gradient.parts.latent_codes import Form, before_each, make_latent_policy, text_of
from jaxrl_llm import reduce
from jaxrl_llm.distributed import mesh as meshes
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import recipes
from jaxrl_llm.metrics import calibration
from jaxrl_llm.rollout.generate import generate
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.train.methods import builders
from jaxrl_llm.types import Key, Params, Policy, Problems, Trajectories


class Search(NamedTuple):
    """The numbers of a search; the released ones."""

    rounds: int = 32
    first: int = 5  # children of the prompt
    then: int = 4  # of any other text
    stretch: int = 64  # tokens that an edge goes on greedily where Q has no doubt
    doubt: float = 0.01  # squared error of Q's own next step, below which it has none
    gamma: float = 0.99
    weight: float = 0.7  # of what was hardly tried

    @property
    def responses(self) -> int:
        """How many responses are completed and judged."""
        return trees.nodes_of(self.rounds, self.first, self.then) - 1


class Written(NamedTuple):
    """The text of a node, the response that the policy completed from it, and what that cost."""

    tokens: Int[Array, "*B N"]  # of the completed response
    length: Int[Array, "*B"]  # of the node's own text, its first tokens
    whole: Int[Array, "*B"]  # of the response
    decoded: Int[Array, "*B"]  # tokens that were decoded for this node


class Model(NamedTuple):
    """A latent-action model whose codes have values, and how its texts end."""

    policy: Policy  # the language model's own
    form: Form
    sharpness: float
    eos_ids: tuple[int, ...]
    pad_id: int = 0

    @property
    def acting(self) -> Policy:
        """The model as a policy of tokens."""
        return make_latent_policy(self.policy, sharpness=self.sharpness, form=self.form)

    @property
    def greedy(self) -> Policy:
        """The same, whose logits are those of the world model under the likeliest code."""

        def unembed(params: Params, states: Array) -> Array:
            best = jnp.argmax(self.form.chances(params["policy"], states), axis=-1)
            return after_codes(self, params, states, best[..., None])[..., 0, :]

        return self.acting._replace(unembed=unembed)


def after_codes(model: Model, params: Params, states: Float[Array, "*B W"], chosen: Int[Array, "*B C"]) -> Array:
    """Logits ``[*B, C, V]`` of the token that each of the chosen codes brings about in a state."""
    actions = params["codes"][chosen]
    text = jnp.broadcast_to(text_of(params, states)[..., None, :], actions.shape)
    return model.policy.unembed(params["model"], model.form.merged(params["merge"], text, actions))


def ending_together(
    prompt: Int[Array, "B L"], valid: Bool[Array, "B L"], tokens: Int[Array, "B N"], length: Int[Array, " B"]
) -> tuple[Int[Array, "B T"], Bool[Array, "B T"]]:
    """Prompt and the first ``length`` tokens of a response as one row, padded on the left alone.

    >>> prompt, response = jnp.array([[0, 7]]), jnp.array([[4, 5]])
    >>> row, real = ending_together(prompt, prompt > 0, response, jnp.array([1]))
    >>> row.tolist(), real.tolist()
    ([[0, 0, 7, 4]], [[False, False, True, True]])
    """
    whole = jnp.concatenate([prompt, tokens], axis=1)
    columns = jnp.arange(whole.shape[1], dtype=jnp.int32)[None, :]
    real = jnp.concatenate([valid, columns[:, : tokens.shape[1]] < length[:, None]], axis=1)
    from_column = columns - (tokens.shape[1] - length)[:, None]
    place = jnp.maximum(from_column, 0)
    kept = jnp.take_along_axis(real, place, axis=1) & (from_column >= 0)
    return jnp.where(kept, jnp.take_along_axis(whole, place, axis=1), 0), kept


def as_rows(
    prompt: Int[Array, "B L"], valid: Bool[Array, "B L"], tokens: Int[Array, "B N"], whole: Int[Array, " B"],
    problem_ids: Int[Array, " B"],
) -> Trajectories:  # fmt: skip
    """Responses as a rollout returns them."""
    said = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :] < whole[:, None]
    real = jnp.concatenate([valid, said], axis=1)
    mask = jnp.concatenate([jnp.zeros(valid.shape, bool), said], axis=1)
    positions = jnp.maximum(jnp.cumsum(real.astype(jnp.int32), axis=1) - 1, 0)
    tokens = jnp.where(real, jnp.concatenate([prompt, tokens], axis=1), 0)
    rows, none = jnp.arange(whole.shape[0], dtype=jnp.int32), jnp.zeros(mask.shape, jnp.float32)
    return Trajectories(
        tokens, real.astype(jnp.int32), jnp.where(real, positions, 0), mask, none, jnp.zeros(whole.shape, bool), rows,
        problem_ids,
    )  # fmt: skip


def completed(
    model: Model, params: Params, prompt: Array, valid: Array, tokens: Array, length: Array
) -> tuple[Int[Array, "B N"], Int[Array, " B"]]:
    """Responses that go on from their first ``length`` tokens with the likeliest codes, and how long they are.

    A text that ends with an end token stays as it is; none becomes longer than there is room.
    """
    room = tokens.shape[1]
    row, real = ending_together(prompt, valid, tokens, length)
    keys = jax.random.split(jax.random.key(0), row.shape[0])  # nothing is drawn
    drawn = generate(
        model.greedy, params, row, real, keys, group_size=1, max_new_tokens=room, eos_ids=model.eos_ids,
        pad_id=model.pad_id, temperature=0.0,
    )  # fmt: skip
    new, columns = drawn.tokens[:, row.shape[1] :], jnp.arange(room, dtype=jnp.int32)[None, :]
    count = jnp.sum(drawn.mask.astype(jnp.int32), axis=1)
    count = jnp.minimum(jnp.where(ended(model, tokens, length), 0, count), room - length)
    later = jnp.take_along_axis(new, jnp.maximum(columns - length[:, None], 0), axis=1)
    return jnp.where(columns < length[:, None], tokens, later), length + count


def ended(model: Model, tokens: Int[Array, "B N"], length: Int[Array, " B"]) -> Bool[Array, " B"]:
    """Whether the last of the first ``length`` tokens ends a response."""
    last = jnp.take_along_axis(tokens, jnp.maximum(length - 1, 0)[:, None], axis=1)[:, 0]
    return (length > 0) & jnp.isin(last, jnp.asarray(model.eos_ids, jnp.int32))


def make_expand(
    model: Model,
    how: Search,
    params: Params,
    problems: Problems,
    score: Callable[[Trajectories], Float[Array, " R"]],
) -> Callable[[Written, int], trees.Children]:
    """The ``expand`` of ``latent_code_tree.search``: the likeliest codes of a text, each with its likeliest token.

    Where ``(Q(s, k) - gamma max_j Q(s', j))^2`` is below ``how.doubt`` the edge is no choice that matters: it goes on
    greedily for up to ``how.stretch`` tokens. The reward of a child is that of the response the policy completes from
    it greedily; its prior is the mean probability of the codes on its edge.

    From "Controlling Large Language Model with Latent Actions" (CoLA), arXiv:2503.21383 (MCTS-Q), as released.

    Args:
      params: with a ``q`` beside the parts.
      problems: one for each tree; ``problem_ids`` count them.
      score: the reward of responses, by whatever judges at test time.
    """
    form = model.form

    def expand(node: Written, children: int) -> trees.Children:
        batch, room = node.tokens.shape
        row, real = ending_together(problems.tokens, problems.valid, node.tokens, node.length)
        positions = jnp.maximum(jnp.cumsum(real.astype(jnp.int32), axis=1) - 1, 0)
        hidden = model.policy.hidden(params["model"], row, positions, real.astype(jnp.int32))
        where = positions, real.astype(jnp.int32)
        state = form.states(params["policy"], hidden, *where)[:, -1]
        chance, chosen = jax.lax.top_k(jax.nn.softmax(form.chances(params["policy"], state), axis=-1), children)
        q = jnp.take_along_axis(form.read(params["q"], hidden, *where)[:, -1], chosen, axis=1).reshape(-1)
        token = jnp.argmax(after_codes(model, params, state, chosen), axis=-1).astype(jnp.int32)

        def each(x: Array) -> Array:
            return jnp.repeat(x, children, axis=0)

        at = each(node.length)
        text = each(node.tokens).at[jnp.arange(batch * children), at].set(token.reshape(-1), mode="drop")
        prompt, valid = each(problems.tokens), each(problems.valid)
        length = jnp.minimum(at + 1, room)
        text, whole = completed(model, params, prompt, valid, text, length)
        ids = each(jnp.arange(batch, dtype=jnp.int32))
        rows = as_rows(prompt, valid, text, whole, ids)
        probability, following = _looked_at(model, params, rows, prompt.shape[1] + at)
        probability = probability[:, prompt.shape[1] :]
        sure = (q - how.gamma * following) ** 2 < how.doubt
        ahead = jnp.minimum(jnp.where(sure, length + how.stretch, length), whole)
        columns = jnp.arange(room, dtype=jnp.int32)[None, :]
        later = (columns > at[:, None]) & (columns < ahead[:, None])
        total = chance.reshape(-1) + jnp.sum(jnp.where(later, probability, 0.0), axis=1)
        prior = total / jnp.maximum(ahead - at, 1).astype(jnp.float32)
        made = trees.Children(prior, score(rows), ahead >= whole, Written(text, ahead, whole, whole - at))
        return jax.tree.map(lambda x: x.reshape(batch, children, *x.shape[1:]), made)

    return expand


def _looked_at(model: Model, params: Params, rows: Trajectories, first: Int[Array, " B"]) -> tuple[Array, Array]:
    """Of completed responses the probability of each likeliest code, and the best Q behind the token at ``first``."""
    hidden = model.policy.hidden(params["model"], rows.tokens, rows.positions, rows.segment_ids)
    where = rows.positions, rows.segment_ids
    before = before_each(model.form.states(params["policy"], hidden, *where))
    likeliest = jnp.max(jax.nn.softmax(model.form.chances(params["policy"], before), axis=-1), axis=-1)
    best = jnp.max(model.form.read(params["q"], hidden, *where), axis=-1)
    following = jnp.take_along_axis(best, jnp.minimum(first, best.shape[1] - 1)[:, None], axis=1)[:, 0]
    return likeliest, following


def searched(
    model: Model, how: Search, params: Params, problems: Problems, score: Callable[[Trajectories], Array], room: int
) -> tuple[trees.Tree, Int[Array, " B"]]:
    """The tree of each problem, and the node whose response is its answer.

    Args:
      room: the most tokens of a response.
    """
    batch = problems.tokens.shape[0]
    none = jnp.zeros((batch,), jnp.int32)
    root = Written(jnp.zeros((batch, room), jnp.int32), none, none, none)
    numbers = how._asdict()
    loop = {name: numbers[name] for name in ("rounds", "first", "then", "gamma", "weight")}
    tree = trees.search(make_expand(model, how, params, problems, score), root, **loop)
    return tree, jax.vmap(partial(trees.answer, gamma=how.gamma))(tree)


AT_ONCE = 64  # problems that are searched together
Judge = Callable[[Model, recipes.Bench], Callable[[Params, Trajectories], Array]]


def judge_of(found: recipes.Bench) -> Callable[[Trajectories], Float[Array, " R"]]:
    """Rewards of responses to held-out problems inside a compiled program, whoever judges; 0 where none is valid."""

    def on_device(rows):
        said = found.score(jax.tree.map(lambda x: x[rows.problem_ids], found.heldout.answers), rows)
        return jnp.where(said.valid, said.value, 0.0)

    def on_host(rows):
        seen = {name: getattr(rows, name) for name in ("tokens", "mask", "problem_ids")}

        def answer(arrays):
            given = found.heldout_score(rows._replace(**{name: np.asarray(x) for name, x in arrays.items()}))
            return np.where(np.asarray(given.valid), np.asarray(given.value), 0.0).astype(np.float32)

        shape = jax.ShapeDtypeStruct((rows.tokens.shape[0],), jnp.float32)
        return jax.pure_callback(answer, shape, seen, vmap_method="sequential")

    return on_device if found.score is not None else meshes.around_callback(on_host, found.model.mesh)


def verified(model: Model, found: recipes.Bench) -> Callable[[Params, Trajectories], Array]:
    """Responses are worth what the verifier says of them, also while a search goes on."""
    judge = judge_of(found)
    return lambda params, rows: judge(rows)


def learned(model: Model, found: recipes.Bench) -> Callable[[Params, Trajectories], Array]:
    """Responses are worth the chance that the learned reward gives them; nobody verifies before an answer is given."""
    return lambda params, rows: jax.nn.sigmoid(rewards.log_odds(model.policy, model.form, params, rows))


def _model(settings: recipes.OnlineSettings, how: codes.Codes, found: recipes.Bench) -> Model:
    tokenizer, form = found.model.tokenizer, codes.form_of(settings, how)
    return Model(found.model.policy, form, how.sharpness, tuple(tokenizer.eos_ids), tokenizer.pad_id)


def by_search(
    settings: recipes.OnlineSettings, how: codes.Codes, search: Search, judge: Judge = verified
) -> Callable[[Params, Key], dict[str, Array]]:
    """``eval/searched``: the share of held-out problems whose answer by search is right; ``eval/search_tokens``.

    Args:
      judge: what the completed responses of a search are worth; the answer is verified whoever judged.

    Raises:
      UserError: where a text may have more children than there are codes, or for ``--stop``.
    """
    if settings.stop:
        raise UserError("--stop: a searched text ends with an end token alone; drop the flag")
    if max(search.first, search.then) > how.number:
        raise UserError(f"--codes {how.number} are fewer than the children of a text: take {max(search[1:3])} or more")
    return _by_search(recipes.bench_identity(settings), how, search, judge)


@lru_cache(maxsize=4)
def _by_search(
    identity: tuple, how: codes.Codes, search: Search, judge: Judge
) -> Callable[[Params, Key], dict[str, Array]]:
    settings = recipes.OnlineSettings(**dict(identity))
    found = recipes.bench(settings)
    model = _model(settings, how, found)
    worth, score = judge(model, found), judge_of(found)

    def measure(params, key):
        def of(part):
            problems, ids = part
            tree, given = searched(
                model, search, params, problems,
                lambda rows: worth(params, rows._replace(problem_ids=ids[rows.problem_ids])), settings.max_new_tokens,
            )  # fmt: skip
            decoded = jnp.sum(jnp.where(tree.there, tree.text.decoded, 0), axis=1)
            text = jax.tree.map(lambda x: x[jnp.arange(ids.shape[0], dtype=jnp.int32), given], tree.text)
            return score(as_rows(problems.tokens, problems.valid, text.tokens, text.whole, ids)), decoded

        ids = jnp.arange(found.heldout.tokens.shape[0], dtype=jnp.int32)
        reward, decoded = builders.in_row_parts(of, (found.heldout, ids), at_once=AT_ONCE)
        right = (reward > 0.5).astype(jnp.float32)
        return {
            "eval/searched": reduce.scalars(right), "eval/search_tokens": reduce.scalars(decoded.astype(jnp.float32)),
        }  # fmt: skip

    return jax.jit(measure)


def by_sampling(
    settings: recipes.OnlineSettings, how: codes.Codes, search: Search, judge: Judge = verified
) -> Callable[[Params, Key], dict[str, Array]]:
    """``eval/best_of``: the same share of the best of as many drawn responses; ``eval/best_of_tokens``.

    The best is the one that ``judge`` finds so; ``eval/reward_auroc`` says how well it parts right responses from wrong
    ones, over all that were drawn.
    """
    return _by_sampling(recipes.bench_identity(settings), how, search.responses, judge)


@lru_cache(maxsize=4)
def _by_sampling(
    identity: tuple, how: codes.Codes, responses: int, judge: Judge
) -> Callable[[Params, Key], dict[str, Array]]:
    settings = recipes.OnlineSettings(**dict(identity))
    plain, found = recipes.bench(settings), codes.over_codes(settings, how)
    rollout = recipes.rollout_of(settings, found, group_size=responses, temperature=1.0, measured=True)
    score, worth = judge_of(found), judge(_model(settings, how, plain), plain)

    def measure(params, key):
        def of(part):
            problems, ids = part
            rows = rollout(params, problems.tokens, problems.valid, sample_keys(key, 1, ids, responses), ids)
            right = score(rows)
            shown = right if judge is verified else worth(params, rows)
            each = (x.reshape(-1, responses) for x in (right, shown))
            return *each, jnp.sum(rows.mask.astype(jnp.float32).reshape(ids.shape[0], -1), axis=1)

        ids = jnp.arange(found.heldout.tokens.shape[0], dtype=jnp.int32)
        right, shown, decoded = builders.in_row_parts(of, (found.heldout, ids), at_once=AT_ONCE)
        best = jnp.take_along_axis(right, jnp.argmax(shown, axis=1)[:, None], axis=1)[:, 0]
        return {
            "eval/best_of": reduce.scalars((best > 0.5).astype(jnp.float32)),
            "eval/best_of_tokens": reduce.scalars(decoded),
            "eval/reward_auroc": calibration.auroc(jnp.clip(shown.reshape(-1), 0.0, 1.0), right.reshape(-1) > 0.5),
        }

    return jax.jit(measure)


@lru_cache(maxsize=4)
def compared(measure: Callable, tree: Callable, drawn: Callable) -> Callable[[Params, Key], dict[str, Array]]:
    """A measurement, ``by_search``, ``by_sampling``, and what the search finds more: ``eval/search_gain``."""

    def figures(params, key):
        found = measure(params, key) | tree(params, key) | drawn(params, key)
        return found | {"eval/search_gain": found["eval/searched"] - found["eval/best_of"]}

    return figures

"""``jaxrl eval``: a model folder, or the models of a run, on problems of a file or generated ones.

Prints avg@k, pass@k and maj@k (where a verifier compares one answer) with 95 % intervals over problems, judged by the
verifiers of training, and writes them.
"""

import collections
import dataclasses
import json
import pathlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import jax
import numpy as np

from jaxrl_llm.data import formats, sources
from jaxrl_llm.data import problems as problem_tables
from jaxrl_llm.data.problem import Problem, all_known
from jaxrl_llm.distributed import hosts
from jaxrl_llm.distributed.compiler_options import jit_sampling
from jaxrl_llm.errors import UserError
from jaxrl_llm.metrics.intervals import Interval, best_of_k, mean_interval, pass_at_k, score_interval
from jaxrl_llm.models.io import hub
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.run import compile_cache, flags, method, options, parts, rated
from jaxrl_llm.run.options import ModelSettings, SamplingSettings
from jaxrl_llm.run.records import record
from jaxrl_llm.train.skipped import name_of
from jaxrl_llm.verifiers.verdict import Verifier

CHUNK = 64  # problems in one compiled call
RIGHT = 0.5  # a verdict above it


@dataclasses.dataclass(frozen=True)
class Settings(SamplingSettings, ModelSettings):
    """Which model on which problems, and how often each is tried."""

    # countdown, chain, reasoning_gym:FAMILY (held-out problems), or a source of rows, all of which are problems
    data: str = "countdown"
    format: parts.Format = "plain"  # the columns of a file; see data.formats
    verifier: parts.VerifierName = ""  # empty: that of the format
    chat: bool = False  # prompts that are text become a user's message, by the model's chat template
    # in place of the verifier: MODULE:FUNCTION of (answer, response) to a number or a Verdict, or the folder of a
    # reward model; of several the sum
    reward: tuple[str, ...] = ()
    reward_weights: tuple[float, ...] = ()  # of several; none: 1 each
    problems: int = 256  # at most; 0: all of a file
    samples: int = 4  # of every problem
    seed: int = 0
    bad_rows: int = 0
    max_new_tokens: int = 28  # of a bundled model; of a model of your own by its size, as in training
    out: str = ""  # a file for the figures and one line a problem; empty: eval.json beside the model, or none
    # a file for the responses, a line each: prompt, completion, label (right or not; by a reward model: the best of its
    # prompt or not) and reward, which sft and dpo read as --format unpaired; without those that are cut off, empty, or
    # judged by nobody
    responses: str = ""
    compile_cache: bool = True  # keep compiled programs in the user's cache folder, for the next start


def asked(settings: Settings) -> tuple[list[Problem], Verifier]:
    """The problems, and what judges their answers.

    Raises:
      UserError: for a source that cannot be read.
    """
    if settings.data in parts.TASKS:
        _, held, verify = parts.load_problems(
            settings.data, train=1, heldout=settings.problems or 256, seed=0, verifier=settings.verifier,
            layout=settings.format, bad_rows=settings.bad_rows,
        )  # fmt: skip
        return held, verify
    if settings.data.startswith(parts.GYM):
        parts.check_generated(settings.data, layout=settings.format, bad_rows=settings.bad_rows)
        return parts.gym_heldout(settings.data, most=settings.problems or 256, verifier=settings.verifier)
    found, bad = formats.read_problems(settings.data, layout=settings.format, bad_rows=settings.bad_rows)
    for row in bad[:10]:
        print(f"{settings.data}: left out {row.where}: {row.reason}", flush=True)
    verify = parts.verifier_of(settings.format, settings.verifier)
    rows = problem_tables.once(found)
    if 0 < settings.problems < len(rows):
        print(
            f"the first {settings.problems} of {len(rows)} rows of {settings.data}; --problems 0 takes all", flush=True
        )
    return rows[: settings.problems or None], verify


def majority(said: Sequence[Any], value: np.ndarray, valid: np.ndarray) -> float:
    """Whether the answer that most samples give is right; of equally many the one given first.

    Args:
      said: which answer each sample gives, as its verifier reads it; one without an answer (None) has no vote.

    >>> majority(["1", "2", None, "1"], np.array([1.0, 0.0, 0.0, 1.0]), np.ones(4, bool))
    1.0
    """
    if not valid.any():
        return float("nan")
    votes = [k for k, one in enumerate(said) if valid[k] and one is not None]
    if not votes:
        return 0.0
    most = collections.Counter(said[k] for k in votes).most_common(1)[0][0]
    return float(value[next(k for k in votes if said[k] == most)] > RIGHT)


def figures(value: np.ndarray, valid: np.ndarray, said: Sequence[Sequence[Any]] | None = None) -> dict[str, Interval]:
    """avg@k, pass@1, 2, 4 ... k and maj@k, each a mean over problems with its interval; ``value`` is ``[N, k]``.

    Args:
      said: as in ``majority``, of each problem; None: there is no maj@k.
    """
    samples, judged = value.shape[1], valid.all(axis=1)
    if not judged.any():
        raise UserError("no problem has a valid verdict for all of its samples; the verifier failed")
    right = ((value > RIGHT) & valid).sum(axis=1)[judged]
    found = {f"avg@{samples}": score_interval(right / samples)}
    for k in shown_sizes(samples):
        found[f"pass@{k}"] = score_interval(pass_at_k(right, samples, k))
    if said is not None:
        votes = [majority(t, v, ok) for t, v, ok, use in zip(said, value, valid, judged, strict=True) if use]
        found[f"maj@{samples}"] = score_interval(np.asarray(votes))
    return found


def answers_read(problems: Sequence[Problem], verify: Verifier, responses: Sequence[Sequence[str]]) -> Any:
    """Of each problem which answer every response gives, as its verifier reads it; None where that reads none.

    That is said: an expression, a program, a query or a reward has no answer on which responses could agree.
    """
    read = parts.READS.get(verify)
    if read is None:
        print(f"no maj@k: {name_of(verify)} reads no answer on which responses could agree", flush=True)
        return None
    return [[read(p.answer, text) for text in texts] for p, texts in zip(problems, responses, strict=True)]


def shown_sizes(samples: int) -> list[int]:
    """Of how many samples figures are shown.

    >>> shown_sizes(6)
    [1, 2, 4, 6]
    """
    return sorted({1 << n for n in range(samples.bit_length())} | {samples})


def rewards_of(value: np.ndarray, valid: np.ndarray) -> dict[str, Interval]:
    """The mean reward and the best of 2, 4 ... k, each a mean over problems with its interval; ``value`` is ``[N, k]``.

    Problems with a response that nobody judged are left out.
    """
    samples, judged = value.shape[1], valid.all(axis=1)
    if not judged.any():
        raise UserError("no problem has a valid reward for all of its samples; the rewards failed")
    found = {"reward": mean_interval(value[judged].mean(axis=1))}
    return found | {f"best@{k}": mean_interval(best_of_k(value[judged], k)) for k in shown_sizes(samples) if k > 1}


def evaluate(settings: Settings) -> tuple[dict[str, Interval], list[dict[str, Any]]]:
    """The figures, and a record of every problem: its prompt, responses and verdicts.

    Raises:
      UserError: for a model or a source that does not serve.
    """
    if settings.samples < 1 or settings.problems < 0:
        raise UserError(
            f"--samples {settings.samples} must be at least 1 and --problems {settings.problems} at least 0"
        )
    sampling = options.sampling_of(settings)._asdict()
    method.check_judged(settings)
    own = method.own_rewards(settings)
    problems, verify = asked(settings)
    if own is not None:
        problems, verify = [all_known(problem) for problem in problems], own
    model = options.open_model(settings, trains=False)
    table = problem_tables.encode_problems(
        model.tokenizer, problems, answers=problem_tables.no_answers, chat=settings.chat
    )
    columns = table.tokens.shape[1] + settings.max_new_tokens
    if columns > model.config.max_positions:
        raise UserError(f"prompt and --max-new-tokens {settings.max_new_tokens} need {columns} columns, the model's "
                        f"context has {model.config.max_positions}; lower it")  # fmt: skip
    rollout = jit_sampling(
        parts.split_rows(parts.make_rollout(model, group_size=settings.samples, **sampling), model.mesh)
    )
    lines, key, chunk = [], jax.random.key(settings.seed), min(CHUNK, len(problems))
    load = rated.load_named(verify, mesh=model.mesh, compute=settings.compute, attention=settings.attention)
    rate = rated.make_rate(load, model.tokenizer, problems, chat=settings.chat)
    with ExitStack() as stack:
        if pool := parts.make_pool(verify):
            stack.enter_context(pool)
        judge = parts.make_judge(model.tokenizer, problems, verify, pool)
        for begin in range(0, len(problems), chunk):
            # the last chunk is filled with repeats so that one shape serves all; the repeats are cut off again
            ids = np.minimum(np.arange(begin, begin + chunk), len(problems) - 1).astype(np.int32)
            keys = sample_keys(key, 0, jax.numpy.asarray(ids), settings.samples)
            rows = rollout(model.params, table.tokens[ids], table.valid[ids], keys, jax.numpy.asarray(ids))
            rows = hosts.gathered(rows)
            judged = judge(rows, rate(rows) if rate else None)
            value, valid = (x.reshape(chunk, -1) for x in (judged.value, judged.valid))
            texts = parts.responses(model.tokenizer, rows)
            for k in range(min(chunk, len(problems) - begin)):
                own = slice(k * settings.samples, (k + 1) * settings.samples)
                lines.append({
                    "prompt": problems[begin + k].prompt, "level": problems[begin + k].level, "responses": texts[own],
                    "value": value[k].tolist(), "valid": valid[k].tolist(),
                    "truncated": np.asarray(rows.truncated)[own].tolist(),
                })  # fmt: skip
            print(f"{len(lines)}/{len(problems)} problems", file=sys.stderr, flush=True)
    value, valid = (np.asarray([line[name] for line in lines]) for name in ("value", "valid"))
    if parts.models_of(verify):
        return rewards_of(value, valid), lines
    found = figures(value, valid, answers_read(problems, verify, [line["responses"] for line in lines]))
    return found | (rewards_of(value, valid) if settings.reward else {}), lines


def rows_of(lines: list[dict[str, Any]], *, best: bool = False) -> list[dict[str, Any]]:
    """The responses of ``evaluate`` as rows to train on.

    Args:
      best: the label is of the first of those with the highest reward of their prompt, not of rewards above a half.

    >>> line = {"prompt": "1+1=", "responses": ["2", "3", ""], "value": [1.0, 0.0, 0.0], "valid": [True, True, True],
    ...         "truncated": [False, True, False]}
    >>> rows_of([line])
    [{'prompt': '1+1=', 'completion': '2', 'label': True, 'reward': 1.0}]
    """
    found = []
    for line in lines:
        columns = (line[name] for name in ("responses", "value", "valid", "truncated"))
        kept = [(text, value) for text, value, valid, cut in zip(*columns, strict=True) if text and valid and not cut]
        first = max(range(len(kept)), key=lambda k, kept=kept: kept[k][1], default=0)
        found += [
            {"prompt": line["prompt"], "completion": text, "label": k == first if best else value > RIGHT,
             "reward": value}
            for k, (text, value) in enumerate(kept)
        ]  # fmt: skip
    return found


def folders(model: str) -> list[str]:
    """The model or adapter itself, or those that a run wrote.

    That is ``model`` of the main job, ``seeds/ARM/seed_K/model`` of others.
    """
    if not model:  # of a variable that is not set: it would be the folder of the command, with all runs below it
        raise UserError("--model '' names nothing; give a model or run folder")
    place = pathlib.Path(model)
    if not place.is_dir() or any((place / x).is_file() for x in ("config.json", "adapter_config.json")):
        return [model]
    found = sorted(str(p.parent) for p in place.rglob("model/config.json"))
    if not found:
        raise UserError(f"--model {model} holds neither config.json nor the model of a run; give a model or run folder")
    return found


@contextmanager
def writing(target: pathlib.Path, flag: str) -> Iterator[None]:
    """What the file system refuses inside is a mistake in the flag that names the file.

    Raises:
      UserError: naming both.
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror or error}; choose another --{flag}") from error


def targets(settings: Settings, models: list[str]) -> list[pathlib.Path | None]:
    """Where the figures of every model are written: ``--out``, or beside the model of a run; None: nowhere.

    Raises:
      UserError: for one file of several models or of two flags, or one that cannot be written, which is then known
        before the evaluation.
    """
    for name, remedy in (("out", ", which writes eval.json beside each"), ("responses", "")):
        if (given := getattr(settings, name)) and len(models) > 1:
            raise UserError(f"--{name} {given} is of one model, and --model {settings.model} has {len(models)}; drop "
                            f"it{remedy}, or give one of them: {models[0]}")  # fmt: skip
    paths = [pathlib.Path(model) for model in models]
    found = [
        pathlib.Path(settings.out) if settings.out else path.parent / "eval.json" if path.name == "model" else None
        for path in paths
    ]
    asked = [(target, "out") for target in found if target is not None]
    asked += [(pathlib.Path(settings.responses), "responses")] if settings.responses else []
    taken = [(pathlib.Path(name), "data") for name, _ in sources.mixture(settings.data)]
    for target, flag in asked:
        for other, whose in taken:
            if target.resolve() == other.resolve():
                raise UserError(f"--{flag} {target} is the file of --{whose}, which would be lost; give another")
        taken.append((target, flag))
    for target, flag in asked:
        with writing(target, flag):
            there = target.exists()
            target.open("a").close()
            if not there:
                target.unlink()
    return found


def cli(arguments: list[str] | None = None) -> int:
    """Command line: one clear line and exit code 2 for a mistake."""
    try:
        words = hub.located(sys.argv[1:] if arguments is None else arguments)
        settings = flags.read(Settings, words, prog="jaxrl eval")
        flags.check_default(settings, options.OF_TRAINING, "is of training: give it to jaxrl train")
        flags.check_seed(settings.seed)
        compile_cache.enable(settings.compile_cache)
        models = folders(settings.model)
        for model, target in zip(models, targets(settings, models), strict=True):
            of_model, told = options.sized(dataclasses.replace(settings, model=model), words)
            if told:
                print(told, flush=True)
            found, lines = evaluate(of_model)
            print(f"{model} on {settings.data}: {len(lines)} problems x {settings.samples} samples, 95 % intervals")
            for name, interval in found.items():
                print(f"  {name:8s} {interval}")
            cut = np.mean([np.mean(line["truncated"]) for line in lines])
            print(f"  cut off  {cut:.1%} of the responses")
            if target is not None:
                whole = {
                    "command": " ".join(["jaxrl eval", *words]), "model": model, "versions": record.versions(),
                    "figures": {name: interval._asdict() for name, interval in found.items()}, "problems": lines,
                }  # fmt: skip
                with writing(target, "out"):
                    target.write_text(json.dumps(whole, default=float) + "\n")
                print(f"  written: {target}")
            if settings.responses:
                best = any(map(method.is_model, settings.reward))
                rows, kind = rows_of(lines, best=best), "the best of their prompt" if best else "right"
                with writing(pathlib.Path(settings.responses), "responses"):
                    pathlib.Path(settings.responses).write_text("".join(json.dumps(row) + "\n" for row in rows))
                print(
                    f"  written: {settings.responses} ({len(rows)} responses, {sum(r['label'] for r in rows)} {kind})"
                )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0

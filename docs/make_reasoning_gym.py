"""Writes docs/reasoning-gym.md: what the scorers of reasoning-gym pay for answers that are not right.

python docs/make_reasoning_gym.py
"""

import importlib.metadata
import pathlib
from collections.abc import Sequence

from jaxrl_llm.verifiers import gym

HEAD = """# What the scorers of reasoning-gym pay for

reasoning-gym {version} has {count} families of problems, each with a scorer of its own. Some pay for answers that are
not right. This page is the audit of all of them, made by `python docs/make_reasoning_gym.py`: {n} problems a family at
its default settings; on each the constants {constants},
the family's most common stored answer, that of its first problem and, where they answer a quarter of the problems, its
two most common ones together, texts that answer nothing ({nothing}),
a copy of the prompt, its first and its last number, and the stored answer of another problem. What a text earns counts
**without being right**: the share of problems whose stored answer it is, is taken off. A slow test
(`tests/verifiers/test_gym.py`) keeps `gym.UNSOUND` and this page as the audit finds them.

Two judges: `gym.verify` gives the family's score, `gym.verify_solved` 1 for full marks and 0 for anything else. Both
ask the scorer in the sandbox; see [foreign-code.md](foreign-code.md).

## Refused unless asked for

A text earns more than {tolerated} on average without being right. `gym.problems(family, ...)` and
`envs.text.reasoning(family, ...)` refuse these with one line; `unsound=True` draws them all the same. "In full": it
gets full marks, so that `verify_solved` is no remedy.

| Family | A text that earns most | Earns | In full | Remedy |
|---|---|---|---|---|
"""
PARTIAL = """
## Partial credit

These give scores between 0 and 1 to some of the texts above, which are not made for the problem, but no more than
{tolerated} on average without being right. Most of it is the package's common rule: where the stored answer is part of
the text, the share of the text that it makes up. Train on them with `gym.verify_solved` if only solved problems should
count.

| Family | Earns at most | Partial scores seen |
|---|---|---|
"""
EXACT = """
## All or nothing

None of the texts above got a score strictly between 0 and 1 from these {count} families: {names}.

The stored answers of {unsolved} get less than full marks on average, or there are none: they have many solutions, and
the scorer checks the text against the problem.
"""


def _scores(values: Sequence[float]) -> str:
    shown = sorted({f"{value:.2g}" for value in values}, key=float)
    return ", ".join(shown) if len(shown) <= 6 else f"{shown[0]} to {shown[-1]}"


def page(audits: Sequence[gym.Audit], n: int) -> str:
    """The page of these audits."""
    head = HEAD.format(
        version=importlib.metadata.version("reasoning_gym"), count=len(audits), n=n, tolerated=gym.TOLERATED,
        constants=", ".join(f"`{c}`" for c in gym.CONSTANTS), nothing=", ".join(f"`{t!r}`" for t in gym.NO_ANSWERS),
    )  # fmt: skip
    refused, partial, exact = [], [], []
    for audit in audits:
        text, much = audit.worst(audit.paid)
        if audit.unsound():
            full = max(audit.worst(audit.full)[1], 0.0)
            remedy = "another family" if audit.pays_in_full() else "`verify_solved`"
            shown = text if len(text) <= 40 else f"{text[:36]} ..."
            refused.append(f"| {audit.family} | `{shown}` | {much:.2f} | {full:.2f} | {remedy} |")
        elif audit.partial:
            partial.append(f"| {audit.family} | {max(much, 0.0):.2f} | {_scores(audit.partial)} |")
        else:
            exact.append(audit.family)
    unsolved = [audit.family for audit in audits if audit.solved is None or audit.solved < 1.0]
    text = head + "\n".join(refused) + "\n" + PARTIAL.format(tolerated=gym.TOLERATED) + "\n".join(partial) + "\n"
    return text + EXACT.format(count=len(exact), names=", ".join(exact), unsolved=", ".join(unsolved))


def main() -> None:
    """Audits all families; a few minutes."""
    n, audits = 40, []
    for family in gym.families():
        audits.append(gym.audit(family, n))
        if audits[-1].unsound():
            print(f"    {family!r}: {audits[-1].unsound()!r},", flush=True)
    print(f"PAID_IN_FULL = {tuple(a.family for a in audits if a.unsound() and a.pays_in_full())!r}")
    (pathlib.Path(__file__).parent / "reasoning-gym.md").write_text(page(audits, n))


if __name__ == "__main__":
    main()

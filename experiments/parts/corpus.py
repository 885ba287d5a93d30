"""Documents of the embedded base models: mixed tasks, a stated share of flawed solutions, packed rows.

Real pre-training text is full of wrong attempts; a base model that imitates it can solve a problem and often does
not. That gap is what reinforcement learning closes, so it is made here on purpose and measured where published.
"""

from collections.abc import Sequence

import numpy as np

from experiments.parts.corpus_tasks import relations, sql, strings, sudoku, translation
from jaxrl_llm.data.problems import is_heldout
from jaxrl_llm.data.tasks import chain, countdown, keydoor
from jaxrl_llm.data.tokenizer import Tokenizer

# task -> (share of documents, share of flawed solutions)
MIXTURE = {
    countdown: (0.34, 0.5),
    chain: (0.22, 0.3),
    sudoku: (0.08, 0.2),
    strings: (0.09, 0.2),
    relations: (0.07, 0.2),
    keydoor: (0.07, 0.2),
    sql: (0.07, 0.2),
    translation: (0.06, 0.2),
}


def document(rng: np.random.Generator) -> tuple[str, str, bool]:
    """One ``(prompt, response, flawed)`` outside the held-out split."""
    tasks = list(MIXTURE)
    task = tasks[rng.choice(len(tasks), p=[share for share, _ in MIXTURE.values()])]
    while True:
        problem = task.make(rng, int(rng.choice(task.LEVELS)))
        if not is_heldout(problem.identity):
            break
    if rng.random() < MIXTURE[task][1]:
        if task in (countdown, chain):
            return problem.prompt, task.flawed(rng, problem), True
        # elsewhere: the answer to another problem of the task
        return problem.prompt, task.make(rng, problem.level).solution, True
    if task is chain:
        # the scratchpad is optional, and some writers check their work by doing it twice
        style = rng.random()
        if style < 0.2:
            return problem.prompt, chain.direct(problem), False
        if style < 0.35 and problem.level <= 3:
            pad = problem.solution.rsplit("#", 1)[0]
            return problem.prompt, f"{pad};{problem.solution}", False
    return problem.prompt, problem.solution, False


def corpus_text(rng: np.random.Generator, n: int) -> list[str]:
    """Plain lines, for training a tokenizer."""
    return ["".join(document(rng)[:2]) for _ in range(n)]


def packed_rows(rng: np.random.Generator, tokenizer: Tokenizer, rows: int, width: int) -> dict[str, np.ndarray]:
    """Rows ``[rows, width]`` of whole documents (BOS prompt response EOS), as tokens, segment_ids, positions, mask.

    ``mask`` is True on response and end tokens: the prompts are noise that no model can predict.
    """
    tokens = np.full((rows, width), tokenizer.pad_id, np.int32)
    segments, positions = np.zeros((rows, width), np.int32), np.zeros((rows, width), np.int32)
    mask = np.zeros((rows, width), bool)
    row, column, segment = 0, 0, 0
    while row < rows:
        prompt, response, _ = document(rng)
        ids = encode_document(tokenizer, prompt, response)
        if len(ids) > width:
            raise ValueError(f"a document of {len(ids)} tokens does not fit width={width}; widen the rows")
        if column + len(ids) > width:
            row, column, segment = row + 1, 0, 0
            if row == rows:
                break
        segment += 1
        here = slice(column, column + len(ids))
        tokens[row, here], segments[row, here], positions[row, here] = ids, segment, np.arange(len(ids))
        mask[row, column + len(ids) - len(response) - 1 : column + len(ids)] = True
        column += len(ids)
    return {"tokens": tokens, "segment_ids": segments, "positions": positions, "mask": mask}


def encode_document(tokenizer: Tokenizer, prompt: str, response: str) -> Sequence[int]:
    """BOS, prompt, response, EOS; one token a character, so lengths of text and ids agree."""
    return [tokenizer.bos_id, *tokenizer.encode(prompt + response), tokenizer.eos_ids[0]]

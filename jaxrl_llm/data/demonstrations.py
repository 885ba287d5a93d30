"""Given responses as token rows."""

from collections.abc import Sequence

import numpy as np

from jaxrl_llm.data.chat import Message, encode_answer
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.errors import UserError


def encode_responses(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    width: int | None = None,
    prompts: Sequence[str | Sequence[Message]] | None = None,
    chat: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Right-pads the texts, each with an end token, into ``(tokens [N, width], valid [N, width])``.

    Args:
      width: None: that of the longest.
      prompts: what each stands behind, see ``chat.encode_answer``; None: behind no text that tokens depend on.
      chat: as in ``chat.encode_prompt``, of the prompts.

    Raises:
      UserError: for a text that does not fit.
    """
    rows = [
        [*(tokenizer.encode(text) if prompts is None else encode_answer(tokenizer, prompts[k], text, chat=chat)),
         tokenizer.eos_ids[0]]
        for k, text in enumerate(texts)
    ]  # fmt: skip
    width = max(map(len, rows)) if width is None else width
    tokens = np.full((len(texts), width), tokenizer.pad_id, np.int32)
    valid = np.zeros((len(texts), width), bool)
    for k, row in enumerate(rows):
        if len(row) > width:
            raise UserError(
                f"response {k} has {len(row)} tokens, the limit is {width}; raise --max-new-tokens or drop it"
            )
        tokens[k, : len(row)], valid[k, : len(row)] = row, True
    return tokens, valid

"""Models and files of the Hugging Face hub by their names: looked up in its cache, and fetched into it.

``--model ORG/NAME``, ``--teacher ORG/NAME``, and everywhere ``hf://ORG/NAME``, with ``@REVISION`` behind them or
without; a file of a data set is ``hf://datasets/ORG/NAME/PATH``, as other libraries write it. A command goes on with
the folder or file of the cache, whose path names the commit.
"""

import pathlib
import re
from collections.abc import Sequence

from jaxrl_llm.errors import UserError

SCHEME = "hf://"
MODELS = ("--model", "--teacher")  # whose values may be bare names
# what a model folder is read from; weights in other formats stay where they are
WANTED = ["*.json", "*.safetensors", "*.model", "*.jinja"]
# no part of it: the weights once more in the layout of who published them, and folders of other formats
UNWANTED = ["consolidated*", "*/*"]
_PART = r"[A-Za-z0-9][\w.-]*"
_MODEL = re.compile(rf"({_PART}/{_PART})(?:@([\w./-]+))?")
_FILE = re.compile(rf"datasets/({_PART}/{_PART})/([\w./-]+)")
_NAMED = re.compile(rf"{SCHEME}(?:datasets/[\w./-]+|{_PART}/{_PART}(?:@[\w./-]+)?)")


def located(arguments: Sequence[str]) -> list[str]:
    """Words of a command line with folders and files of the cache in the place of what the hub has.

    A bare ``ORG/NAME`` that is there as a path stays one.

    >>> located(["--data", "a.jsonl", "--model", "nano"])
    ['--data', 'a.jsonl', '--model', 'nano']

    Raises:
      UserError: naming the flag, for what the hub does not give.
    """
    found, flag = [], ""
    for word in arguments:
        name, sign, value = word.partition("=") if word.startswith("--") else (flag, "", word)
        flag = name
        bare = value and flag in MODELS and _MODEL.fullmatch(value) and not pathlib.Path(value).exists()
        value = _fetched(SCHEME + value, flag) if bare else _NAMED.sub(lambda x, at=flag: _fetched(x[0], at), value)
        found.append(f"{name}{sign}{value}" if word.startswith("--") else value)
    return found


def _fetched(name: str, flag: str) -> str:
    """The folder or file of ``hf://...``."""
    import huggingface_hub  # a second of imports, for who needs it

    given, rest = f"{flag} {name}".strip(), name.removeprefix(SCHEME)
    file, model = _FILE.fullmatch(rest), _MODEL.fullmatch(rest)
    if file is None and (model is None or rest.startswith("datasets/")):
        raise UserError(f"{given}: give hf://ORG/NAME, or hf://datasets/ORG/NAME/PATH of a file")
    try:
        if file is not None:
            return huggingface_hub.hf_hub_download(file[1], file[2], repo_type="dataset")
        return huggingface_hub.snapshot_download(
            model[1], revision=model[2], allow_patterns=WANTED, ignore_patterns=UNWANTED
        )
    except Exception as error:  # the library raises those of its own transport, too
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{given} is no path here, and the hub does not give it: {first[:300]}; hf auth login for what is gated, "
            "or give a folder"
        ) from error

"""``python -m jaxrl_llm view RUN_DIR`` writes one page to read the rollouts of a run, token by token.

The page needs nothing but a browser: rows by step and group, prompts, actions and observations told apart, and per
token the advantage, the ratio of the updated policy to the sampler, or the sampler's probability as a colour.
"""

import base64
import hashlib
import html
import json
import pathlib
import re
import sys
from typing import Any

from jaxrl_llm.errors import DataError, UserError

FILE, PAGE = "episodes.jsonl", "episodes.html"
COLUMNS = ("tokens", "mask", "sampler_logp", "logp", "advantage")  # one value a token
NEEDED = ("step", "group", "reward", "valid", *COLUMNS)
USAGE = "usage: python -m jaxrl_llm view [RUN_DIR, else the newest under runs/] [--out FILE.html]"


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """The records that ``run.records.transcripts`` wrote.

    Raises:
      DataError: for a line that is none.
    """
    found, lines = [], path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):  # a last line without an end was cut by a crash
        try:
            record = json.loads(line.decode())
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}:{number}: not UTF-8 ({error.reason} at byte {error.start}); delete the line"
            ) from error
        except (ValueError, RecursionError) as error:
            what = getattr(error, "msg", "nested too deeply or no text")
            raise DataError(f"{path}:{number}: not JSON ({what}); delete the line") from error
        absent = [name for name in NEEDED if not isinstance(record, dict) or name not in record]
        if absent:
            raise DataError(f"{path}:{number}: lacks {', '.join(absent)}; delete the line")
        lists = [record[name] for name in COLUMNS]
        if not all(isinstance(x, list) for x in lists) or len({len(x) for x in lists}) != 1:
            raise DataError(f"{path}:{number}: lists of different length; delete the line")
        found.append(record)
    if not found:
        raise DataError(f"{path} holds no rollouts yet; they are written at checkpoints")
    return found


def page(records: list[dict[str, Any]], title: str) -> str:
    """One self-contained HTML document; text of a model is data in it, never markup."""
    data = json.dumps(records, separators=(",", ":")).replace("<", "\\u003c")
    template = (pathlib.Path(__file__).parent / "view.html").read_text()
    filled = {"TITLE": html.escape(title), "DATA": data, "POLICY": policy(template)}
    # in one pass: what is filled in is not filled in again
    return re.sub(r"\{\{(TITLE|DATA|POLICY)\}\}", lambda found: filled[found[1]], template)


def policy(template: str) -> str:
    """The content security policy of the page: its own script and style by their hashes, and nothing from anywhere."""

    def hashes(tag: str) -> str:
        texts = re.findall(rf"<{tag}>(.*?)</{tag}>", template, re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(t.encode()).digest()).decode()}'" for t in texts)

    return (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; base-uri 'none'; "
        "form-action 'none'"
    )


def write(run: str, out: str = "") -> pathlib.Path:
    """Writes the page of a run folder; where it lies.

    Raises:
      UserError: for a folder without rollouts, or a page that cannot be written.
    """
    source = pathlib.Path(run) / FILE
    if not source.is_file():
        seeds = sorted(pathlib.Path(run).glob(f"seeds/*/*/{FILE}"))  # an experiment's folder holds those of its seeds
        nearest = f"one of its seeds: {seeds[0].parent}" if seeds else "a run of python -m jaxrl_llm, or of one seed"
        raise UserError(f"{run} has no {FILE}; give the folder of {nearest}")
    target = pathlib.Path(out) if out else pathlib.Path(run) / PAGE
    try:
        target.write_text(page(read(source), pathlib.Path(run).resolve().name))
    except OSError as error:
        raise UserError(f"cannot write {target} ({error.strerror}); choose another --out") from error
    return target


def newest() -> str:
    """The folder under ``runs/`` whose rollouts were written last.

    Raises:
      UserError: where there is none.
    """
    found = sorted(pathlib.Path("runs").rglob(FILE), key=lambda path: path.stat().st_mtime)
    if not found:
        raise UserError(
            f"no run with rollouts under runs/; train first (python -m jaxrl_llm), or give RUN_DIR; {USAGE}"
        )
    return str(found[-1].parent)


def main(arguments: list[str]) -> int:
    """0, or 2 after one line that says what is wrong."""
    try:
        match arguments:
            case ["--help" | "-h"]:
                print(USAGE)
            case []:
                print(f"written: {write(newest())}")
            case ["--out", out]:
                print(f"written: {write(newest(), out)}")
            case [run] if not run.startswith("-"):
                print(f"written: {write(run)}")
            case [run, "--out", out] if not run.startswith("-"):
                print(f"written: {write(run, out)}")
            case _:
                raise UserError(f"cannot read {' '.join(arguments)!r}; {USAGE}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

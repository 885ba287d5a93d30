"""A web of pages: searched by several queries at once, read segment by segment by an agent with notes of its own.

What trains asks ``web_search`` for titles, addresses and beginnings, ``web_browse`` for what pages say about a goal. A
reader is a function ``(goal, notes so far, segment) -> Note``: ``by_words`` is a rule, ``make_reader`` asks a model.
"""

import pathlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.data.sources import Row, json_lines, sift
from jaxrl_llm.errors import DataError, UserError
from jaxrl_llm.tools import schema
from jaxrl_llm.tools.calls import Toolbox, of_functions
from jaxrl_llm.tools.endpoints import Chat

SEGMENT = 2000  # characters that a reader sees at once
SEGMENTS = 20  # of a page, at most
PATIENCE = 2  # segments in a row that bring nothing before a page is left
HITS, SNIPPET = 10, 200  # pages of a query, characters of each
MOST_CALLS = 5  # queries or addresses of one call
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")
_WORD = re.compile(r"\w+")


class Page(NamedTuple):
    """A page of a corpus."""

    url: str
    title: str
    text: str


class Note(NamedTuple):
    """What a segment brings (nothing: ""), and whether reading on is worth while."""

    text: str
    more: bool


Reader = Callable[[str, Sequence[str], str], Note]


def corpus_rows(path: pathlib.Path) -> list[Row]:
    """The objects of a corpus, one a line, with the places of their lines.

    Raises:
      UserError: where there is no such file.
      DataError: naming the line that is none.
    """
    try:
        return sift(json_lines(path), [], bad_rows=0)
    except OSError as error:
        raise UserError(f"the corpus {path} cannot be read ({error.strerror or error}); give a file") from error


def read_corpus(path: pathlib.Path) -> list[Page]:
    """Pages of JSON lines with ``text`` (or ``contents``), and ``title`` and ``url`` where there are.

    Raises:
      UserError: where there is no such file.
      DataError: naming the line that is none.
    """
    found = []
    for where, row in corpus_rows(path):
        number = where.rpartition(":")[2]
        page = Page(
            row.get("url") or f"page:{number}", row.get("title") or "", row.get("text") or row.get("contents") or ""
        )
        if not all(isinstance(part, str) for part in page) or not page.text:
            raise DataError(f"{where}: needs text (or contents), and title and url as texts where there are")
        found.append(page)
    if not found:
        raise DataError(f"{path} holds no pages")
    if len({page.url for page in found}) < len(found):
        raise DataError(f"{path}: two pages have one url; give each its own")
    return found


def segments(text: str, *, size: int = SEGMENT) -> list[str]:
    """The text in pieces of at most ``size`` characters, cut behind sentences where these are short enough.

    >>> segments("One. Two. Three.", size=9)
    ['One. Two.', 'Three.']
    """
    if size < 1:
        raise ValueError(f"size={size} must be at least 1 character")
    found = [""]
    for sentence in _SENTENCE.split(text.strip()):
        for begin in range(0, len(sentence), size):
            part = sentence[begin : begin + size]
            if found[-1] and len(found[-1]) + 1 + len(part) > size:
                found.append("")
            found[-1] = f"{found[-1]} {part}".strip()
    return [part for part in found if part]


def browse(page: Page, goal: str, read: Reader) -> str:
    """What a page says about a goal: segment after segment with the notes so far, until the reader has enough.

    A page of which ``PATIENCE`` segments in a row bring nothing is left.

    From "DeepResearcher: Scaling Deep Research via Reinforcement Learning in Real-world Environments",
    arXiv:2504.03160, section 3.2.
    """
    notes, idle = [], 0
    for segment in segments(page.text)[:SEGMENTS]:
        note = read(goal, tuple(notes), segment)
        notes, idle = ([*notes, note.text], 0) if note.text else (notes, idle + 1)
        if not note.more or idle == PATIENCE:
            break
    return "\n".join(notes) or "the page says nothing about that"


def _words(text: str) -> set[str]:
    return {word for word in _WORD.findall(text.casefold()) if len(word) > 2}


def by_words(goal: str, notes: Sequence[str], segment: str) -> Note:
    """A rule in the place of a model: the sentence with the most words of the goal, if it has half of them.

    >>> by_words("capital of Peru", (), "Peru is old. The capital of Peru is Lima.")
    Note(text='The capital of Peru is Lima.', more=False)
    """
    wanted = _words(goal)
    sentences = _SENTENCE.split(segment)
    best = max(sentences, key=lambda sentence: len(wanted & _words(sentence)))
    enough = 2 * len(wanted & _words(best)) >= max(len(wanted), 1)
    return Note(best.strip() if enough and wanted else "", not enough)


def first_segment(goal: str, notes: Sequence[str], segment: str) -> Note:
    """No reading at all: the beginning of the page, whatever it says."""
    return Note(segment, False)


ASKED = """You read a page for somebody, one segment after another. Goal: {goal}

Notes so far:
{notes}

Next segment:
{segment}

Write down what this segment says about the goal, in one or two sentences, or NOTHING. Then, on a line of its own,
write CONTINUE if the rest of the page may say more about the goal, or STOP."""


def parsed(reply: str) -> Note:
    """The note in a reply to ``ASKED``; one without CONTINUE stops.

    >>> parsed("Lima is the capital.\\nCONTINUE"), parsed("NOTHING\\nSTOP")
    (Note(text='Lima is the capital.', more=True), Note(text='', more=False))
    """
    lines = [line.strip() for line in reply.strip().splitlines() if line.strip()]
    verdict = lines.pop().strip("*. ") if lines and lines[-1].strip("*. ") in ("CONTINUE", "STOP") else "STOP"
    text = " ".join(lines)[:SEGMENT]
    return Note("" if text.strip("*. ") == "NOTHING" else text, verdict == "CONTINUE")


def make_reader(chat: Chat) -> Reader:
    """A language model that reads: ``endpoints.make_chat``, asked once a segment."""

    def read(goal: str, notes: Sequence[str], segment: str) -> Note:
        asked = ASKED.format(goal=goal[:SEGMENT], notes="\n".join(notes) or "none", segment=segment)
        return parsed(chat([{"role": "user", "content": asked}]))

    return read


def _texts(name: str, given: Any) -> list[str]:
    found = [given] if isinstance(given, str) else given
    if not isinstance(found, list) or not found or not all(isinstance(text, str) for text in found):
        raise ValueError(f"{name} must be a list of texts")
    if len(found) > MOST_CALLS:
        raise ValueError(f"{len(found)} {name}; give at most {MOST_CALLS} at once")
    return found


def pages_box(
    corpus: Sequence[Page], find: Callable[[str, int], Iterable[int]], read: Reader = by_words, *, count: int = HITS
) -> Toolbox:
    """``web_search(queries)`` and ``web_browse(urls, goal)`` over a corpus of pages.

    Args:
      find: ``(query, n) -> numbers`` of pages, for example ``boxes.bm25`` of titles and texts.
    """
    at = {page.url: page for page in corpus}

    def web_search(queries: Any) -> str:
        blocks = []
        for query in _texts("queries", queries):
            hits = [corpus[k] for k in find(query, count)]
            shown = [f"[{place}] {p.title} ({p.url})\n{p.text[:SNIPPET]}" for place, p in enumerate(hits, start=1)]
            blocks.append("\n".join([f"Results of {query!r}:", *(shown or ["nothing was found"])]))
        return "\n\n".join(blocks)

    def web_browse(urls: Any, goal: str) -> str:
        found = []
        for url in _texts("urls", urls):
            said = browse(at[url], goal, read) if url in at else "no such page"
            found.append(f"{url}: {said}")
        return "\n\n".join(found)

    texts = {"type": "array", "items": {"type": "string"}}
    searching = {"type": "object", "properties": {"queries": texts}, "required": ["queries"]}
    browsing = {
        "type": "object", "properties": {"urls": texts, "goal": {"type": "string"}}, "required": ["urls", "goal"],
    }  # fmt: skip
    return of_functions(
        [
            (schema.tool("web_search", "Searches the web; titles, addresses and beginnings.", searching), web_search),
            (schema.tool("web_browse", "What pages say about a goal.", browsing), web_browse),
        ]
    )

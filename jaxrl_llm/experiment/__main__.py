"""Commands beside those of the experiment files: see ``USAGE``."""

import sys

from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import compare, doctor, locate, sweep
from jaxrl_llm.experiment.durable import Stopped
from jaxrl_llm.experiment.evidence import pages, records, systems
from jaxrl_llm.run import quiet, stop

USAGE = """usage: python -m jaxrl_llm.experiment COMMAND
  doctor FILE              checks an experiment file, its claim on made-up results, its arms and its record
  pilot FILE [flags]       two minutes before a record: room, difference of the updates, expected interval; with
                           --record its row in results/pilots.tsv, which orders records by their cost
  certify FILE [flags]     a test bed: gates, controls and response to the dose, kept under results/ with --record
  atlas FILE [flags]       a map: methods by dose and base model; cell by cell, a page and a figure of what was run
  sweep FILE [--help]      one setting over every arm
  compare FAMILY [--help]  the methods of a family on one task and budget
  pages                    writes docs/SYSTEMS.md and docs/papers/, one page a paper
  rejudge [FAMILY/SLUG]    judges committed records again and draws their figures; nothing is run"""


def main(arguments: list[str]) -> int:
    """0: all well; 1: the doctor or the pilot found problems; 2: a mistake in the command; 130: stopped."""
    quiet.quieten()
    stop.watch_output()
    try:
        with stop.interruptible("stopped"):
            return _command(arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (Stopped, KeyboardInterrupt) as stopped:
        print(stopped if isinstance(stopped, Stopped) else "stopped", file=sys.stderr)
        return 130


def _command(arguments: list[str]) -> int:
    match arguments:
        case ["--help" | "-h"] | [
            "doctor" | "pilot" | "certify" | "atlas" | "rejudge" | "pages" | "systems",
            "--help" | "-h",
        ]:
            print(USAGE)
            return 0
        case ["doctor", path]:
            return doctor.doctor(path)
        case ["pilot", path, *rest] if not path.startswith("-"):
            from jaxrl_llm.experiment.evidence import standard  # which needs the command line of the experiments

            return standard.pilot_command(path, rest)
        case ["certify", path, *rest] if not path.startswith("-"):
            from jaxrl_llm.experiment.evidence import certificates  # as above

            return certificates.command(path, rest)
        case ["atlas", path, *rest] if not path.startswith("-"):
            from jaxrl_llm.experiment.evidence import atlas  # as above

            return atlas.command(path, rest)
        case ["pages" | "systems"]:  # both from the same files: one is not up to date without the other
            print(f"written: {systems.write()} and {len(pages.write())} pages")
            return 0
        case ["rejudge", *names]:
            there = {f"{path.parent.name}/{path.stem}" for path, _ in records.committed(locate.root())}
            if absent := [name for name in names if name not in there]:
                raise UserError(f"rejudge {' '.join(absent)}: no record of that name; give FAMILY/SLUG of a file "
                                "results/FAMILY/SLUG.json")  # fmt: skip
            print("\n".join(records.rejudge(only=tuple(names))) or "no records")
            return 0
        case ["compare", family, *rest] if not family.startswith("-"):
            compare.compare(family, rest)
            return 0
        case ["sweep", path, *rest] if not path.startswith("-"):
            sweep.sweep(path, rest)
            return 0
        case ["compare" | "sweep" as command, "--help" | "-h", *_]:
            print(USAGE)
            print(compare.usage() if command == "compare" else sweep.usage())
            return 0
    first = USAGE.splitlines()[0]
    raise UserError(f"cannot read {' '.join(arguments)!r}; {first}; --help lists them" if arguments else first)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

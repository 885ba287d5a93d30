"""``jaxrl`` or ``python -m jaxrl_llm``: the main job; ``run SLUG``: an experiment; ``doctor DIR``: a model folder."""

import sys
from collections.abc import Sequence

import jaxrl_llm


def main(arguments: Sequence[str] | None = None) -> int:
    """The command of ``arguments`` (None: those of the process); its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    match words:
        case ["--version"]:
            print(f"jaxrl_llm {jaxrl_llm.__version__}")
            return 0
        case ["doctor", *rest]:
            from jaxrl_llm import doctor

            return doctor.cli(rest)
        case ["run", *rest]:
            from jaxrl_llm.experiment import locate

            return locate.run(rest)
    from jaxrl_llm import main as job

    return job.cli(words)


if __name__ == "__main__":
    sys.exit(main())

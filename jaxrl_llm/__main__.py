"""``python -m jaxrl_llm``: the main job; ``python -m jaxrl_llm doctor DIR``: checks of a model folder."""

import sys

from jaxrl_llm.run import doctor
from jaxrl_llm.run.grpo import cli

if __name__ == "__main__":
    sys.exit(doctor.cli(sys.argv[2:]) if sys.argv[1:2] == ["doctor"] else cli())

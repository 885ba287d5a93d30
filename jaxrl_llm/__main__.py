"""``python -m jaxrl_llm``: the main job."""

import sys

from jaxrl_llm.main import cli

if __name__ == "__main__":
    sys.exit(cli())

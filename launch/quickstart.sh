#!/usr/bin/env bash
# Makes or reuses .venv, installs the core, and trains the bundled model on Countdown by GRPO.
# Arguments go to the main job: bash launch/quickstart.sh --model DIR --data FILE.jsonl --steps 100
set -euo pipefail
. "$(dirname "$0")/common.sh"
install_project ""
exec .venv/bin/python -m jaxrl_llm "$@"

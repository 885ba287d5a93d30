#!/usr/bin/env bash
# Makes or reuses .venv, installs the core, and trains the bundled model on Countdown by GRPO.
# Arguments go to the main job: bash launch/quickstart.sh --model DIR --data FILE.jsonl --steps 100
set -euo pipefail
here="$PWD"
. "$(dirname "$0")/common.sh"
install_project ""
root="$PWD"
cd "$here" # relative files and folders among the arguments are those of who gives them
exec "$root/.venv/bin/jaxrl" "$@"

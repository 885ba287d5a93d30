#!/usr/bin/env bash
# Installs the test extra into .venv and runs the suite; further arguments go to pytest.
# With none, the slow proofs run as well, after the default suite; none begins after SLOW_MINUTES (30).
set -euo pipefail
. "$(dirname "$0")/common.sh"
install_project "[test]"
.venv/bin/python -m ruff check jaxrl_llm experiments tests benchmarks docs
.venv/bin/python -m ruff format --check --quiet jaxrl_llm experiments tests benchmarks docs
if [ $# -eq 0 ]; then
    set -- --slow --slow-minutes "${SLOW_MINUTES:-30}"
fi
.venv/bin/python -m pytest -n "${PYTEST_WORKERS:-2}" "$@"

#!/usr/bin/env bash
# Everything that needs a CUDA device, within 25 minutes: checks and measurements, each in a process of its own. Less of
# it: --only checks, --only llama_8b,nano_256, or --seconds 500 for what matters most.
# It installs nothing and reaches for no network. A package that the machine lacks (msgspec, pytest) can be brought along:
#     pip install --target tests/gpu/packages --no-deps msgspec pytest pluggy iniconfig
# with a pip of the same Python version. On a CPU: bash tests/gpu/run.sh --device cpu --tiny
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHONPATH="$PWD:$PWD/tests/gpu/packages"
exec python3 tests/gpu/run_steps.py "$@"

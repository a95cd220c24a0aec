#!/usr/bin/env bash
# Everything that needs a CUDA device, within nine minutes: checks and measurements, each in a process of its own.
# It installs nothing and reaches for no network. A package that the machine lacks (msgspec, pytest) can be brought along:
#     pip install --target tests/gpu/packages --no-deps msgspec pytest pluggy iniconfig
# with a pip of the same Python version. On a CPU: bash tests/gpu/run.sh --device cpu --tiny
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHONPATH="$PWD:$PWD/tests/gpu/packages"
exec python3 tests/gpu/run_steps.py "$@"

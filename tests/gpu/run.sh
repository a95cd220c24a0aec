#!/usr/bin/env bash
# Everything that needs a CUDA device, within nine minutes: checks, then measurements.
# It installs nothing and reaches for no network; what is missing is named and its checks are skipped.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export OUT="${OUT:-$PWD/tests/gpu/results}" PYTHONPATH="$PWD" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
mkdir -p "$OUT"
python3 - <<'PYTHON' | tee "$OUT/versions.txt"
import importlib, platform
print("python", platform.python_version())
missing = []
for name in ("torch", "triton", "transformers", "safetensors", "tokenizers", "numpy", "msgspec", "gguf", "typer", "rich", "pytest", "hypothesis"):
    try:
        module = importlib.import_module(name)
        print(name, getattr(module, "__version__", "(no version)"))
    except Exception as error:
        missing.append(name)
        print(name, "missing:", type(error).__name__)
if missing:
    print("Missing here:", ", ".join(missing), "- checks that need them are skipped or fail by name.")
import torch
print("CUDA", torch.version.cuda, torch.cuda.get_device_name() if torch.cuda.is_available() else "no device")
PYTHON
code=0
if python3 -c "import pytest" 2>/dev/null; then
    # No plugins and no project settings: only pytest itself may be there.
    PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 timeout 300 python3 -m pytest -c /dev/null --rootdir=tests/gpu --noconftest -rs -q \
        -W ignore tests/gpu/test_cuda_*.py 2>&1 | tee "$OUT/checks.txt" || code=1
else
    echo "pytest is missing: the checks are not run, only the measurements." | tee "$OUT/checks.txt"
fi
left=$((530 - SECONDS))
timeout "$left" python3 tests/gpu/measure.py "$@" 2>&1 | tee "$OUT/measure.txt" || code=1
echo "Took $SECONDS s; results in $OUT"
exit "$code"

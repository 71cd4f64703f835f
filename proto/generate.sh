#!/usr/bin/env bash
# Generates the stubs of proto/quartet/v1 below a folder (default: src). PYTHON is the interpreter (default: .venv/bin/python).
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-src}
python=$(command -v "${PYTHON:-.venv/bin/python}")
mkdir -p "$out/quartet/v1"
rm -f "$out"/quartet/v1/*_pb2*.py "$out"/quartet/v1/*_pb2*.pyi
PATH="$(dirname "$python"):$PATH" "$python" -m grpc_tools.protoc --proto_path=proto \
    --python_out="$out" --grpc_python_out="$out" --mypy_out="quiet:$out" --mypy_grpc_out="quiet:$out" \
    proto/quartet/v1/*.proto
# protoc also writes an empty gRPC stub for a file without a service.
for stub in "$out"/quartet/v1/*_pb2_grpc.py; do
    grep -q '^class .*Stub' "$stub" || rm -f "$stub" "${stub}i"
done

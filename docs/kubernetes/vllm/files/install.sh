#!/bin/sh
# Installs kvstore beside vLLM into a folder of its own: install.sh WHEELS TARGET REQUIREMENT
#
# What the image has stays as it is, and nothing in TARGET shadows it: pip is asked what is missing, under the
# constraint of every version that is there. Where that can't be met it fails, and says which two disagree, before an
# engine starts. Needs pip, and no network.
set -eu
wheels=$1 target=$2 requirement=$3
export PIP_NO_INDEX=1 PIP_FIND_LINKS=$wheels PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
export PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore
# --dry-run installs nothing; without this pip refuses even that where a distribution manages its Python.
export PIP_BREAK_SYSTEM_PACKAGES=1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

python3 -m pip list --format=freeze >"$work/there"
if ! python3 -m pip install --dry-run --constraint "$work/there" --report "$work/report" "$requirement" \
  >"$work/said" 2>&1; then
  cat "$work/said" >&2
  exit 1
fi
python3 - "$work/report" >"$work/missing" <<'PYTHON'
import json
import sys

with open(sys.argv[1]) as report:
    for found in json.load(report)["install"]:
        print(f"{found['metadata']['name']}=={found['metadata']['version']}")
PYTHON

if [ -s "$work/missing" ]; then
  python3 -m pip install --quiet --no-deps --target "$target" --upgrade --requirement "$work/missing"
  echo "installed in $target, beside what the image has:" $(cat "$work/missing")
else
  echo "the image has $requirement already"
fi

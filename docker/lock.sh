#!/bin/sh
# Pins what the image is made of: docker/requirements.lock, what kvstore-vllm[cli] needs; docker/wheels.lock, the same without
# what vLLM itself depends on, for its image; and docker/build.lock, what builds the project's wheel. Every file of a
# version is listed by its hash, so that one lock does for amd64 and arm64 and for any minor of CPython.
#   docker/lock.sh             what pyproject.toml changed, and nothing else
#   docker/lock.sh --upgrade   the newest versions that it allows
set -eu
cd "$(dirname "$0")/.."
compile() {
  uv pip compile --quiet --python-version 3.12 --python-platform linux --generate-hashes --no-annotate \
    --no-emit-index-url --custom-compile-command docker/lock.sh "$@"
}
compile pyproject.toml --extra cli --output-file docker/requirements.lock "$@"
compile pyproject.toml --extra cli --output-file docker/wheels.lock --constraint docker/requirements.lock \
  --no-emit-package blake3 --no-emit-package numpy --no-emit-package pydantic --no-emit-package pydantic-core --no-emit-package pyyaml
printf 'setuptools>=77\n' | compile - --output-file docker/build.lock "$@"

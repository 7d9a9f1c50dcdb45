# cache-admin: the janitor and exporter (`serve`), and every other verb.
#   docker build --build-arg VERSION=0.1.0 --build-arg REVISION=$(git rev-parse HEAD) -t kvstore .
#   docker run --read-only --tmpfs /tmp -p 9464:9464 -e KVSTORE_PAYLOADS=s3://... -e KVSTORE_INDEX=redis://... kvstore
#   docker run --rm -e ... kvstore doctor
# In /wheels lies what installs kvstore into vLLM's image without a network (docs/kubernetes).
#
# The base is pinned by the digest of its index, which has all platforms. To move it:
#   docker buildx imagetools inspect python:3.12-slim-bookworm --format '{{.Manifest.Digest}}'
# What is installed is pinned by hash in docker/*.lock. To move it: docker/lock.sh
FROM python:3.12-slim-bookworm@sha256:a116514e19457bcb7af7efe9c3dd0b9b71e85b317694e7882a1c52aa15a78134 AS python

FROM python AS build
ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY docker/requirements.lock docker/wheels.lock docker/build.lock docker/
RUN python -m venv --without-pip /opt/kvstore && \
    pip --python /opt/kvstore/bin/python install --require-hashes --no-deps --only-binary :all: \
      --requirement docker/requirements.lock && \
    pip install --require-hashes --no-deps --only-binary :all: --requirement docker/build.lock
# For the minors of CPython that vLLM runs on.
RUN for minor in 11 12 13; do \
      pip download --quiet --require-hashes --no-deps --requirement docker/wheels.lock --dest /wheels \
        --only-binary :all: --implementation cp --python-version "3.$minor" \
        --platform "manylinux_2_28_$(uname -m)" --platform "manylinux_2_27_$(uname -m)" \
        --platform "manylinux_2_17_$(uname -m)" --platform "manylinux2014_$(uname -m)" || exit 1; \
    done
COPY pyproject.toml README.md LICENSE ./
COPY kvstore kvstore
COPY connectors connectors
COPY schemas schemas
RUN pip wheel --no-index --no-deps --no-build-isolation --wheel-dir /wheels . && \
    pip --python /opt/kvstore/bin/python install --no-index --no-deps /wheels/kvstore_vllm-*.whl

FROM python
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="kvstore" \
      org.opencontainers.image.description="One shared cache of encoder embeddings and KV blocks for fleets of vLLM replicas" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# Bytecode was written when it was installed, and the file system may be read-only from here on, but for /tmp.
ENV PATH=/opt/kvstore/bin:$PATH \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
COPY --from=build /wheels /wheels
COPY --from=build /opt/kvstore /opt/kvstore
USER 65532:65532
WORKDIR /tmp
EXPOSE 9464
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 \
  CMD ["cache-admin", "serve", "--probe"]
ENTRYPOINT ["cache-admin"]
CMD ["serve", "--listen", "0.0.0.0:9464"]

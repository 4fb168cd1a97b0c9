# ms_kungfu and MindSpore on CPUs. In the checkout: docker build -t ms_kungfu .   (or: buildah build -t ms_kungfu .)
# Then: docker run --rm ms_kungfu kungfu-run -np 2 python examples/comm-fusion/train.py
#
# BASE is any image with Debian's apt, Python 3.10 to 3.12 as python3, and venv.
ARG BASE=docker.io/library/python:3.11-slim-bookworm

FROM ${BASE} AS build
ARG MINDSPORE=2.10.0
# To use your own mirror: --build-arg PIP_INDEX_URL=...
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
RUN apt-get update && apt-get install -y --no-install-recommends g++ python3-dev && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# A separate layer, because it is large, and changes of the checkout don't change it.
RUN pip install "mindspore==${MINDSPORE}" "numpy<2"
COPY . /src
RUN pip install /src

FROM ${BASE}
# MindSpore's library is linked with this library.
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
# A job doesn't need root, a writable home, /dev/shm, ptrace or any other capability.
RUN useradd --create-home trainer
USER trainer
WORKDIR /home/trainer
COPY --chown=trainer examples examples
CMD ["python", "-m", "ms_kungfu"]

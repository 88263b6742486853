# syntax=docker/dockerfile:1
# cutekernels on a machine with NVIDIA GPUs: driver 580 or newer and NVIDIA's container toolkit on the host.
#
#   docker build -t cutekernels .
#   docker run --rm --gpus all -v cutekernels:/data cutekernels doctor
#   docker run --rm --gpus all -v cutekernels:/data cutekernels tune demo --gpu auto
#   docker run --rm -it --gpus all -v cutekernels:/data --entrypoint python cutekernels
#
# torch's wheel brings CUDA's libraries; Triton compiles its launchers with gcc and Python's headers, which this image has.
FROM python:3.12-slim-bookworm

RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /src
COPY constraints.txt pyproject.toml setup.py README.md ./
COPY cutekernels ./cutekernels
COPY autotune ./autotune
COPY db ./db
RUN pip install --no-cache-dir -c constraints.txt ".[cu13,transformers,postgres]" \
    && useradd --create-home --uid 1000 user \
    && install -d -m 0700 -o user /data /data/cache

# The cache of compiled kernels must be the user's own; both it and the database outlive the container in the volume.
ENV CUTEKERNELS_CACHE=/data/cache CUTEKERNELS_DB=/data/tuned.db
VOLUME /data
USER user
WORKDIR /home/user
ENTRYPOINT ["cutekernels"]
CMD ["doctor"]

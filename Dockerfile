# Runs ds-compare on NVIDIA GPUs:
#
#   docker build -t ds-compare .
#   docker run --gpus all --shm-size=1g -v ops:/cache -v "$PWD/results:/work/results" ds-compare run --model gpt2 --strategies all
#
# NCCL needs --shm-size, and the volume "ops" keeps DeepSpeed's compiled ops.
#
# BASE needs Python 3.11 or newer from its package manager and, for DeepSpeed's CUDA ops, nvcc of the CUDA that torch is
# built for (python -c "import torch; print(torch.version.cuda)").
ARG BASE=nvidia/cuda:13.0.0-devel-ubuntu24.04
FROM ${BASE}

# A C++ compiler and Python's headers build DeepSpeed's ops; libaio is for NVMe rows.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        g++ libaio-dev python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# The versions that the figures of this repository were measured with come first: they change less often than the code.
COPY requirements.txt /tmp/requirements.txt
RUN python3 -m venv /opt/venv \
    && sed '/^# tests and checks/,$d' /tmp/requirements.txt > /tmp/run.txt \
    && /opt/venv/bin/pip install --no-cache-dir -r /tmp/run.txt
COPY pyproject.toml README.md LICENSE /src/
COPY ds_bench /src/ds_bench
RUN /opt/venv/bin/pip install --no-cache-dir --no-deps --no-build-isolation /src && rm -rf /src /tmp/*.txt

# Ranks and the built ops belong to the user who starts the container; results are written to /work/results.
ENV PATH=/opt/venv/bin:$PATH XDG_CACHE_HOME=/cache
RUN mkdir -m 1777 /work /cache
VOLUME /cache
WORKDIR /work
ENTRYPOINT ["ds-compare"]
CMD ["--help"]

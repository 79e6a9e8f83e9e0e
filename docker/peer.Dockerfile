# A contributed cluster: dilocox-peer. Build it from the root of the repository:
#     docker build -f docker/peer.Dockerfile -t dilocox-peer .
# The steps up to the sources are those of bootstrap.Dockerfile: the two images share these layers.
FROM debian:bookworm-slim

RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3 python3-venv tini \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/dilocox \
    && useradd --uid 10001 --create-home dilocox \
    && install -d -o dilocox -g dilocox -m 700 /state \
    && install -d -o dilocox -g dilocox /link
ENV PATH=/opt/dilocox/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1

# The CPU build of torch. For NVIDIA GPUs: --build-arg TORCH_BUILD= --build-arg TORCH_INDEX= (the default build, with CUDA).
ARG TORCH_BUILD=+cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY pyproject.toml constraints.txt /src/
RUN cd /src \
    && pip install --no-deps ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' constraints.txt)$TORCH_BUILD" \
    && python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' \
        > dependencies.txt \
    && pip install --constraint constraints.txt --requirement dependencies.txt

COPY . /src/
RUN pip install --no-deps /src && rm -rf /src

USER dilocox
WORKDIR /home/dilocox
# Identity, run spec, checkpoints and logs of this cluster. Whoever has it is this cluster: keep it, and keep it private.
VOLUME /state
# tini passes signals on and reaps what a killed process leaves behind. SIGTERM (docker stop) leaves the run.
ENTRYPOINT ["tini", "-s", "--", "dilocox-peer"]
CMD ["join", "--help"]
HEALTHCHECK --interval=60s --timeout=30s --start-period=60s \
    CMD dilocox-peer status --state-dir /state --json | grep -q '"running": true'

# A bootstrap host: dilocox-bootstrap. Build it from the root of the repository:
#     docker build -f docker/bootstrap.Dockerfile -t dilocox-bootstrap .
# The steps up to the sources are those of peer.Dockerfile: the two images share these layers.
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
# The organiser's key and the node's identity. Whoever has them can sign for this run: keep it, and keep it private.
VOLUME /state
EXPOSE 31337
# tini passes signals on and reaps what a killed process leaves behind.
ENTRYPOINT ["tini", "-s", "--", "dilocox-bootstrap"]
CMD ["serve", "--run", "demo", "--state-dir", "/state", "--listen", "/ip4/0.0.0.0/tcp/31337"]
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s \
    CMD test -s /state/join-link && python -c 'import socket; socket.create_connection(("127.0.0.1", 31337), 3)'

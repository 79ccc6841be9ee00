# Adds podwatch to a trainer's image, in its own environment (never in the trainer's site-packages):
#     docker build -t my-run --build-arg BASE=<the trainer's image> .
# Every package has the version and the hash of config/*.lock (`make lock` updates them): the same source gives the
# same image. If the image has no Python 3.11 to 3.13, uv installs one, which these files do not lock.
# As PID 1 podwatch reaps processes, handles the SIGTERM of a preemption in time, and restarts its daemon if that dies.
ARG BASE=python:3.12-slim-bookworm
FROM ${BASE}

# Some trainer images run as another user; installing needs root, running does not.
USER root
COPY pyproject.toml README.md LICENSE /tmp/podwatch/
COPY src /tmp/podwatch/src
COPY config /tmp/podwatch/config
COPY systemd /tmp/podwatch/systemd
COPY tools /tmp/podwatch/tools
RUN set -eu; \
    if ! python3 -c 'import venv, ensurepip' 2>/dev/null; then \
        apt-get update && apt-get install --yes --no-install-recommends python3 python3-venv && rm -rf /var/lib/apt/lists/*; \
    fi; \
    install() { venv=$1; shift; "$venv/bin/pip" install --quiet --no-cache-dir --disable-pip-version-check "$@"; }; \
    cd /tmp/podwatch; \
    sh tools/make-venv /opt/podwatch; \
    sh tools/make-venv build; \
    install build --require-hashes --only-binary :all: -r config/build.lock; \
    build/bin/pip wheel --quiet --disable-pip-version-check --no-index --no-deps --no-build-isolation -w dist .; \
    install /opt/podwatch --require-hashes --only-binary :all: -r config/requirements.lock; \
    install /opt/podwatch --no-index --no-deps dist/podwatch-*.whl; \
    cd /; \
    ln -s /opt/podwatch/bin/podwatch /usr/local/bin/podwatch; \
    rm -rf /tmp/podwatch; \
    podwatch --version

# Put the state on a volume if you have one. Checkpoints can be restored from the store without it.
VOLUME ["/var/lib/podwatch"]
EXPOSE 9477
# Unhealthy only when podwatch does not run or cannot see (3). Some engines restart an unhealthy container, which would
# end the training that podwatch is restarting (2) or warns about (1).
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s CMD podwatch status --plugin || [ $? -ne 3 ]
ENTRYPOINT ["podwatch"]
CMD ["run"]

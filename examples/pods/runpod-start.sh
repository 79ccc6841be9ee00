#!/bin/sh
# RunPod: the container start command of the template, as  sh -c '<this text>'  or as a file in the image. podwatch becomes
# process 1, so that it receives the SIGTERM of a stop. Settings are kept on the volume at /workspace; the container's own
# disk is empty after a restart, and this text then installs podwatch again.
# Environment variables of the template (secrets: {{ RUNPOD_SECRET_name }}):
#   B2_APPLICATION_KEY_ID, B2_APPLICATION_KEY   a key limited to the run's bucket and prefix
#   POD_STORE=b2://bucket   POD_RUN=name-of-the-run
#   POD_TRUST=--trust, or "--digest D" (docs/pods.md)
#   POD_SOURCE=what pip installs: the URL of podwatch's wheel, or git+https://...
set -eu
: "${POD_STORE:?}" "${POD_RUN:?}" "${POD_TRUST:?}" "${POD_SOURCE:?}"
if [ -x /start.sh ]; then /start.sh & fi  # RunPod's own images: ssh and Jupyter

# podwatch, in an environment of its own; where the image's Python does not fit (3.11 to 3.13, with venv), uv brings one
if [ ! -x /opt/podwatch/bin/podwatch ]; then
    fits='import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'
    if python3 -c "$fits" 2>/dev/null; then
        python3 -m venv /opt/podwatch
        /opt/podwatch/bin/pip install --quiet "$POD_SOURCE"
    else
        command -v uv >/dev/null || python3 -m pip install --quiet uv || curl -LsSf https://astral.sh/uv/install.sh | sh
        PATH=$PATH:${HOME:-/root}/.local/bin
        uv venv --quiet --clear --python '>=3.11,<3.14' /opt/podwatch
        uv pip install --quiet --python /opt/podwatch/bin/python "$POD_SOURCE"
    fi
    ln -sf /opt/podwatch/bin/podwatch /usr/local/bin/podwatch
fi

# A start that needs you leaves the pod reachable, and its log says what to do. The pod is billed while it waits.
# POD_TRUST without quotes: it can be two words.
dir=/workspace/podwatch
mkdir -p "$dir"
if ! /opt/podwatch/bin/podwatch bootstrap "$POD_STORE" "$POD_RUN" $POD_TRUST --dir "$dir" --no-start; then
    echo "podwatch did not start training: see the lines above" >&2
    exec sleep infinity
fi
exec /opt/podwatch/bin/podwatch bootstrap "$POD_STORE" "$POD_RUN" $POD_TRUST --dir "$dir"

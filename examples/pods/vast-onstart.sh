#!/bin/sh
# Vast.ai, launch modes "ssh" and "jupyter": the on-start script. Vast runs it at every start of the instance, after an
# outbid pause too: a second run of this text continues with what is there.
# Set in the template's environment (Vast shows them to whoever can see the template):
#   B2_APPLICATION_KEY_ID, B2_APPLICATION_KEY   a key limited to the run's bucket and prefix
#   POD_STORE=b2://bucket   POD_RUN=name-of-the-run
#   POD_TRUST=--trust, or "--digest D" (docs/pods.md)
#   POD_SOURCE=what pip installs: the URL of podwatch's wheel, or git+https://...
set -eu
: "${POD_STORE:?}" "${POD_RUN:?}" "${POD_TRUST:?}" "${POD_SOURCE:?}"

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

# Vast waits for this script: podwatch goes to the background, under a parent that restarts it.
# POD_TRUST without quotes: it can be two words.
exec /opt/podwatch/bin/podwatch bootstrap "$POD_STORE" "$POD_RUN" $POD_TRUST --detach

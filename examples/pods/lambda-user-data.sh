#!/bin/sh
# Lambda: user_data of the launch request. cloud-init runs it once, as root, at the first boot; podwatch is then a service
# of systemd, which starts it at every later boot. user_data can be read on the machine and by your team: use a key that is
# limited to the run's bucket and prefix.
set -eu
export B2_APPLICATION_KEY_ID="${B2_APPLICATION_KEY_ID:-your key id}"
export B2_APPLICATION_KEY="${B2_APPLICATION_KEY:-your key}"
POD_STORE=${POD_STORE:-b2://bucket}
POD_RUN=${POD_RUN:-name-of-the-run}
POD_TRUST=${POD_TRUST:---trust}    # or: --digest D (docs/pods.md)
POD_SOURCE=${POD_SOURCE:-the URL of the wheel of podwatch, or git+https://...}
export HOME="${HOME:-/root}"       # cloud-init sets none

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

# POD_TRUST without quotes: it can be two words.
/opt/podwatch/bin/podwatch bootstrap "$POD_STORE" "$POD_RUN" $POD_TRUST --no-start
exec /opt/podwatch/bin/podwatch install  # a service, started now and at each boot; it keeps the key in a file of its own

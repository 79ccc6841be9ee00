#!/bin/sh
# podwatch as a job without an engine: sh loop.sh --store b2://my-bucket --run-id run1 -- uv run rl @ config.toml --ckpt
# Runs it again while it asks for that, on this machine; ends with podwatch's last code. PAUSE: seconds between two runs.
stopped=
# A signal is for podwatch, not for this shell; after it, no further run. Repeated signals are harmless.
job=
trap 'stopped=1; [ -z "$job" ] || kill -TERM "$job" 2>/dev/null' TERM INT HUP
while :; do
    podwatch run --job "$@" <&0 &      # in the background, because a shell runs no trap while it waits for a foreground job
    job=$!
    wait "$job"
    code=$?
    while kill -0 "$job" 2>/dev/null; do   # a signal interrupts `wait`; podwatch is still ending training
        wait "$job"
        code=$?
    done
    [ -z "$stopped" ] || exit "$code"
    case $code in
        86|137) sleep "${PAUSE:-30}" & ;;  # run again; 137: killed, as a rule for memory
        *) exit "$code" ;;
    esac
    job=$!
    wait "$job"
    [ -z "$stopped" ] || exit "$code"
done

"""The engine core: the process that holds the policy (on a pod: GPU memory). JSON lines on stdin and stdout."""

import ctypes
import io
import json
import os
import sys
from base64 import b64encode
from pathlib import Path

import torch
from policy import make_deterministic, make_policy, play


def main() -> None:
    ctypes.CDLL(None).prctl(15, b"VLLM::EngineCore", 0, 0, 0)  # PR_SET_NAME: the title vLLM gives its engine
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    sys.stdout = sys.stderr
    make_deterministic()
    policy = make_policy(0)
    print(json.dumps({"ready": os.getpid()}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "weights" in request:
            policy.load_state_dict(torch.load(Path(request["weights"]) / "model.pt", weights_only=True))
            answer = {"loaded": request["weights"]}
        else:
            batch = play(policy, request["seed"], request["step"])
            buffer = io.BytesIO()
            torch.save(batch, buffer)
            answer = {"batch": b64encode(buffer.getvalue()).decode(), "tokens": int(batch["alive"].sum())}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()

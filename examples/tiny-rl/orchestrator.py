"""The orchestrator: requests rollouts with the newest policy from the inference server and sends them to the
trainer."""

import argparse
import base64
import http.client
import io
import json
import time
from pathlib import Path

import torch
from layout import Layout, write_whole


def ask(port: int, request: dict) -> dict:
    """As in prime-rl's orchestrator of early 2026: log and retry, forever. So training hangs after a silent death."""
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        try:
            connection.request("POST", "/", json.dumps(request), {"Content-Type": "application/json"})
            response = connection.getresponse()
            body = response.read()
            if response.status == 200:
                return json.loads(body)
            print(f"Rollout failed: {response.status}", flush=True)
        except (OSError, http.client.HTTPException) as error:
            print(f"Rollout failed: APIConnectionError {error}", flush=True)
        finally:
            connection.close()
        time.sleep(0.2)


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def save_progress(layout: Layout, step: int) -> None:
    buffer = io.BytesIO()
    torch.save({"progress": {"step": step, "total_tokens": 0}}, buffer)
    write_whole(layout.orchestrator_checkpoint(step) / "progress.pt", buffer.getvalue())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--layout", choices=("A", "B"), required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--max-steps", type=int, required=True)
    parser.add_argument("--interval", type=int, required=True)
    parser.add_argument("--resume-step", type=int)
    args = parser.parse_args()
    layout = Layout(args.output_dir, args.layout)
    if args.resume_step is not None:
        saved = torch.load(layout.orchestrator_checkpoint(args.resume_step) / "progress.pt", weights_only=True)
        assert saved["progress"]["step"] == args.resume_step, "this progress belongs to another step"
    start = layout.start_after(args.resume_step)
    for step in range(start, args.max_steps + layout.first_step):
        policy_step = step if layout.variant == "A" else step - 1
        if layout.variant == "A" and step and step % args.interval == 0 and step != args.resume_step:
            save_progress(layout, step)
        wait_for(layout.broadcast(policy_step) / "STABLE")
        ask(args.port, {"weights": str(layout.broadcast(policy_step))})
        answer = ask(args.port, {"step": step, "seed": args.seed})
        if layout.variant == "B" and step % args.interval == 0:
            save_progress(layout, step)
        write_whole(layout.rollouts(step) / "rank_0.bin", base64.b64decode(answer["batch"]))
    if layout.variant == "A" or args.max_steps % args.interval:
        save_progress(layout, args.max_steps)
    print("Orchestrator finished.", flush=True)


if __name__ == "__main__":
    main()

"""podwatch as a Ray job, submitted again as long as podwatch asks for it: ``python ray_job.py http://HEAD:8265``.

Needs ``ray[default]``. Ray starts a job once and has no rule for exit codes, and `ray job submit` itself ends only with
0 or 1: this script reads the code and decides. The entrypoint runs on one node and sees at most the GPUs that it asks
for. For training that is itself distributed by Ray, run podwatch outside and Ray inside (docs/trainer.md).
"""

import os
import sys
import time

from ray.job_submission import JobStatus, JobSubmissionClient

# exec: the shell that Ray starts becomes podwatch, so that Ray signals podwatch.
ENTRYPOINT = "exec podwatch run --job -c podwatch.toml --set recovery.end_grace=110s"
RUNTIME_ENV = {
    "working_dir": ".",  # with podwatch.toml; Ray copies it to the node
    # To stop a job, Ray sends SIGTERM, and SIGKILL 3 s later unless this says more. end_grace above is below it.
    "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "120"},
}
GPUS = 2
RUN_AGAIN = 86
PAUSE_SECONDS = float(os.environ.get("PAUSE", "30"))


def run_once(client: JobSubmissionClient) -> int:
    """Submit the job, wait for its end, and return its exit code; 1 if it was stopped, or if Ray knows no code, because
    its node was lost."""
    job = client.submit_job(entrypoint=ENTRYPOINT, runtime_env=RUNTIME_ENV, entrypoint_num_gpus=GPUS)
    while not (info := client.get_job_info(job)).status.is_terminal():
        time.sleep(1)
    print(f"{job}: {info.message}", file=sys.stderr)
    if info.status is JobStatus.STOPPED or info.driver_exit_code is None:
        return 1
    return info.driver_exit_code


def main() -> int:
    client = JobSubmissionClient(sys.argv[1])
    while (code := run_once(client)) == RUN_AGAIN:
        time.sleep(PAUSE_SECONDS)
    return code


if __name__ == "__main__":
    sys.exit(main())

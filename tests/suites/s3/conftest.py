"""S3 clients that know nothing of podwatch: boto3 and rclone (make test-s3)."""

import os
from pathlib import Path

import pytest

from tests.support.s3server import KEY, KEY_ID

VENV = Path(__file__).parents[3] / ".venv-s3" / "bin"


def tool(name: str) -> Path:
    """Skips where `make test-s3` could not install it."""
    path = VENV / name
    if not path.exists():
        pytest.skip(f"{path} is not installed (make test-s3)")
    return path


def aws(url: str) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"], "AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": KEY,
        "AWS_EC2_METADATA_DISABLED": "true", "AWS_ENDPOINT_URL": url, "HOME": "/nonexistent",
        "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required", "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
    }  # fmt: skip

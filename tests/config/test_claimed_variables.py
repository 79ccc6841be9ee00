"""Which variables of podwatch's own environment files training does not get."""

from pathlib import Path

from podwatch.config.env_files import claim_own
from podwatch.system.environment_without_secrets import scrubbed_environment


def test_the_key_becomes_podwatchs_alone_and_a_role_stays_where_boto3_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "podwatch.env"
    file.write_text(
        "export AWS_SECRET_ACCESS_KEY='s3cret'\nAWS_ROLE_ARN=arn\nAWS_REGION=eu\nAWS_PROFILE=other\n"
        "no line\nAWS_CA_BUNDLE='without an end\n"
    )
    environ = {"AWS_SECRET_ACCESS_KEY": "s3cret", "AWS_ROLE_ARN": "arn", "AWS_REGION": "eu", "AWS_PROFILE": "users"}
    claim_own(environ, (file, tmp_path / "absent.env"))
    assert environ == {
        "PODWATCH_AWS_SECRET_ACCESS_KEY": "s3cret", "AWS_ROLE_ARN": "arn", "PODWATCH_AWS_REGION": "eu",
        "AWS_PROFILE": "users",
    }  # fmt: skip
    assert scrubbed_environment(environ) == {"AWS_ROLE_ARN": "arn", "AWS_PROFILE": "users"}

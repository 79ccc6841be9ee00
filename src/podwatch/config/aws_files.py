"""The files that AWS's tools keep in the home directory, and files of certificates: whoever can write them decides to
whom podwatch gives the key, and whose checkpoints training loads."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from podwatch.config.trusted_files import check_trusted, read_trusted
from podwatch.domain.errors import ConfigurationError, PermissionDenied


def check_aws_files(paths: list[Path]) -> None:
    """Raise PermissionDenied if another user could have written one of them or put it there, or can read a secret in
    it. Absent ones are fine."""
    for path in paths:
        try:
            check_trusted(path, "the AWS file")
            if "aws_secret_access_key" in read_trusted(path, "the AWS file"):
                read_trusted(path, "the AWS file", secret=True)
        except OSError:
            continue
        except ConfigurationError as error:
            raise PermissionDenied(error.what, where=error.where, fix=error.fix) from error


def check_certificates(path: str) -> None:
    """Raise PermissionDenied if another user could choose which servers count as the store."""
    try:
        if path:
            check_trusted(Path(path), "the file of certificates")
    except OSError:
        return  # whoever opens it says so
    except ConfigurationError as error:
        raise PermissionDenied(error.what, where=error.where, fix=error.fix) from error


def credential_program(profiles: Mapping[str, Any], name: str) -> str:
    """The profile, of this one and those that it takes its credentials from, that lets a program find them; empty if
    none does."""
    seen = set[str]()
    while name not in seen and isinstance(profile := profiles.get(name), Mapping):
        if "credential_process" in profile:
            return name
        seen.add(name)
        name = str(profile.get("source_profile") or "")
    return ""

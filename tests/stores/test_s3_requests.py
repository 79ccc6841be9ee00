"""S3 without a server: signatures against AWS's published examples, XML, what answers mean, where keys come from."""

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from podwatch.domain.errors import ConfigurationError, IntegrityError, PermissionDenied
from podwatch.domain.secrets import scrub
from podwatch.stores import s3_xml
from podwatch.stores.credentials import Credentials
from podwatch.stores.s3_credentials import S3Credentials, S3Settings, claim_own, find, own_names
from podwatch.stores.s3_errors import Kind, S3Place, explain, kind_of
from podwatch.stores.s3_sign import EMPTY_SHA256, quoted_path, quoted_query, signed
from podwatch.stores.s3_xml import Problem
from podwatch.system.environment_without_secrets import scrubbed_environment

ACCESS, SECRET = "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
HOST = {"Host": "examplebucket.s3.amazonaws.com"}
BODY = hashlib.sha256(b"Welcome to Amazon S3.").hexdigest()


@pytest.mark.parametrize(
    ("method", "key", "query", "headers", "payload", "signature"),
    [
        ("GET", "test.txt", {}, {"Range": "bytes=0-9"}, EMPTY_SHA256,
         "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"),
        ("PUT", "test$file.text", {}, {"Date": "Fri, 24 May 2013 00:00:00 GMT", "x-amz-storage-class":
         "REDUCED_REDUNDANCY"}, BODY, "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd"),
        ("GET", "", {"lifecycle": ""}, {}, EMPTY_SHA256,
         "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"),
        ("GET", "", {"max-keys": "2", "prefix": "J"}, {}, EMPTY_SHA256,
         "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"),
    ],
)  # fmt: skip
def test_aws_examples(
    method: str, key: str, query: dict[str, str], headers: dict[str, str], payload: str, signature: str
) -> None:
    """docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html"""
    sent = signed(
        method, quoted_path("", key), quoted_query(query.items()), HOST | headers, payload=payload, access_key=ACCESS,
        secret=SECRET, region="us-east-1", wall=datetime(2013, 5, 24, tzinfo=UTC).timestamp(),
    )  # fmt: skip
    assert sent["Authorization"].endswith(f"Signature={signature}")
    assert SECRET not in "".join(sent.values())


def test_names_are_quoted_as_s3_signs_them() -> None:
    assert quoted_path("b", "run/a b+c=ä~'(1).bin") == "/b/run/a%20b%2Bc%3D%C3%A4~%27%281%29.bin"
    assert quoted_path("b", "") == "/b"
    assert quoted_path("", "") == "/"
    assert quoted_query([("uploads", ""), ("prefix", "a/b c"), ("A", "1")]) == "A=1&prefix=a%2Fb%20c&uploads="


# -- XML -------------------------------------------------------------------------------------------------------------


def test_listing() -> None:
    page = s3_xml.objects(
        b"""<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">
        <EncodingType>url</EncodingType><IsTruncated>true</IsTruncated><NextContinuationToken>t=</NextContinuationToken>
        <Contents><Key>a%2Bb+c%0A</Key><Size>7</Size><ETag>&quot;e-2&quot;</ETag>
        <LastModified>2026-11-23T08:30:00.250Z</LastModified></Contents></ListBucketResult>""",
        where="x",
    )
    wall = datetime(2026, 11, 23, 8, 30, 0, 250000, UTC).timestamp()
    assert page.entries == (s3_xml.Listed("a+b c\n", 7, "e-2", wall),)
    assert page.following == (("continuation-token", "t="),)


@pytest.mark.parametrize(
    "data",
    [
        b"<html>log in",
        b'<!DOCTYPE x [<!ENTITY a "aaaa">]><x>&a;</x>',
        b"<x>" + b"y" * s3_xml.LARGEST + b"</x>",
        b"",
    ],
)
def test_what_is_no_answer_of_s3(data: bytes) -> None:
    with pytest.raises(IntegrityError):
        s3_xml.objects(data, where="x")
    assert s3_xml.problem(data) is None


@pytest.mark.parametrize("parsed", [s3_xml.objects, s3_xml.versions, s3_xml.uploads, s3_xml.parts])
def test_a_page_that_is_none_is_not_an_empty_listing(parsed: Callable[..., object]) -> None:
    """Whatever is absent from a listing is taken for absent from the store: a run, a checkpoint, the money spent."""
    with pytest.raises(IntegrityError, match="no listing"):
        parsed(b"<html><body>Please log in</body></html>", where="x")
    if parsed is s3_xml.parts:
        return  # a part that is not listed is sent again
    with pytest.raises(IntegrityError, match="breaks off"):
        parsed(b"<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>", where="x")


def test_an_error_after_white_space_is_read() -> None:
    """Completing a large upload answers 200 at once, blanks while it works, and then perhaps an error."""
    found = s3_xml.problem(b"  \n<?xml version='1.0'?>\n<Error><Code>InternalError</Code><Message>x</Message></Error>")
    assert found == Problem("InternalError", "x")


# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (503, "SlowDown", Kind.AGAIN),
        (500, "", Kind.AGAIN),
        (429, "", Kind.AGAIN),
        (409, "ConditionalRequestConflict", Kind.AGAIN),
        (400, "RequestTimeout", Kind.AGAIN),
        (400, "BadDigest", Kind.DAMAGED),
        (400, "ExpiredToken", Kind.EXPIRED),
        (403, "RequestTimeTooSkewed", Kind.SKEWED),
        (301, "PermanentRedirect", Kind.REGION),
        (400, "AuthorizationHeaderMalformed", Kind.REGION),
        (404, "NoSuchKey", Kind.ABSENT),
        (404, "", Kind.ABSENT),
        (404, "NoSuchBucket", Kind.REFUSED),
        (404, "NoSuchUpload", Kind.NO_UPLOAD),
        (412, "PreconditionFailed", Kind.CHANGED),
        (416, "InvalidRange", Kind.RANGE),
        (501, "NotImplemented", Kind.UNSUPPORTED),
        (403, "AccessDenied", Kind.DENIED),
        (401, "Unauthorized", Kind.REFUSED),
        (403, "SignatureDoesNotMatch", Kind.DENIED),
        (507, "", Kind.REFUSED),
    ],
)
def test_meaning(status: int, code: str, kind: Kind) -> None:
    assert kind_of(status, Problem(code) if code else None) is kind


def test_access_denied_with_a_wrong_clock_is_a_wrong_clock() -> None:
    assert kind_of(400, Problem("AccessDenied"), skewed=True) is Kind.SKEWED
    assert kind_of(403, None, skewed=True) is Kind.SKEWED


def test_the_operator_learns_what_to_do() -> None:
    place = S3Place("s3://b", "b", "https://endpoint")
    denied = explain(Kind.DENIED, 403, Problem("AccessDenied", "no"), place, key="k", action="s3:PutObject")
    assert "s3:PutObject" in denied.what
    assert not denied.transient
    assert "policy" in denied.fix
    wrong = explain(Kind.DENIED, 403, Problem("SignatureDoesNotMatch"), place, key="", action="")
    assert "secret key is wrong" in wrong.what
    full = explain(Kind.REFUSED, 403, Problem("QuotaExceeded"), place, key="", action="")
    assert "quota" in full.what
    archived = explain(Kind.DENIED, 403, Problem("InvalidObjectState", "x"), place, key="k", action="s3:GetObject")
    assert "archive" in archived.what
    assert explain(Kind.AGAIN, 503, None, place, key="", action="").transient


# -- credentials -----------------------------------------------------------------------------------------------------

NOWHERE = {"AWS_EC2_METADATA_DISABLED": "true"}


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


def test_variables(tmp_path: Path) -> None:
    assert find(NOWHERE, home=tmp_path) is None
    names = NOWHERE | {
        "AWS_ACCESS_KEY_ID": "AKID-1234567",
        "AWS_SECRET_ACCESS_KEY": "environment-secret",
        "AWS_REGION": "r",
    }
    found = find(names | {"AWS_SESSION_TOKEN": "token-abcdefg"}, home=tmp_path)
    assert found is not None
    assert (found.access_key, found.secret, found.token, found.region) == (
        "AKID-1234567", "environment-secret", "token-abcdefg", "r",
    )  # fmt: skip
    assert "environment-secret" not in repr(found)
    assert "environment-secret" not in scrub("an error names environment-secret")
    with pytest.raises(ConfigurationError, match="half"):
        find(NOWHERE | {"AWS_ACCESS_KEY_ID": "AKID-1234567"}, home=tmp_path)


def test_endpoints(tmp_path: Path) -> None:
    names = NOWHERE | {"AWS_ACCESS_KEY_ID": "AKID-1234567", "AWS_SECRET_ACCESS_KEY": "environment-secret"}
    both = names | {"AWS_ENDPOINT_URL": "https://all", "AWS_ENDPOINT_URL_S3": "https://s3/"}
    found = find(both, home=tmp_path)
    assert found is not None
    assert found.endpoint == "https://s3"
    found = find(both, S3Settings(s3_endpoint="http://set:9000", s3_region="auto"), home=tmp_path)
    assert found is not None
    assert (found.endpoint, found.region) == ("http://set:9000", "auto")
    for bad in ("s3.example", "ftp://x", "https://user:pw@x", "https://x/bucket"):
        with pytest.raises(ConfigurationError):
            find(names, S3Settings(s3_endpoint=bad), home=tmp_path)


def test_podwatch_own_names_come_first_and_are_not_mixed(tmp_path: Path) -> None:
    names = NOWHERE | {
        "AWS_ACCESS_KEY_ID": "AKID-training", "AWS_SECRET_ACCESS_KEY": "training-secret",
        "AWS_SESSION_TOKEN": "training-token",
        "PODWATCH_AWS_ACCESS_KEY_ID": "AKID-podwatch", "PODWATCH_AWS_SECRET_ACCESS_KEY": "podwatch-secret",
    }  # fmt: skip
    found = find(names, home=tmp_path)
    assert found is not None
    assert (found.access_key, found.secret, found.token) == ("AKID-podwatch", "podwatch-secret", "")


def test_profiles(tmp_path: Path) -> None:
    write(
        tmp_path / ".aws/credentials",
        "[default]\naws_access_key_id = AKID-default\naws_secret_access_key = default-secret\n"
        "[lab]\naws_access_key_id = AKID-lab\naws_secret_access_key = lab-secret-0\naws_session_token = lab-token-0\n",
    )
    write(tmp_path / ".aws/config", "[default]\nregion = eu-1\n[profile lab]\nregion = lab-1\nendpoint_url = https://lab\n"
          "[profile sso]\nsso_session = x\n")  # fmt: skip
    found = find(NOWHERE, home=tmp_path)
    assert found is not None
    assert (found.access_key, found.region, found.renew) == ("AKID-default", "eu-1", "")
    found = find(NOWHERE | {"AWS_PROFILE": "lab"}, home=tmp_path)
    assert found is not None
    assert (found.access_key, found.region, found.endpoint) == ("AKID-lab", "lab-1", "https://lab")
    write(tmp_path / ".aws/credentials", "[lab]\naws_access_key_id = AKID-lab2\naws_secret_access_key = lab-secret-2\n")
    again = found.renewed()
    assert (again.access_key, again.secret, again.token, again.region) == ("AKID-lab2", "lab-secret-2", "", "lab-1")
    with pytest.raises(ConfigurationError, match="sso_session"):
        find(NOWHERE, S3Settings(s3_profile="sso"), home=tmp_path)
    (tmp_path / ".aws/credentials").chmod(0o640)
    with pytest.raises(PermissionDenied, match="other users"):
        find(NOWHERE | {"AWS_PROFILE": "lab"}, home=tmp_path)


class Metadata:
    """IMDSv2 and the container's endpoint, as AWS documents them; ``number`` counts the keys given out."""

    def __init__(self) -> None:
        outer = self
        self.number, self.seconds = 0, 3600.0

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def do_PUT(self) -> None:
                self._say("session-token" if "X-aws-ec2-metadata-token-ttl-seconds" in self.headers else "", 200)

            def do_GET(self) -> None:
                machine = self.path.startswith("/latest/")
                wanted = ("X-aws-ec2-metadata-token", "session-token") if machine else ("Authorization", "pod-token")
                if self.headers.get(wanted[0]) != wanted[1]:
                    self._say("", 401)
                elif self.path.endswith("/security-credentials/"):
                    self._say("training-role\n", 200)
                else:
                    outer.number += 1
                    end = datetime.fromtimestamp(time.time() + outer.seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
                    keys = {"AccessKeyId": f"ASIA-{outer.number:07}", "SecretAccessKey": f"role-secret-{outer.number}"}
                    self._say(json.dumps(keys | {"Token": f"role-token-{outer.number}", "Expiration": end}), 200)

            def _say(self, text: str, status: int) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    made = Metadata()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.mark.parametrize("kind", ["machine", "container"])
def test_roles(metadata: Metadata, tmp_path: Path, kind: str) -> None:
    names = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": metadata.url}
    if kind == "container":
        names = {"AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{metadata.url}/v2/x",
                 "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(write(tmp_path / "token", "pod-token\n"))}  # fmt: skip
    found = find(names, home=tmp_path)
    assert found is not None
    assert (found.access_key, found.token) == ("ASIA-0000001", "role-token-1")
    assert not found.stale(time.time())
    assert found.stale(time.time() + 3500)
    again = found.renewed()
    assert (again.access_key, again.secret) == ("ASIA-0000002", "role-secret-2")
    assert "role-secret-2" not in scrub("role-secret-2 leaked")


def test_a_machine_without_metadata_service_has_no_role(tmp_path: Path) -> None:
    assert find({"AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:9"}, home=tmp_path) is None


def test_container_credentials_only_from_trusted_addresses(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="untrusted"):
        find({"AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://evil.example/x"}, home=tmp_path)


def test_our_own_keys_and_those_given_to_training(tmp_path: Path) -> None:
    """Only a value that is in podwatch's own environment file is podwatch's."""
    ours = write(
        tmp_path / "podwatch.env", "AWS_ACCESS_KEY_ID=ours-1\nexport AWS_SECRET_ACCESS_KEY='ours-2'\nAWS_REGION=x\n"
    )
    environ = {"AWS_ACCESS_KEY_ID": "ours-1", "AWS_SECRET_ACCESS_KEY": "ours-2", "AWS_REGION": "given", "HF_TOKEN": "t"}
    assert own_names(environ, ()) == frozenset()
    claim_own(environ, (ours, tmp_path / "absent.env"))
    assert environ == {
        "PODWATCH_AWS_ACCESS_KEY_ID": "ours-1", "PODWATCH_AWS_SECRET_ACCESS_KEY": "ours-2", "AWS_REGION": "given",
        "HF_TOKEN": "t",
    }  # fmt: skip
    assert scrubbed_environment(environ) == {"AWS_REGION": "given", "HF_TOKEN": "t"}, "what training gets"


def test_credentials_survive_a_job_line() -> None:
    made = Credentials(s3=S3Credentials("a", "s", "t", 12.0, "machine:x", "https://e", "r", "path", "/ca"))
    assert Credentials.from_json(json.loads(json.dumps(made.to_json()))) == made


def test_another_podwatch_gets_the_same_credentials(tmp_path: Path) -> None:
    made = Credentials(s3=S3Credentials("AKID-static", "static-secret", endpoint="https://e", region="r"))
    assert all(name.startswith("PODWATCH_") for name in made.variables()), "training never gets them"
    again = find(NOWHERE | made.variables(), home=tmp_path)
    assert again == made.s3


def test_parts_that_s3_would_refuse_are_refused_at_once(tmp_path: Path) -> None:
    from pydantic import ValidationError

    from podwatch.config.settings import SyncSettings

    assert SyncSettings.model_validate({"store": "b2://bucket-name", "part_size": "5MB"}).part_size == 5_000_000
    with pytest.raises(ValidationError, match="5MiB"):
        SyncSettings.model_validate({"store": "s3://bucket", "part_size": "5MB"})

"""A whole pod with an S3 store: real daemon, trainer and children. It publishes, deletes what is no longer kept,
disappears, and another machine restores the run. The server refuses what is wrong and watches the pointer."""

import json
from pathlib import Path

import pytest

from tests.blackbox.test_pod_gone import die
from tests.support.rig import Rig
from tests.support.s3server import BUCKET, KEY, KEY_ID, S3Server

pytestmark = pytest.mark.timeout(600)


def steps_stored(server: S3Server) -> set[int]:
    manifests = server.versions("/manifest.json")
    return {int(v["key"].split("/step_")[1].split("/")[0]) for v in manifests if not v["marker"]}


@pytest.mark.slow
@pytest.mark.parametrize("versions", [False, True])
def test_publish_retain_and_restore_elsewhere(rig: Rig, tmp_path: Path, versions: bool) -> None:
    rig.trainer_flags = ["--step-seconds=0.2", "--ckpt.interval=10"]
    with S3Server(tmp_path / "s3") as server:
        server.traits(versions=versions)
        # The environment's names, and the endpoint as a setting.
        environ = {
            "AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": KEY, "AWS_EC2_METADATA_DISABLED": "true",
            "HOME": str(tmp_path),
        }  # fmt: skip
        daemon = rig.daemon(
            environ, sync__store=f"s3://{BUCKET}/lab/pods", sync__s3_endpoint=server.url, sync__heartbeat="5s",
            sync__keep_last=1, sync__keep_every=0,
        )  # fmt: skip
        server.fault("PutObject", "status", status=503, count=2, suffix="latest.json")
        server.fault("PutObject", "lost", count=1, suffix=".distcp")
        daemon.start()
        daemon.wait_event("published", 180)
        daemon.wait_for(lambda: len(steps_stored(server)) >= 2, 120, "a second checkpoint is stored")
        checked = daemon.command("check")
        assert "s3://test-bucket is usable" in checked.stdout, checked.stdout + checked.stderr
        listed = daemon.command("store", "verify", "--deep")
        assert listed.returncode == 0, listed.stdout + listed.stderr
        secret = [p for p in (daemon.log,) if KEY in p.read_text(errors="replace")]
        assert secret == []
        die(daemon, rig)
        assert server.violations() == []
        pointer = json.loads((tmp_path / "s3" / "body" / str(server.versions("latest.json")[-1]["number"])).read_text())
        restored = daemon.command("restore", "--to", str(tmp_path / "there"), "--json")
        assert restored.returncode == 0, restored.stderr
        document = json.loads(restored.stdout)
        assert document["step"] == pointer["step"]
        assert any(path.is_file() for path in (tmp_path / "there").rglob("*"))
        assert {v["key"].split("/")[0] for v in server.versions()} == {"lab"}

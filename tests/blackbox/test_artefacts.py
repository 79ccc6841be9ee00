"""What is left to read when the pod is gone: the real daemon, a real bucket, an engine that dies."""

import io
import tarfile
from pathlib import Path

import pytest

from tests.support.asking import kill_engine, running
from tests.support.b2server import BUCKET, KEY, B2Server
from tests.support.rig import Rig

pytestmark = pytest.mark.slow

SECRET = "wandb-secret-of-this-user"


def test_logs_configuration_and_evidence_are_in_the_store(rig: Rig, tmp_path: Path) -> None:
    with B2Server(tmp_path / "b2") as server:
        environ = {
            n: server.environment()[n] for n in ("B2_APPLICATION_KEY_ID", "B2_APPLICATION_KEY", "B2_ENVIRONMENT")
        }
        daemon = rig.daemon({**environ, "WANDB_API_KEY": SECRET}, sync__store=f"b2://{BUCKET}").start()
        running(daemon, rig, step=5)
        kill_engine(rig)
        daemon.wait_event("incident-closed", 40)
        root = f"{rig.run_id}/podwatch/"

        def arrived() -> bool:
            names = [name.removeprefix(root) for name in server.objects(root)]
            kinds = {name.partition("/")[0] for name in names}
            return {"incidents", "config"} <= kinds and any(name.endswith("__train.log") for name in names)

        daemon.wait_for(arrived, 60, "the round after the incident")
        assert daemon.stop() == 0
        found = {name.removeprefix(root): data for name, data in server.objects(root).items()}
    (log,) = [data for name, data in found.items() if name.startswith("logs/") and name.endswith("__train.log")][:1]
    assert log.count(b"\n") > 3
    assert any(name.startswith("config/") for name in found), sorted(found)
    (bundle,) = [data for name, data in found.items() if name.startswith("incidents/")]
    with tarfile.open(fileobj=io.BytesIO(bundle)) as archive:
        assert "finding.json" in archive.getnames()
    assert not any(s in data for data in found.values() for s in (SECRET.encode(), KEY.encode()))

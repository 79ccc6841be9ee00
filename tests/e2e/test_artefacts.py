"""What is left to read when the pod is gone: the real daemon, a real bucket, an engine that dies."""

import io
import tarfile
from pathlib import Path

import pytest

from podwatch.domain.manifest import Keys
from podwatch.stores.b2 import B2Store
from podwatch.stores.credentials import Credentials
from tests.support.asking import kill_engine, running
from tests.support.b2server import BUCKET, KEY, KEY_ID, B2Server
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
        store = B2Store(BUCKET, Credentials(KEY_ID, KEY, server.url), writer_id="look")
        root = f"{Keys(rig.run_id).root}/"

        def arrived() -> bool:
            names = [o.key.removeprefix(root) for o in store.list(root)]
            kinds = {name.partition("/")[0] for name in names}
            return {"incidents", "config"} <= kinds and any(name.endswith("__train.log") for name in names)

        daemon.wait_for(arrived, 60, "the round after the incident")
        assert daemon.stop() == 0
        found = {o.key.removeprefix(root): store.get_bytes(o.key) or b"" for o in store.list(root)}
        store.close()
    (log,) = [data for name, data in found.items() if name.startswith("logs/") and name.endswith("__train.log")][:1]
    assert log.count(b"\n") > 3
    assert any(name.startswith("config/") for name in found), sorted(found)
    (bundle,) = [data for name, data in found.items() if name.startswith("incidents/")]
    with tarfile.open(fileobj=io.BytesIO(bundle)) as archive:
        assert "finding.json" in archive.getnames()
    assert not any(s in data for data in found.values() for s in (SECRET.encode(), KEY.encode()))

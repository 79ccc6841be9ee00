"""The open store: which key is used after an error, and what counts as a refusal."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from podwatch.app.backup.connection import StoreConnection, as_known
from podwatch.domain.errors import HostError, IntegrityError, InternalError
from podwatch.domain.event import EventName
from podwatch.domain.finding import Severity
from podwatch.store.objects.base import Objects
from podwatch.store.objects.errors import LeaseUnsettled, StoreOutage, StoreRefused
from podwatch.store.publish import LeaseLost
from tests.app.backup.backup_world import World
from tests.support.b2server import B2Server


@pytest.fixture
def connection(b2: World) -> Iterator[StoreConnection]:
    made = StoreConnection(b2.settings, b2.clock, b2.run.events.append)
    yield made
    made.close()


def put(store: Objects) -> None:
    store.put("run/podwatch/tmp/x", b"x")


async def test_a_corrected_key_is_used_at_the_next_request(
    connection: StoreConnection, server: B2Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("B2_APPLICATION_KEY", "wrong")
    with pytest.raises(StoreRefused) as error:
        await connection.call(put)
    assert error.value.kind == "key"
    monkeypatch.setenv("B2_APPLICATION_KEY", server.environment()["B2_APPLICATION_KEY"])
    await connection.call(put)


async def test_a_key_that_is_withdrawn_and_replaced(connection: StoreConnection, server: B2Server, b2: World) -> None:
    """The open connection has the old one."""
    await connection.call(put)
    server.fault("b2_upload_file", "status", status=401, code="unauthorized", count=99)
    with pytest.raises(StoreRefused):
        await connection.call(put)
    server.admin("clear")
    opened: list[Objects] = []
    await connection.call(opened.append)
    first = opened[0]
    await connection.call(opened.append)
    assert opened[1] is first, "without an error it stays open"


async def test_half_a_key_is_said_before_the_store_is_asked(
    connection: StoreConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("B2_APPLICATION_KEY")
    with pytest.raises(Exception, match="B2_APPLICATION_KEY"):
        await connection.call(put)


async def test_what_the_store_does_not_have_does_not_close_it(connection: StoreConnection) -> None:
    opened: list[Objects] = []

    def missing(store: Objects) -> None:
        opened.append(store)
        store.read("run/podwatch/none", 10)

    for _ in range(2):
        with pytest.raises(IntegrityError):
            await connection.call(missing)
    assert opened[0] is opened[1]


@pytest.mark.parametrize(
    ("error", "refused", "severity"),
    [
        (StoreRefused("key", "unknown key", where="b2", fix="x"), True, Severity.CRITICAL),
        (StoreRefused("cap", "cap exceeded", where="b2", fix="x"), True, Severity.CRITICAL),
        (StoreOutage("no answer", where="b2"), False, Severity.WARNING),
    ],
    ids=["key", "cap", "outage"],
)
async def test_a_refusal_is_told_apart_from_an_outage(
    local: World, error: Any, refused: bool, severity: Severity
) -> None:
    connection = StoreConnection(local.settings, local.clock, local.run.events.append)
    for _ in range(3):
        connection.unwell(error)
    connection.tries_again_in(7.0)
    assert connection.trouble is not None
    assert (connection.works, connection.trouble.refused) == (False, refused)
    assert connection.trouble.next_attempt_wall is not None
    assert [(e.name, e.severity) for e in local.run.events] == [(EventName.SYNC_FAILED, severity)], (
        "once, not at every try"
    )
    connection.unwell(StoreOutage("something else", where="b2"))
    connection.well()
    connection.well()
    assert [e.name for e in local.run.events][1:] == [EventName.SYNC_FAILED, EventName.STORE_RECOVERED]
    assert connection.trouble is None


async def test_the_lease_is_no_trouble_of_the_store(local: World) -> None:
    connection = StoreConnection(local.settings, local.clock, local.run.events.append)
    for error in (LeaseLost("lost"), LeaseUnsettled("not yet", where="", fix="")):
        connection.unwell(error)
    assert (connection.works, connection.trouble, local.run.events) == (None, None, [])


def test_any_exception_becomes_one_of_podwatchs() -> None:
    assert isinstance(as_known(OSError(5, "I/O error")), HostError)
    assert isinstance(as_known(KeyError("x")), InternalError)
    known = HostError("x")
    assert as_known(known) is known


async def test_a_directory_that_vanished_is_not_made_again(local: World, tmp_path: Path) -> None:
    """A volume that is not mounted any more: an empty directory in its place is no store."""
    connection = StoreConnection(local.settings, local.clock, local.run.events.append)
    await connection.call(put)
    store = tmp_path / "store"
    store.rename(tmp_path / "away")
    with pytest.raises(StoreOutage):
        await connection.call(put)
    assert not store.exists()
    store.mkdir()
    with pytest.raises(StoreOutage):
        await connection.call(put)
    store.rmdir()
    (tmp_path / "away").rename(store)
    await connection.call(put)

"""The backup as a whole, over a real disk and store."""

from tests.daemon.backup.backup_world import World, until


async def test_the_newest_is_stored_and_what_was_kept_for_it_is_gone(local: World) -> None:
    local.save(5)
    local.save(10)
    local.scan()
    await local.start()
    await until(lambda: "published" in local.names())
    assert local.stored() == {10}
    assert local.newest() == 10
    await until(lambda: local.links() == local.lists() == [])

"""A container's own disk is gone and with it the journal; output_dir and what lies beside it are still there."""

import shutil

from podwatch.domain.finding import FindingKind
from podwatch.recovery import Phase, quarantine
from tests.support.recovery_world import Podwatch, World, death


async def set_aside(world: World, *, first: bool) -> Podwatch:
    """A run whose step 20 is set aside because it goes back to 15 by a person's wish."""
    podwatch = Podwatch(world)
    await podwatch.recovery.begin()
    await podwatch.until(Phase.CONFIRMING)
    for step in (15, 20):
        world.save(step)
    if not first:  # the same file names with other contents: a step that was saved again
        (world.output / "checkpoints" / "step_20" / "a.bin").write_bytes(b"second life")
    podwatch.see(21)
    await podwatch.recovery.requests.restart(15)
    await podwatch.until(Phase.CONFIRMING)
    podwatch.see(16)
    return podwatch


async def test_what_was_set_aside_before_is_never_mixed_with_what_is_set_aside_now(world: World) -> None:
    podwatch = await set_aside(world, first=True)
    (old,) = quarantine.listing(podwatch.workspace)
    await podwatch.leave()
    world.kill()
    world.kept = None
    shutil.rmtree(world.root / "state")
    kept = world.contents()
    again = await set_aside(world, first=False)
    entries = quarantine.listing(again.workspace)
    assert len(entries) == 2
    assert len({e.id for e in entries}) == 2
    assert entries[0] == old, "its index, and with it its protection, is as it was"
    assert kept <= world.contents()
    assert FindingKind.BLOCKED not in {f.kind for f in again.recovery.findings()}
    told = [e.fields["quarantine"] for e in world.events if e.name == "quarantined"]
    assert told == [e.id for e in entries], "a person is told the number that returns it"
    await again.leave()


async def test_an_act_cut_off_by_a_loss_of_state_is_not_taken_for_a_place_of_ours(world: World) -> None:
    """Directories of other names, and numbers far above any id, do not confuse the next one."""
    podwatch = Podwatch(world)
    podwatch.workspace.quarantine.mkdir(parents=True)
    (podwatch.workspace.quarantine / "900").mkdir()
    (podwatch.workspace.quarantine / "901.restore.step_5").mkdir()
    world.save(15)
    await podwatch.recovery.begin()
    await podwatch.until(Phase.CONFIRMING)
    world.save(20)
    podwatch.see(21)
    world.save(25, whole=False)
    podwatch.see(22, finding=death())
    await podwatch.until(Phase.CONFIRMING)
    assert (podwatch.workspace.quarantine / "901" / quarantine.INDEX).exists()
    await podwatch.leave()

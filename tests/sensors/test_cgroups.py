"""Memory cgroups, from files of the kernel's own form."""

import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from podwatch.sensors import host


def world(tmp_path: Path, mountinfo: str, membership: str) -> Path:
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "7").mkdir()
    (proc / "self" / "mountinfo").write_text(mountinfo)
    (proc / "7" / "cgroup").write_text(membership)
    return proc


def v2(directory: Path, current: int, limit: str = "max", cache: int = 0, kills: int = 0) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.current").write_text(f"{current}\n")
    (directory / "memory.max").write_text(f"{limit}\n")
    (directory / "memory.stat").write_text(
        f"anon 1\nfile {cache}\ninactive_file {cache // 2}\nactive_file {cache // 2}\n"
    )
    (directory / "memory.events").write_text(f"low 0\nhigh 0\nmax 9\noom 1\noom_kill {kills}\noom_group_kill 0\n")


def test_v2_takes_the_group_nearest_to_its_limit_and_leaves_the_cache_out(tmp_path: Path) -> None:
    root = tmp_path / "sys fs"
    v2(root / "kubepods/pod", current=900, limit="1000", cache=400, kills=5)
    v2(root / "kubepods/pod/train", current=300, limit="2000", cache=0, kills=2)
    escaped = str(root).replace(" ", "\\040")
    proc = world(tmp_path, f"36 25 0:32 / {escaped} rw - cgroup2 cgroup2 rw\n", "0::/kubepods/pod/train\n")
    assert host.read(7, proc) == host.Memory(1000, 500, 2)


def test_v2_in_a_namespace_of_its_own(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    v2(root, current=70, limit="100", kills=1)
    proc = world(tmp_path, f"36 25 0:32 /../.. {root} rw - cgroup2 cgroup2 rw\n", "0::/../other\n")
    assert host.read(7, proc) == host.Memory(100, 70, 1)


def test_without_a_limit_there_is_none(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    v2(root / "a", current=70)
    proc = world(tmp_path, f"36 25 0:32 / {root} rw - cgroup2 cgroup2 rw\n", "0::/a\n")
    assert host.read(7, proc) == host.Memory(None, 70, 0)


def test_v1_below_the_root_that_a_container_sees(tmp_path: Path) -> None:
    """docker without a cgroup namespace: the mount shows /docker/ID, and /proc/PID/cgroup names it too."""
    root = tmp_path / "memory"
    (root / "train").mkdir(parents=True)
    for directory, limit in ((root, "1000"), (root / "train", "9223372036854771712")):
        (directory / "memory.limit_in_bytes").write_text(limit)
        (directory / "memory.usage_in_bytes").write_text("800")
        (directory / "memory.stat").write_text("total_inactive_file 100\ntotal_active_file 50\n")
        (directory / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    mountinfo = (
        f"35 31 0:32 /docker/abc {root} rw - cgroup cgroup rw,memory\n"
        f"36 25 0:33 / {tmp_path}/unified rw - cgroup2 cgroup2 rw\n"
    )
    proc = world(tmp_path, mountinfo, "4:memory:/docker/abc/train\n0::/\n")
    assert host.read(7, proc) == host.Memory(1000, 650, 3)


def test_nothing_to_see_is_none(tmp_path: Path) -> None:
    proc = world(tmp_path, "22 1 0:20 / /proc rw - proc proc rw\n", "0::/\n")
    assert host.read(7, proc) is None
    assert host.read(8, proc) is None


def test_this_process_on_this_machine() -> None:
    found = host.read(os.getpid())
    assert found is None or found.used_bytes is None or found.used_bytes > 0


@given(st.text(max_size=400))
def test_any_mountinfo_is_read(text: str) -> None:
    host.find_mount(text)
    host.group_of(text, 1)
    host.group_of(text, 2)

"""Which configuration files are believed: the same by the daemon and by every command. Root and mounts where needed."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from podwatch.cli import find_daemon
from podwatch.cli.find_daemon import locate, read_hints
from podwatch.config.loading import load_settings
from podwatch.config.trusted_files import fuse_user, read_trusted
from podwatch.domain.errors import ConfigurationError
from podwatch.system.endpoint import RUNTIME_LINK, own_endpoint, write_endpoint
from tests.support.strangers import UID, needs_root

TEXT = 'run_id = "r"\nstate_dir = "/s"\n[trainer]\noutput_dir = "/o"\n'


def daemon_reads(path: Path) -> str:
    return load_settings(path, environ={}).settings.run_id


def client_reads(path: Path) -> str:
    return read_hints(str(path), {}).run_id


both = pytest.mark.parametrize("reads", [daemon_reads, client_reads])


def write(path: Path, mode: int = 0o600, uid: int = -1) -> Path:
    path.write_text(TEXT)
    path.chmod(mode)
    os.chown(path, uid, -1)
    return path


@both
@pytest.mark.parametrize("mode", [0o400, 0o600, 0o644, 0o444, 0o755])
def test_ours_is_believed(tmp_path: Path, reads: Callable[[Path], str], mode: int) -> None:
    assert reads(write(tmp_path / "x.toml", mode)) == "r"


@both
@pytest.mark.parametrize("mode", [0o620, 0o602, 0o664, 0o666, 0o777])
def test_what_others_can_write_is_not(tmp_path: Path, reads: Callable[[Path], str], mode: int) -> None:
    with pytest.raises(ConfigurationError, match=r"written by other users \(mode 0\d+\).*chmod go-w"):
        reads(write(tmp_path / "x.toml", mode))


@needs_root
@both
@pytest.mark.parametrize("through", ["", "link", "links"])
def test_another_users_is_not_whoever_made_the_links(
    tmp_path: Path, reads: Callable[[Path], str], through: str
) -> None:
    file = path = write(tmp_path / "x.toml", uid=UID)
    if through:
        path = tmp_path / "link"
        path.symlink_to(file.name if through == "link" else "hop")
        (tmp_path / "hop").symlink_to(file)
    with pytest.raises(ConfigurationError, match=f"belongs to uid {UID}.*chown 0 {file}"):
        reads(path)


@needs_root
@both
def test_a_config_map_is_believed_and_another_users_link_to_it(tmp_path: Path, reads: Callable[[Path], str]) -> None:
    """Kubernetes: podwatch.toml -> ..data/podwatch.toml, ..data -> ..2026_11_22; modes of the links mean nothing."""
    (tmp_path / "..2026").mkdir()
    write(tmp_path / "..2026" / "podwatch.toml", 0o644)
    (tmp_path / "..data").symlink_to("..2026")
    (tmp_path / "podwatch.toml").symlink_to("..data/podwatch.toml")
    os.lchown(tmp_path / "podwatch.toml", UID, UID)
    assert reads(tmp_path / "podwatch.toml") == "r"


@needs_root
@pytest.mark.parametrize(("options", "believed"), [("ro", True), ("rw", False)])
@pytest.mark.parametrize("mode", [0o666, 0o777])
def test_on_a_read_only_mount_owner_and_mode_do_not_matter(
    tmp_path: Path, options: str, believed: bool, mode: int
) -> None:
    """A ConfigMap with defaultMode 0666 and an fsGroup, as its kubelet mounts it. In a mount namespace of its own."""
    (tmp_path / "source" / "..2026").mkdir(parents=True)
    write(tmp_path / "source" / "..2026" / "podwatch.toml", mode, UID)
    (tmp_path / "source" / "..data").symlink_to("..2026")
    (tmp_path / "source" / "podwatch.toml").symlink_to("..data/podwatch.toml")
    (tmp_path / "mount").mkdir()
    code = (
        "import sys; from pathlib import Path\nfrom podwatch.domain.errors import ConfigurationError\n"
        "from podwatch.cli.find_daemon import read_hints\nfrom podwatch.config.loading import load_settings\n"
        "for read in (lambda p: read_hints(p, {}), lambda p: load_settings(Path(p), environ={}).settings):\n"
        "    try: print(read(sys.argv[1]).run_id)\n"
        "    except ConfigurationError: print('refused')\n"
    )
    script = 'mount --bind "$1" "$2" && mount -o remount,bind,$3 "$2" && exec "$4" -c "$5" "$2/podwatch.toml"'
    paths = [str(tmp_path / "source"), str(tmp_path / "mount"), options, sys.executable, code]
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", *paths]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mount namespaces here: {done.stderr.strip()}")
    assert done.stdout.split() == (["r", "r"] if believed else ["refused", "refused"]), done.stderr


@both
@pytest.mark.parametrize("kind", ["fifo", "device", "directory", "dangling", "large"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, reads: Callable[[Path], str], kind: str) -> None:
    """A FIFO would block the command, and opening some devices does something (a watchdog starts)."""
    path = tmp_path / "x.toml"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "directory":
        path.mkdir()
    elif kind == "dangling":
        path.symlink_to("nowhere")
    else:
        path.write_text("#" * (2 << 20))
    with pytest.raises(ConfigurationError):
        reads(path)


@needs_root
def test_another_users_file_in_the_current_directory_leads_no_command_to_his_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a daemon, commands look at ./podwatch.toml. His names a state directory with a living endpoint."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("podwatch.cli.find_daemon.USUAL_CONFIGS", ("podwatch.toml",))
    monkeypatch.setattr(find_daemon, "searched", lambda _: [])  # without this machine's own /run/podwatch
    runtime, link = tmp_path / "his" / "run" / "x", tmp_path / "his" / "x" / RUNTIME_LINK
    for directory in (runtime, link.parent):
        directory.mkdir(parents=True)
    link.symlink_to(runtime)
    write_endpoint(runtime, own_endpoint("x", started_wall=1.0))
    file = tmp_path / "podwatch.toml"
    file.write_text(f"state_dir = {json.dumps(str(tmp_path / 'his'))}\n")
    assert locate("x", "", {}) is not None  # ours would be followed
    os.chown(file, UID, UID)
    assert locate("x", "", {}) is None


def test_the_text_is_read_from_what_was_checked(tmp_path: Path) -> None:
    path = write(tmp_path / "x.toml")
    path.write_bytes(b"\xef\xbb\xbf" + TEXT.encode())  # with a byte order mark, as some editors write it
    assert read_trusted(path) == TEXT
    assert client_reads(path) == "r"


@pytest.mark.parametrize(("mount", "uid"), [("36", 0), ("40", 1000), ("41", 0), ("99", 0)])
def test_the_server_of_a_fuse_mount_is_known(mount: str, uid: int) -> None:
    mounts = (
        "36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue\n"
        "40 36 0:52 / /home/e/m rw,nosuid,nodev shared:2 - fuse.sshfs x:/ rw,user_id=1000,group_id=1000,allow_other\n"
        "41 36 0:53 / /mnt/s3 rw - fuse rclone rw,user_id=0,group_id=0\n"
    )
    assert fuse_user(mount, mounts) == uid

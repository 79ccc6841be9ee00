"""Root filesystems to run podwatch in: the image that the Dockerfile makes, or an overlay of this machine's own root.

The image is built by buildah without a daemon, on a base that debootstrap makes once (kept in the cache directory).
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[3]
TOOLS = ("unshare", "nsenter", "chroot", "mount")
IMAGE_TOOLS = ("buildah", "debootstrap")
MISSING = (
    "needs root"
    if os.geteuid() != 0
    else next((f"needs {tool}" for tool in TOOLS if not shutil.which(tool)), "")
)  # fmt: skip
"""Why no container can run here, in one line; empty if one can."""
IMAGE_MISSING = next((f"building the image needs {tool}" for tool in IMAGE_TOOLS if not shutil.which(tool)), "")
SUITE = "bookworm"


@dataclass(frozen=True)
class Rootfs:
    """A root directory. ``argv`` is what the image starts; ``podwatch`` and ``python`` are programs inside."""

    path: Path
    argv: tuple[str, ...]
    podwatch: str
    python: str
    image: dict[str, Any] = field(default_factory=dict)


@contextlib.contextmanager
def built_image() -> Iterator[Rootfs]:
    """The Dockerfile built for real, as ``docker run`` would start it. Raises AssertionError with the build's log."""
    with tempfile.TemporaryDirectory(prefix="podwatch-image-") as scratch:
        store = ["--root", f"{scratch}/storage", "--runroot", f"{scratch}/run", "--storage-driver", "vfs"]

        def buildah(*arguments: str) -> str:
            command, *rest = arguments
            done = subprocess.run(["buildah", *store, command, *rest], capture_output=True, text=True, timeout=900)
            assert done.returncode == 0, f"buildah {command}: {done.stdout[-4000:]}\n{done.stderr[-4000:]}"
            return done.stdout.strip()

        container = buildah("from", "scratch")
        buildah("add", "--quiet", container, str(_base()), "/")
        buildah("commit", "--quiet", container, "podwatch-test-base")
        # What makes pip reach its index here has to hold inside as well; nothing of it stays in the image.
        shared = [p for p in ("/etc/ssl/certs/ca-certificates.crt", "/etc/pip.conf") if Path(p).is_file()]
        volumes = [f"--volume={p}:{p}:ro" for p in shared]
        build = ("bud", "--isolation=chroot", "--format=docker", "--build-arg=BASE=podwatch-test-base", *volumes)
        print(buildah(*build, "--tag=podwatch-test", f"--file={REPO}/Dockerfile", str(REPO))[-300:])
        image = json.loads(buildah("inspect", "--type=image", "podwatch-test"))["Docker"]["config"]
        path = Path(buildah("mount", buildah("from", "podwatch-test")))
        argv = (*image["Entrypoint"], *image["Cmd"])
        yield Rootfs(path, argv, "/usr/local/bin/podwatch", "/usr/bin/python3", image)


@contextlib.contextmanager
def own_root() -> Iterator[Rootfs]:
    """This machine's root under a tmpfs overlay, with the podwatch that runs the tests. Nothing reaches the host."""
    base = Path(tempfile.mkdtemp(prefix="podwatch-container-"))
    layers, root = base / "layers", base / "root"
    try:
        layers.mkdir()
        _run("mount", "-t", "tmpfs", "-o", "size=1g", "tmpfs", str(layers))
        for directory in (layers / "upper", layers / "work", root):
            directory.mkdir()
        options = f"lowerdir=/,upperdir={layers}/upper,workdir={layers}/work"
        _run("mount", "-t", "overlay", "-o", options, "overlay", str(root))
        for path in {REPO, Path(sys.prefix), Path(sys.base_prefix)}:
            if not (root / path.relative_to("/")).exists():  # on another filesystem than /
                (root / path.relative_to("/")).mkdir(parents=True)
                _run("mount", "--bind", str(path), str(root / path.relative_to("/")))
        podwatch = str(Path(sys.prefix, "bin", "podwatch"))
        yield Rootfs(root, (podwatch, "run"), podwatch, sys.executable)
    finally:
        subprocess.run(["umount", "-R", "-l", str(root)], capture_output=True)
        subprocess.run(["umount", "-l", str(layers)], capture_output=True)
        shutil.rmtree(base, ignore_errors=True)


def _base() -> Path:
    """A small Debian with python3 as a tar file, made once: what a trainer's image brings at the least."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "podwatch-tests"
    target = cache / f"base-{SUITE}.tar"
    if target.is_file():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="podwatch-base-") as scratch:
        include = "--include=ca-certificates,python3"
        done = subprocess.run(
            ["debootstrap", "--variant=minbase", include, SUITE, f"{scratch}/root"],
            capture_output=True, text=True, timeout=900,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
        shutil.rmtree(f"{scratch}/root/var/cache/apt/archives", ignore_errors=True)
        unfinished = target.with_suffix(f".{os.getpid()}")
        _run("tar", "-C", f"{scratch}/root", "-cf", str(unfinished), ".")
        unfinished.replace(target)
    return target


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)

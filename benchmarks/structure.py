"""The structural check of a set with the shape of a 47 GB one: 8 shards of 3.9 GB and a 16 GB broadcast.

    python benchmarks/structure.py

The files are sparse: headers, indexes and record ends are real, the tensors between them are not there. The peer is a
plain read of 1 GiB of page cache, scaled to 47 GB: what any check costs that reads the data.
"""

import io
import json
import resource
import struct
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measuring import Figures, parser, percentile, spread
from podwatch.checkpoints.known_checkpoints import Catalogue
from podwatch.system.clock import SystemClock
from tests.drivers.checkpoints import prime_rl_layout
from tests.support import checkpoints as real

LIMIT = 0.5
RANKS, RECORDS, RECORD = 8, 1200, 3_230_000
SHARDS, TENSORS = 4, 100


def write_dcp(directory: Path) -> int:
    """8 ranks x 1,200 tensors: the index is as large as a real one; each record begins and ends as torch writes it."""
    directory.mkdir(parents=True)
    storage, state = {}, {}
    for rank in range(RANKS):
        name = f"__{rank}_0.distcp"
        with (directory / name).open("wb") as shard:
            for number in range(RECORDS):
                key, offset = f"app.model.layers.{number}.rank{rank}.weight", number * RECORD
                index = real._make(real._Index, fqn=key, offset=real._SizeValue(0), index=0)
                storage[index] = real._make(
                    real._Info, relative_path=name, offset=offset, length=RECORD, transform_descriptors=None
                )
                chunk = real._make(real._Chunk, offsets=real._SizeValue(0), sizes=real._SizeValue(RECORD))
                state[key] = real._make(real._Tensor, properties=None, size=real._SizeValue(RECORD), chunks=[chunk])
                shard.seek(offset)
                shard.write(b"PK\x03\x04")
                shard.seek(offset + RECORD - 22)
                shard.write(b"PK\x05\x06" + bytes(18))
    meta = real._make(real._StorageMeta, checkpoint_id=None, save_id="0" * 32, load_id=None, modules=[])
    whole = real._make(
        real._Metadata,
        state_dict_metadata=state,
        planner_data={},
        storage_data=storage,
        storage_meta=meta,
        version="1.0.0",
    )
    out = io.BytesIO()
    real._Pickler(out, 4).dump(whole)
    (directory / ".metadata").write_bytes(out.getvalue())
    return RANKS * RECORDS * RECORD


def write_broadcast(directory: Path) -> int:
    directory.mkdir(parents=True)
    total = 0
    for number in range(SHARDS):
        header, position = {}, 0
        for tensor in range(TENSORS):
            end = position + 20_000_000 * 2
            header[f"layers.{number}.{tensor}"] = {
                "dtype": "BF16",
                "shape": [20_000_000],
                "data_offsets": [position, end],
            }
            position = end
        raw = json.dumps(header).encode()
        raw += b" " * (-len(raw) % 8)
        with (directory / f"model-{number + 1:05}-of-{SHARDS:05}.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(raw)) + raw)
            file.truncate(8 + len(raw) + position)
        total += position
    names = {
        f"layers.{n}.{t}": f"model-{n + 1:05}-of-{SHARDS:05}.safetensors" for n in range(SHARDS) for t in range(TENSORS)
    }
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (directory / "config.json").write_text("{}")
    (directory / "STABLE").touch()
    return total


def cpu() -> float:
    """Seconds of this process and of the readers it has ended."""
    own, readers = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + readers.ru_utime + readers.ru_stime


def main() -> int:
    args = parser(__doc__ or "").parse_args()
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "outputs"
        real.finish(real.orchestrator_operations(out / "run_default/checkpoints/step_5/orchestrator", 5, "A"))
        size = write_broadcast(out / "run_default" / "broadcasts" / "step_5")
        size += write_dcp(out / "checkpoints" / "step_5" / "trainer")
        figures = Figures(f"structural check of a set of {size / 1e9:.0f} GB")
        judged, verified, judged_cpu, verified_cpu = [], [], [], []
        for _ in range(5 if args.quick else 20):
            catalogue = Catalogue(prime_rl_layout(out), SystemClock(), settle=0.0, settle_weak=0.0)
            began, spent = time.perf_counter(), cpu()
            catalogue.rescan()
            judged.append(time.perf_counter() - began)
            judged_cpu.append(cpu() - spent)
            catalogue.rescan()
            (found,) = catalogue.sets
            if not found.complete:
                raise SystemExit(f"not complete: {found.reason}")
            began, spent = time.perf_counter(), cpu()
            if problems := catalogue.verify(5):
                raise SystemExit(f"not sound: {problems[0]}")
            verified.append(time.perf_counter() - began)
            verified_cpu.append(cpu() - spent)
    figures.line(f"completeness: {spread(judged, 'ms', 1000)}")
    figures.line(f"verify ({RANKS * RECORDS} records): {spread(verified, 'ms', 1000)}")
    figures.line(f"CPU of completeness: {spread(judged_cpu, 'ms', 1000)}")
    figures.line(f"CPU of verify: {spread(verified_cpu, 'ms', 1000)}")
    with tempfile.TemporaryFile() as cached:
        block = bytes(1 << 20)
        for _ in range(1024):
            cached.write(block)
        cached.seek(0)
        began = time.perf_counter()
        while cached.read(1 << 20):
            pass
        reading = (time.perf_counter() - began) * size / (1 << 30)
    figures.line(f"reading it all, from memory: {reading:.1f} s; the check is {reading / percentile(judged, 0.5):.0f}x")
    figures.at_most("CPU of completeness, p95", percentile(judged_cpu, 0.95), LIMIT, "s")
    figures.at_most("CPU of verify, p95", percentile(verified_cpu, 0.95), LIMIT, "s")
    figures.at_most("completeness, p95", percentile(judged, 0.95), LIMIT, "s")
    figures.at_most("verify, p95", percentile(verified, 0.95), LIMIT, "s")
    return figures.code


if __name__ == "__main__":
    sys.exit(main())

"""What one PUT of a hashed piece to S3 costs: boto3's ``put_object`` beside a presigned URL sent by requests.

    python benchmarks/s3_put.py [--gib 2] [--rounds 3] [--only http tls] [--piece 128]

The service throws bodies away (measuring/discard_s3.py). Each client reads slices of one file in the page cache, hashes
each with SHA-256, and sends it with that hash, four at a time; the whole child of a
transfer and rclone, where it is installed, beside them. Clients take
turns within each round. boto3 signs the body's hash once more over plain HTTP, and sends in blocks of 16 KiB.
"""

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measuring import ROOT, parser
from benchmarks.measuring.discard_s3 import BUCKET
from benchmarks.measuring.sending import write_file
from benchmarks.measuring.uploaders import certify

COMMON = """
import base64, hashlib, json, os, resource, sys, time
from concurrent.futures import ThreadPoolExecutor
url, path, piece, ca = sys.argv[1], sys.argv[2], int(sys.argv[3]) << 20, sys.argv[4] or None
descriptor, size = os.open(path, os.O_RDONLY), os.stat(path).st_size
os.environ |= {"AWS_ACCESS_KEY_ID": "AKTEST000000", "AWS_SECRET_ACCESS_KEY": "secretsecret", "AWS_REGION": "us-east-1"}

def hashed(at, length):
    digest, block, end = hashlib.sha256(), memoryview(bytearray(1 << 20)), at + length
    while at < end:
        count = os.preadv(descriptor, [block[: min(1 << 20, end - at)]], at)
        digest.update(block[:count])
        at += count
    return digest

class Slice:
    def __init__(self, at, length):
        self.at, self.length, self.done = at, length, 0
    def __len__(self):
        return self.length
    def tell(self):
        return self.done
    def seek(self, to, whence=0):
        self.done = to + (0, self.done, self.length)[whence]
        return self.done
    def read(self, size=-1):
        left = self.length - self.done
        data = os.pread(descriptor, left if size < 0 else min(size, left), self.at + self.done)
        self.done += len(data)
        return data

def run(send):
    began = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda at: send(at, min(piece, size - at)), range(0, size, piece)))
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps([time.monotonic() - began, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024]))

def client():
    import boto3
    from botocore.config import Config
    return boto3.client("s3", endpoint_url=url, verify=ca, config=Config(max_pool_connections=8,
        request_checksum_calculation="when_required", signature_version="s3v4", s3={"addressing_style": "path"}))
"""
CLIENTS = {
    "put_object": """
s3 = client()
run(lambda at, length: s3.put_object(Bucket="%s", Key=f"a/{at}", Body=Slice(at, length),
    ChecksumSHA256=base64.b64encode(hashed(at, length).digest()).decode()))
""",
    "presigned": """
import requests
from requests.adapters import HTTPAdapter
class Adapter(HTTPAdapter):
    def init_poolmanager(self, *positional, **options):
        super().init_poolmanager(*positional, **options, blocksize=1 << 20)
s3, session = client(), requests.Session()
session.mount("http://", Adapter(pool_maxsize=8)), session.mount("https://", Adapter(pool_maxsize=8))
def send(at, length):
    digest = base64.b64encode(hashed(at, length).digest()).decode()
    wanted = {"Bucket": "%s", "Key": f"a/{at}", "ChecksumSHA256": digest}
    signed = s3.generate_presigned_url("put_object", Params=wanted)
    answer = session.put(signed, data=Slice(at, length), headers={"x-amz-checksum-sha256": digest}, verify=ca or True)
    assert answer.status_code == 200, answer.text
run(send)
""",
    "transfer child": """
import tempfile
from podwatch.store.objects.s3 import S3Access
from podwatch.domain.checkpoint import FileEntry
from podwatch.store.transfer.job import TransferJob
from podwatch.store.transfer.start import Transfer
status, root = os.stat(path), os.open(os.path.dirname(path), os.O_RDONLY)
file = FileEntry(os.path.basename(path), "part", size, status.st_mtime_ns, 0o644, status.st_ino, status.st_dev)
job = TransferJob("send", "s3://%s", "c/", (file,), piece, {"part": root}, sent=tempfile.mktemp(), connections=4)
began = time.monotonic()
Transfer(job).run(S3Access("AKTEST000000", "secretsecret", endpoint=url, region="us-east-1", ca=ca or ""), id)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([time.monotonic() - began, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024]))
""",
    "rclone": """
import subprocess
env = os.environ | {"RCLONE_CONFIG": "", "RCLONE_CONFIG_X_TYPE": "s3", "RCLONE_CONFIG_X_PROVIDER": "Other",
    "RCLONE_CONFIG_X_ENV_AUTH": "true", "RCLONE_CONFIG_X_ENDPOINT": url, "RCLONE_CONFIG_X_REGION": "us-east-1",
    "RCLONE_S3_NO_CHECK_BUCKET": "true"} | ({"RCLONE_CA_CERT": ca} if ca else {})
began = time.monotonic()
subprocess.run(["rclone", "copyto", path, "x:%s/r", "--s3-upload-concurrency", "4", "--s3-chunk-size", "32M",
    "--retries", "1"], env=env, check=True, capture_output=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([time.monotonic() - began, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024]))
""",
}


def serve(home: Path, tls: bool) -> tuple[subprocess.Popen[str], str]:
    more = ["--tls", str(home / "cert.pem"), str(home / "cert.key")] if tls else []
    command = [sys.executable, "-m", "benchmarks.measuring.discard_s3", *more]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--gib", type=float, default=2.0)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--piece", type=int, default=128, help="MiB")
    arguments.add_argument("--only", nargs="*", default=["http", "tls"])
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
        home = Path(made)
        file = write_file(home / "file", int(given.gib * 1024))
        for line in given.only:
            certify(home / "cert.pem") if line == "tls" else None
            service, url = serve(home, line == "tls")
            figures: dict[str, list[list[float]]] = {name: [] for name in CLIENTS}
            try:
                for _ in range(given.rounds):
                    for name, text in CLIENTS.items():
                        if name == "rclone" and shutil.which("rclone") is None:
                            continue
                        program = COMMON + (text % BUCKET if "%s" in text else text)
                        ca = str(home / "cert.pem") if line == "tls" else ""
                        command = [sys.executable, "-c", program, url, str(file), str(given.piece), ca]
                        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
                        figures[name].append(json.loads(done.stdout))
            finally:
                service.kill()
            gigabytes = file.stat().st_size / 1e9
            for name, runs in figures.items():
                if not runs:
                    continue
                seconds, cpu, memory = (statistics.median(column) for column in zip(*runs, strict=True))
                print(
                    f"{line:5} {name:14} {gigabytes * 1000 / seconds:7.0f} MB/s {cpu / gigabytes:6.2f} CPU s/GB "
                    f"{memory:5.0f} MiB"
                )


if __name__ == "__main__":
    main()

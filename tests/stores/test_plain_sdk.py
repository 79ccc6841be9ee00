"""What opening a B2 store loads, in a process of its own."""

import subprocess
import sys

OPEN = """
import sys
from podwatch.stores.credentials import Credentials
from podwatch.stores.open_store import open_store
open_store("b2://some-bucket", Credentials("id", "key"), writer_id="w")
import requests
answer = requests.Response()
answer._content, answer.status_code = '{"a": "\\u00e9"}'.encode(), 200
assert answer.json() == {"a": "\\u00e9"} and answer.text == '{"a": "\\u00e9"}'
print([name for name in ("chardet", "charset_normalizer", "pydantic") if name in sys.modules])
import charset_normalizer, pydantic
"""


def test_nothing_needless_is_loaded_and_nothing_is_missed() -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", OPEN], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")

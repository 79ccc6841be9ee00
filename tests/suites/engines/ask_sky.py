"""Parse SkyPilot files with SkyPilot itself, without its server. Run by the Python that has skypilot:
``python ask_sky.py FILE...``

Prints one JSON line for each file: ``recovery``, which is job_recovery as SkyPilot understood it, or its ``error``.
"""

import json
import sys

import sky


def parse(path: str) -> dict[str, object]:
    try:
        (resources,) = sky.Task.from_yaml(path).resources
    except Exception as error:  # its errors have no common class
        return {"error": f"{type(error).__name__}: {error}"}
    return {"recovery": resources.job_recovery}


for path in sys.argv[1:]:
    print(json.dumps(parse(path)))

"""Two providers of rented machines on loopback: Vast.ai (API v0 and v1) and RunPod (REST API v2), with their faults.

Each keeps what it bills: ``instances``. ``faults`` are used up in order, each by the first request that it matches.
"""

from tests.support.clouds.http import Cloud, Fault
from tests.support.clouds.runpod import RunPodCloud
from tests.support.clouds.vast import VastCloud

__all__ = ["Cloud", "Fault", "RunPodCloud", "VastCloud"]

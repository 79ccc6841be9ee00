"""A notifier: docs/contributing.md."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from podwatch.domain.errors import PodwatchError
from podwatch.report.deliver_notices import NotSent
from podwatch.system.child import run_child


@dataclass(frozen=True, slots=True)
class SyslogChannel:
    timeout: float
    program: str = "logger"
    name: str = "syslog"

    async def send(self, document: Mapping[str, Any]) -> None:
        try:
            done = await run_child([self.program, "-t", "podwatch", str(document["title"])], timeout=self.timeout)
        except PodwatchError as error:
            raise NotSent(error.what, final=True) from error
        if not done.ok:
            raise NotSent(f"exit {done.code}")

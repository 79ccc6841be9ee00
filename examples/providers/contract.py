"""The contract between ``podwatch controller`` and a provider command, for programs in Python (docs/controller.md).

A provider command is one program. Its first argument is ``list``, ``create`` or ``destroy``; it reads one JSON object
from stdin, writes one to stdout, logs to stderr, and ends with one of the exit codes below. ``serve`` does all of that
for an object with four methods (``Provider``), and keeps the rules that no provider may break:

- an answer that cannot be read whole is an error, never an empty list;
- only an instance whose label is exactly ``podwatch:<run-id>:<generation>:<tag>`` belongs to a run. The tag is that of
  the run's store; labels of the first controllers end with the generation;
- ``create`` returns the instance that has the label already, instead of a second one;
- ``destroy`` looks at the label first, and is done only when the instance is gone from the list.

Standard library only: copy the directory.
"""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Protocol

OK, NO_OFFER, REFUSED, UNAVAILABLE, OUTCOME_UNKNOWN = 0, 3, 65, 69, 75
STATES = ("pending", "running", "stopped", "ended", "unknown")
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
NUMBER = r"([1-9][0-9]{0,17})"
TAG = "s[a-z2-7]{7}"
SECONDS = {"list": 120, "create": 420, "destroy": 240}
"""Limit of a whole command; PODWATCH_PROVIDER_SECONDS replaces it."""


class ProviderError(Exception):
    """Ends the command with ``code`` and a message on stderr."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Instance:
    """``price_per_hour`` is None if the provider shows none; ``detail`` is the provider's own description."""

    id: str
    label: str
    state: str
    price_per_hour: float | None
    created_at: str | None
    detail: str


@dataclass(frozen=True)
class Order:
    """The instance to create. ``environment`` has the controller's variables and nothing of this process."""

    label: str
    max_price_per_hour: float
    environment: dict[str, str] = field(default_factory=dict)


class Provider(Protocol):
    """What ``serve`` needs. Each method raises ProviderError, and nothing else, for what goes wrong outside."""

    def account(self) -> str:
        """The identity of the account, the same for every key of it."""

    def instances(self) -> list[Instance]:
        """Every instance of the account that has a label, or a ProviderError: never a part of them."""

    def create(self, order: Order) -> tuple[str, float]:
        """The id of the new instance and its price per hour. A request that may have created one: OUTCOME_UNKNOWN."""

    def destroy(self, instance: Instance) -> None:
        """Requests it; ``serve`` then waits until the instance is gone."""


def parse_label(label: object) -> tuple[str, int] | None:
    """Run id and generation, or None for a label that podwatch did not write."""
    if not isinstance(label, str):
        return None
    match = re.fullmatch(rf"podwatch:({RUN_ID.pattern}):{NUMBER}(?::{TAG})?", label)
    return (match[1], int(match[2])) if match else None


def log(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def serve(name: str, make: Callable[[], Provider]) -> NoReturn:
    """Run one command and end the process."""
    sys.exit(command(name, make, sys.argv[1:], sys.stdin.read, sys.stdout.write))


def command(
    name: str,
    make: Callable[[], Provider],
    arguments: list[str],
    read: Callable[[], str],
    write: Callable[[str], object],
) -> int:
    """The exit code. ``make`` is called once the request is valid."""
    verbs: dict[str, Callable[[Provider, dict[str, Any]], dict[str, Any]]]
    verbs = {"list": _list, "create": _create, "destroy": _destroy}
    if len(arguments) != 1 or arguments[0] not in verbs:
        log(f"usage: {name} list | create | destroy (one JSON object on stdin)")
        return 64
    verb = arguments[0]
    try:
        with_limit(verb)
        answer = verbs[verb](make(), _request(verb, read()))
        signal.setitimer(signal.ITIMER_REAL, 0.0)
    except ProviderError as failure:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        log(f"{name} {verb}: {failure}")
        return failure.code
    write(json.dumps({"version": 1, **answer}) + "\n")
    return OK


def with_limit(verb: str) -> None:
    """Raise a ProviderError in the main thread after the verb's limit. A create that is cut off may have happened."""
    limit = float(os.environ.get("PODWATCH_PROVIDER_SECONDS") or SECONDS[verb])

    def expire(_signal: int, _frame: FrameType | None) -> None:
        code = UNAVAILABLE if verb == "list" else OUTCOME_UNKNOWN
        raise ProviderError(code, f"not finished after {limit:g} s")

    signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, limit)


FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "list": {"version": int, "run_id": str},
    "create": {"version": int, "run_id": str, "generation": int, "label": str, "max_price_per_hour": (int, float),
               "environment": dict},
    "destroy": {"version": int, "id": str, "label": str},
}  # fmt: skip


def _request(verb: str, text: str) -> dict[str, Any]:
    """The request from stdin. Unknown fields are refused: this program would not honour them."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ProviderError(REFUSED, f"stdin is not JSON: {error}") from None
    fields = FIELDS[verb]
    if not isinstance(found, dict) or found.keys() != fields.keys():
        raise ProviderError(REFUSED, f"stdin must be one JSON object with the fields {', '.join(fields)}")
    for name, kind in fields.items():
        if not isinstance(found[name], kind) or isinstance(found[name], bool):
            raise ProviderError(REFUSED, f"invalid value for {name}: {found[name]!r}")
    if found["version"] != 1:
        raise ProviderError(REFUSED, f"version {found['version']} of the contract is not known here (expected 1)")
    return found


def _ours(provider: Provider) -> list[Instance]:
    """The instances of every run of podwatch in the account."""
    found = [instance for instance in provider.instances() if parse_label(instance.label)]
    ids = [instance.id for instance in found]
    if len(set(ids)) != len(ids):
        raise ProviderError(UNAVAILABLE, "the list names an instance twice")
    assert all(instance.state in STATES for instance in found)
    return found


def _list(provider: Provider, request: dict[str, Any]) -> dict[str, Any]:
    account = provider.account()
    own = [i for i in _ours(provider) if (parse_label(i.label) or ("", 0))[0] == request["run_id"]]
    for instance in own:
        if instance.price_per_hour is None:
            raise ProviderError(UNAVAILABLE, f"instance {instance.id} has no readable price: {instance.detail}")
    shown = [{**vars(instance), "created_at": moment(instance.created_at)} for instance in own]
    return {"account": account, "complete": True, "instances": shown}


def _create(provider: Provider, request: dict[str, Any]) -> dict[str, Any]:
    label, price = request["label"], float(request["max_price_per_hour"])
    if parse_label(label) != (request["run_id"], request["generation"]):
        raise ProviderError(REFUSED, f"the label {label!r} does not name run and generation of the request")
    if not math.isfinite(price) or price <= 0:
        raise ProviderError(REFUSED, f"invalid value for max_price_per_hour: {price}")
    environment = request["environment"]
    for name, value in environment.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or not isinstance(value, str):
            raise ProviderError(REFUSED, f"invalid variable in environment: {name!r}")
    for found in _ours(provider):
        if found.label == label and found.state != "ended":
            log(f"instance {found.id} has the label {label} already ({found.state}): not creating another one")
            return {"id": found.id, "label": label, "price_per_hour": found.price_per_hour or 0.0}
    number, paid = provider.create(Order(label, price, environment))
    return {"id": number, "label": label, "price_per_hour": paid}


def _destroy(provider: Provider, request: dict[str, Any]) -> dict[str, Any]:
    if parse_label(request["label"]) is None:
        raise ProviderError(REFUSED, f"{request['label']!r} is not a label of podwatch: nothing is destroyed")
    destroy_and_wait(provider, request["id"], request["label"])
    return {"id": request["id"], "destroyed": True}


def destroy_and_wait(provider: Provider, number: str, label: str, seconds: float = 90.0) -> None:
    """Return once the instance is gone from the provider's list. A request without an answer may have been carried
    out, so the list decides."""

    def present() -> Instance | None:
        found = next((i for i in provider.instances() if i.id == number), None)
        if found is not None and found.label != label:
            raise ProviderError(
                REFUSED, f"instance {number} has the label {found.label!r}, not {label!r}: not destroyed"
            )
        return found if found is not None and found.state != "ended" else None

    found = present()
    if found is None:
        log(f"instance {number} is gone already")
        return
    end = time.monotonic() + seconds
    last = "the instance is still in the list"
    try:
        provider.destroy(found)
    except ProviderError as failure:
        if failure.code == REFUSED:
            raise
        last = str(failure)
    for pause in (0.0, 1.0, 2.0, 4.0, *[8.0] * 100):
        time.sleep(pause)
        if present() is None:
            return
        if time.monotonic() + pause > end:
            break
    raise ProviderError(OUTCOME_UNKNOWN, f"instance {number} is not confirmed as destroyed: {last}")


# What the programs have in common: their configuration, and reading answers.


def settings(program: str, known: dict[str, Any]) -> dict[str, Any]:
    """The defaults and the TOML file over them: <PROGRAM>_CONFIG, or <program>.toml beside the program."""
    variable = f"{program.upper()}_CONFIG"
    path = Path(os.environ.get(variable) or Path(sys.argv[0]).resolve().with_name(f"{program}.toml"))
    try:
        found = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ProviderError(REFUSED, f"cannot read {path} (set {variable}): {error}") from None
    for name, value in found.items():
        if name not in known:
            raise ProviderError(REFUSED, f"{path}: unknown key {name} (known: {', '.join(known)})")
        default = known[name]
        kinds = (
            (int, float) if isinstance(default, (int, float)) and not isinstance(default, bool) else (type(default),)
        )
        if not isinstance(value, kinds) or (isinstance(value, bool) and not isinstance(default, bool)):
            raise ProviderError(REFUSED, f"{path}: invalid value for {name}: {value!r} (expected like {default!r})")
    return {**known, **found, "directory": path.parent}


def variable(name: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        raise ProviderError(REFUSED, f"{name} is not set")
    return value


def environment(own: dict[str, Any], passed: list[Any], order: Order) -> dict[str, str]:
    """The variables of the new instance: those of the configuration, the controller's, and of this process only those
    that ``pass`` names ("NAME", or "NAME=OTHER" for the value of OTHER here)."""
    made = {name: str(value) for name, value in own.items()} | order.environment
    for entry in passed:
        inside, _, outside = str(entry).partition("=")
        made[inside] = variable(outside or inside)
    return made


def name_of(label: str, prefix: str) -> str:
    """A name for a provider whose names cannot have a colon."""
    assert parse_label(label) is not None
    return prefix + label.removeprefix("podwatch:").replace(":", "-")


def label_of(name: str, prefix: str) -> str:
    """The label of a name made by ``name_of``, or "": the last number between hyphens, with at most a tag behind it."""
    match = re.fullmatch(rf"{re.escape(prefix)}({RUN_ID.pattern})-{NUMBER}(?:-({TAG}))?", name)
    label = ":".join(("podwatch", *(part for part in match.groups() if part))) if match else ""
    return label if parse_label(label) else ""


def run(words: list[str], more: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """A vendor's command line, which has the time that the whole command has. ``more``: variables for it."""
    try:
        return subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env={**os.environ, **(more or {})},
        )
    except OSError as error:
        raise ProviderError(REFUSED, f"cannot run {words[0]}: {error}") from None


def parsed(text: str) -> Any:
    """JSON, or None."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def moment(text: str | None) -> str | None:
    """A time in RFC 3339, also from Go's form (2026-11-23 10:00:00 +0000 UTC); None for what cannot be read: the
    controller can do without, but not with another form."""
    form = re.sub(r" ([+-]\d{4})( [A-Z]+)?$", r"\1", text or "")
    try:
        return form if datetime.fromisoformat(form).tzinfo is not None else None
    except ValueError:
        return None


def number(value: object) -> float | None:
    """A finite number that is not negative, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        return None
    return float(value)


def clipped(text: object) -> str:
    return " ".join(str(text).split())[:300]

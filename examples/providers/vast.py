#!/usr/bin/env python3
"""Vast.ai for ``podwatch controller``: ``vast.py list | create | destroy`` (docs/controller.md).

It calls the vendor's command line, ``vastai`` (1.9 or newer; VASTAI names another path). Needs contract.py beside it,
vast.toml (or VAST_CONFIG) and VAST_API_KEY; VAST_URL is honoured.

``vastai`` ends with 0 and prints nothing when the server refuses a request, and prints an empty list when an answer has
no list in it. So this program reads single pages (they carry a total), and believes no answer that it cannot check.
"""

import json
import os
import subprocess
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from shutil import which
from typing import Any

import contract
from contract import (
    NO_OFFER,
    OUTCOME_UNKNOWN,
    REFUSED,
    UNAVAILABLE,
    Instance,
    Order,
    ProviderError,
    clipped,
    log,
    number,
)

DEFAULTS: dict[str, Any] = {
    "query": "",  # as for `vastai search offers`: "gpu_name=RTX_4090 num_gpus=2 reliability>0.98 inet_down>200"
    "image": "",
    "template": "",  # a template's hash, instead of an image
    "disk_gb": 0,  # cannot be changed later
    "onstart": "",  # a file, relative to vast.toml: examples/pods/vast-onstart.sh
    "arguments": [],  # more words for `vastai create instance`, such as ["--ssh", "--direct"]
    "interruptible": False,
    "bid_factor": 1.25,  # of the offer's lowest bid; never above the controller's price limit
    "offers": 3,  # how many offers to try
    "environment": {},
    "pass": [],
}
STATES = {
    "loading": "pending", "created": "pending", "rebooting": "pending", "running": "running", "stopped": "stopped",
    "frozen": "stopped", "exited": "stopped",
}  # fmt: skip
"""Of ``actual_status``. Everything else, null included, is unknown: it says neither that the instance runs nor that it
is gone."""
HOURS_PER_MONTH = 730.0
# Runs a script with the arguments that come by stdin: those of `create` carry secrets, and every user can read argv.
BY_STDIN = "import json, runpy, sys; sys.argv = json.load(sys.stdin); runpy.run_path(sys.argv[0], run_name='__main__')"


@dataclass(frozen=True)
class Answer:
    """Of one call: its JSON, or the status (0: none) and message of its error. ``broken``: neither."""

    data: Any = None
    status: int = 0
    message: str = ""
    broken: bool = False


@dataclass(frozen=True)
class Offer:
    id: int
    price: float
    bid: float | None


class Vast:
    def __init__(self) -> None:
        self._settings = contract.settings("vast", DEFAULTS)
        self._key = contract.variable("VAST_API_KEY")
        found = which(os.environ.get("VASTAI") or "vastai")
        if found is None:
            raise ProviderError(REFUSED, "vastai not found. Fix: pip install vastai, or set VASTAI to its path")
        self._program = found

    def account(self) -> str:
        found = self._read("show", "user", "--raw")
        account = found.get("id") if isinstance(found, dict) else None
        if not isinstance(account, int) or isinstance(account, bool):
            raise ProviderError(UNAVAILABLE, f"no account in the answer: {clipped(found)}")
        return f"vast:{account}"

    def instances(self) -> list[Instance]:
        for attempt in range(3):
            rows, total = self._pages()
            if total == len(rows):
                return [_instance(row) for row in rows if row.get("label")]
            log(f"the list has {len(rows)} instances of {total}: reading it again")
            time.sleep(attempt)
        raise ProviderError(UNAVAILABLE, "the pages of the list do not add up to its total")

    def _pages(self) -> tuple[list[dict[str, Any]], int]:
        rows: list[dict[str, Any]] = []
        tokens: list[str] = []
        while len(tokens) < 1000:
            more = ["--next-token", tokens[-1]] if tokens else []
            page = self._read("show", "instances", "--raw", "--limit", "25", *more)
            if not isinstance(page, dict) or not isinstance(found := page.get("instances"), list):
                raise ProviderError(UNAVAILABLE, f"no list of instances in the answer: {clipped(page)}")
            total, token = number(page.get("total_instances")), page.get("next_token")
            if not all(isinstance(row, dict) for row in found) or total is None:
                raise ProviderError(UNAVAILABLE, f"the list of instances has another form: {clipped(page)}")
            rows += found
            if token is None or token == "":
                return rows, int(total)
            if not isinstance(token, str) or token in tokens:
                raise ProviderError(UNAVAILABLE, f"the list does not end: token {clipped(token)}")
            tokens.append(token)
        raise ProviderError(UNAVAILABLE, "the list does not end: 1,000 pages")

    def create(self, order: Order) -> tuple[str, float]:
        words = self._words(order)
        refusals: list[Answer] = []
        for offer in self._offers(order.max_price_per_hour):
            bid = [] if offer.bid is None else ["--bid_price", f"{offer.bid:.4f}"]
            answer = self._ask(["create", "instance", str(offer.id), "--raw", "--cancel-unavail", *bid, *words])
            data = answer.data if isinstance(answer.data, dict) else {}
            contract_id = data.get("new_contract")
            if data.get("success") is True and isinstance(contract_id, int):
                return str(contract_id), offer.price
            if isinstance(contract_id, int):  # an error, and the instance exists all the same: it is billed
                self._remove(contract_id, order.label, answer)
            elif answer.broken or not (400 <= answer.status < 500 or data.get("success") is False):
                raise ProviderError(OUTCOME_UNKNOWN, f"no answer to the request for offer {offer.id}: {_shown(answer)}")
            else:
                self._none_made(order.label)
            log(f"offer {offer.id} is refused: {_shown(answer)}")
            if answer.status in (401, 402, 403):
                raise ProviderError(REFUSED, f"Vast.ai refuses the key or the account: {_shown(answer)}")
            if answer.status == 429:
                raise ProviderError(UNAVAILABLE, f"Vast.ai limits the rate: {_shown(answer)}")
            refusals.append(answer)
        if refusals and all(answer.status == 400 for answer in refusals):
            raise ProviderError(REFUSED, f"Vast.ai refuses the request for every offer: {_shown(refusals[-1])}")
        raise ProviderError(NO_OFFER, f"no offer for at most ${order.max_price_per_hour:g} per hour is left")

    def destroy(self, instance: Instance) -> None:
        answer = self._ask(["destroy", "instance", instance.id, "-y"], json_expected=False)
        if answer.status in (401, 403):
            raise ProviderError(REFUSED, f"Vast.ai refuses the key: {_shown(answer)}")
        if answer.broken or answer.status:
            raise ProviderError(UNAVAILABLE, _shown(answer))

    def _words(self, order: Order) -> list[str]:
        """The words for the new instance, from the configuration."""
        own = self._settings
        if bool(own["image"]) == bool(own["template"]) or own["disk_gb"] < 8:
            raise ProviderError(REFUSED, "vast.toml needs one of image and template, and disk_gb of at least 8")
        words = ["--label", order.label, "--disk", str(own["disk_gb"])]
        words += ["--image", own["image"]] if own["image"] else ["--template_hash", own["template"]]
        if own["onstart"]:
            try:
                text = (Path(own["directory"]) / own["onstart"]).read_text()
            except (OSError, ValueError) as error:
                raise ProviderError(REFUSED, f"cannot read the start text: {error}") from None
            words += ["--onstart-cmd", text]
        options = []
        for name, value in contract.environment(own["environment"], own["pass"], order).items():
            if any(sign in value for sign in "'\"\n"):
                raise ProviderError(REFUSED, f"vastai cannot pass {name}: its value has a quote or a line break")
            options.append(f'-e {name}="{value}"')
        return [*words, *(["--env", " ".join(options)] if options else []), *map(str, own["arguments"])]

    def _offers(self, limit: float) -> list[Offer]:
        """The cheapest offers, each with all that it costs per hour: the disk is billed too."""
        own = self._settings
        spot, disk = own["interruptible"], own["disk_gb"]
        field = "min_bid" if spot else "dph_total"
        words = ["--type", "bid" if spot else "on-demand", "--storage", str(disk), "--limit", "64", "-o", field]
        query = f"{own['query']} {field}<={limit:g}".strip()
        found = self._read("search", "offers", query, "--raw", *words)
        if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
            raise ProviderError(UNAVAILABLE, f"no list of offers in the answer: {clipped(found)}")
        offers = [_offer(row, own, limit) for row in found]
        fitting = sorted((o for o in offers if o is not None and o.price <= limit), key=lambda o: o.price)
        return fitting[: int(own["offers"])]

    def _none_made(self, label: str) -> None:
        """Raise OUTCOME_UNKNOWN if an instance has the label, or if that cannot be seen: vastai keeps back the text of
        an error, in which the number of a new instance may be."""
        try:
            made = [instance.id for instance in self.instances() if instance.label == label]
        except ProviderError as failure:
            raise ProviderError(OUTCOME_UNKNOWN, f"an instance may exist: {failure}") from None
        if made:
            raise ProviderError(
                OUTCOME_UNKNOWN, f"the request is refused, but instance {made[0]} has the label {label}"
            )

    def _remove(self, made: int, label: str, answer: Answer) -> None:
        log(f"the request is refused ({_shown(answer)}), but instance {made} exists and is billed: destroying it")
        try:
            contract.destroy_and_wait(self, str(made), label)
        except ProviderError as failure:
            raise ProviderError(OUTCOME_UNKNOWN, f"instance {made} exists after a refused request: {failure}") from None

    def _read(self, *words: str) -> Any:
        """The JSON of a call that changes nothing; vastai itself repeats it after 429 (Retry-After) and 5xx."""
        for pause in (2.0, 5.0, None):
            answer = self._ask([*words, "--retry", "3"], limit=100.0)
            if not answer.broken and not answer.status:
                return answer.data
            if pause is None or (400 <= answer.status < 500 and answer.status != 429):
                break
            log(f"{' '.join(words[:2])}: {_shown(answer)}; again in {pause:g} s")
            time.sleep(pause)
        raise ProviderError(UNAVAILABLE, f"{' '.join(words[:2])}: {_shown(answer)}")

    def _ask(self, words: list[str], limit: float = 150.0, json_expected: bool = True) -> Answer:
        """One call. Without --retry it is sent once: vastai would repeat a create that got no answer. A request that
        is turned away for the rate (429) was not carried out, so it is sent again."""
        once = words if "--retry" in words else [*words[:3], "--retry", "1", *words[3:]]
        for pause in (5.0, 10.0, 20.0, None):
            answer = self._call(once, limit, json_expected)
            if answer.status != 429 or pause is None or "--retry" in words:
                break
            log(f"Vast.ai limits the rate: again in {pause:g} s")
            time.sleep(pause)
        return answer

    def _call(self, words: list[str], limit: float, json_expected: bool) -> Answer:
        command, given = [self._program, *words], None
        if words[0] == "create":
            first = Path(self._program).read_bytes()[:200].split(b"\n")[0].decode("utf-8", "replace")
            python = first[2:].strip() if first.startswith("#!") and "python" in first else ""
            if not python or " " in python:
                raise ProviderError(
                    REFUSED, f"{self._program} is not a script of Python: cannot hide secrets from `ps`"
                )
            command, given = [python, "-c", BY_STDIN], json.dumps(command)
        kept = {n: v for n, v in os.environ.items() if n in ("PATH", "HOME", "LANG", "LC_ALL", "VAST_URL", "TMPDIR")
                or n.startswith(("XDG_", "SSL_", "REQUESTS_")) or n.lower().endswith("_proxy")}  # fmt: skip
        kept |= {"VAST_API_KEY": self._key, "VASTAI_NO_UPDATE_CHECK": "1"}
        try:
            done = subprocess.run(
                command, input=given, stdin=subprocess.DEVNULL if given is None else None, capture_output=True,
                text=True, timeout=limit, env=kept, errors="replace",
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Answer(broken=True, message=f"no answer after {limit:g} s")
        except OSError as error:
            raise ProviderError(REFUSED, f"cannot run {self._program}: {error}") from None
        return _answer(done, json_expected)


def _answer(done: subprocess.CompletedProcess[str], json_expected: bool) -> Answer:
    """vastai reports a refused request on stderr and ends with 0; for a lost connection it ends with a traceback."""
    last = (done.stderr.strip().splitlines() or [""])[-1]
    try:
        error = json.loads(last)
        if error.get("error") is True:
            status = error.get("status_code")
            return Answer(status=status or 0, message=clipped(error.get("msg")), broken=not status)
    except (ValueError, AttributeError):
        if last.startswith("Failed with error "):  # without --raw
            status_text = last.removeprefix("Failed with error ").split(":")[0]
            if status_text.isdigit():
                return Answer(status=int(status_text), message=clipped(last))
    if done.returncode == 2:
        raise ProviderError(REFUSED, f"vastai does not accept its arguments: {clipped(last)}")
    if done.returncode or not json_expected:
        return Answer(broken=bool(done.returncode), message=clipped(last or done.stdout))
    try:
        return Answer(data=json.loads(done.stdout))
    except ValueError:
        return Answer(broken=True, message=f"the answer is not JSON: {clipped(done.stdout or last)!r}")


def _instance(row: dict[str, Any]) -> Instance:
    if not isinstance(row.get("id"), int) or not isinstance(row["label"], str):
        raise ProviderError(UNAVAILABLE, f"an instance without an id or with another label: {clipped(row)}")
    status, started = row.get("actual_status"), number(row.get("start_date"))
    words = f"{status} (intended {row.get('intended_status')}, current {row.get('cur_state')})"
    return Instance(
        id=str(row["id"]), label=row["label"].strip(), state=STATES.get(status, "unknown") if status else "unknown",
        price_per_hour=number(row.get("dph_total")),
        created_at=datetime.fromtimestamp(started, UTC).isoformat() if started else None,
        detail=clipped(f"{words} {row.get('status_msg') or ''}"),
    )  # fmt: skip


def _offer(row: dict[str, Any], own: dict[str, Any], limit: float) -> Offer | None:
    """None for an offer that cannot be judged."""
    number_, total = row.get("id"), number(row.get("dph_total"))
    if not isinstance(number_, int):
        return None
    if not own["interruptible"]:
        return None if total is None else Offer(number_, total, None)
    lowest, storage = number(row.get("min_bid")), number(row.get("storage_cost"))
    if lowest is None or storage is None:
        return None
    disk = storage * own["disk_gb"] / HOURS_PER_MONTH
    bid = max(lowest, min(lowest * own["bid_factor"], limit - disk))
    return Offer(number_, bid + disk, bid)


def _shown(answer: Answer) -> str:
    return f"{answer.status or 'no status'} {answer.message or clipped(answer.data)}"


if __name__ == "__main__":
    contract.serve("vast.py", Vast)

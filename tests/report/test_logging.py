"""Log lines: the three forms, redaction, and a reader that is stuck."""

import io
import json
import logging
import os
import re
import socket
import struct
import threading
from dataclasses import replace

import pytest
import structlog

from podwatch.domain.event import Event, EventName
from podwatch.domain.finding import Severity
from podwatch.domain.secrets import MASK, register, scrub
from podwatch.report.logging import Sink, StreamTarget, configure, encode, log_event

SECRET = "K005abcdef0123456789+/="


@pytest.fixture
def lines():
    stream = io.StringIO()
    made = configure("json", "info", stream=stream)

    def read():
        assert any(made.flush() for _ in range(20))
        return [json.loads(x) for x in stream.getvalue().splitlines()]

    yield read
    made.close()


def event(**fields) -> Event:
    return Event(EventName.PUBLISHED, 0.0, "step 80 is in the store", Severity.WARNING, fields)


def test_an_event_as_json(lines):
    log_event(event(step=80))
    (line,) = lines()
    assert (line["event"], line["level"], line["step"]) == ("step 80 is in the store", "warning", 80)
    assert line["podwatch_event"] == "published"
    assert line["timestamp"].endswith("Z")


def test_level_is_respected(lines):
    structlog.get_logger().debug("too much")
    assert lines() == []


def test_library_lines_take_the_same_way(lines):
    register(SECRET)
    logging.getLogger("b2sdk").warning("retrying with key %s", SECRET)
    logging.getLogger("b2sdk").debug("chatter")
    (line,) = lines()
    assert line["event"] == f"retrying with key {MASK}"
    assert line["logger"] == "b2sdk"


def test_a_secret_is_hidden_wherever_it_stands(lines):
    register(SECRET, "abc")
    log = structlog.get_logger()
    try:
        raise ValueError(f"bad key {SECRET}")
    except ValueError:
        log.exception(
            "failed", nested={"a": [SECRET, (SECRET,)], SECRET: 1}, path="/x?key=K005abcdef0123456789%2B%2F%3D"
        )
    log.info("abc stays, it is too short", obj=RuntimeError(SECRET))
    text = json.dumps(lines())
    assert "K005abcdef" not in text
    assert text.count(MASK) >= 6
    assert "abc stays" in text


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Bearer abcdefghijkl",
        "WANDB_API_KEY=abcdefghijkl",
        "B2_APPLICATION_KEY: abcdefghijkl",
        '{"password": "abcdefghijkl"}',
        "url?auth_token=abcdefghijkl&x=1",
    ],
)
def test_unregistered_values_behind_telling_names_are_hidden(text):
    assert "abcdefghijkl" not in scrub(text)
    assert scrub("step 80 of 200, tokens: 512") == "step 80 of 200, tokens: 512"


def test_the_journal_gets_native_fields(tmp_path):
    path = str(tmp_path / "journal.sock")
    journal = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    journal.bind(path)
    journal.settimeout(10)
    made = configure("journal", stream=io.StringIO(), journal_socket=path)
    log_event(event(step=80))
    entry = dict(x.split("=", 1) for x in journal.recv(65536).decode().splitlines())
    assert entry["MESSAGE"] == "step 80 is in the store"
    assert (entry["PRIORITY"], entry["PODWATCH_EVENT"], entry["STEP"]) == ("4", "published", "80")
    made.close()
    journal.close()


def test_without_a_journal_lines_carry_their_priority(tmp_path):
    stream = io.StringIO()
    made = configure("journal", stream=stream, journal_socket=str(tmp_path / "none"))
    structlog.get_logger().error("two\nlines")
    made.close()
    assert stream.getvalue() == "<3>two\n<3>lines\n"


def test_multi_line_values_are_length_prefixed():
    assert encode({"A": "x", "B": "1\n2"}) == b"A=x\nB\n" + struct.pack("<Q", 3) + b"1\n2\n"


def test_auto_takes_the_journal_only_for_its_own_stream(tmp_path):
    with (tmp_path / "log").open("w") as stream:
        found = os.fstat(stream.fileno())
        for variable, form in (
            (f"{found.st_dev}:{found.st_ino}", "journal"),
            ("1:2", "json"),
            ("x", "json"),
            ("", "json"),
        ):
            made = configure("auto", stream=stream, environ={"JOURNAL_STREAM": variable})
            assert made.form == form
            made.close()


def test_console_on_a_terminal_and_no_colour_when_asked():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for environ, coloured in (({}, True), ({"NO_COLOR": "1"}, False)):
        stream = Terminal()
        made = configure("auto", stream=stream, environ=environ)
        log_event(event(step=80))
        made.close()
        assert made.form == "console"
        assert ("\x1b[" in stream.getvalue()) is coloured
        assert "step 80 is in the store" in stream.getvalue()


def test_a_console_line_is_for_people_and_a_library_keeps_its_fields():
    stream = io.StringIO()
    made = configure("console", stream=stream)
    log_event(replace(event(step=80), severity=Severity.CRITICAL))
    logging.getLogger("b2sdk").warning("slow")
    made.close()
    first, second = stream.getvalue().splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d !! step 80 is in the store", first)
    assert second.endswith(" ! slow  logger=b2sdk")


def test_a_stuck_reader_never_blocks_the_caller():
    release = threading.Event()
    stream = io.StringIO()

    class Stuck(StreamTarget):
        def write(self, level, text, fields):
            release.wait(10)
            super().write(level, text, fields)

    sink = Sink(Stuck(stream), size=3)
    for n in range(50):
        sink.write("info", f"line {n}", {})
    assert not sink.flush(0.05)
    release.set()
    sink.close(5)
    text = stream.getvalue()
    assert "line 0" in text
    assert "log lines were dropped" in text


def test_configuring_twice_does_not_double_lines():
    stream = io.StringIO()
    configure("json", stream=io.StringIO()).close()
    made = configure("json", stream=stream)
    logging.getLogger("x").warning("once")
    made.close()
    assert stream.getvalue().count("once") == 1

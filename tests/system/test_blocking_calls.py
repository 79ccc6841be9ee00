"""Worker: results, deadlines, a hung call, interpreter exit."""

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from podwatch.system.blocking_calls import Worker, WorkerStuck


async def test_results_errors_and_order() -> None:
    worker = Worker("t")
    seen: list[int] = []

    def add(n: int) -> int:
        seen.append(n)
        return n * 2

    assert await asyncio.gather(*(worker.call(add, n) for n in range(5))) == [0, 2, 4, 6, 8]
    assert seen == [0, 1, 2, 3, 4]
    with pytest.raises(ZeroDivisionError):
        await worker.call(lambda: 1 / 0)
    with pytest.raises(TimeoutError, match="mine"):
        await worker.call(_raise_timeout, timeout=5)
    assert not worker.stuck
    worker.close()
    with pytest.raises(RuntimeError, match="closed"):
        await worker.call(add, 1)


def _raise_timeout() -> None:
    raise TimeoutError("mine")


def _hang(entered: threading.Event, gate: threading.Event) -> None:
    entered.set()
    gate.wait()


async def test_a_hung_call_is_noticed_and_clears_when_it_returns() -> None:
    worker = Worker("hang")
    entered, gate = threading.Event(), threading.Event()
    with pytest.raises(TimeoutError):
        await worker.call(_hang, entered, gate, timeout=0.5)
    assert entered.is_set(), "a call that never began is dropped: nothing hangs"
    assert worker.stuck
    assert worker.busy_seconds > 0
    started = time.monotonic()
    with pytest.raises(WorkerStuck):
        await worker.call(int, timeout=60)
    assert time.monotonic() - started < 30
    gate.set()
    while worker.stuck:
        await asyncio.sleep(0.005)
    assert await worker.call(int) == 0
    worker.close()


async def test_a_queued_call_that_times_out_never_runs() -> None:
    worker = Worker("queue")
    gate = threading.Event()
    first = asyncio.create_task(worker.call(gate.wait))
    await asyncio.sleep(0.01)
    ran: list[int] = []
    with pytest.raises(TimeoutError):
        await worker.call(ran.append, 1, timeout=0.03)
    assert not worker.stuck  # the one that runs still has its caller
    gate.set()
    await first
    assert await worker.call(int) == 0
    assert ran == []
    worker.close()


async def test_renew_gives_a_fresh_thread() -> None:
    worker = Worker("renew")
    entered, gate = threading.Event(), threading.Event()
    with pytest.raises(TimeoutError):
        await worker.call(_hang, entered, gate, timeout=0.5)
    assert entered.is_set(), "a call that never began is dropped: nothing hangs"
    worker.renew()
    assert worker.abandoned == 1
    assert not worker.stuck
    assert await worker.call(threading.get_ident) != threading.get_ident()
    gate.set()
    worker.close()


def test_a_hung_call_does_not_hold_the_interpreter() -> None:
    code = (
        "import asyncio, time\n"
        "from podwatch.system.blocking_calls import Worker\n"
        "async def main():\n"
        "    try: await Worker('x').call(time.sleep, 3600, timeout=0.05)\n"
        "    except TimeoutError: print('late')\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "late\n"), done.stderr


async def test_a_cancel_that_meets_the_result_is_not_swallowed() -> None:
    worker = Worker("w")
    try:
        for timeout in (None, 5.0):
            begun = threading.Event()

            async def act(begun: threading.Event = begun, timeout: float | None = timeout) -> str:
                await worker.call(begun.set, timeout=timeout)
                await asyncio.sleep(0)
                return "went on"

            task = asyncio.create_task(act())
            await asyncio.sleep(0)
            begun.wait()
            time.sleep(0.05)  # the answer lies ready in the loop's queue: this task does not let it run
            asyncio.get_running_loop().call_soon(task.cancel)
            await asyncio.wait([task])
            assert task.cancelled()
    finally:
        worker.close()


async def test_a_cancelled_call_does_not_stand_in_the_way_of_the_next() -> None:
    """``podwatch start`` right after ``restart`` interrupts an act that may be looking at /proc at this moment."""
    worker = Worker("cancelled")
    entered, leave = threading.Event(), threading.Event()

    def look() -> None:
        entered.set()
        leave.wait(5.0)

    first = asyncio.create_task(worker.call(look))
    while not entered.is_set():
        await asyncio.sleep(0.001)
    first.cancel()
    await asyncio.wait([first])
    assert worker.stuck
    threading.Timer(0.1, leave.set).start()
    assert await worker.call(lambda: "answered") == "answered"
    worker.close()

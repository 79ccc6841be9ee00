"""The transient unit: what is asked of systemd-run, and what never stands on its command line."""

from pathlib import Path

from podwatch.trainer.launcher import KeeperOptions, runs_as_service, systemd_argv


def test_the_unit_has_a_fixed_name_and_stands_apart_from_podwatch() -> None:
    keeper = ["/usr/bin/python3", "-I", "-S", "-E", "/s/keeper.pyc", "/s", "id-1"]
    argv = systemd_argv("demo", Path("/s"), keeper, KeeperOptions(grace=30), 131_072)
    assert argv[:2] == ["systemd-run", "--unit=podwatch-train-demo"]
    assert argv[argv.index("--") + 1 :] == keeper
    for wanted in ("Before=podwatch.service", "KillMode=mixed", "TimeoutStopSec=45", "LimitNOFILE=131072"):
        assert f"--property={wanted}" in argv
    assert "--scope" not in argv  # a scope inherits the sandbox
    assert not any(word.startswith(("--setenv", "-E=", "--property=Environment")) for word in argv[: argv.index("--")])


def test_only_a_service_gets_a_unit() -> None:
    assert not runs_as_service({})

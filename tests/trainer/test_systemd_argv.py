"""The transient unit: what is asked of systemd-run, and what never stands on its command line."""

from pathlib import Path

from podwatch.trainer.start_and_adopt import SupervisorOptions, own_unit, runs_as_service, systemd_argv


def test_the_unit_has_a_fixed_name_and_stands_apart_from_podwatch() -> None:
    supervisor = ["/usr/bin/python3", "-I", "-S", "-E", "/s/supervisor.pyc", "/s", "id-1"]
    argv = systemd_argv("demo", Path("/s"), supervisor, SupervisorOptions(grace=30), 131_072)
    assert argv[:2] == ["systemd-run", "--unit=podwatch-train-demo"]
    assert argv[argv.index("--") + 1 :] == supervisor
    for wanted in ("Before=podwatch.service", "KillMode=mixed", "TimeoutStopSec=45", "LimitNOFILE=131072"):
        assert f"--property={wanted}" in argv
    assert "--scope" not in argv  # a scope inherits the sandbox
    assert not any(word.startswith(("--setenv", "-E=", "--property=Environment")) for word in argv[: argv.index("--")])


def test_only_a_service_gets_a_unit() -> None:
    assert not runs_as_service({})


def test_training_is_ordered_before_the_very_unit_that_guards_it() -> None:
    """At power-off the later one gets SIGTERM first: podwatch must be gone before training is told to end."""
    v2 = "0::/system.slice/system-podwatch.slice/podwatch@bs4-qwen3.service\n"
    assert own_unit(v2) == "podwatch@bs4-qwen3.service"
    v1 = "12:cpu:/\n1:name=systemd:/system.slice/podwatch.service\n0::/init.scope\n"
    assert own_unit(v1) == "podwatch.service"
    assert own_unit("0::/user.slice/session-1.scope\n") == "podwatch.service"
    unit = own_unit(v2)
    argv = systemd_argv("demo", Path("/s"), ["supervisor"], SupervisorOptions(), 65_536, unit)
    assert f"--property=Before={unit}" in argv

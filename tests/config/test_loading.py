import json
import os
from pathlib import Path

import pytest

from podwatch.config.loading import find_file, load_settings, load_text
from podwatch.config.problems import ConfigurationProblems
from podwatch.config.reload_limits import refused_by_reload
from podwatch.config.setting_names import looks_secret
from podwatch.config.settings import Section
from podwatch.domain.errors import ConfigurationError, ExitCode, PodwatchError
from podwatch.system.rights import rights_of

MINIMAL = 'run_id = "r1"\n[trainer]\noutput_dir = "/data/out"\n'


def write(path: Path, text: str, mode: int = 0o644) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def problems(text: str, environ: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigurationProblems) as caught:
        load_text(text, Path("/etc/p.toml"), environ=environ or {})
    assert caught.value.exit_code == ExitCode.CONFIGURATION
    return [str(problem) for problem in caught.value.problems]


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = write(tmp_path / "p.toml", MINIMAL + '[gpu]\nrelease_wait = "1s"\nhold = "9s"\nfloor = "2GiB"\n')
    loaded = load_settings(
        file,
        environ={"PODWATCH_GPU__HOLD": "10s", "PODWATCH_GPU__FLOOR": "3GiB", "UNRELATED": "x"},
        overrides={"gpu.floor": "4GiB"},
    )
    gpu = loaded.settings.gpu
    assert (gpu.release_wait, gpu.hold, gpu.floor, gpu.trainer) == (1.0, 10.0, 4 << 30, ())
    assert [loaded.sources[f"gpu.{key}"] for key in ("release_wait", "hold", "floor", "trainer")] == [
        "file",
        "environment",
        "flag",
        "default",
    ]
    assert loaded.path == file


def test_a_section_that_is_not_given_has_the_defaults_of_its_model() -> None:
    settings = load_text(MINIMAL, None, environ={}).settings
    sections = [value for name, value in vars(settings).items() if isinstance(value, Section) and name != "trainer"]
    assert len(sections) > 15
    for section in sections:
        assert section == type(section)()
        assert not section.model_fields_set


def test_lists_and_mappings_from_the_environment() -> None:
    loaded = load_text(
        MINIMAL,
        None,
        environ={
            "PODWATCH_GPU__INFERENCE": "0, 1",
            "PODWATCH_TRAINER__COMMAND": '["uv", "run", "a,b"]',
            "PODWATCH_TRAINER__RESUME_ARGS": "none",
            "PODWATCH_TRAINER__ENV__Mixed_Case": "1",
            "PODWATCH_DISK__CAPACITY": "100GB",
        },
    )
    trainer = loaded.settings.trainer
    assert loaded.settings.gpu.inference == (0, 1)
    assert trainer.command == ("uv", "run", "a,b")
    assert trainer.resume_args == "none"
    assert trainer.env == {"Mixed_Case": "1"}
    assert loaded.settings.disk.capacity == 100 * 10**9
    assert loaded.sources["trainer.env"] == "environment"


def test_resume_args_may_be_a_json_list_in_the_environment() -> None:
    loaded = load_text(MINIMAL, None, environ={"PODWATCH_TRAINER__RESUME_ARGS": '["--from", "{step}"]'})
    assert loaded.settings.trainer.resume_args == ("--from", "{step}")


def test_flags_are_read_as_text_too() -> None:
    flags = {"gpu.inference": "0,1", "trainer.command": '["a", "b"]', "disk.prune_to": "70%", "trainer.user": "[x"}
    settings = load_text(MINIMAL, None, environ={}, overrides=flags).settings
    assert settings.gpu.inference == (0, 1)
    assert settings.trainer.command == ("a", "b")
    assert settings.disk.prune_to == 0.7
    assert settings.trainer.user == "[x"
    with pytest.raises(ConfigurationError, match=r'command line: unknown key "hol".*"hold"'):
        load_text(MINIMAL, None, environ={}, overrides={"gpu.hol": "1s"})
    with pytest.raises(ConfigurationError):
        load_text(MINIMAL, None, environ={}, overrides={"gpu": "1s", "gpu.hold": "1s"})


def test_environment_alone_is_enough() -> None:
    loaded = load_settings(None, environ={"PODWATCH_RUN_ID": "r", "PODWATCH_TRAINER__OUTPUT_DIR": "/o"}, search=False)
    assert loaded.path is None
    assert loaded.settings.run_id == "r"


def test_every_problem_is_listed_at_once_with_its_place() -> None:
    found = problems(
        'run_id = "a b"\nmode = "acts"\n[trainer]\nlayuot = "hf"\noutput_dir = "/o"\ncommand = "rl"\n'
        '[gpu]\nrelease_wait = "2 parsec"\n[disk]\nprune-above = "90%"\n[gpuu]\nx = 1\n',
        {"PODWATCH_GPU_FLOOR": "1s", "PODWATCH_GPU__HOLD": "x"},
    )
    text = "\n".join(found)
    for expected in (
        "/etc/p.toml: Invalid value for \"run_id\": 'a b' (expected 1 to 128 letters",
        "/etc/p.toml: Invalid value for \"mode\": 'acts' (expected 'act' or 'observe')",
        '/etc/p.toml: unknown key "layuot" in [trainer]: did you mean "layout"?',
        "/etc/p.toml: Invalid value for \"command\" in [trainer]: 'rl' (must be a list of arguments",
        "/etc/p.toml: Invalid value for \"release_wait\" in [gpu]: unknown unit 'parsec'",
        '/etc/p.toml: unknown key "prune-above" in [disk]: write "prune_above"',
        '/etc/p.toml: unknown key "gpuu": did you mean "gpu"?',
        "environment: unknown setting PODWATCH_GPU_FLOOR: did you mean PODWATCH_GPU__FLOOR?",
        'PODWATCH_GPU__HOLD: Invalid value for "hold" in [gpu]',
    ):
        assert expected in text
    assert len(found) == 9


def test_a_key_in_the_wrong_section_is_sent_home() -> None:
    assert problems('store = "b2://x"\n' + MINIMAL) == [
        '/etc/p.toml: unknown key "store": did you mean "store" in [sync]?'
    ]


def test_a_right_name_in_the_wrong_section_beats_one_that_resembles_it() -> None:
    assert problems(MINIMAL + '[recovery]\nstop_grace = "5s"\n')[0].endswith('did you mean "stop_grace" in [trainer]?')
    assert problems(MINIMAL + '[sync]\nfloor = "1GiB"\n')[0].endswith('did you mean "floor" in [gpu] or in [hang]?')


def test_a_word_that_nearly_fits_is_told_what_was_meant() -> None:
    text = 'run_id = "r"\n[trainer]\noutput_dir = "/o"\nlayout = "primerl"\n'
    assert "Invalid value for \"layout\" in [trainer]: 'primerl'" in problems(text)[0]
    assert problems(text)[0].endswith(': did you mean "prime-rl"?')
    assert "did you mean" not in problems(text.replace("primerl", "zzz"))[0]


def test_an_unknown_key_that_resembles_none_names_the_keys_of_its_section() -> None:
    (found,) = problems(MINIMAL + "zzzz = 1\n")
    assert '"zzzz" in [trainer]' in found
    assert "output_dir" in found
    assert "hold" not in found


def test_relative_paths_are_made_absolute_by_the_directory_of_the_command() -> None:
    text = 'run_id = "r1"\nstate_dir = "s"\n[trainer]\noutput_dir = "out"\ncwd = "/app"\n'
    text += '[[hooks]]\nname = "a"\non = ["checkpoint"]\ncommand = ["true"]\ncwd = "h"\n'
    settings = load_text(text, None, environ={"PODWATCH_DIRECTORY": "/data"}).settings
    trainer = settings.trainer
    assert [str(x) for x in (settings.state_dir, trainer.output_dir, trainer.cwd, settings.hooks[0].cwd)] == [
        "/data/s", "/data/out", "/app", "/data/h",
    ]  # fmt: skip
    assert load_text(text, None, environ={}).settings.trainer.output_dir == Path.cwd() / "out"


def test_toml_syntax_names_line_and_column() -> None:
    with pytest.raises(ConfigurationError, match=r"/etc/p.toml:2:5") as caught:
        load_text('run_id = "r"\n[gpu\n', Path("/etc/p.toml"), environ={})
    assert "not valid TOML" in str(caught.value)


def test_contradictions() -> None:
    assert "prune_to must be below" in problems(MINIMAL + '[disk]\nprune_to = "90%"\n')[0]
    assert "[checkpoints.custom]" in problems(MINIMAL + 'layout = "custom"\n')[0]
    assert "state_dir must not be inside" in problems('state_dir = "/data/out/x"\n' + MINIMAL)[0]


@pytest.mark.parametrize(
    "text",
    [
        'b2_application_key = "hush"\n' + MINIMAL,
        MINIMAL + 'env = { WANDB_API_KEY = "hush" }\n',
        MINIMAL + '[trainer.env]\nHF_TOKEN = "hush"\n',
        MINIMAL + '[trainer.env]\nPROXY = "http://me:hush@host"\n',
        MINIMAL + '[sync]\nstore = "b2://id:hush@bucket"\n',
        MINIMAL + '[sync]\napplication_key_id = "hush"\n',
    ],
)
def test_secrets_in_the_file_are_refused_and_not_repeated(text: str) -> None:
    found = problems(text)
    assert len(found) == 1
    assert "a secret in the configuration" in found[0]
    assert "hush" not in found[0]


@pytest.mark.parametrize("key", ["password", "api_key", "secret_key", "application_key"])
@pytest.mark.parametrize("where", ["flag", "environment", "list of tables"])
def test_an_unknown_key_that_is_called_like_a_secret_is_a_problem_wherever_it_is_given(key: str, where: str) -> None:
    text = MINIMAL + (f'[[hooks]]\non = ["check"]\n{key} = "hush"\n' if where == "list of tables" else "")
    environ = {"PODWATCH_HTTP": json.dumps({key: "hush"})} if where == "environment" else {}
    flags: dict[str, object] = {f"http.{key}": "hush"} if where == "flag" else {}
    with pytest.raises(ConfigurationProblems) as caught:
        load_text(text, None, environ=environ, overrides=flags)
    assert key in str(caught.value)
    assert "hush" not in str(caught.value)


def test_harmless_names_are_no_secrets() -> None:
    harmless = ("TOKENIZERS_PARALLELISM", "KEYBOARD", "MONKEY", "PATH", "KEEP", "HF_TOKEN_PATH", "SECRET_DIR")
    assert not any(looks_secret(name) for name in harmless)
    assert all(looks_secret(name) for name in ("WANDB_API_KEY", "HF_TOKEN_READ", "TOKEN_HF", "B2_APPLICATION_KEY_ID"))


def test_operational_variables_are_not_settings() -> None:
    environ = {"PODWATCH_DEBUG": "1", "PODWATCH_STEP": "5", "PODWATCH_RUNTIME_DIR": "/run/x"}
    assert load_text(MINIMAL, None, environ=environ).settings.run_id == "r1"


def test_bad_json_in_the_environment_is_one_problem() -> None:
    assert problems(MINIMAL, {"PODWATCH_GPU__INFERENCE": "[0,"}) == [
        'environment: PODWATCH_GPU__INFERENCE is not valid JSON: write for example ["a", "b"]'
    ]


@pytest.mark.parametrize("pattern", ["(", "a{5000000000}", "(" * 9000 + ")" * 9000])
def test_a_pattern_that_cannot_be_compiled_is_a_problem_of_the_configuration(pattern: str) -> None:
    rules = f'[[log_rules]]\nname = "r"\npattern = "{pattern}"\n'
    assert len(problems(MINIMAL + rules)) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("PODWATCH_TRAINER__ENV", "A=b"), ("PODWATCH_CONTROLLER__PROVIDERS__COMMAND", '["x"]'),
     ("PODWATCH_CONTROLLER__PROVIDERS__TIMEOUT", "x"), ("PODWATCH_HOOKS", "x")],
)  # fmt: skip
def test_a_variable_of_the_wrong_form_is_a_problem_of_the_configuration(name: str, value: str) -> None:
    with pytest.raises(PodwatchError) as caught:
        load_text(MINIMAL, None, environ={name: value})
    assert caught.value.exit_code == ExitCode.CONFIGURATION


def test_the_search_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    etc = tmp_path / "etc"
    etc.mkdir()
    monkeypatch.setattr("podwatch.config.loading.ETC", etc)
    monkeypatch.chdir(tmp_path)
    for place, run_id in ((etc / "podwatch.toml", "etc"), (etc / "night.toml", "night")):
        write(place, MINIMAL.replace("r1", run_id))
    assert load_settings(None, environ={}).settings.run_id == "etc"
    write(tmp_path / "podwatch.toml", MINIMAL.replace("r1", "here"))
    assert load_settings(None, environ={}).settings.run_id == "here"
    named = write(tmp_path / "named.toml", MINIMAL.replace("r1", "named"))
    assert load_settings(None, environ={"PODWATCH_CONFIG": str(named)}).settings.run_id == "named"
    flag = write(tmp_path / "flag.toml", MINIMAL.replace("r1", "flag"))
    assert load_settings(flag, environ={"PODWATCH_CONFIG": str(named)}).settings.run_id == "flag"
    assert load_settings(None, environ={}, run="night").settings.run_id == "night"


def test_nothing_found_says_where_it_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podwatch.config.loading.ETC", tmp_path / "etc")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=r"no configuration file.*config init"):
        load_settings(None, environ={})
    with pytest.raises(ConfigurationError, match="does not exist"):
        load_settings(tmp_path / "nope.toml", environ={})
    with pytest.raises(ConfigurationError, match="PODWATCH_CONFIG is a directory"):
        load_settings(None, environ={"PODWATCH_CONFIG": str(tmp_path)})


def test_without_a_current_directory_the_other_places_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deleted, or outside a container that was entered with nsenter: there is no podwatch.toml in it."""
    monkeypatch.setattr("podwatch.config.loading.ETC", tmp_path / "etc")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert find_file(None, environ={}) is None
    with pytest.raises(ConfigurationError, match=r"no configuration file.*config init"):
        load_settings(None, environ={})
    with pytest.raises(ConfigurationError, match="use its absolute path"):
        load_settings(Path("podwatch.toml"), environ={})
    (tmp_path / "etc").mkdir()
    write(tmp_path / "etc" / "podwatch.toml", MINIMAL)
    assert load_settings(None, environ={}).settings.run_id == "r1"


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
def test_a_file_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    file = write(tmp_path / "p.toml", MINIMAL, mode)
    with pytest.raises(ConfigurationError, match=f"chmod go-w {file}"):
        load_settings(file, environ={})


@pytest.mark.root
def test_a_named_file_below_a_closed_directory_is_a_permission_error_with_its_fix(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o700)
    file = write(tmp_path / "closed" / "p.toml", MINIMAL)
    with (
        rights_of(61_018).applied(),
        pytest.raises(ConfigurationError, match="Permission denied: cannot read") as caught,
    ):
        find_file(file, environ={})
    assert caught.value.where == str(file)
    assert "enter every directory" in caught.value.fix


@pytest.mark.root
def test_a_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "p.toml", MINIMAL)
    os.chown(file, 12345, 12345)
    with pytest.raises(ConfigurationError, match=f"chown 0 {file}"):
        load_settings(file, environ={})


def test_what_a_reload_cannot_change() -> None:
    old = load_text(MINIMAL, None, environ={}).settings
    new = load_text(
        MINIMAL, None, environ={}, overrides={"run_id": "r2", "sync.store": "file:///x", "gpu.hold": "3s"}
    ).settings
    assert refused_by_reload(old, new) == ("run_id", "sync.store")
    assert refused_by_reload(old, old) == ()


def test_warnings_say_what_is_not_guarded() -> None:
    warnings = "\n".join(load_text(MINIMAL, None, environ={}).warnings)
    assert "NOT BACKED UP" in warnings
    assert "[trainer] command is empty" in warnings


@pytest.mark.parametrize("name", ["prime-rl", "hf", "custom"])
def test_the_examples_load(name: str) -> None:
    file = Path(__file__).parents[2] / "config" / f"{name}.toml"
    loaded = load_text(file.read_text(), file, environ={})
    assert loaded.settings.trainer.layout == name
    assert loaded.warnings == ()

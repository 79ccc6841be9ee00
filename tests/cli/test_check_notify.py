"""``podwatch check``: who would hear of a bad night, and whether it would get through."""

import json
from pathlib import Path
from typing import Any

import pytest

from podwatch.cli.check.notify import notify, own_wandb
from podwatch.config.explain import render_toml, to_json
from podwatch.config.settings import Settings
from podwatch.domain.errors import ConfigurationError

URL = "https://hooks.example.com/services/T024BE7LD/abcDEF123456"


def settings(root: Path, **chosen: Any) -> Settings:
    trainer = {"layout": "hf", "output_dir": root / "out"}
    return Settings.model_validate({"run_id": "r", "state_dir": root / "state", "trainer": trainer, "notify": chosen})


def lines(made: Settings, *, send: bool = False) -> list[tuple[str, str]]:
    return [(line.level, line.text) for line in notify(made, send=send)]


def test_each_channel_is_looked_at_and_nothing_is_sent(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    tell = ["/bin/sh", "-c", f"cat > {out}"]
    assert lines(settings(tmp_path)) == [("ok", "podwatch sends no notices: [notify] is empty")]
    found = lines(settings(tmp_path, command=tell, urls=[URL, "http://10.0.0.1/x", "http://127.0.0.1/x"]))
    assert [level for level, _ in found] == ["ok", "ok", "warn", "ok"]
    assert not any("T024BE7LD" in text for _, text in found)
    assert not out.exists()
    assert lines(settings(tmp_path, command=["/no/such"])) == [("fail", "/no/such not found")]
    assert lines(settings(tmp_path, command=tell), send=True) == [("ok", "notify.command: test notice accepted")]
    assert json.loads(out.read_text())["topic"] == "findings"
    ((level, text),) = lines(settings(tmp_path, command=["/bin/sh", "-c", "echo not today; exit 2"]), send=True)
    assert (level, text) == ("fail", "notify.command: exit 2: not today")


def test_urls_in_a_file_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "urls"
    file.write_text(f"# pager\n\n{URL}\n")
    file.chmod(0o644)
    with pytest.raises(ConfigurationError, match="read by other users"):
        lines(settings(tmp_path, urls_file=file))
    file.chmod(0o600)
    assert lines(settings(tmp_path, urls_file=file)) == [
        ("ok", "podwatch sends notices to https://hooks.example.com/...")
    ]
    file.write_text("hooks.example.com/T024BE7LD")
    with pytest.raises(ConfigurationError, match="URL number 1 has no scheme") as refused:
        lines(settings(tmp_path, urls_file=file))
    assert "T024BE7LD" not in str(refused.value)


def test_no_url_is_shown(tmp_path: Path) -> None:
    made = settings(tmp_path, urls=[URL])
    assert "T024BE7LD" not in render_toml(made) + json.dumps(to_json(made, {}, None), default=str)
    assert '"https://***"' in render_toml(made)


def test_podwatchs_own_wandb_run(tmp_path: Path) -> None:
    def seen(send: bool = False, **chosen: Any) -> list[tuple[str, str]]:
        trainer = {"layout": "hf", "output_dir": tmp_path / "out", "env": {"WANDB_MODE": chosen.pop("mode", "offline")}}
        given = {"run_id": "r", "state_dir": tmp_path / "state", "trainer": trainer, "wandb": chosen}
        return [(x.level, x.text) for x in own_wandb(Settings.model_validate(given), send=send)]

    assert seen() == []
    assert seen(enabled=True, python="/no/such/python") == [("fail", "/no/such/python has no wandb")]
    knows = tmp_path / "python"
    knows.write_text("#!/bin/sh\necho 0.31.0\n")
    knows.chmod(0o755)
    ((level, text),) = seen(enabled=True, python=knows)
    assert (level, "wandb 0.31.0, offline" in text, str(tmp_path / "state") in text) == ("ok", True, True)
    ((level, text),) = seen(enabled=True, python=knows, project="p", mode="online")
    assert text.endswith("online, in the project p")
    ((level, _),) = seen(enabled=True, python=knows, mode="disabled")
    assert level == "warn"
    _, (level, text) = seen(send=True, enabled=True, python=knows)
    assert (level, text) == ("fail", "wandb: its process ended"), "what answers only that is no W&B"

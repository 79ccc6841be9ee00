"""A directory in which whatever is imported by name is another user's code: it leaves a mark and fails."""

import sys
from importlib.metadata import packages_distributions
from pathlib import Path

STANDARD = sorted(name for name in sys.stdlib_module_names if name not in sys.builtin_module_names)
INSTALLED = sorted({*packages_distributions(), "sitecustomize", "usercustomize", "apprise", "wandb", "rich", "torch"})


class Poison:
    """``imported`` is what was."""

    def __init__(self, directory: Path, names: list[str]) -> None:
        self._mark = directory / "imported-from-here"
        directory.mkdir(parents=True, exist_ok=True)
        code = f"{self._leave_a_mark}raise SystemExit('imported from the directory')\n"
        for name in names:
            if name.isidentifier():
                (directory / f"{name}.py").write_text(code)

    def with_podwatch(self) -> "Poison":
        package = self._mark.parent / "podwatch"
        package.mkdir()
        for name in ("__init__", "__main__"):
            (package / f"{name}.py").write_text(f"{self._leave_a_mark}raise SystemExit(9)\n")
        return self

    @property
    def _leave_a_mark(self) -> str:
        return f"open({str(self._mark)!r}, 'a').write(__name__ + '\\n')\n"

    @property
    def imported(self) -> list[str]:
        return self._mark.read_text().split() if self._mark.exists() else []

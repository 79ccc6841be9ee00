"""An installed package that adds a layout and a store to podwatch: the examples of docs/contributing.md, outside of
podwatch, with the metadata that pip writes."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "contributing.md"
GROUPS = {
    "podwatch.layouts": "shelf = podwatch_shelf:LAYOUT",
    "podwatch.stores": "shelf = podwatch_shelf_store:open_store",
}


def examples() -> dict[str, str]:
    """File name -> text of each example to which the page links."""
    return {path.name: path.read_text() for path in sorted((ROOT / "examples" / "extending").glob("*.py"))}


def install(site: Path, name: str = "podwatch-shelf", files: dict[str, str] | None = None, **groups: str) -> Path:
    """Write modules and metadata into ``site``, a directory for sys.path. Without ``groups`` (``layouts``, ``stores``)
    the examples are installed."""
    module = name.replace("-", "_")
    info = site / f"{module}-1.2.dist-info"
    info.mkdir(parents=True)
    for file, text in (examples() if files is None else files).items():
        (site / file).write_text(text)
    entries = {f"podwatch.{group}": line for group, line in groups.items()} or GROUPS
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("".join(f"[{group}]\n{line}\n" for group, line in entries.items()))
    return site

"""The names of b2sdk that are not part of its public interface. pyproject allows all versions of one major number, so
each of them may move: this list is what an upgrade must be checked against. The other tests of stores/ use them.

At another version: ``pip install --no-deps --target DIR b2sdk==VERSION``, then tests/stores with PYTHONPATH=DIR. 2.13.0
fails 37 of them: it has no ``RequestTimeout``.
"""

import ast
import importlib
from pathlib import Path

import podwatch

PRIVATE = {
    "b2sdk._internal.b2http": {"HttpCallback", "NotDecompressingHTTPAdapter", "ResponseContextManager"},
    "b2sdk._internal.exception": {"ResourceNotFound", "UploadTokenUsedConcurrently"},
}


def test_no_other_private_names_are_imported() -> None:
    found: dict[str, set[str]] = {}
    for path in Path(podwatch.__file__).parent.rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "b2sdk" in text else ():
            if isinstance(node, ast.ImportFrom) and "._" in f"{node.module}" and f"{node.module}".startswith("b2sdk."):
                found.setdefault(f"{node.module}", set()).update(alias.name for alias in node.names)
            elif isinstance(node, ast.Import):
                assert not [alias.name for alias in node.names if alias.name.startswith("b2sdk._")]
    assert found == PRIVATE


def test_the_installed_version_has_them() -> None:
    for module, names in PRIVATE.items():
        assert not [name for name in names if not hasattr(importlib.import_module(module), name)]

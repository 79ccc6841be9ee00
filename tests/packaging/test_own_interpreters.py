"""Every Python that podwatch starts leaves the current directory out of what it imports from."""

import ast
import re
from pathlib import Path

import podwatch


def launches() -> list[tuple[str, list[str]]]:
    """Each list or tuple in our sources that begins a Python of ours: where, and its first words."""
    found = []
    pythons = ("sys.executable", "self._python", "self._plan.python", "python")
    source = Path(podwatch.__file__).parent
    begins = re.compile(rf"(?<!\w)({'|'.join(map(re.escape, pythons))})\s*,")  # most files need not be parsed
    for file in source.rglob("*.py"):
        text = file.read_text()
        for node in ast.walk(ast.parse(text)) if begins.search(text) else ():
            words = node.elts if isinstance(node, ast.List | ast.Tuple) else []
            if isinstance(node, ast.Call):
                words = node.args
            for position, word in enumerate(words):
                if isinstance(word, ast.Name | ast.Attribute) and ast.unparse(word) in pythons:
                    rest = [ast.unparse(w).strip("'\"") for w in words[position + 1 :]]
                    if rest and rest[0].startswith("-"):
                        found.append((f"{file.relative_to(source)}:{node.lineno}", rest))
    return found


def test_every_python_that_we_start_leaves_the_current_directory_out() -> None:
    """-I implies -P. The simulated trainers of the demo are scripts: their own directory comes first."""
    found = launches()
    assert len(found) >= 9, found
    simulated = (
        "simulation/simulated_rl.py",
        "simulation/simulated_inference_server.py",
        "simulation/simulated_trainer.py",
    )
    wrong = [f for f in found if f[1][0] not in ("-I", "-P") and not f[0].startswith(simulated)]
    assert wrong == []

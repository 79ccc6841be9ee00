"""A layout in a package of its own: docs/contributing.md."""

LAYOUT = {
    "parts": {"checkpoint": "shelf_{step}"},
    "require": [["model.safetensors"], ["DONE"]],
    "last": {"DONE": ["*"]},  # no other file is newer
    "ends": "last",
    "reshards": False,  # it loads a checkpoint only with the same number of processes
    "finish_lines": ["shelf is done"],
    "command": {
        "signs": [{"modules": ["shelf"]}],
        "resume": {"add": ["--resume", "{checkpoint}"], "drop": ["resume"]},
        "target": ["max_steps"],
    },
    "disk": [{"holds": ["DONE"]}],
    "log": {"steps": [{"pattern": r"^shelf step (\d{1,12}): loss "}]},
    "processes": {"programs": {"shelf": "trainer"}},
}

"""Actor and critic save in parallel, each as DeepSpeed does, each with its own ``latest``."""

from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from tests.support.layout_makers._writing import Operation, write, write_json
from tests.support.layout_makers._zero import tag_operations

COMMAND = ("python", "-m", "openrlhf.cli.train_ppo_ray", "--algo.advantage.estimator", "gae")


def role(output_dir: Path, folder: str, step: int, **options: Any) -> list[Operation]:
    if folder == "_actor":
        options = {"episode": 0, "global_step": step, **options}
    done = tag_operations(output_dir / folder / f"global_step{step}", **options)
    return done + write(output_dir / folder / "latest", f"global_step{step}".encode())


def operations(output_dir: Path, step: int, **options: Any) -> list[Operation]:
    both = (role(output_dir, folder, step, **options) for folder in ("_actor", "_critic"))
    return [o for o in chain.from_iterable(zip_longest(*both)) if o is not None]


def metric(output_dir: Path, step: int) -> list[Operation]:
    """Written when all is over."""
    values = {"metric_key": "eval/pass@1", "metric_value": 0.5}
    return write_json(output_dir / "_actor" / f"global_step{step}" / "metric.json", values)

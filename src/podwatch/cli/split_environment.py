"""Which variables of a running trainer ``podwatch config init`` writes to which file.

Variables that affect training (prefixes in ``KEEP_PREFIXES``, names in ``KEEP``) go into podwatch.toml; store
credentials, and names or values that look like a secret, into podwatch.env; the rest is dropped.
"""

import re
from collections.abc import Mapping

from podwatch.config.env_files import is_text
from podwatch.config.setting_names import looks_secret
from podwatch.config.store_kinds import KINDS
from podwatch.domain.secrets import scrub

KEEP = frozenset({"PATH", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "XDG_CACHE_HOME", "HOME"})
KEEP_PREFIXES: tuple[str, ...] = (
    "WANDB_",
    "HF_",
    "CUDA_",
    "NCCL_",
    "VLLM_",
    "PYTORCH_",
    "TORCH_",
    "TOKENIZERS_",
    "TRANSFORMERS_",
    "UV_",
    "PRIME_",
    "PRL_",
    "RAY_",
    "TRITON_",
    "GLOO_",
)
_NOT_COPIED = ("PODWATCH_", "SSH_", "SUDO_", "DBUS_", "XDG_SESSION", "GPG_", "AWS_SESSION_TOKEN_EXPIRY")


def split_environment(environment: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """The variables for the TOML and those for the env file, which can be impossible to write; the rest is dropped."""
    env: dict[str, str] = {}
    secrets: dict[str, str] = {}
    for name, value in sorted(environment.items()):
        if name in KINDS["b2"].names:
            secrets[name] = value
        elif name.startswith(_NOT_COPIED) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            continue
        elif looks_secret(name, value) or scrub(value) != value:
            secrets[name] = value
        elif is_text(value) and (name in KEEP or name.startswith(KEEP_PREFIXES)):
            env[name] = value
    return env, secrets

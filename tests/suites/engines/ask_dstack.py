"""Parse a dstack configuration with dstack itself. Run by the Python that has dstack: ``python ask_dstack.py FILE``.

The parser is no public interface of dstack: the version is pinned in the Makefile.
"""

import sys
from pathlib import Path

import yaml
from dstack._internal.core.models.configurations import parse_run_configuration

print(parse_run_configuration(yaml.safe_load(Path(sys.argv[1]).read_text())).type)

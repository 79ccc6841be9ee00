"""The ``podwatch`` command: one file per command, heavy imports inside the command."""


def main() -> None:
    """Entry point of the console script."""
    from podwatch.cli.failing import run
    from podwatch.cli.root import cli

    run(cli)

"""``python -m tests.support.s3server --port 0 --dir D``: see ``store_server.serve``."""

from tests.support.s3server.server import Handler
from tests.support.s3server.state import State
from tests.support.store_server import serve


def main() -> None:
    serve(State, Handler)


if __name__ == "__main__":
    main()

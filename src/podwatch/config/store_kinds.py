"""The kinds of store that podwatch has itself, by the scheme of their URL. Installed packages add more (plugins.py)."""

from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class StoreKind:
    """``example`` shows the form of the URL; ``key`` are the variables that a key for it needs, empty where none is;
    ``more``: those that may belong to it."""

    scheme: str
    example: str
    key: tuple[str, ...] = ()
    more: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.key, *self.more)


KINDS = MappingProxyType(
    {
        kind.scheme: kind
        for kind in (
            StoreKind(
                "b2", "b2://bucket[/prefix]", ("B2_APPLICATION_KEY_ID", "B2_APPLICATION_KEY"), ("B2_ENVIRONMENT",)
            ),
            StoreKind(
                "s3",
                "s3://bucket[/prefix]",
                ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
                (
                    "AWS_SESSION_TOKEN",
                    "AWS_ENDPOINT_URL_S3",
                    "AWS_ENDPOINT_URL",
                    "AWS_REGION",
                    "AWS_DEFAULT_REGION",
                    "AWS_PROFILE",
                    "AWS_CA_BUNDLE",
                ),
            ),
            StoreKind("file", "file:///path"),
        )
    }
)
EXAMPLES = " or ".join(f'"{kind.example}"' for kind in KINDS.values())
"""For messages."""


def kind_of(url: str) -> StoreKind | None:
    """The kind of this store; None for that of an installed package, and for what is no store's URL."""
    scheme, separator, _ = url.partition("://")
    return KINDS.get(scheme) if separator else None


def bucket_of(url: str) -> str:
    """The bucket that the URL names; empty where it names none, as a directory's does."""
    return url.partition("://")[2].partition("/")[0]

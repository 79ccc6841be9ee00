"""Numbers with their noun: ``1 shard``, ``4 shards``."""


def counted(number: int, noun: str, plural: str = "") -> str:
    """``number`` and ``noun`` in singular or plural; ``plural`` for a noun that does not simply take an ``s``."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"

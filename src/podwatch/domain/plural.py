"""Numbers with their noun: ``1 shard``, ``4 shards``."""


def counted(number: int, noun: str, plural: str = "") -> str:
    """``number`` and ``noun`` in singular or plural. ``plural``: needed if it is not ``noun`` plus ``s``."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"

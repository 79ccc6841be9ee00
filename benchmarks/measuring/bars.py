"""Bars of each client's median time, workload by workload, as an SVG without a plotting library."""

from collections.abc import Mapping, Sequence
from html import escape

LEFT, WIDTH, HEIGHT, TOP = 250, 430, 18, 40
OURS, LIMIT, OTHERS = "#00798c", "#c9c9c9", "#d1a24b"


def svg(works: Sequence[tuple[str, Mapping[str, tuple[float, float]]]], note: str) -> str:
    """``works``: (title, {client: (median seconds, CPU seconds per GB)}). Each workload has its own scale."""
    out: list[str] = []
    y = TOP
    for title, clients in works:
        longest = max(seconds for seconds, _ in clients.values())
        out.append(f'<text x="12" y="{y}" font-weight="bold">{escape(title)}</text>')
        y += 8
        for name, (seconds, cpu) in sorted(clients.items(), key=lambda pair: pair[1][0]):
            colour = OURS if name == "podwatch" else LIMIT if name.startswith("limit") else OTHERS
            width = max(2.0, seconds / longest * WIDTH)
            middle = y + HEIGHT - 6
            out.append(f'<text x="{LEFT - 8}" y="{middle}" text-anchor="end">{escape(name)}</text>')
            out.append(
                f'<rect x="{LEFT}" y="{y + 2}" width="{width:.1f}" height="{HEIGHT - 5}" fill="{colour}"/>'
                f'<text x="{LEFT + width + 6:.1f}" y="{middle}">{seconds:.2f} s, {cpu:.2f} CPU s/GB</text>'
            )
            y += HEIGHT
        y += 26
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 160}" height="{y}"'
        ' font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="12" y="18" fill="#555">{escape(note)}</text>'
    )
    return "\n".join([head, *out, "</svg>", ""])

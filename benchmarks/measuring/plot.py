"""Plots of detection times without a plotting library: a histogram for the terminal, and an SVG."""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from html import escape

Row = tuple[str, Sequence[float], float, dict[str, Sequence[float]]]
"""(fault, podwatch's seconds, its bound, others' seconds by name)."""
COLOURS = ("#d1495b", "#8d6a9f", "#edae49", "#66a182", "#2e4057", "#a1a1a1", "#c98b5e")
LEFT, WIDTH, HEIGHT, TOP = 290, 620, 17, 46
LEAST, MOST = 0.2, 3 * 3600.0


def histogram(values: Sequence[float], width: float, longest: int = 60) -> str:
    """One line per ``width`` seconds."""
    if not values:
        return "(none)"
    bins = Counter(int(value / width) for value in values)
    top = max(bins.values())

    def bar(n: int) -> str:
        return "#" * max(1, round(bins[n] / top * longest)) if bins[n] else ""

    return "\n".join(
        f"{n * width:6.1f} s {bar(n):{longest}} {bins[n] or ''}".rstrip() for n in range(min(bins), max(bins) + 1)
    )


def _x(seconds: float) -> float:
    share = math.log(max(LEAST, min(MOST, seconds)) / LEAST) / math.log(MOST / LEAST)
    return LEFT + share * WIDTH


def svg(rows: Sequence[Row]) -> str:
    """One line per fault on a logarithmic axis: every death as a dot, the bound as a bar, each peer's median."""
    peers = list(rows[0][3]) if rows else []
    bottom = TOP + HEIGHT * len(rows)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 60}" height="{bottom + 34}"'
        ' font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    legend = [("podwatch, each death", "#00798c"), *zip(peers, COLOURS, strict=False)]
    for n, (name, colour) in enumerate(legend):
        at = 12 + n * 112 + (34 if n else 0)
        out.append(f'<circle cx="{at}" cy="14" r="4" fill="{colour}"/><text x="{at + 7}" y="18">{escape(name)}</text>')
    out.append(
        '<text x="12" y="34" fill="#555">medians of the peers; | podwatch\'s bound; right edge: 3 h, or never</text>'
    )
    for seconds, label in (
        (1, "1 s"),
        (15, "15 s"),
        (60, "1 min"),
        (300, "5"),
        (900, "15"),
        (1800, "30"),
        (3600, "1 h"),
    ):
        x = _x(seconds)
        out.append(f'<line x1="{x:.1f}" y1="{TOP - 6}" x2="{x:.1f}" y2="{bottom}" stroke="#e4e4e4"/>')
        out.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{label}</text>')
    for n, (name, times, bound, others) in enumerate(rows):
        y = TOP + HEIGHT * n + 6
        out.append(f'<text x="{LEFT - 12}" y="{y + 4}" text-anchor="end">{escape(name)}</text>')
        out.append(f'<line x1="{LEFT}" y1="{y}" x2="{LEFT + WIDTH}" y2="{y}" stroke="#f2f2f2"/>')
        for k, peer in enumerate(peers):
            seen = others[peer]
            x = _x(statistics.median(seen)) if seen else LEFT + WIDTH + 8 + 6 * k
            out.append(f'<circle cx="{x:.1f}" cy="{y}" r="2.6" fill="{COLOURS[k % len(COLOURS)]}"/>')
        out += [f'<circle cx="{_x(t):.1f}" cy="{y}" r="3" fill="#00798c" fill-opacity="0.35"/>' for t in times]
        x = _x(bound)
        out.append(f'<line x1="{x:.1f}" y1="{y - 6}" x2="{x:.1f}" y2="{y + 6}" stroke="#00798c" stroke-width="2"/>')
    return "\n".join([*out, "</svg>", ""])

#!/usr/bin/env python3
"""card_plot.py - tables of bench/card as one picture.

    bench/card_plot.py OUT.svg TITLE=FILE ...

Each FILE is what `card` printed. Three panels a table: answer tokens a second
(those in time darker), deadlines missed, and memory at its peak.
"""
import sys
from xml.sax.saxutils import escape

ROW, WIDTH, LEFT, GAP = 22, 200, 190, 70
PANELS = (("answer tokens/s (dark: in time)", "tokens/s", "timely"),
          ("deadlines missed", "missed", None),
          ("memory at its peak, GB", "peak GB", None))


def read(path):
    lines = [line.rstrip("\n").split("\t") for line in open(path)]
    return [dict(zip(lines[0], line)) for line in lines[1:]]


def bar(out, x, y, value, most, colour):
    width = WIDTH * value / most if most else 0
    out.append(f'<rect x="{x}" y="{y}" width="{width:.1f}" height="{ROW - 7}"'
               f' fill="{colour}"/>')
    return width


def table(out, top, title, rows):
    out.append(f'<text x="10" y="{top + 16}" class="title">{escape(title)}'
               '</text>')
    for p, (name, key, inner) in enumerate(PANELS):
        x = LEFT + p * (WIDTH + GAP)
        most = max(float(row[key]) for row in rows)
        out.append(f'<text x="{x}" y="{top + 36}">{escape(name)}</text>')
        for i, row in enumerate(rows):
            y = top + 44 + i * ROW
            if p == 0:
                out.append(f'<text x="{LEFT - 8}" y="{y + 12}" '
                           f'text-anchor="end">{escape(row["policy"])}</text>')
            width = bar(out, x, y, float(row[key]), most,
                        "#9ab4d0" if inner else "#2f5d8a")
            if inner:
                bar(out, x, y, float(row[inner]), most, "#2f5d8a")
            out.append(f'<text x="{x + width + 4:.1f}" y="{y + 12}">'
                       f'{float(row[key]):g}</text>')
    return top + 60 + len(rows) * ROW


def main():
    out, top = [], 0
    for argument in sys.argv[2:]:
        title, path = argument.rsplit("=", 1)
        top = table(out, top, title, read(path))
    width = LEFT + len(PANELS) * (WIDTH + GAP)
    with open(sys.argv[1], "w") as file:
        file.write(f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" '
                   f'height="{top}" font-family="sans-serif" font-size="12">\n'
                   '<style>.title{font-size:14px;font-weight:bold}</style>\n'
                   '<rect width="100%" height="100%" fill="white"/>\n'
                   + "\n".join(out) + "\n</svg>\n")


if __name__ == "__main__":
    main()

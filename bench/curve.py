#!/usr/bin/env python3
"""Speed against batch, prefix and threads, beside transformers and the machine.

    bench/curve.py BUILD_DIR OUT.svg [--short]

Denoise steps on nightshift-mid-1, fp32: positions a second (canvases times 256
over the step's time). Three panels: 1 to 64 canvases behind 1,024 tokens; 4
canvases behind 256 to 7,936; 8 canvases on one thread and on all. At each point
we and the peer take turns, and each one's fastest step counts; the peer goes to
16 canvases, as its logits fill the memory beyond. The limit is the multiply-add
peak that cpu_limit finds in the same run, over the operations of a position.
--short takes every other point, to 16 canvases and 4,096 tokens. Prints the points, tab-separated.
"""
import json
import math
import os
import subprocess
import sys
import time
from xml.sax.saxutils import escape

from compare import Engine, denoise_gflop
from peer import CANVAS, EXPERTS, Peer, export

BATCHES = (1, 2, 4, 8, 16, 32, 64)
PREFIXES = (256, 512, 1024, 2048, 4096, 7936)
PEER_MOST = 16      # canvases
PREFIX = 1024       # of the panels of batches and threads
ROUNDS = 2
COLOURS = {"nightshift": "#2f5d8a", "transformers": "#c0692b",
           "limit": "#888888"}
WIDTH, HEIGHT, LEFT, TOP = 250, 200, 60, 40


class Bench:
    def __init__(self, build):
        self.build = build
        self.model = f"{build}/bench/nightshift-mid-1"
        self.threads = min(2, len(os.sched_getaffinity(0)))
        export(self.model)
        self.peer = Peer(self.threads)
        self.peak = {}  # by threads, the best of all points
        self.engines = {}

    def engine(self, threads):
        if threads not in self.engines:
            for other in self.engines.values():
                other.close()
            self.engines = {threads: Engine(self.build, self.model, threads,
                                            "16384", "", "64")}
        return self.engines[threads]

    def measure_limit(self, threads):
        out = subprocess.run([f"{self.build}/bench/cpu_limit", str(threads)],
                             capture_output=True, text=True, check=True)
        rates = [json.loads(line) for line in out.stdout.splitlines()]
        peak = max(rate["gflops"] for rate in rates
                   if rate["threads"] == threads and
                   rate["what"] in ("avx2_fp32", "avx512_fp32"))
        self.peak[threads] = max(peak, self.peak.get(threads, 0))

    def open_peer(self, batch, prefix):
        """With the fastest of its three ways to compute experts."""
        took = {}
        for experts in EXPERTS if batch == 1 else ("grouped_mm",):
            self.peer.use(experts)
            state = self.peer.open_denoise(batch, prefix)
            took[experts] = self.peer.time_denoise(state)
        self.peer.use(min(took, key=took.get))
        return state

    def point(self, batch, prefix, threads, with_peer):
        """Positions a second of each."""
        ours, theirs, state = [], [], None
        if with_peer:
            state = self.open_peer(batch, prefix)
        for _ in range(ROUNDS):
            if state:
                theirs.append(self.peer.time_denoise(state))
            ours += self.engine(threads).ask(
                f"denoise {batch} 2 {prefix}")["ms"]
        self.measure_limit(threads)
        rate = batch * CANVAS * 1e3
        got = {"nightshift": rate / min(ours)}
        if theirs:
            got["transformers"] = rate / min(theirs)
        print(f"{batch} x {CANVAS} behind {prefix}, {threads} threads: " +
              " ".join(f"{name} {rate:.0f}" for name, rate in got.items()),
              file=sys.stderr, flush=True)
        return got


def panel(out, number, title, label, points):
    """points: {x: {name: y}}; the axis of x in powers of two."""
    left, bottom = LEFT + number * (WIDTH + LEFT + 20), TOP + HEIGHT
    xs = sorted(points)
    low, high = math.log2(xs[0]), math.log2(xs[-1])
    most = max(y for at in points.values() for y in at.values()) * 1.05

    def place(x, y):
        return (left + WIDTH * (math.log2(x) - low) / (high - low or 1),
                bottom - HEIGHT * y / most)

    out.append(f'<text x="{left}" y="18" class="title">{escape(title)}</text>'
               f'<path d="M{left} {TOP}V{bottom}H{left + WIDTH}" fill="none" '
               'stroke="black"/>')
    for x in xs:
        out.append(f'<text x="{place(x, 0)[0]:.1f}" y="{bottom + 16}" '
                   f'text-anchor="middle">{x}</text>')
    out.append(f'<text x="{left + WIDTH / 2}" y="{bottom + 34}" '
               f'text-anchor="middle">{escape(label)}</text>')
    for share in (0.25, 0.5, 0.75, 1):
        y = bottom - HEIGHT * share
        out.append(f'<text x="{left - 4}" y="{y + 4:.1f}" text-anchor="end">'
                   f'{most * share:.0f}</text>'
                   f'<path d="M{left} {y:.1f}h{WIDTH}" stroke="#dddddd"/>')
    for name, colour in COLOURS.items():
        line = [place(x, points[x][name]) for x in xs if name in points[x]]
        dash = ' stroke-dasharray="5 4"' if name == "limit" else ""
        out.append('<polyline fill="none" stroke-width="2" points="' +
                   " ".join(f"{x:.1f},{y:.1f}" for x, y in line) +
                   f'" stroke="{colour}"{dash}/>')
        out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'
                for x, y in line if name != "limit"]


def main():
    build, picture = sys.argv[1:3]
    short = "--short" in sys.argv
    batches = BATCHES[:5:2] if short else BATCHES
    prefixes = PREFIXES[::2] if short else PREFIXES
    bench = Bench(build)
    load = os.getloadavg()[0]
    panels = (
        ("batch", "canvases", {
            b: bench.point(b, PREFIX, bench.threads, b <= PEER_MOST)
            for b in batches}),
        ("prefix", "tokens before 4 canvases", {
            p: bench.point(4, p, bench.threads, True) for p in prefixes}),
        ("threads", "threads, 8 canvases", {
            t: bench.point(8, PREFIX, t, False)
            for t in sorted({1, bench.threads})}),
    )
    for title, _, points in panels:
        for x, got in points.items():
            threads = x if title == "threads" else bench.threads
            prefix = x if title == "prefix" else PREFIX
            got["limit"] = (bench.peak[threads] / denoise_gflop(prefix) *
                            CANVAS)
    names = list(COLOURS)
    print("panel\tx\t" + "\t".join(names))
    for title, _, points in panels:
        for x, got in points.items():
            print(f"{title}\t{x}\t" + "\t".join(
                f"{got[name]:.0f}" if name in got else "-" for name in names))
    out = []
    for number, (title, label, points) in enumerate(panels):
        panel(out, number, f"positions/s by {title}", label, points)
    for number, (name, colour) in enumerate(COLOURS.items()):
        out.append(f'<text x="{LEFT + number * 110}" y="{TOP + HEIGHT + 58}" '
                   f'fill="{colour}">{name}</text>')
    out.append(f'<text x="{LEFT + 340}" y="{TOP + HEIGHT + 58}">fp32, '
               f'{bench.threads} threads, {time.strftime("%Y-%m-%d")}, load '
               f'{load:.1f} before</text>')
    with open(picture, "w", encoding="utf-8") as file:
        file.write(f'<svg xmlns="http://www.w3.org/2000/svg" '
                   f'width="{len(panels) * (WIDTH + LEFT + 20)}" '
                   f'height="{TOP + HEIGHT + 70}" font-family="sans-serif" '
                   'font-size="12">\n<style>.title{font-size:14px;'
                   'font-weight:bold}</style>\n<rect width="100%" '
                   'height="100%" fill="white"/>\n' + "\n".join(out) +
                   "\n</svg>\n")


if __name__ == "__main__":
    main()

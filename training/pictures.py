"""Generated pictures with a caption that can be checked: coloured shapes and bar charts.

A picture is a function of its number alone, so a data set keeps numbers, not pixels. 128 by 128 pixels is what
the smallest budget of soft tokens makes of any square picture, so none is resized on its way into the model.
"""
import random
import struct
import zlib

import numpy as np

SIDE = 128
COLOURS = {"red": (214, 40, 40), "green": (46, 140, 60), "blue": (40, 80, 200), "black": (30, 30, 30), "orange": (245, 140, 30),
           "yellow": (240, 220, 60)}
SHAPES = ("circle", "square", "triangle", "cross")
PLACES = ("at the upper left", "at the top", "at the upper right", "at the left", "in the middle", "at the right",
          "at the lower left", "at the bottom", "at the lower right")
ASK = ("Describe this picture.", "What does this picture show?", "What is in this picture?")
NAME = "Which shapes are in this picture?"
CHARTS = 0.3  # the share of charts, which are easier
UNIT, FLOOR = 12, 120  # pixels: a step of a chart's scale, its base line


def listed(parts):
    """a, b and c"""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


# ---------------------------------------------------------------- what stands in a picture

def shapes(r):
    """Up to three shapes in nine places, all told in reading order, or asked for by their names alone."""
    places = sorted(r.sample(range(9), r.randrange(1, 4)))
    things = [(r.choice(SHAPES), r.choice(list(COLOURS)), p) for p in places]
    drawn = [(shape, colour, 22 + 42 * (p % 3) + r.uniform(-4, 4), 22 + 42 * (p // 3) + r.uniform(-4, 4), r.uniform(11, 16))
             for shape, colour, p in things]
    facts = [f"{colour} {shape} {PLACES[p]}" for shape, colour, p in things]
    key = "|".join(facts)
    if r.random() < 0.4:
        answer = listed([f"a {shape}" for shape, _, _ in things])
        return drawn, NAME, "A" + answer[1:] + ".", [answer[2:]], key
    answer = listed([("an " if f.startswith("orange") else "a ") + f for f in facts])
    return drawn, r.choice(ASK), "A" + answer[1:] + ".", facts, key


def chart(r):
    """Two to four bars from 1 to 9 high."""
    n = r.randrange(2, 5)
    colours = r.sample(list(COLOURS), n)
    heights = r.sample(range(1, 10), n)
    bars = [f"{c} {h}" for c, h in zip(colours, heights)]
    ends = [f"highest is {colours[heights.index(max(heights))]}", f"lowest is {colours[heights.index(min(heights))]}"]
    answer = f"The chart shows {listed(bars)}. The {ends[0]}, the {ends[1]}."
    step = SIDE / n
    half = step * r.uniform(0.22, 0.4)
    drawn = [("bar", c, step * (i + 0.5), h, half) for i, (c, h) in enumerate(zip(colours, heights))]
    return drawn, r.choice(ASK), answer, bars + ends, "|".join(bars + ends)


def picture(number):
    """The example behind a number: prompt, answer, what to check, what to draw."""
    r = random.Random(f"picture {number}")
    kind = chart if r.random() < CHARTS else shapes
    drawn, prompt, answer, facts, key = kind(r)
    return {"task": "image", "kind": kind.__name__, "prompt": prompt, "answer": answer, "key": key, "check": {"facts": facts},
            "picture": number, "paper": r.randrange(215, 256), "drawn": drawn}


def image(r):
    return picture(r.randrange(2 ** 31))


# ---------------------------------------------------------------- drawing

def distance(shape, x, y, size):
    """Signed distance (about) of every pixel from the edge of a shape around 0; negative inside."""
    ax, ay = np.abs(x), np.abs(y)
    if shape == "circle":
        return np.hypot(x, y) - size
    if shape == "square":
        return np.maximum(ax, ay) - 0.9 * size
    if shape == "triangle":
        return np.maximum(0.87 * ax - 0.5 * y - 0.5 * size, y - 0.8 * size)
    return np.minimum(np.maximum(ax - size, ay - 0.3 * size), np.maximum(ay - size, ax - 0.3 * size))


def pixels(example):
    """[SIDE, SIDE, 3] uint8."""
    y, x = np.mgrid[0.5:SIDE, 0.5:SIDE]
    image = np.full((SIDE, SIDE, 3), float(example["paper"]))
    if example["kind"] == "chart":
        image[FLOOR - UNIT * 9: FLOOR + 1: UNIT] -= 25
    for shape, colour, cx, cy, size in example["drawn"]:
        if shape == "bar":
            d = np.maximum(np.abs(x - cx) - size, np.maximum(y - FLOOR, FLOOR - UNIT * cy - y))
        else:
            d = distance(shape, x - cx, y - cy, size)
        cover = np.clip(0.5 - d, 0, 1)[..., None]
        image += cover * (np.array(COLOURS[colour]) - image)
    return np.rint(image).astype(np.uint8)


def png(image):
    """The bytes of a PNG file."""
    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    h, w, _ = image.shape
    rows = np.concatenate((np.zeros((h, 1), np.uint8), image.reshape(h, -1)), 1)  # filter 0 before every row
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", w, h, 8, 2, 0, 0, 0)) + \
        chunk(b"IDAT", zlib.compress(rows.tobytes(), 9)) + chunk(b"IEND", b"")

"""The jobs of `make demo`:  python demo.py WORK ../examples

The first held-out cases of each task as demo-jobs.jsonl, their references as demo-answers.jsonl, the pictures beside them.
"""
import os
import sys

import evaluate as E
import pictures as P

CASES = {"report": 6, "sql": 6, "code": 6, "debian": 4}
MODES = {"debian": "ar"}  # open text: its denoised answers are no sentences yet


def modes(case):
    return {"mode": MODES[case["task"]]} if case["task"] in MODES else {}


def main():
    work, out = sys.argv[1:3]
    cases = {f"{task}-{i:03}": c for task, n in CASES.items() for i, c in enumerate(E.held_out(work, task, 0, n))}
    seen = E.held_out(work, "image", 0, 100)
    for kind in ("shapes", "chart"):
        cases[kind] = next(c for c in seen if c["kind"] == kind and len(c["check"]["facts"]) >= 3)
    folder = os.path.join(out, "pictures")
    os.makedirs(folder, exist_ok=True)
    urls = {name: f"pictures/{name}.png" for name, c in cases.items() if "picture" in c}
    for name, url in urls.items():
        with open(os.path.join(out, url), "wb") as f:
            f.write(P.png(P.pixels(P.picture(cases[name]["picture"]))))
    E.write_lines(os.path.join(out, "demo-jobs.jsonl"), (E.job(name, c, urls.get(name), **modes(c)) for name, c in cases.items()))
    E.write_lines(os.path.join(out, "demo-answers.jsonl"), (E.reference(name, c) for name, c in cases.items()))


if __name__ == "__main__":
    main()

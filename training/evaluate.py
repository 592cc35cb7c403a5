"""Held-out evaluation through nightshift:  python evaluate.py WORK MODEL NIGHTSHIFT [FROM:TO [MODE,.. [TASK,..]]]

Held-out cases FROM to TO of every task (250:400 unless told: the shipped settings were tried on those before) run as
one job file in each mode, with the settings that MODEL ships; those given in SETTINGS (a JSON object in the environment,
fields of a job's `nightshift`) go before them. Jobs, reference answers and results stay in WORK/evaluation. A line for
each task and mode is printed, as a table.
"""
import base64
import itertools
import json
import os
import subprocess
import sys

import pictures as P
from score import first_words, rouge_l, score

MODES = ("diffusion", "ar", "hybrid")
TASKS = ("report", "sql", "code", "image", "debian")
MEASURES = {"sql": "executed right", "code": "executed right", "report": "facts named", "image": "facts named", "debian": "ROUGE-L"}


def held_out(work, task, first, last):
    with open(os.path.join(work, f"held-{task}.jsonl"), encoding="utf-8") as f:
        return [json.loads(line) for line in itertools.islice(f, first, last)]


def content(case, url=None):
    """A message's content. A picture goes as `url` or, without one, as data, and asks for the smallest budget."""
    if "picture" not in case:
        return case["prompt"]
    if url is None:
        url = "data:image/png;base64," + base64.b64encode(P.png(P.pixels(P.picture(case["picture"])))).decode()
    return [{"type": "image_url", "image_url": {"url": url, "detail": "low"}}, {"type": "text", "text": case["prompt"]}]


def job(name, case, url=None, **nightshift):
    body = {"model": "demo", "messages": [{"role": "user", "content": content(case, url)}], "max_tokens": 128, "seed": 1}
    if nightshift.get("mode") in ("ar", "hybrid"):
        body["temperature"] = 0
    if nightshift:
        body["nightshift"] = nightshift
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}


def reference(name, case):
    return {"custom_id": name, **{k: case[k] for k in ("task", "kind", "prompt", "answer", "check", "picture") if k in case}}


def write_lines(path, lines):
    with open(path, "w", encoding="utf-8") as f:
        for line in lines:
            f.write(json.dumps(line, ensure_ascii=False) + "\n")


def run(nightshift, model, jobs, out):
    """The results by custom_id. Failed jobs are counted later; a run that fails as a whole ends here."""
    code = subprocess.run([nightshift, "run", jobs, "--model", model, "-o", out, "--restart", "--quiet"]).returncode
    if code not in (0, 1, 2):
        sys.exit(f"nightshift ended with {code}")
    with open(out, encoding="utf-8") as f:
        return {r["custom_id"]: r for r in map(json.loads, f)}


def measure(cases, results):
    """Totals over the cases of one task."""
    total = dict.fromkeys(("failed", "score", "same", "tokens", "steps", "blocks", "passes", "drafted", "kept"), 0)
    for name, case in cases.items():
        r = results[name]
        body = (r.get("response") or {}).get("body")
        if not body:
            total["failed"] += 1
            continue
        text, ours = body["choices"][0]["message"].get("content") or "", r["nightshift"]
        total["score"] += score(case, text)
        total["same"] += text.strip() == case["answer"]
        total["tokens"] += body["usage"]["completion_tokens"]
        total["steps"] += ours["denoise_steps"]
        total["blocks"] += ours["blocks"]
        total["passes"] += ours["passes"]
        total["drafted"] += ours.get("drafted", 0)
        total["kept"] += ours.get("kept", 0)
    return total


def ratio(a, b, form):
    return format(a / b, form) if b else "-"


def main():
    work, model, nightshift = sys.argv[1:4]
    first, last = map(int, (sys.argv[4] if len(sys.argv) > 4 else "250:400").split(":"))
    modes = sys.argv[5].split(",") if len(sys.argv) > 5 else MODES
    tasks = sys.argv[6].split(",") if len(sys.argv) > 6 else TASKS
    settings = json.loads(os.environ.get("SETTINGS", "{}"))
    folder = os.path.join(work, "evaluation")
    os.makedirs(folder, exist_ok=True)
    cases = {task: {f"{task}-{i:03}": c for i, c in enumerate(held_out(work, task, first, last), first)} for task in tasks}
    every = {name: c for group in cases.values() for name, c in group.items()}
    write_lines(os.path.join(folder, "answers.jsonl"), (reference(name, c) for name, c in every.items()))
    print("| mode | task | cases | failed | measure | result | identical | tokens per denoise step | tokens per pass | steps per canvas "
          "| drafts kept |\n|" + " --- |" * 11)
    for mode in modes:
        jobs = os.path.join(folder, mode + "-jobs.jsonl")
        write_lines(jobs, (job(name, c, mode=mode, **settings) for name, c in every.items()))
        results = run(nightshift, model, jobs, os.path.join(folder, mode + "-results.jsonl"))
        for task, group in cases.items():
            t = measure(group, results)
            count = len(group)
            print("|", " | ".join((mode, task, str(count), str(t["failed"]), MEASURES[task], f"{t['score'] / count:.3f}", f"{t['same'] / count:.2f}",
                                   ratio(t["tokens"], t["steps"], ".2f"), ratio(t["tokens"], t["passes"], ".2f"),
                                   ratio(t["steps"], t["blocks"] if t["steps"] else 0, ".2f"),
                                   ratio(t["kept"], t["drafted"], ".2f"))), "|", flush=True)
    if "debian" in cases:
        baseline = sum(rouge_l(first_words(c["prompt"]), c["answer"]) for c in cases["debian"].values()) / len(cases["debian"])
        print(f"\nThe first eight words of the description, as a synopsis: ROUGE-L {baseline:.3f}")


if __name__ == "__main__":
    main()

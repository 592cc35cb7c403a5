#!/usr/bin/env python3
"""32 questions on one long document against 32 on documents of their own.

    bench/documents.py BUILD_DIR

The demo model, `nightshift run` as a user has it, some 3,000 tokens a document
and one canvas an answer. The 32 documents are the one, begun at another of its
paragraphs each, so that both files ask for the same work but for what can be
shared. They take turns (A B A B A); the time of a run of no jobs is taken off.
The last line printed is
    ratio: documents X
of the minima, and the exit status is 1 below the floor or where the usage says
that nothing was shared.
"""
import json
import pathlib
import subprocess
import sys
import tempfile
import time

QUESTIONS = 32
WORDS = 1400        # of a document
STEPS = 6           # of a canvas, at most: what the demo model needs for its own
                    # tasks; on these documents it would try to the last
ROUNDS = 3          # of the separate ones; the shared ones run between them
FLOOR = 2.0


def paragraphs():
    """What the demo's jobs are about, without what they ask."""
    texts = []
    for line in open("examples/demo-jobs.jsonl", encoding="utf-8"):
        content = json.loads(line)["body"]["messages"][-1]["content"]
        if isinstance(content, str):
            texts += content.split("\n\n")[1:]
    while sum(len(text.split()) for text in texts) < WORDS:
        texts += texts
    enough, n_words = [], 0
    for number, text in enumerate(texts):
        if n_words >= WORDS:
            break
        n_words += len(text.split())
        enough.append(f"{number + 1}. {text}")
    return enough


def write(path, parts, shared):
    with open(path, "w", encoding="utf-8") as out:
        for i in range(QUESTIONS):
            first = 0 if shared else i % len(parts)
            document = "\n\n".join(parts[first:] + parts[:first])
            if not shared:
                document = f"Copy {i + 1}.\n\n{document}"
            out.write(json.dumps(dict(
                custom_id=f"question-{i}", method="POST",
                url="/v1/chat/completions", body=dict(
                    model="demo", seed=i, max_tokens=64,
                    messages=[dict(role="user", content=f"{document}\n\n"
                                   f"What does part {i + 1} say?")],
                    nightshift=dict(mode="diffusion",
                                    max_denoising_steps=STEPS)))) + "\n")


def main():
    build = sys.argv[1]
    with tempfile.TemporaryDirectory() as folder:
        work = pathlib.Path(folder)
        parts = paragraphs()
        write(work / "separate", parts, False)
        write(work / "shared", parts, True)
        (work / "none").write_text("")

        def run(name):
            start = time.perf_counter()
            subprocess.run([f"{build}/nightshift", "run", work / name, "-o",
                            work / f"{name}.out", "-q", "--restart"],
                           check=name != "none")
            return time.perf_counter() - start

        def usage(name):
            lines = [json.loads(line) for line in open(work / f"{name}.out")]
            each = [line["response"]["body"]["usage"] for line in lines]
            return (sum(u["prompt_tokens"] for u in each),
                    sum(u["prompt_tokens_details"]["cached_tokens"]
                        for u in each),
                    sum(u["completion_tokens"] for u in each),
                    sum(line["nightshift"]["denoise_steps"] for line in lines))

        idle = min(run("none") for _ in range(3))
        separate, shared = [], []
        for turn in range(ROUNDS):
            separate.append(run("separate") - idle)
            if turn < ROUNDS - 1:
                shared.append(run("shared") - idle)
        ratio = min(separate) / min(shared)
        for name, took in (("separate", separate), ("shared", shared)):
            prompt, cached, answer, steps = usage(name)
            print(f"  {name:<9} {min(took):6.2f} s   {prompt} prompt tokens, "
                  f"cached_tokens {cached} ({cached / prompt:.2f})   "
                  f"{answer} answer tokens in {steps} denoise steps")
        cached = usage("shared")[1]
    print(f"ratio: documents {ratio:.2f}")
    return 0 if ratio >= FLOOR and cached > 0 else 1


if __name__ == "__main__":
    sys.exit(main())

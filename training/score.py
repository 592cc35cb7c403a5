"""What an answer is worth.

SQL is run against a table of random rows, Python and C in a process of their own with limits on time and memory;
a case is right when it gives what the reference answer gives. Summaries and captions: share of the named facts.
Synopses: ROUGE-L.
"""
import os
import random
import resource
import sqlite3
import subprocess
import sys
import tempfile

import words as W


# ---------------------------------------------------------------- running answers

def limits():
    resource.setrlimit(resource.RLIMIT_CPU, (2, 2))
    resource.setrlimit(resource.RLIMIT_AS, (512 << 20, 512 << 20))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))


def run(command, source=None):
    try:
        p = subprocess.run(command, input=source, capture_output=True, timeout=10, preexec_fn=limits, env={"PATH": "/usr/bin:/bin"})
    except (subprocess.TimeoutExpired, OSError):
        return None
    return p.stdout if p.returncode == 0 else None


def sql_outcome(check, statement, ordered):
    """What a statement returns and leaves behind; None if it fails."""
    r = random.Random(7)
    db = sqlite3.connect(":memory:")
    columns = check["columns"]
    db.execute(f"CREATE TABLE {check['table']} ({', '.join(columns)})")
    rows = 300
    data = []
    for c in columns:
        if c in W.TEXT:
            data.append([W.TEXT[c][r.randrange(len(W.TEXT[c]))] for _ in range(rows)])
        elif c == "name":
            data.append([f"name{i}" for i in range(rows)])
        else:
            data.append(r.sample(range(1, 1200), rows))  # no ties, so that an order has one result
    db.executemany(f"INSERT INTO {check['table']} VALUES ({', '.join('?' * len(columns))})", list(zip(*data)))
    budget = [200]

    def tick():
        budget[0] -= 1
        return budget[0] < 0

    db.set_progress_handler(tick, 10000)
    try:
        got = db.execute(statement).fetchall()
        left = db.execute(f"SELECT * FROM {check['table']}").fetchall()
    except (sqlite3.Error, sqlite3.Warning):
        return None
    finally:
        db.close()
    return (got if ordered else sorted(got, key=repr)), left


INPUTS = {
    "list": ["[]", "[1]", "[3, -4, 10, 7, 0, 25, -13, 48, 60, 6, 9, 12]", "list(range(-70, 110, 3))", "[2, 4, 6, 6, 30]"],
    "text": ["''", "'a'", "'apple Banana cat elephant is on the road near tropical islands'", "'pip rotor mama noon at sea'",
             "'many different words have different lengths and shapes'"],
    "array": ["0", "1, 5", "12, 3, -4, 10, 7, 0, 25, -13, 48, 60, 6, 9, 12", "9, -70, -31, 2, 15, 33, 64, 81, 17, 90"],
    "pair": ["3, 4", "-5, 12", "100, 7", "0, 0", "8, -9"],
}


def python_outcome(check, source):
    tests = "".join(f"print(repr({check['name']}({x})))\n" for x in INPUTS[check["args"]])
    if "set(" in source:
        tests = tests.replace("repr(", "repr(sorted(").replace(")))\n", "))))\n")
    return run([sys.executable, "-I", "-S", "-c", source + "\n" + tests])


def c_outcome(check, source):
    lines = []
    for x in INPUTS[check["args"]]:
        if check["args"] == "pair":
            lines.append(f'printf("%d\\n", {check["name"]}({x}));')
        else:
            n, _, rest = x.partition(", ")
            lines.append(f'{{ int v[] = {{{rest or 0}}}; printf("%d\\n", {check["name"]}(v, {n})); }}')
    program = f"#include <stdio.h>\n{source}\nint main(void)\n{{\n" + "\n".join(lines) + "\nreturn 0;\n}\n"
    with tempfile.TemporaryDirectory() as d:
        exe = os.path.join(d, "a")
        try:
            ok = subprocess.run(["cc", "-w", "-x", "c", "-", "-o", exe], input=program.encode(), capture_output=True, timeout=20).returncode == 0
        except subprocess.TimeoutExpired:
            ok = False
        return run([exe]) if ok else None


def same_result(case, text):
    """True if the answer, executed, does what the reference does."""
    text = text.strip()
    if text == case["answer"]:
        return True
    check = case["check"]
    if case["task"] == "sql":
        if not text.upper().startswith(("SELECT", "UPDATE", "DELETE")):
            return False
        ordered = "ORDER BY" in case["answer"]
        want = sql_outcome(check, case["answer"], ordered)
        return want is not None and sql_outcome(check, text, ordered) == want
    outcome = python_outcome if check["lang"] == "python" else c_outcome
    want = outcome(check, case["answer"])
    return want is not None and outcome(check, text) == want


# ---------------------------------------------------------------- texts

def rouge_l(a, b):
    """F1 over the longest common subsequence of words."""
    a, b = a.lower().split(), b.lower().split()
    if not a or not b:
        return 0.0
    row = [0] * (len(b) + 1)
    for x in a:
        last = 0
        for j, y in enumerate(b, 1):
            last, row[j] = row[j], last + 1 if x == y else max(row[j], row[j - 1])
    n = row[-1]
    return 2 * n / (len(a) + len(b)) if n else 0.0


def first_words(prompt, n=8):
    return " ".join(prompt.split("\n\n", 1)[1].split(": ", 1)[1].split()[:n])


def score(case, text):
    """A number from 0 to 1: executed right, share of facts, or ROUGE-L."""
    text = text or ""
    if case["task"] in ("sql", "code"):
        return float(same_result(case, text))
    if case["task"] in ("report", "image"):
        facts = case["check"]["facts"]
        return sum(f in text for f in facts) / len(facts)
    return rouge_l(text, case["answer"])

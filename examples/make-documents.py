#!/usr/bin/env python3
"""Rebuilds documents.jsonl from texts/*.txt and the tasks below.

    examples/make-documents.py

Run it after changing a text or a task. The file it writes is the one that is
committed: same input, same bytes.
"""
import json
import pathlib

HERE = pathlib.Path(__file__).parent
URL = "/v1/chat/completions"

SHORT = "Summarise the text in one sentence."
LONG = "Summarise the text in a short paragraph for a reader in a hurry."

# custom_id, text, what is asked for, limit of the answer. Short first: a
# small model stops at the ones that fit it.
SUMMARIES = [
    ("tzdata", "package-tzdata", SHORT, 64),
    ("xz-utils", "package-xz-utils", SHORT, 64),
    ("heisenbug", "jargon-heisenbug", SHORT, 64),
    ("cargo-cult", "jargon-cargo-cult-programming", SHORT, 64),
    ("magic-smoke", "jargon-magic-smoke", SHORT, 64),
    ("hacker-ethic", "jargon-hacker-ethic", SHORT, 64),
    ("lexicographer", "devil-lexicographer", SHORT, 64),
    ("debian-ja", "debian-faq-ja", "本文を日本語で一文に要約してください。", 128),
    ("debian-fr", "debian-faq-fr", "Résumez le texte en une phrase.", 128),
    ("serverless", "sqlite-serverless", LONG, 256),
    ("about-sqlite", "sqlite-about", LONG, 256),
    # The same document twice: it is prefilled once.
    ("about-sqlite-facts", "sqlite-about",
     "List the five most important facts of the text, one a line.", 256),
    ("cc0", "licence-cc0-1.0", LONG, 256),
    ("declaration", "us-declaration", LONG, 256),
    ("when-to-use", "sqlite-whentouse", LONG, 512),
    ("how-to-corrupt", "sqlite-howtocorrupt",
     "List the ways to corrupt the database that the text names, one a line.",
     512),
    ("gpl-3", "licence-gpl-3", LONG, 512),
    ("xz-manual", "xz-manual",
     "Which option changes what? Summarise the manual page.", 512),
    ("constitution", "us-constitution", LONG, 512),
    ("atomic-commit", "sqlite-atomiccommit", LONG, 512),
]

CODE = [
    ("code-sql",
     "Table orders(id, customer, total, placed_on). Write one SQL query that "
     "gives each customer's number of orders and their total, largest total "
     "first."),
    ("code-python",
     "Write a Python function median(values) that returns the median of a "
     "non-empty list of numbers and leaves the list as it is."),
    ("code-c",
     "Write a C function size_t count_words(const char *text) that counts "
     "the runs of characters that are not white space."),
]


def line(custom_id, content, max_tokens, **extra):
    body = {
        "model": "nightshift",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
    }
    body.update(extra)
    return {"custom_id": custom_id, "method": "POST", "url": URL,
            "body": body}


def main():
    lines = []
    for custom_id, name, task, max_tokens in SUMMARIES:
        text = (HERE / "texts" / (name + ".txt")).read_text(encoding="utf-8")
        # The document leads, so that jobs on it share a prefix.
        lines.append(line(custom_id, text.strip() + "\n\n" + task,
                          max_tokens))
    text = (HERE / "texts" / "xz-manual.txt").read_text(encoding="utf-8")
    lines.append(line("xz-manual-in-parts", text.strip(), 512,
                      nightshift={"task": {"type": "summarize",
                                           "chunk_tokens": 2048}}))
    for custom_id, task in CODE:
        lines.append(line(custom_id, task, 256,
                          nightshift={"task": "code"}))
    with open(HERE / "documents.jsonl", "w", encoding="utf-8") as out:
        for entry in lines:
            out.write(json.dumps(entry, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()

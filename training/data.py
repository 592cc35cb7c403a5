"""Builds tokenizer and data sets:  python data.py WORK [TASK,..]   (WORK: a directory outside the repository)

Without tasks, all. The tokenizer is made once, from the texts of all but the pictures.

WORK/debian/*            package lists, fetched with apt into a private directory
WORK/tokenizer.json      BPE with byte fallback, control tokens at the ids of the Gemma 4 family
WORK/train-TASK.npz      tokens (uint16), offsets, prompt lengths, numbers of the pictures
WORK/held-TASK.jsonl     held-out cases with prompt, answer and what the evaluator checks
"""
import glob
import hashlib
import json
import os
import random
import re
import subprocess
import sys

import numpy as np
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

import generate
import pictures

CONTROL = {0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>", 4: "<mask>", 46: "<|tool>", 47: "<tool|>", 48: "<|tool_call>",
           49: "<tool_call|>", 50: "<|tool_response>", 51: "<tool_response|>", 52: "<|\"|>", 98: "<|think|>",
           100: "<|channel>", 101: "<channel|>", 105: "<|turn>", 106: "<turn|>"}
NEWLINE = 107
MAKERS = {**generate.MAKERS, "image": pictures.image}
TOKENIZER_READS = {"report": 15000, "sql": 15000, "code": 15000, "debian": 12000}  # examples of each
PIECES = Regex("▁▁+|\n|[0-9]|▁?[^\\W\\d_▁]+|▁?[^\\w\\s▁]{1,2}|▁|[^▁]")


def held_out(key, share):
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") < share * 2 ** 32


def is_combination(task, key):
    """Only what combines operations is held out: a single one that no training case shows could not be known."""
    return task != "code" or sum(x not in ("all", "id") for x in key.split(",")[1:]) > 1


# ---------------------------------------------------------------- Debian

def fetch_debian(folder):
    lists = os.path.join(folder, "lists")
    os.makedirs(os.path.join(lists, "partial"), exist_ok=True)
    if not glob.glob(lists + "/*Translation-en*"):
        subprocess.run(["apt-get", "-o", "Acquire::Languages=en", "-o", "Dir::State::lists=" + os.path.abspath(lists), "update"], check=True)
    return lists


def cat(pattern):
    for path in sorted(glob.glob(pattern)):
        yield subprocess.run(["/usr/lib/apt/apt-helper", "cat-file", path], check=True, capture_output=True).stdout.decode("utf-8", "replace")


def debian(folder):
    """(source, package, description, synopsis), one per distinct text."""
    lists = fetch_debian(folder)
    source = {}
    for text in cat(lists + "/*_main_binary-*_Packages*"):
        for block in text.split("\n\n"):
            f = dict(m for m in re.findall(r"^(Package|Source): (\S+)", block, re.M))
            if "Package" in f:
                source[f["Package"]] = f.get("Source", f["Package"])
    seen, out = set(), []
    for text in cat(lists + "/*_main_i18n_Translation-en*"):
        for block in text.split("\n\n"):
            m = re.match(r"Package: (\S+)\nDescription-md5: \S+\nDescription-en: (.*)\n((?: .*\n?)+)", block)
            if not m:
                continue
            package, synopsis, body = m.groups()
            words = []
            for line in body.split("\n"):
                line = line.strip()
                if line and line != ".":
                    words.append(line)
            body = " ".join(words)
            if body in seen or len(body) < 60 or len(synopsis) < 15:
                continue
            seen.add(body)
            out.append((source.get(package, package), package, body, synopsis.strip()))
    return out


def debian_example(item, r):
    source, package, body, synopsis = item
    if len(body) > 420:
        cut = body[:420]
        body = cut[: cut.rfind(" ")] + " ..."
    return {"task": "debian", "kind": "debian", "prompt": f"Describe this package in one line.\n\n{package}: {body}", "answer": synopsis,
            "key": source, "check": {}}


# ---------------------------------------------------------------- tokenizer

def render(prompt, soft_tokens=0):
    """The chat template, a picture before the text."""
    image = "<|image>" + "<|image|>" * soft_tokens + "<image|>" if soft_tokens else ""
    return f"<|turn>user\n{image}{prompt}<turn|>\n<|turn>model\n"


def build_tokenizer(texts, vocab, path):
    """Trains on pieces that never cross a word, a digit or a sign, then writes the published form.

    The published form has no such cuts, but no merge crosses one either, so both encode alike.
    """
    special = set(CONTROL.values())
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    images = ["<|image>", "<image|>", "<|image|>"]
    pieces = ["▁▁", "▁▁▁▁", "▁▁▁▁▁▁▁▁"]
    room = vocab - len(CONTROL) - 256 - 1 - len(images) - len(pieces)
    t = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    t.normalizer = normalizers.Replace(" ", "▁")
    t.pre_tokenizer = pre_tokenizers.Split(PIECES, "isolated")
    trainer = trainers.BpeTrainer(vocab_size=room, limit_alphabet=110, show_progress=False,
                                  initial_alphabet=[chr(c) for c in range(33, 127)] + ["▁"])
    t.train_from_iterator(texts, trainer)
    model = json.loads(t.to_str())["model"]
    learned = [x for x, _ in sorted(model["vocab"].items(), key=lambda kv: kv[1]) if x != "\n" and not re.fullmatch("▁▁+", x)]
    merges = [m if isinstance(m, list) else m.split(" ") for m in model["merges"]]
    merges = [["▁", "▁"], ["▁▁", "▁▁"], ["▁▁▁▁", "▁▁▁▁"]] + [m for m in merges if not set("".join(m)) == {"▁"}]
    ids = dict(CONTROL)
    ids[NEWLINE] = "\n"
    for i, x in enumerate(images):
        ids[vocab - len(images) + i] = x
    queue = iter(bytes_ + pieces + learned)
    for i in range(vocab):
        if i not in ids:
            ids[i] = next(queue, None) or f"<unused{i}>"
    table = {ids[i]: i for i in range(vocab)}
    merges = [m for m in merges if "".join(m) in table and m[0] in table and m[1] in table]
    added = [{"id": i, "content": ids[i], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
              "special": ids[i] != "<mask>"} for i in sorted(ids) if ids[i] in special or ids[i] in images]
    bos = {"SpecialToken": {"id": "<bos>", "type_id": 0}}
    out = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
        "post_processor": {"type": "TemplateProcessing", "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
                           "pair": [bos, {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<bos>", "type_id": 1}},
                                    {"Sequence": {"id": "B", "type_id": 1}}],
                           "special_tokens": {"<bos>": {"id": "<bos>", "ids": [2], "tokens": ["<bos>"]}}},
        "decoder": {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                                                     {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": True, "byte_fallback": True, "ignore_merges": False, "vocab": table, "merges": merges},
    }
    with open(path, "w", encoding="utf-8") as f:
        json.dump(out, f, ensure_ascii=False, indent=1)


# ---------------------------------------------------------------- data sets

def generated(cfg, task):
    """Examples of a generated task: to train on, held out."""
    d = cfg["data"]
    r = random.Random(f"{cfg['seed']} {task}")
    train, held, seen = [], [], set()
    while len(train) < d["train"][task] or len(held) < d["held_out"]:
        e = MAKERS[task](r)
        own = e.get("picture", e["prompt"])
        if own in seen:
            continue
        if is_combination(task, e["key"]) and held_out(e["key"], d["held_out_share"]):
            if len(held) < d["held_out"]:
                seen.add(own)
                held.append(e)
        elif len(train) < d["train"][task]:
            seen.add(own)
            train.append(e)
    return train, held


def packages(cfg, work):
    """Debian's descriptions, held out by source package."""
    d = cfg["data"]
    r = random.Random(cfg["seed"])
    items = debian(os.path.join(work, "debian"))
    r.shuffle(items)
    train = [debian_example(i, r) for i in items if not held_out(i[0], 0.05)][: d["train"]["debian"]]
    return train, [debian_example(i, r) for i in items if held_out(i[0], 0.05)][: d["held_out"]]


class Encoder:
    def __init__(self, cfg, tok):
        self.cfg, self.tok = cfg, tok
        v = cfg["model"]["vision"]
        self.soft = (pictures.SIDE // (v["patch"] * v["pooling"])) ** 2

    def encode(self, examples):
        """(example, prompt ids, answer ids) of those that are short enough."""
        prompts = self.tok.encode_batch([render(e["prompt"], self.soft if "picture" in e else 0) for e in examples])
        answers = self.tok.encode_batch([e["answer"] + "<turn|>" for e in examples], add_special_tokens=False)
        return [(e, p.ids, a.ids) for e, p, a in zip(examples, prompts, answers)
                if len(p.ids) <= self.cfg["max_prompt_tokens"] and len(a.ids) <= self.cfg["max_answer_tokens"]]


def write(work, task, encoder, train, held):
    tokens, offsets, prompts, numbers = [], [0], [], []
    for s in range(0, len(train), 5000):
        for e, p, a in encoder.encode(train[s: s + 5000]):
            tokens.extend(p + a)
            offsets.append(len(tokens))
            prompts.append(len(p))
            numbers.append(e.get("picture", 0))
    more = {"pictures": np.array(numbers, np.int64)} if "picture" in train[0] else {}
    np.savez(os.path.join(work, f"train-{task}.npz"), tokens=np.array(tokens, np.uint16), offsets=np.array(offsets, np.int64),
             prompts=np.array(prompts, np.int32), **more)
    kept = encoder.encode(held)
    with open(os.path.join(work, f"held-{task}.jsonl"), "w", encoding="utf-8") as f:
        for e, p, a in kept:
            f.write(json.dumps(dict({k: x for k, x in e.items() if k != "drawn"}, prompt_ids=p, answer_ids=a), ensure_ascii=False) + "\n")
    lens = np.diff(offsets) - np.array(prompts)
    print(f"{task}: {len(prompts)} examples ({len(train) - len(prompts)} too long), prompt {np.mean(prompts):.0f} tokens (max {max(prompts)}), "
          f"answer {np.mean(lens):.1f} (max {max(lens)}), held out {len(kept)}", flush=True)


def main():
    work = sys.argv[1]
    here = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(here, "config.json")) as f:
        cfg = json.load(f)
    tasks = sys.argv[2].split(",") if len(sys.argv) > 2 else list(cfg["data"]["train"])
    os.makedirs(work, exist_ok=True)
    sets = {task: packages(cfg, work) if task == "debian" else generated(cfg, task) for task in tasks}
    path = os.path.join(work, "tokenizer.json")
    if not os.path.exists(path):
        read = [e for task, n in TOKENIZER_READS.items() for e in sets[task][0][:n]]
        build_tokenizer([e["prompt"] + "\n" + e["answer"] for e in read], cfg["model"]["vocab"], path)
    encoder = Encoder(cfg, Tokenizer.from_file(path))
    for task, (train, held) in sets.items():
        write(work, task, encoder, train, held)


if __name__ == "__main__":
    main()

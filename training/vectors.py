"""What transformers' own class answers to the demo jobs:  python vectors.py MODEL EXAMPLES OUT [STORED]

A line for each job: the prompt's token ids, the greedy causal answer, and one run of the published sampler with its
tokens per forward. nightshift must give the same ids and, in `ar` and `hybrid` at temperature 0, the same causal answer;
draws differ, so the denoised answer is to be compared by its score. fp32 arithmetic on the bf16 weights. With STORED the
ids and causal answers must be those of that file; the rest depends on the build of PyTorch.
"""
import json
import os
import sys

import torch
from tokenizers import Tokenizer
from transformers import DiffusionGemmaGenerationConfig

import data
import published


def read(path):
    with open(path, encoding="utf-8") as f:
        return [json.loads(line) for line in f]


@torch.no_grad()
def answer(model, settings, tok, case):
    number = case.get("picture")
    v = model.config.vision_config
    soft = (data.pictures.SIDE // (v.patch_size * v.pooling_kernel_size)) ** 2 if number is not None else 0
    ids = tok.encode(data.render(case["prompt"], soft)).ids
    ends = settings.eos_token_id
    causal = published.greedy(model, ids, number, ends, 128)
    torch.manual_seed(1)
    more = {} if number is None else published.picture_inputs(model, ids, number)
    run = model.generate(input_ids=torch.tensor([ids]), generation_config=settings, **more)
    tokens = run.sequences[0, len(ids):].tolist()
    cut = next((i for i, x in enumerate(tokens) if x in ends), len(tokens))
    return {"custom_id": case["custom_id"], "prompt_ids": ids, "ar": tok.decode([x for x in causal if x not in ends]),
            "diffusion": tok.decode(tokens[:cut]), "tokens_per_forward": round(float(run.tokens_per_forward[0]), 3)}


def main():
    folder, examples, out = sys.argv[1:4]
    torch.set_num_threads(2)
    model, _ = published.load(folder)
    settings = DiffusionGemmaGenerationConfig.from_pretrained(folder)
    tok = Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
    lines = [answer(model, settings, tok, case) for case in read(os.path.join(examples, "demo-answers.jsonl"))]
    with open(out, "w", encoding="utf-8") as f:
        for line in lines:
            f.write(json.dumps(line, ensure_ascii=False) + "\n")
    if sys.argv[4:]:
        stored = read(sys.argv[4])
        differ = [a["custom_id"] for a, b in zip(lines, stored, strict=True) if any(a[k] != b[k] for k in ("custom_id", "prompt_ids", "ar"))]
        print(f"vectors: {len(lines) - len(differ)} of {len(lines)} demo answers as stored")
        if differ:
            sys.exit("vectors: others: " + ", ".join(differ))


if __name__ == "__main__":
    main()

"""What transformers' own class answers to the demo jobs:  python vectors.py ../models/demo ../examples/demo-jobs.jsonl OUT

A line for each job: the prompt's token ids, the greedy causal answer, and one run of the published sampler with its
tokens per forward. nightshift must give the same ids and, in `ar` and `hybrid` at temperature 0, the same causal answer;
draws differ, so the denoised answer is to be compared by its score. fp32 arithmetic on the bf16 weights.
"""
import json
import sys

import torch
from tokenizers import Tokenizer
from transformers import DiffusionGemmaForBlockDiffusion, DiffusionGemmaGenerationConfig, DynamicCache

import data


def greedy(model, ids, ends, longest):
    cap = model.config.get_text_config().final_logit_softcapping
    table = model.model.decoder.embed_tokens.weight
    cache = DynamicCache(config=model.config.get_text_config())
    out, new = [], torch.tensor([ids])
    while len(out) < longest:
        seen = torch.ones(1, len(ids) + len(out), dtype=torch.long)
        h = model.model.encoder(input_ids=new, attention_mask=seen, past_key_values=cache).last_hidden_state[0, -1]
        token = int((torch.tanh(h @ table.t() / cap) * cap).argmax())
        out.append(token)
        if token in ends:
            break
        new = torch.tensor([[token]])
    return out


@torch.no_grad()
def main():
    folder, jobs, out = sys.argv[1:4]
    torch.set_num_threads(2)
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    scale = torch.tensor(model.config.get_text_config().hidden_size ** 0.5).bfloat16().float()
    for e in (model.model.decoder.embed_tokens, model.model.encoder.language_model.embed_tokens):
        e.embed_scale = scale.clone()
    settings = DiffusionGemmaGenerationConfig.from_pretrained(folder)
    ends = settings.eos_token_id
    tok = Tokenizer.from_file(folder + "/tokenizer.json")
    with open(jobs, encoding="utf-8") as f, open(out, "w", encoding="utf-8") as g:
        for line in f:
            job = json.loads(line)
            ids = tok.encode(data.render(job["body"]["messages"][0]["content"])).ids
            causal = greedy(model, ids, ends, 128)
            torch.manual_seed(1)
            run = model.generate(input_ids=torch.tensor([ids]), generation_config=settings)
            tokens = run.sequences[0, len(ids):].tolist()
            cut = next((i for i, x in enumerate(tokens) if x in ends), len(tokens))
            g.write(json.dumps({"custom_id": job["custom_id"], "prompt_ids": ids, "ar": tok.decode([x for x in causal if x not in ends]),
                                "diffusion": tok.decode(tokens[:cut]), "tokens_per_forward": round(float(run.tokens_per_forward[0]), 3)},
                               ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()

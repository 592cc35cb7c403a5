"""Stage two:  python refine.py WORK   (starts from WORK/stage1.pt, resumes from WORK/stage2.pt)

Reinforcement and sampler distillation in one loop. Per iteration

  1. groups of answers to training prompts are sampled with the real sampler, every visited state is kept;
  2. an answer is scored: executed code right or wrong, share of the facts, overlap of a synopsis;
  3. every visited state is taught a final canvas: its own, weighted by its advantage, if it ended well; that of the
     best answer of its group if it did not; the reference if the whole group failed. So the weight of good answers
     grows, and an early state learns what the late ones settled on: the same answer in fewer steps.

The causal loss on the reference stays, and a share of plain stage-one denoising keeps the model broad.
"""
import json
import os
import sys
import time

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

import evaluate as E
import model as M
import sampler as S
import train as T


def training_cases(cfg, work, tasks):
    """Stage-two prompts need what the evaluator checks, so they are generated anew, from another seed, outside the held-out share."""
    import random

    import data as D
    import generate

    tok = Tokenizer.from_file(os.path.join(work, "tokenizer.json"))
    share = cfg["data"]["held_out_share"]

    def cases(iteration, n):
        r = random.Random(f"{cfg['seed']} refine {iteration}")
        out = []
        while len(out) < n:
            e = generate.MAKERS[tasks[len(out) % len(tasks)]](r)
            if D.is_combination(e["task"], e["key"]) and D.held_out(e["key"], share):
                continue
            e["prompt_ids"] = tok.encode(D.render(e["prompt"])).ids
            e["answer_ids"] = tok.encode(e["answer"] + "<turn|>", add_special_tokens=False).ids
            if len(e["answer_ids"]) <= cfg["canvas"]:
                out.append(e)
        return out

    return tok, cases


def reward(case, text):
    """Executed right or wrong; for summaries the facts and the overlap together, so that naming facts in rubble does not pay."""
    score = E.score(case, text)
    return (score + E.rouge_l(text, case["answer"])) / 2 if case["task"] == "report" else score


def main():
    work = sys.argv[1]
    cfg = T.load_config()
    m, s2, s1, n = cfg["model"], cfg["stage2"], cfg["stage1"], cfg["canvas"]
    gen = dict(cfg["generation"], max_denoising_steps=s2["max_sampler_steps"])
    torch.set_num_threads(cfg["threads"])
    torch.manual_seed(cfg["seed"])
    logfile = os.path.join(work, "stage2.log")
    path, start = os.path.join(work, "stage2.pt"), os.path.join(work, "stage1.pt")
    params = M.create(m, cfg["seed"])
    opt = T.Optimizer(params, s1["momentum"])
    data = T.Data(work, cfg["data"]["mixture"], cfg["seed"] + 1, n)
    rng = torch.Generator().manual_seed(cfg["seed"] + 2)
    resumed = os.path.exists(path)
    st = torch.load(path if resumed else start)
    for k, p in params.items():
        p.data.copy_((st["params"] if resumed else st["average"])[k])
    average = {k: v.clone() for k, v in st["average"].items()}
    step, seconds = (st["step"], st["seconds"]) if resumed else (0, 0.0)
    if resumed:
        opt.load(st["opt"])
        data.load(st["data"])
        rng.set_state(st["rng"])
    tables = M.Tables(m)
    held = T.read_held(work, [x for x in data.names if x != "debian"])
    tok, cases = training_cases(cfg, work, s2["tasks"])
    M.load_fused()
    threads = T.Threads(cfg["threads"])
    # the effort of the shipped sampler, before and after
    check = cfg["generation"]
    before = {} if resumed else {"held": T.evaluate(cfg, average, tables, held, cfg["seed"], check, s2["evaluate_cases"])}
    T.log(logfile, event="start", step=step, **before)

    def checkpoint():
        T.save(path, {"params": {k: p.detach() for k, p in params.items()}, "average": average, "opt": opt.state(), "data": data.state(),
                      "rng": rng.get_state(), "step": step, "seconds": seconds})

    saved = evaluated = shown = tick = time.time()
    sums = {}
    T.stop_on_terminate()
    while step < s2["steps"] and not T.STOP:
        threads.adapt()
        group = s2["group"]
        batch = cases(step, s2["prompts"])
        rows = [c for c in batch for _ in range(group)]
        w = M.cast(params, torch.bfloat16)
        trace = []
        final, steps = S.denoise(m, {k: v.detach() if torch.is_tensor(v) else v for k, v in w.items()}, tables,
                                 [c["prompt_ids"] for c in rows], n, gen, rng, trace)
        rewards = torch.zeros(len(rows))
        for i, c in enumerate(rows):
            kept, _ = S.finish(final[i])
            rewards[i] = 1.0 if kept == c["answer_ids"] else reward(c, tok.decode(kept))
        r = rewards.view(-1, group)
        # fewer steps count a little, so that equal answers are told apart by their effort
        merit = r - 0.02 * steps.view(-1, group)
        spread = merit.std(1, keepdim=True)
        advantage = ((merit - merit.mean(1, keepdim=True)) / (spread + 0.05)).view(-1)
        best = merit.argmax(1)
        targets, weights = final.clone(), torch.zeros(len(rows))
        for i, c in enumerate(rows):
            g = i // group
            if rewards[i] >= 0.999:
                weights[i] = 1.0 + 0.5 * float(advantage[i].clamp(-1, 2))
            elif r[g].max() >= 0.999:
                targets[i] = final[g * group + int(best[g])]
                weights[i] = 1.0
            else:
                targets[i] = torch.tensor(c["answer_ids"] + [S.TURN] * (n - len(c["answer_ids"])))
                weights[i] = 1.0
            kept, ended = S.finish(targets[i])
            if ended:
                targets[i, len(kept):] = S.TURN
        # some visited states of every row, early ones as often as late ones; the first, pure noise, always
        k = s2["states"]
        canvas = torch.zeros(len(rows), k, n, dtype=torch.long)
        soft = torch.zeros(len(rows), k, n, m["hidden"], dtype=torch.bfloat16)
        for i in range(len(rows)):
            for a in range(k):
                j = int(torch.randint(int(steps[i]), (1,), generator=rng)) if a else 0
                canvas[i, a] = trace[j][0][i]
                if trace[j][1] is not None:
                    soft[i, a] = trace[j][1][i]
        prefixes = [c["prompt_ids"] + c["answer_ids"] for c in rows]
        tokens = S.pad_rows(prefixes)
        cols = tokens.shape[1]
        lens = torch.tensor([len(p) for p in prefixes])
        seen = torch.tensor([len(c["prompt_ids"]) for c in rows])
        pos = torch.cat((torch.arange(cols).expand(len(rows), -1), (seen[:, None] + torch.arange(n)).repeat(1, k)), 1)
        bias_s, bias_f = (x.bfloat16() for x in M.masks(m, lens, seen, cols, k, n))
        table = w[M.SHARED + "embed_tokens.weight"]
        x = torch.cat((M.embed(w, tokens), M.embed_canvas(m, w, canvas.view(len(rows), k * n), soft.view(len(rows), k * n, -1))), 1)
        h = M.forward(m, w, tables, x, pos, torch.arange(cols + k * n) >= cols, bias_s, bias_f)
        part = [("refine", torch.tensor(p).numpy(), int(k)) for p, k in zip(prefixes, seen)]
        index, target, cw = T.causal_targets(part, cols, 0.0)
        causal = M.cross_entropy_sum(F.linear(h[:, :cols].reshape(-1, m["hidden"]).index_select(0, index), table), target, cw, m["softcap"]) / cw.sum()
        filled = (targets == S.TURN).cumsum(1) > 3
        tw = (torch.where(filled, s1["fill_weight"], 1.0) * weights[:, None]).repeat_interleave(k, 0)
        refine = M.cross_entropy_sum(F.linear(h[:, cols:].reshape(-1, m["hidden"]), table), targets.repeat_interleave(k, 0).view(-1), tw.view(-1), m["softcap"]) / tw.sum()
        plain = T.batch_loss(cfg, w, tables, data.next(s1["canvases"] * n, s2["plain_tokens"]), s1["canvases"], rng)[0]
        (refine + s1["causal_weight"] * causal + s2["plain_weight"] * plain).backward()
        torch.nn.utils.clip_grad_norm_([params[k] for k in opt.others], 1.0)
        scale = min(1.0, (step + 1) / 10) * max(0.05, min(1.0, (s2["steps"] - step) / s2["decay_steps"]))
        opt.step(s2["lr_matrix"] * scale, s2["lr_adam"] * scale)
        with torch.no_grad():
            d = min(s2["average"], (step + 1) / (step + 10))
            for k, p in params.items():
                average[k].lerp_(p, 1 - d)
        step += 1
        now = time.time()
        seconds += now - tick
        tick = now
        for k, v in (("reward", rewards.mean().item()), ("right", (rewards >= 0.999).float().mean().item()), ("steps", steps.float().mean().item()),
                     ("refine", refine.item()), ("causal", causal.item()), ("plain", plain.item()), ("n", 1)):
            sums[k] = sums.get(k, 0) + v
        if now - shown > 60:
            T.log(logfile, step=step, **{k: round(v / sums["n"], 4) for k, v in sums.items() if k != "n"}, minutes=round(seconds / 60, 1))
            sums, shown = {}, now
        if now - saved > s2["checkpoint_seconds"]:
            checkpoint()
            saved = now
        if now - evaluated > s2["evaluate_seconds"]:
            T.log(logfile, step=step, held=T.evaluate(cfg, average, tables, held, cfg["seed"], check, s2["evaluate_cases"]))
            evaluated = tick = time.time()
    checkpoint()
    if not T.STOP:
        T.log(logfile, event="end", step=step, held=T.evaluate(cfg, average, tables, held, cfg["seed"], check, s2["evaluate_cases"]))


if __name__ == "__main__":
    main()

"""Stage two:  python refine.py WORK   (starts from WORK/stage1.pt, resumes from WORK/stage2.pt)

Reinforcement and sampler distillation in one loop. Per iteration

  1. groups of answers to training prompts are sampled with the real sampler, every visited state is kept;
  2. an answer is scored: executed code right or wrong, share of the facts, overlap of a summary;
  3. visited states are taught a final canvas: their own, weighted by its advantage, if it ended well; that of the
     best answer of its group if it did not; the reference if the whole group failed. So the weight of good answers
     grows, and an early state learns what the late ones settled on: the same answer in fewer steps.

The causal loss on the reference stays, and a share of plain stage-one denoising keeps the model broad. It begins from
averaged weights that a falling learning rate has settled, so the rate stays far below that of stage one: a step of
orthogonalised momentum is as long as its rate, and one of stage one's would first undo what the fall has gained.
"""
import os
import random
import sys
import time

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

import data as D
import model as M
import sampler as S
import score
import train as T
import vision as V


class Prompts:
    """Training prompts with what the score needs; so they are generated anew, outside the held-out share."""

    def __init__(self, cfg, tok, tasks):
        self.cfg, self.tasks, self.encoder = cfg, tasks, D.Encoder(cfg, tok)

    def draw(self, iteration, n):
        r = random.Random(f"{self.cfg['seed']} refine {iteration}")
        out = []
        while len(out) < n:
            e = D.MAKERS[self.tasks[len(out) % len(self.tasks)]](r)
            if D.is_combination(e["task"], e["key"]) and D.held_out(e["key"], self.cfg["data"]["held_out_share"]):
                continue
            for e, prompt, answer in self.encoder.encode([e]):
                if len(answer) <= self.cfg["canvas"]:
                    out.append(dict(e, prompt_ids=prompt, answer_ids=answer))
        return out


def reward(case, text):
    """Executed right or wrong; facts and overlap together, so that naming facts in rubble does not pay."""
    value = score.score(case, text)
    return value if case["task"] in ("sql", "code") else (value + score.rouge_l(text, case["answer"])) / 2


def lesson(rows, final, steps, rewards, group, canvas):
    """What the states of each answer are taught, and how strongly: canvases [B,L], weights [B]."""
    # fewer steps count a little, so that equal answers are told apart by their effort
    merit = rewards.view(-1, group) - 0.02 * steps.view(-1, group)
    advantage = ((merit - merit.mean(1, keepdim=True)) / (merit.std(1, keepdim=True) + 0.05)).view(-1)
    best = merit.argmax(1)
    targets, weights = final.clone(), torch.ones(len(rows))
    for i, case in enumerate(rows):
        leader = i // group * group + int(best[i // group])
        if rewards[i] >= 0.999:
            weights[i] = 1.0 + 0.5 * float(advantage[i].clamp(-1, 2))
        elif rewards[leader] >= 0.999:
            targets[i] = final[leader]
        else:
            targets[i] = torch.tensor(case["answer_ids"] + [S.TURN] * (canvas - len(case["answer_ids"])))
        kept, ended = S.finish(targets[i])
        if ended:
            targets[i, len(kept):] = S.TURN
    return targets, weights


def visited(trace, steps, k, canvas, hidden, rng):
    """k states of every row, early ones as often as late ones, the first (pure noise) always: canvases, soft embeddings."""
    at = torch.tensor([[0] + [int(torch.randint(int(n), (1,), generator=rng)) for _ in range(k - 1)] for n in steps])
    noisy = torch.zeros(*at.shape, canvas, dtype=torch.long)
    soft = torch.zeros(*at.shape, canvas, hidden, dtype=torch.bfloat16)
    for j, (rows, states, embedded) in enumerate(trace):
        place = {int(r): p for p, r in enumerate(rows)}
        for i, a in (at == j).nonzero().tolist():
            noisy[i, a] = states[place[i]]
            if embedded is not None:
                soft[i, a] = embedded[place[i]]
    return noisy, soft


def refine_loss(cfg, w, tables, rows, noisy, soft, targets, weights):
    """(loss of the visited states, causal loss of the reference answers)."""
    m, s1, n = cfg["model"], cfg["stage1"], cfg["canvas"]
    b, k = noisy.shape[:2]
    part = [T.Row("refine", torch.tensor(c["prompt_ids"] + c["answer_ids"]).numpy(), len(c["prompt_ids"])) for c in rows]
    tokens = S.pad_rows([x.ids for x in part])
    cols = tokens.shape[1]
    seen = torch.tensor([x.prompt for x in part])
    pos = torch.cat((torch.arange(cols).expand(b, -1), (seen[:, None] + torch.arange(n)).repeat(1, k)), 1)
    bias_s, bias_f = (x.bfloat16() for x in M.masks(m, tokens, seen, k, n))
    prefix = V.embed(m, w, tokens, [c.get("picture") for c in rows])
    x = torch.cat((prefix, M.embed_canvas(m, w, noisy.view(b, k * n), soft.view(b, k * n, -1))), 1)
    h = M.forward(m, w, tables, x, pos, torch.arange(cols + k * n) >= cols, bias_s, bias_f)
    table = w[M.SHARED + "embed_tokens.weight"]
    index, target, cw = T.causal_targets(part, cols, 0.0)
    hc = h[:, :cols].reshape(-1, m["hidden"]).index_select(0, index)
    causal = M.cross_entropy_sum(F.linear(hc, table), target, cw, m["softcap"]) / cw.sum()
    filled = (targets == S.TURN).cumsum(1) > 3
    tw = (torch.where(filled, s1["fill_weight"], 1.0) * weights[:, None]).repeat_interleave(k, 0)
    hd = h[:, cols:].reshape(-1, m["hidden"])
    return M.cross_entropy_sum(F.linear(hd, table), targets.repeat_interleave(k, 0).view(-1), tw.view(-1), m["softcap"]) / tw.sum(), causal


def main():
    work = sys.argv[1]
    cfg = T.load_config()
    m, s1, s2, n = cfg["model"], cfg["stage1"], cfg["stage2"], cfg["canvas"]
    gen = dict(cfg["generation"], max_denoising_steps=s2["max_sampler_steps"])
    torch.set_num_threads(cfg["threads"])
    torch.manual_seed(cfg["seed"])
    logfile = os.path.join(work, "stage2.log")
    path, start = os.path.join(work, "stage2.pt"), os.path.join(work, "stage1.pt")
    params = M.create(T.shapes(m), cfg["seed"])
    opt = T.Optimizer(params, s1["momentum"])
    plain_data = T.Data(work, cfg["data"]["mixture"], cfg["seed"] + 1, n)
    rng = torch.Generator().manual_seed(cfg["seed"] + 2)
    resumed = os.path.exists(path)
    st = torch.load(path if resumed else start)
    for k, p in params.items():
        p.data.copy_((st["params"] if resumed else st["average"])[k])
    average = {k: v.clone() for k, v in st["average"].items()}
    step, seconds = (st["step"], st["seconds"]) if resumed else (0, 0.0)
    if resumed:
        opt.load(st["opt"])
        plain_data.load(st["data"])
        rng.set_state(st["rng"])
    tables = M.Tables(m)
    held = T.read_held(work, [x for x in plain_data.names if x != "debian"])
    tok = Tokenizer.from_file(os.path.join(work, "tokenizer.json"))
    prompts = Prompts(cfg, tok, s2["tasks"])
    M.load_fused()
    threads = T.Threads(cfg["threads"])

    def checkpoint():
        T.save(path, {"params": {k: p.detach() for k, p in params.items()}, "average": average, "opt": opt.state(), "data": plain_data.state(),
                      "rng": rng.get_state(), "step": step, "seconds": seconds})

    def quality():  # at the effort of the shipped sampler
        return T.evaluate(cfg, average, tables, held, cfg["seed"], cfg["generation"], s2["evaluate_cases"])

    T.log(logfile, event="start", step=step, **({} if resumed else {"held": quality()}))
    saved = shown = tick = time.time()
    means = T.Means()
    T.stop_on_terminate()
    while step < s2["steps"] and not T.STOP:
        threads.adapt()
        group = s2["group"]
        rows = [c for c in prompts.draw(step, s2["prompts"]) for _ in range(group)]
        w = M.cast(params, torch.bfloat16)
        trace = []
        final, steps = S.denoise(m, w, tables, [c["prompt_ids"] for c in rows], [c.get("picture") for c in rows], n, gen, rng, trace)
        kept = [S.finish(block)[0] for block in final]
        rewards = torch.tensor([1.0 if a == c["answer_ids"] else reward(c, tok.decode(a)) for a, c in zip(kept, rows)])
        targets, weights = lesson(rows, final, steps, rewards, group, n)
        noisy, soft = visited(trace, steps, s2["states"], n, m["hidden"], rng)
        refine, causal = refine_loss(cfg, w, tables, rows, noisy, soft, targets, weights)
        plain = T.batch_loss(cfg, w, tables, plain_data.next(s1["canvases"] * n, s2["plain_tokens"]), s1["canvases"], rng)[0]
        (refine + s1["causal_weight"] * causal + s2["plain_weight"] * plain).backward()
        torch.nn.utils.clip_grad_norm_([params[k] for k in opt.others], 1.0)
        scale = min(1.0, (step + 1) / s2["warmup"]) * max(0.05, min(1.0, (s2["steps"] - step) / s2["decay_steps"]))
        opt.step(s2["lr_matrix"] * scale, s2["lr_adam"] * scale)
        with torch.no_grad():
            for k, p in params.items():
                average[k].lerp_(p, 1 - s2["average"])
        step += 1
        now = time.time()
        seconds += now - tick
        tick = now
        means.add(reward=rewards.mean().item(), right=(rewards >= 0.999).float().mean().item(), steps=steps.float().mean().item(),
                  tokens_per_step=sum(map(len, kept)) / float(steps.sum()), refine=refine.item(), causal=causal.item(), plain=plain.item())
        if now - shown > 60:
            T.log(logfile, step=step, **means.take(), minutes=round(seconds / 60, 1))
            shown = now
        if now - saved > s2["checkpoint_seconds"]:
            checkpoint()
            saved = now
    checkpoint()
    if not T.STOP:
        T.log(logfile, event="end", step=step, held=quality())


if __name__ == "__main__":
    main()

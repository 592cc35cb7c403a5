"""Stage one:  python train.py WORK   (resumes from WORK/stage1.pt when it exists)

First causal steps (encoder mode, next token), then denoising steps with the causal loss kept as co-loss. A share of
the steps stays causal, on tasks that need to see many examples: one costs a third there, and what the prefix learns to
hold serves the canvases too.
Progress goes to WORK/stage1.log, one JSON object a line.
"""
import json
import os
import signal
import sys
import time
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

import model as M
import sampler as S
import vision as V

HERE = os.path.dirname(os.path.abspath(__file__))


def load_config():
    with open(os.path.join(HERE, "config.json")) as f:
        return json.load(f)


def save(path, state):
    torch.save(state, path + ".tmp")
    os.replace(path + ".tmp", path)


def log(path, **fields):
    fields["time"] = time.strftime("%H:%M:%S")
    line = json.dumps(fields)
    print(line, flush=True)
    with open(path, "a") as f:
        f.write(line + "\n")


class Means:
    """Of what was added under a name since the last take()."""

    def __init__(self):
        self.sums = {}

    def add(self, **fields):
        for k, v in fields.items():
            total, n = self.sums.get(k, (0, 0))
            self.sums[k] = total + v, n + 1

    def take(self):
        out = {k: round(total / n, 4) for k, (total, n) in self.sums.items()}
        self.sums = {}
        return out


STOP = []


def stop_on_terminate():
    """SIGTERM ends the loop behind the running step, with a checkpoint."""
    signal.signal(signal.SIGTERM, lambda *_: STOP.append(True))


class Threads:
    """Two threads only help while both cores are free: a step waits for the slower one. Others go first."""

    def __init__(self, most):
        self.most, self.last = most, self.read()

    def read(self):
        with open("/proc/stat") as f:
            x = [int(v) for v in f.readline().split()[1:8]]
        own = sum(os.times()[:2]) * os.sysconf("SC_CLK_TCK")
        return x[0] + x[1] + x[2] - own, sum(x)  # what others worked, all

    def adapt(self):
        now = self.read()
        busy = (now[0] - self.last[0]) / max(1, now[1] - self.last[1])
        self.last = now
        torch.set_num_threads(self.most if busy < 0.08 else max(1, self.most // 2))
        return busy


class Optimizer:
    """Orthogonalised momentum for the matrices inside the layers, Adam for all other weights."""

    def __init__(self, params, momentum):
        self.params, self.momentum, self.t = params, momentum, 0
        self.matrices = [n for n, p in params.items() if p.dim() > 1 and "embed" not in n and "router" not in n]
        self.groups = {}
        for n in self.matrices:
            self.groups.setdefault(tuple(params[n].shape[-2:]), []).append(n)
        self.others = [n for n in params if n not in set(self.matrices)]
        self.m = {n: torch.zeros_like(p) for n, p in params.items()}
        self.v = {n: torch.zeros_like(params[n]) for n in self.others}

    def state(self):
        return {"m": self.m, "v": self.v, "t": self.t}

    def load(self, state):
        self.m.update(state["m"])
        self.v.update(state["v"])
        self.t = state["t"]

    @torch.no_grad()
    def step(self, lr_matrix, lr_adam, decay=0.0):
        self.t += 1
        for shape, names in self.groups.items():
            stack = []
            for n in names:
                p = self.params[n]
                g = p.grad if p.grad is not None else torch.zeros_like(p)
                self.m[n].lerp_(g, 1 - self.momentum)
                stack.append(g.lerp(self.m[n], self.momentum).view(-1, *shape))
            x = torch.cat(stack)
            x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
            x = x.bfloat16()
            tall = shape[0] > shape[1]
            if tall:
                x = x.transpose(1, 2)
            for _ in range(5):
                a = torch.bmm(x, x.transpose(1, 2))
                b = torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315)
                x = torch.baddbmm(x, b, x, beta=3.4445)
            if tall:
                x = x.transpose(1, 2)
            x = x.float() * (max(1.0, shape[0] / shape[1]) ** 0.5)
            at = 0
            for n in names:
                p = self.params[n]
                k = p.numel() // (shape[0] * shape[1])
                p.mul_(1 - lr_matrix * decay)
                p.add_(x[at: at + k].reshape(p.shape), alpha=-lr_matrix)
                at += k
        b1, b2 = 0.9, 0.98
        c1, c2 = 1 - b1 ** self.t, 1 - b2 ** self.t
        for n in self.others:
            p = self.params[n]
            if p.grad is None:
                continue
            self.m[n].lerp_(p.grad, 1 - b1)
            self.v[n].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
            p.addcdiv_(self.m[n] / c1, (self.v[n] / c2).sqrt_().add_(1e-8), value=-lr_adam)
        for p in self.params.values():
            p.grad = None


class Row(NamedTuple):
    """One example: prompt and answer, the prompt's length, the number of its picture."""
    task: str
    ids: np.ndarray
    prompt: int
    picture: int | None = None


class Data:
    """Batches of about `budget` tokens. A pool of examples is drawn by its number, sorted by length and cut."""

    def __init__(self, work, mixture, seed, canvas):
        self.sets, self.names, self.weights = {}, sorted(mixture), [mixture[k] for k in sorted(mixture)]
        for name in self.names:
            z = np.load(os.path.join(work, f"train-{name}.npz"))
            self.sets[name] = (z["tokens"], z["offsets"], z["prompts"], z["pictures"] if "pictures" in z else None)
        self.seed, self.canvas = seed, canvas
        self.pool = self.at = 0
        self.cuts = None

    def state(self):
        return {"pool": self.pool, "at": self.at}

    def load(self, state):
        self.pool, self.at, self.cuts = state["pool"], state["at"], None

    def draw(self, extra, budget):
        r = np.random.default_rng((self.seed, self.pool))
        rows = []
        for k in r.choice(len(self.names), 512, p=self.weights):
            tokens, offsets, prompts, pictures = self.sets[self.names[k]]
            i = int(r.integers(len(prompts)))
            rows.append(Row(self.names[k], tokens[offsets[i]: offsets[i + 1]].astype(np.int64), int(prompts[i]),
                            None if pictures is None else int(pictures[i])))
        rows.sort(key=lambda x: len(x.ids))
        cuts, part = [], []
        for row in rows:
            width = -(-len(row.ids) // 16) * 16 + extra
            if part and width * (len(part) + 1) > budget:
                cuts.append(part)
                part = []
            part.append(row)
        if len(part) > 8:
            cuts.append(part)
        r.shuffle(cuts)
        for part in cuts:
            r.shuffle(part)
        return cuts

    def skip(self):
        """Leaves the rest of a pool, which was cut for another width."""
        if self.cuts is not None:
            self.pool, self.at, self.cuts = self.pool + 1, 0, None

    def next(self, extra, budget):
        if self.cuts is None:
            self.cuts = self.draw(extra, budget)
        while self.at >= len(self.cuts):
            self.pool, self.at = self.pool + 1, 0
            self.cuts = self.draw(extra, budget)
        part = self.cuts[self.at]
        self.at += 1
        return part


def causal_targets(part, cols, prompt_weight):
    """Flat positions, targets and weights of the next-token loss."""
    index, target, weight = [], [], []
    for i, (name, ids, prompt, _) in enumerate(part):
        start = 1 if name == "debian" else prompt
        j = np.arange(start, len(ids))
        index.append(i * cols + j - 1)
        target.append(ids[j])
        weight.append(np.where(j < prompt, prompt_weight, 1.0))
    return torch.from_numpy(np.concatenate(index)), torch.from_numpy(np.concatenate(target)), \
        torch.from_numpy(np.concatenate(weight)).float()


def canvas_targets(part, length, canvases, fill_weight, rng):
    """Clean canvases [B*K, L], the prefix each may see [B], weights [B*K, L]. One block a row, K noise draws of it."""
    clean = torch.full((len(part), length), S.TURN)
    weight = torch.full((len(part), length), fill_weight)
    seen = []
    for i, (_, ids, prompt, _) in enumerate(part):
        n = len(ids) - prompt
        block = int(torch.randint(-(-n // length), (1,), generator=rng))
        a = ids[prompt + block * length: prompt + (block + 1) * length]
        clean[i, : len(a)] = torch.from_numpy(a)
        weight[i, : len(a)] = 1.0
        weight[i, len(a): len(a) + 2] = 1.0
        seen.append(prompt + block * length)
    return clean.repeat_interleave(canvases, 0), torch.tensor(seen), weight.repeat_interleave(canvases, 0)


def roll(p, canvas, s1, rng):
    """What the sampler makes of its canvases: sampled where the entropy bound accepts, new noise elsewhere."""
    n, length, vocab = p.shape
    entropy = torch.special.entr(p).sum(-1)
    low, high = s1["roll_bounds"]
    bound = low * (high / low) ** torch.rand(n, 1, generator=rng)
    order = entropy.sort(-1)
    accept = torch.zeros(n, length, dtype=torch.bool).scatter(1, order.indices, order.values.cumsum(-1) - order.values <= bound)
    sampled = torch.multinomial(p.view(-1, vocab), 1, generator=rng).view(n, length)
    fresh = torch.where(accept, sampled, torch.randint(vocab, (n, length), generator=rng))
    return torch.where(torch.rand(n, 1, generator=rng) < s1["roll_share"], fresh, canvas)


def batch_loss(cfg, w, tables, part, canvases, rng):
    """(loss, causal loss, denoising loss or None, balance, tokens) of one batch; canvases 0: the causal stage."""
    m, s1, canvas = cfg["model"], cfg["stage1"], cfg["canvas"]
    k = canvases
    rows = len(part)
    tokens = S.pad_rows([x.ids for x in part])
    cols = tokens.shape[1]
    t = cols + k * canvas
    prefix = V.embed(m, w, tokens, [x.picture for x in part])
    iscanvas = torch.arange(t) >= cols
    if k:
        clean, seen, cw = canvas_targets(part, canvas, k, s1["fill_weight"], rng)
        level = torch.rand(rows * k, 1, generator=rng)
        level[torch.rand(rows * k, 1, generator=rng) < s1["pure_noise_share"]] = 1.0
        noise = torch.randint(m["vocab"], clean.shape, generator=rng)
        noisy = torch.where(torch.rand(clean.shape, generator=rng) < level, noise, clean).view(rows, k * canvas)
        pos = torch.cat((torch.arange(cols).expand(rows, -1), (seen[:, None] + torch.arange(canvas)).repeat(1, k)), 1)
    else:
        seen, pos = torch.tensor([len(x.ids) for x in part]), torch.arange(cols).expand(rows, -1)
    bias_s, bias_f = (x.bfloat16() for x in M.masks(m, tokens, seen, k, canvas))
    table = w[M.SHARED + "embed_tokens.weight"]
    x = prefix
    if k:
        half = max(1, int(rows * s1["self_conditioning_share"]))
        soft = torch.zeros(rows, k * canvas, m["hidden"], dtype=torch.bfloat16)
        with torch.no_grad():
            plain = M.embed_canvas(m, w, noisy[:half], None)
            h = M.forward(m, w, tables, torch.cat((prefix[:half], plain), 1), pos[:half], iscanvas, bias_s[:half], bias_f[:half])
            g = cfg["generation"]
            temperature = g["t_min"] + (g["t_max"] - g["t_min"]) * float(torch.rand(1, generator=rng))
            z = S.logits_of(m, w, h[:, cols:]) / temperature
            p = torch.softmax(z, -1)
            soft[:half] = F.linear(p.bfloat16(), table.t())
            # a share of these canvases goes one step of the sampler further: so the model meets its own mistakes
            rolled = roll(p.view(half * k, canvas, -1), noisy[:half].reshape(half * k, canvas), s1, rng)
            noisy = torch.cat((rolled.view(half, k * canvas), noisy[half:]))
        # a zero soft embedding passes the gated MLP as zero, so one call serves both halves
        x = torch.cat((prefix, M.embed_canvas(m, w, noisy, soft)), 1)
    balance = []
    h = M.forward(m, w, tables, x, pos, iscanvas, bias_s, bias_f, balance)
    index, target, weight = causal_targets(part, cols, s1["debian_prompt_weight"])
    hc = h[:, :cols].reshape(rows * cols, -1).index_select(0, index)
    causal = M.cross_entropy_sum(F.linear(hc, table), target, weight, m["softcap"]) / weight.sum()
    loss, denoise = causal, None
    if k:
        hd = h[:, cols:].reshape(rows * k * canvas, -1)
        denoise = M.cross_entropy_sum(F.linear(hd, table), clean.view(-1), cw.view(-1), m["softcap"]) / cw.sum()
        loss = denoise + s1["causal_weight"] * causal
    bal = sum(balance) / len(balance)
    return loss + s1["balance"] * bal, causal, denoise, bal, rows * t


def evaluate(cfg, params, tables, held, seed, gen, n=32, sample=True):
    """Exactness on held-out cases: (causal, teacher forced) and (diffusion, by the sampler), steps and tokens per forward."""
    m = cfg["model"]
    w = M.cast(params, torch.bfloat16)
    out = {}
    for task, cases in held.items():
        cases = cases[:n]
        prompts, pictures = [c["prompt_ids"] for c in cases], [c.get("picture") for c in cases]
        right = S.causal_right(m, w, tables, prompts, pictures, [c["answer_ids"] for c in cases])
        out[task] = {"ar": round(sum(r == k for r, k in right) / len(cases), 3),
                     "ar_token": round(sum(r for r, _ in right) / sum(k for _, k in right), 3)}
        if not sample:
            continue
        answers, steps, _ = S.generate(m, w, tables, prompts, pictures, cfg["canvas"], gen, seed)
        exact = sum(a == c["answer_ids"] for a, c in zip(answers, cases))
        overlap = sum(sum(x == y for x, y in zip(a, c["answer_ids"])) / len(c["answer_ids"]) for a, c in zip(answers, cases))
        out[task] |= {"exact": round(exact / len(cases), 3), "token": round(overlap / len(cases), 3),
                      "steps": round(sum(steps) / len(cases), 1), "tpf": round(sum(map(len, answers)) / sum(steps), 2)}
    return out


def read_held(work, names):
    held = {}
    for name in names:
        with open(os.path.join(work, f"held-{name}.jsonl"), encoding="utf-8") as f:
            held[name] = [json.loads(line) for line in f]
    return held


def shapes(m):
    """All weights, those of the text layers and of the tower."""
    return {**M.shapes(m), **V.shapes(m)}


class Run:
    """Weights, their average, optimizer, generator and the place in the data: all that a checkpoint holds."""

    def __init__(self, cfg, work):
        self.cfg, self.path = cfg, os.path.join(work, "stage1.pt")
        seed = cfg["seed"]
        self.params = M.create(shapes(cfg["model"]), seed)
        self.average = {n: p.detach().clone() for n, p in self.params.items()}
        self.opt = Optimizer(self.params, cfg["stage1"]["momentum"])
        self.data = {"diffusion": Data(work, cfg["data"]["mixture"], seed, cfg["canvas"]),
                     "causal": Data(work, cfg["data"]["causal_mixture"], seed + 3, cfg["canvas"])}
        self.rng = torch.Generator().manual_seed(seed)
        self.step, self.seconds = 0, 0.0
        self.count = {"causal_tokens": 0, "diffusion_tokens": 0}
        if os.path.exists(self.path):
            self.restore(torch.load(self.path))

    def restore(self, state):
        for n, p in state["params"].items():  # weights that a newer configuration adds keep their first values
            self.params[n].data.copy_(p)
        self.average.update(state["average"])
        self.opt.load(state["opt"])
        for name, place in state["data"].items():
            self.data[name].load(place)
        self.rng.set_state(state["rng"])
        self.step, self.seconds, self.count = state["step"], state["seconds"], state["count"]

    def save(self):
        save(self.path, {"params": {n: p.detach() for n, p in self.params.items()}, "average": self.average, "opt": self.opt.state(),
                         "data": {name: d.state() for name, d in self.data.items()}, "rng": self.rng.get_state(), "step": self.step,
                         "seconds": self.seconds, "count": self.count})

    def batch(self):
        """(examples, canvases a row) of the next step."""
        s1 = self.cfg["stage1"]
        start = self.step < s1["causal_steps"]
        if self.step == s1["causal_steps"]:
            self.data["diffusion"].skip()
        causal = not start and float(torch.rand(1, generator=self.rng)) < s1["causal_share"]
        canvases = 0 if start or causal else s1["canvases"]
        return self.data["causal" if causal else "diffusion"].next(canvases * self.cfg["canvas"], s1["batch_tokens"]), canvases

    def learn(self, loss, total):
        """One step down the gradient; its norm. The rate rises at first and falls towards `total`."""
        s1 = self.cfg["stage1"]
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_([self.params[n] for n in self.opt.others], 1.0)
        left = (total - self.step) / max(1, s1["decay_steps"])
        scale = min(1.0, (self.step + 1) / s1["warmup"]) * max(s1["final_lr"], min(1.0, left))
        if torch.isfinite(loss):
            self.opt.step(s1["lr_matrix"] * scale, s1["lr_adam"] * scale)
        keep = min(s1["average"], (self.step + 1) / (self.step + 10))
        with torch.no_grad():
            for n, p in self.params.items():
                self.average[n].lerp_(p, 1 - keep)
        self.step += 1
        return float(norm)


def main():
    work = sys.argv[1]
    cfg = load_config()
    s1 = cfg["stage1"]
    torch.set_num_threads(cfg["threads"])
    torch.manual_seed(cfg["seed"])
    logfile = os.path.join(work, "stage1.log")
    run, tables = Run(cfg, work), M.Tables(cfg["model"])
    held = read_held(work, [x for x in run.data["diffusion"].names if x != "debian"])
    M.load_fused()
    threads = Threads(cfg["threads"])
    total = s1["causal_steps"] + s1["diffusion_steps"]
    saved = evaluated = shown = tick = time.time()
    means, done = Means(), 0
    log(logfile, event="start", step=run.step, parameters=sum(p.numel() for p in run.params.values()))
    stop_on_terminate()
    while run.step < total and not STOP:
        means.add(busy=threads.adapt())
        part, canvases = run.batch()
        loss, causal, denoise, balance, tokens = batch_loss(cfg, M.cast(run.params, torch.bfloat16), tables, part, canvases, run.rng)
        means.add(norm=run.learn(loss, total), balance=balance.item())
        if canvases:
            means.add(denoise=denoise.item(), causal=causal.item())
        else:
            means.add(only_causal=causal.item())
        run.count["diffusion_tokens" if canvases else "causal_tokens"] += tokens
        done += tokens
        now = time.time()
        run.seconds += now - tick
        tick = now
        if now - shown > 30:
            log(logfile, step=run.step, **means.take(), rate=round(done / (now - shown)), minutes=round(run.seconds / 60, 1), **run.count)
            done, shown = 0, now
        if now - saved > s1["checkpoint_seconds"]:
            run.save()
            saved = now
        if now - evaluated > s1["evaluate_seconds"]:
            gen = dict(cfg["generation"], max_denoising_steps=10, confidence_threshold=0.05)
            log(logfile, step=run.step, held=evaluate(cfg, run.average, tables, held, cfg["seed"], gen, s1["evaluate_cases"], bool(canvases)))
            evaluated = time.time()
    run.save()
    log(logfile, event="end", step=run.step, **run.count)


if __name__ == "__main__":
    main()

"""The published sampler on the lean model: entropy-bound acceptance, renoising, adaptive stop. Greedy AR is
judged by teacher forcing: an answer is what greedy decoding gives exactly if every token is the argmax."""
import torch
import torch.nn.functional as F

import model as M
import vision as V

END = (1, 106, 50)
PAD, TURN = 0, 106


def logits_of(cfg, w, h):
    z = F.linear(h, w[M.SHARED + "embed_tokens.weight"])
    return torch.tanh(z.float() / cfg["softcap"]) * cfg["softcap"]


def pad_rows(rows, multiple=16):
    n = -(-max(map(len, rows)) // multiple) * multiple
    out = torch.zeros(len(rows), n, dtype=torch.long)
    for i, x in enumerate(rows):
        out[i, : len(x)] = torch.tensor(x)
    return out


@torch.no_grad()
def denoise(cfg, w, tables, prefixes, pictures, canvas_len, gen, rng, trace=None):
    """One block for every prefix and its picture (a number or None). Returns (committed tokens [B,L], steps taken [B]).

    trace, a list, receives per step (rows that still run, their canvases before the step, the soft embedding before it or
    None). Rows that have stopped leave the batch.
    """
    b, vocab = len(prefixes), cfg["vocab"]
    tokens = pad_rows(prefixes)
    lens = torch.tensor([len(p) for p in prefixes])
    cols = tokens.shape[1]
    pos = torch.cat((torch.arange(cols).expand(b, -1), lens[:, None] + torch.arange(canvas_len)), 1)
    iscanvas = torch.arange(cols + canvas_len) >= cols
    table = w[M.SHARED + "embed_tokens.weight"]
    dtype = table.dtype
    bias_s, bias_f = (x.to(dtype) for x in M.masks(cfg, tokens, lens, 1, canvas_len))
    prefix = V.embed(cfg, w, tokens, pictures)
    canvas = torch.randint(vocab, (b, canvas_len), generator=rng)
    soft, history, committed = None, [], torch.zeros(b, canvas_len, dtype=torch.long)
    rows, steps = torch.arange(b), torch.zeros(b, dtype=torch.long)
    total, k = gen["max_denoising_steps"], gen["stability_threshold"]
    for n in range(total, 0, -1):
        if trace is not None:
            trace.append((rows, canvas, soft))
        x = torch.cat((prefix[rows], M.embed_canvas(cfg, w, canvas, soft)), 1)
        h = M.forward(cfg, w, tables, x, pos[rows], iscanvas, bias_s[rows], bias_f[rows])[:, cols:]
        temperature = gen["t_min"] + (gen["t_max"] - gen["t_min"]) * n / total
        z = logits_of(cfg, w, h) / temperature
        logp = torch.log_softmax(z, -1)
        p = logp.exp()
        entropy = -(p * logp).sum(-1)
        best = z.argmax(-1)
        sampled = torch.multinomial(p.view(-1, vocab), 1, generator=rng).view(best.shape)
        order = entropy.sort(-1)
        ok = order.values.cumsum(-1) - order.values <= gen["entropy_bound"]
        accept = torch.zeros_like(ok).scatter(1, order.indices, ok)
        committed[rows] = best
        steps[rows] += 1
        stable = torch.full((len(rows),), len(history) >= k)
        for old in history[len(history) - k:] if k and len(history) >= k else []:
            stable &= (old[rows] == best).all(-1)
        history.append(committed.clone())
        runs = ~(stable & (entropy.mean(-1) < gen["confidence_threshold"]))
        if not runs.any():
            break
        canvas = torch.where(accept, sampled, torch.randint(vocab, best.shape, generator=rng))[runs]
        soft = F.linear(torch.softmax(z[runs].to(dtype).float(), -1).to(dtype), table.t())
        rows = rows[runs]
    return committed, steps


def finish(block):
    """(tokens kept, ended) of one committed block."""
    out = block.tolist()
    for i, x in enumerate(out):
        if x in END:
            return out[: i + 1], True
    return out, False


@torch.no_grad()
def generate(cfg, w, tables, prompts, pictures, canvas_len, gen, seed, max_blocks=2):
    """Answers (token lists with their end token), denoising steps and blocks of every prompt."""
    rng = torch.Generator().manual_seed(seed)
    answers, steps, blocks = [[] for _ in prompts], [0] * len(prompts), [0] * len(prompts)
    live = list(range(len(prompts)))
    for _ in range(max_blocks):
        if not live:
            break
        committed, taken = denoise(cfg, w, tables, [prompts[i] + answers[i] for i in live], [pictures[i] for i in live],
                                   canvas_len, gen, rng)
        rest = []
        for row, i in enumerate(live):
            kept, ended = finish(committed[row])
            answers[i] += kept
            steps[i] += int(taken[row])
            blocks[i] += 1
            if not ended:
                rest.append(i)
        live = rest
    return answers, steps, blocks


@torch.no_grad()
def causal_right(cfg, w, tables, prompts, pictures, answers):
    """Per case the number of answer tokens that are the causal argmax, and the answer's length."""
    rows = [p + a for p, a in zip(prompts, answers)]
    tokens = pad_rows(rows)
    b, t = tokens.shape
    lens = torch.tensor([len(r) for r in rows])
    bias_s, bias_f = M.masks(cfg, tokens, lens, 0, 1)
    dtype = w[M.SHARED + "embed_tokens.weight"].dtype
    h = M.forward(cfg, w, tables, V.embed(cfg, w, tokens, pictures), torch.arange(t).expand(b, -1), torch.zeros(t, dtype=torch.bool),
                  bias_s.to(dtype), bias_f.to(dtype))
    right = []
    for i, (p, a) in enumerate(zip(prompts, answers)):
        best = logits_of(cfg, w, h[i, len(p) - 1: len(p) + len(a) - 1]).argmax(-1)
        right.append((int((best == torch.tensor(a)).sum()), len(a)))
    return right

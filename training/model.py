"""A lean DiffusionGemma for training: the same mathematics as the published class, fewer detours.

Weights live in one flat dictionary under the names of the published checkpoint, in fp32. A step casts
them to bf16 once and runs everything on a batch of rows

    [ prompt and answer, causal | canvas | canvas ... ]

in a single pass: a mask decides who sees whom, and the two layer_scalars are chosen per token. So the
causal loss and the denoising loss share one forward. check_export.py compares this file with the
published class on every exported checkpoint.
"""
import math

import torch
import torch.nn.functional as F

SHARED = "model.decoder."


def is_full(cfg, layer):
    return layer % 6 == 5 or layer == cfg["layers"] - 1


def shapes(cfg):
    """Name -> (shape, initial value): a float is the deviation of a normal, ("fill", x) a constant."""
    h, d, x, m = cfg["hidden"], cfg["dense"], cfg["experts"], cfg["expert_dim"]
    out = {SHARED + "embed_tokens.weight": ((cfg["vocab"], h), h ** -0.5),
           SHARED + "norm.weight": ((h,), ("fill", 1.0))}
    for i in range(cfg["layers"]):
        full = is_full(cfg, i)
        hd = cfg["head_dim_full"] if full else cfg["head_dim"]
        kv = cfg["kv_heads_full"] if full else cfg["kv_heads"]
        p = f"{SHARED}layers.{i}."
        branch = ("fill", 0.4)
        out[p + "input_layernorm.weight"] = ((h,), ("fill", 1.0))
        out[p + "self_attn.q_proj.weight"] = ((cfg["heads"] * hd, h), h ** -0.5)
        out[p + "self_attn.k_proj.weight"] = ((kv * hd, h), h ** -0.5)
        if not full:
            out[p + "self_attn.v_proj.weight"] = ((kv * hd, h), h ** -0.5)
        out[p + "self_attn.o_proj.weight"] = ((h, cfg["heads"] * hd), (cfg["heads"] * hd) ** -0.5)
        # the score has no 1/sqrt(d): the head norms start with the factor that replaces it
        out[p + "self_attn.q_norm.weight"] = ((hd,), ("fill", hd ** -0.25))
        out[p + "self_attn.k_norm.weight"] = ((hd,), ("fill", hd ** -0.25))
        out[p + "post_attention_layernorm.weight"] = ((h,), branch)
        out[p + "pre_feedforward_layernorm.weight"] = ((h,), ("fill", 1.0))
        out[p + "mlp.gate_proj.weight"] = ((d, h), h ** -0.5)
        out[p + "mlp.up_proj.weight"] = ((d, h), h ** -0.5)
        out[p + "mlp.down_proj.weight"] = ((h, d), d ** -0.5)
        out[p + "post_feedforward_layernorm_1.weight"] = ((h,), ("fill", 0.7))
        out[p + "pre_feedforward_layernorm_2.weight"] = ((h,), ("fill", 1.0))
        out[p + "router.proj.weight"] = ((x, h), 1.0)
        out[p + "router.scale"] = ((h,), ("fill", 1.0))
        out[p + "router.per_expert_scale"] = ((x,), ("fill", 1.0))
        out[p + "experts.gate_up_proj"] = ((x, 2 * m, h), h ** -0.5)
        out[p + "experts.down_proj"] = ((x, h, m), m ** -0.5)
        out[p + "post_feedforward_layernorm_2.weight"] = ((h,), ("fill", 0.7))
        out[p + "post_feedforward_layernorm.weight"] = ((h,), branch)
        out[p + "layer_scalar"] = ((1,), ("fill", 1.0))
        out[f"model.encoder.language_model.layers.{i}.layer_scalar"] = ((1,), ("fill", 1.0))
    s = SHARED + "self_conditioning."
    out[s + "pre_norm.weight"] = ((h,), ("fill", 1.0))
    out[s + "gate_proj.weight"] = ((d, h), h ** -0.5)
    out[s + "up_proj.weight"] = ((d, h), h ** -0.5)
    out[s + "down_proj.weight"] = ((h, d), 0.5 * d ** -0.5)
    return out


def create(cfg, seed):
    g = torch.Generator().manual_seed(seed)
    params = {}
    for name, (shape, init) in shapes(cfg).items():
        t = torch.full(shape, init[1]) if isinstance(init, tuple) else torch.randn(shape, generator=g) * init
        params[name] = t.requires_grad_(True)
    return params


def rms(x, w, eps):
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (y * w if w is not None else y).to(x.dtype)


def gated(h):
    g, u = h.chunk(2, -1)
    return F.gelu(g, approximate="tanh") * u


def gated_backward(h, d):
    g, u = h.float().chunk(2, -1)
    d = d.float()
    k = math.sqrt(2 / math.pi)
    t = torch.tanh(k * (g + 0.044715 * g * g * g))
    act = 0.5 * g * (1 + t)
    slope = 0.5 * (1 + t) + 0.5 * g * (1 - t * t) * k * (1 + 3 * 0.044715 * g * g)
    return torch.cat((d * u * slope, d * act), -1).to(h.dtype)


class Experts(torch.autograd.Function):
    """Tokens sorted by expert, one product per expert, gathers instead of scatters both ways."""

    @staticmethod
    def forward(ctx, y, w, chosen, w1, w2):
        n, k = chosen.shape
        flat = chosen.reshape(-1)
        order = torch.argsort(flat, stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel())
        token = order // k
        ends = torch.bincount(flat, minlength=w1.shape[0]).cumsum(0).tolist()
        xs = y.index_select(0, token)
        h = y.new_empty(n * k, w1.shape[1])
        o = y.new_empty(n * k, y.shape[1])
        s = 0
        for e, t in enumerate(ends):
            if t > s:
                torch.mm(xs[s:t], w1[e].t(), out=h[s:t])
            s = t
        a = fused_gated(h)
        s = 0
        for e, t in enumerate(ends):
            if t > s:
                torch.mm(a[s:t], w2[e].t(), out=o[s:t])
            s = t
        ctx.save_for_backward(w, token, inverse, order, xs, h, a, o, w1, w2)
        ctx.ends = ends
        return fused_combine(o.index_select(0, inverse).view(n, k, -1), w)

    @staticmethod
    def backward(ctx, d):
        w, token, inverse, order, xs, h, a, o, w1, w2 = ctx.saved_tensors
        n, k = w.shape
        dg = d.index_select(0, token)
        do, dw = fused_split(dg, o, w.reshape(-1).index_select(0, order))
        dw = dw.index_select(0, inverse).view(n, k)
        da = torch.empty_like(a)
        dw1, dw2 = torch.zeros_like(w1), torch.zeros_like(w2)
        s = 0
        for e, t in enumerate(ctx.ends):
            if t > s:
                torch.mm(do[s:t], w2[e], out=da[s:t])
                torch.mm(do[s:t].t(), a[s:t], out=dw2[e])
            s = t
        dh = fused_gated_backward(h, da)
        dx = torch.empty_like(xs)
        s = 0
        for e, t in enumerate(ctx.ends):
            if t > s:
                torch.mm(dh[s:t], w1[e], out=dx[s:t])
                torch.mm(dh[s:t].t(), xs[s:t], out=dw1[e])
            s = t
        dy = fused_sum(dx.index_select(0, inverse).view(n, k, -1))
        return dy, dw, None, dw1, dw2


def combine(o, w):
    return (o.float() * w.unsqueeze(-1)).sum(1).to(o.dtype)


def split(dg, o, w):
    dgf = dg.float()
    return (dgf * w.unsqueeze(-1)).to(dg.dtype), (dgf * o.float()).sum(-1)


def sum_copies(x):
    return x.float().sum(1).to(x.dtype)


def route(r, proj, scale, per_expert, k, eps):
    u = rms(r, None, eps).float() * scale * (r.shape[-1] ** -0.5)
    prob = torch.softmax(u @ proj.t(), -1)
    top, chosen = torch.topk(prob, k, -1)
    w = top / top.sum(-1, keepdim=True) * per_expert[chosen]
    return prob, w, chosen


def rotate(x, cos, sin):
    h = x.shape[-1] // 2
    a, b = x[..., :h], x[..., h:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def attend(x, qkv_w, o_w, nin, qn, kn, post, cos, sin, bias, heads, kv, full, eps):
    """The attention half of a layer: the new residual."""
    b, t, h = x.shape
    d = qn.shape[0]
    y = F.linear(rms(x, nin, eps), qkv_w)
    q = y[..., : heads * d].view(b, t, heads, d)
    k = y[..., heads * d: (heads + kv) * d].view(b, t, kv, d)
    v = k if full else y[..., (heads + kv) * d:].view(b, t, kv, d)
    q = rotate(rms(q, qn, eps), cos, sin).transpose(1, 2)
    k = rotate(rms(k, kn, eps), cos, sin).transpose(1, 2)
    v = rms(v, None, eps).transpose(1, 2)
    g = heads // kv
    q = q.reshape(b * kv, g * t, d)
    k = k.reshape(b * kv, t, d)
    v = v.reshape(b * kv, t, d)
    s = torch.bmm(q, k.transpose(1, 2)).view(b, kv, g, t, t).float() + bias[:, None, None]
    p = torch.softmax(s, -1).to(x.dtype).view(b * kv, g * t, t)
    o = torch.bmm(p, v).view(b, heads, t, d).transpose(1, 2).reshape(b, t, heads * d)
    return x + rms(F.linear(o, o_w), post, eps)


def before_experts(r, pre1, gu, down, post1, pre2, eps):
    m = rms(F.linear(gated(F.linear(rms(r, pre1, eps), gu)), down), post1, eps)
    return m, rms(r, pre2, eps)


def after_experts(r, m, e, post2, post, scalar, eps):
    return ((r + rms(m + rms(e, post2, eps), post, eps)).float() * scalar).to(r.dtype)


def cross_entropy_sum(z, target, weight, cap):
    """Weighted sum of the losses behind the soft-cap; z is the raw product of hidden state and table."""
    logit = torch.tanh(z.float() / cap) * cap
    loss = torch.logsumexp(logit, -1) - logit.gather(1, target.unsqueeze(1)).squeeze(1)
    return (loss * weight).sum()


def condition(c, soft, w, eps):
    pre, gu, down = w
    return rms(c + F.linear(gated(F.linear(rms(soft, pre, eps), gu)), down), None, eps)


fused_gated, fused_gated_backward, fused_combine, fused_split, fused_sum = gated, gated_backward, combine, split, sum_copies
fused_route, fused_attend, fused_before, fused_after, fused_loss, fused_condition = route, attend, before_experts, after_experts, cross_entropy_sum, condition


def compile_parts():
    """Fuse the element-wise chains: on a small model they cost more than the products."""
    global fused_gated, fused_gated_backward, fused_combine, fused_split, fused_sum
    global fused_route, fused_attend, fused_before, fused_after, fused_loss, fused_condition
    c = lambda f: torch.compile(f, dynamic=True)
    fused_gated, fused_gated_backward, fused_combine, fused_split, fused_sum = map(c, (gated, gated_backward, combine, split, sum_copies))
    fused_route, fused_attend, fused_before, fused_after, fused_loss, fused_condition = map(
        c, (route, attend, before_experts, after_experts, cross_entropy_sum, condition))


class Tables:
    def __init__(self, cfg, longest=4096):
        pos = torch.arange(longest, dtype=torch.float32)
        self.rope = []
        for d, theta, n in ((cfg["head_dim"], 1e4, cfg["head_dim"] // 2), (cfg["head_dim_full"], 1e6, cfg["head_dim_full"] // 8)):
            f = 1.0 / (theta ** (torch.arange(0, d, 2, dtype=torch.float32) / d))
            f[n:] = 0
            a = pos[:, None] * f[None]
            self.rope.append((a.cos(), a.sin()))


def cast(params, dtype):
    """The weights of one step, products joined: [q|k|v] and [gate|up]."""
    w = {}
    for name, p in params.items():
        w[name] = p.to(dtype) if p.dim() > 1 and "router" not in name else p
    for base in {n[: n.rindex("self_attn.")] for n in params if "self_attn.q_proj" in n}:
        parts = [w[base + f"self_attn.{x}_proj.weight"] for x in "qkv" if base + f"self_attn.{x}_proj.weight" in w]
        w[base + "qkv"] = torch.cat(parts)
        w[base + "gu"] = torch.cat((w[base + "mlp.gate_proj.weight"], w[base + "mlp.up_proj.weight"]))
    s = SHARED + "self_conditioning."
    w[s + "gu"] = torch.cat((w[s + "gate_proj.weight"], w[s + "up_proj.weight"]))
    w["scale"] = torch.tensor(params[SHARED + "embed_tokens.weight"].shape[1] ** 0.5, dtype=torch.bfloat16).float().item()
    return w


def embed(w, tokens):
    return F.embedding(tokens, w[SHARED + "embed_tokens.weight"]) * w["scale"]


def embed_canvas(cfg, w, tokens, soft):
    """Canvas embedding; soft (probabilities times table) or None for exact zero."""
    s = SHARED + "self_conditioning."
    c = embed(w, tokens)
    if soft is None:
        return rms(c, None, cfg["eps"])
    return fused_condition(c, soft * w["scale"], (w[s + "pre_norm.weight"], w[s + "gu"], w[s + "down_proj.weight"]), cfg["eps"])


def forward(cfg, w, tables, x, pos, canvas_mask, bias_sliding, bias_full, balance=None):
    """x [B,T,H] embedded, pos [B,T], canvas_mask [T] true at decoder tokens; the normed hidden states."""
    eps = cfg["eps"]
    b, t, h = x.shape
    rope = [(c[pos].to(x.dtype).unsqueeze(2), s[pos].to(x.dtype).unsqueeze(2)) for c, s in tables.rope]
    for i in range(cfg["layers"]):
        p = f"{SHARED}layers.{i}."
        full = is_full(cfg, i)
        cos, sin = rope[full]
        r = fused_attend(x, w[p + "qkv"], w[p + "self_attn.o_proj.weight"], w[p + "input_layernorm.weight"],
                         w[p + "self_attn.q_norm.weight"], w[p + "self_attn.k_norm.weight"], w[p + "post_attention_layernorm.weight"],
                         cos, sin, bias_full if full else bias_sliding, cfg["heads"],
                         cfg["kv_heads_full"] if full else cfg["kv_heads"], full, eps)
        flat = r.reshape(b * t, h)
        prob, ew, chosen = fused_route(flat, w[p + "router.proj.weight"], w[p + "router.scale"],
                                       w[p + "router.per_expert_scale"], cfg["top_k"], eps)
        if balance is not None:
            share = torch.zeros(cfg["experts"]).index_add_(0, chosen.reshape(-1), torch.ones(chosen.numel())) / chosen.numel()
            balance.append((share * prob.mean(0)).sum() * cfg["experts"])
        m, y = fused_before(r, w[p + "pre_feedforward_layernorm.weight"], w[p + "gu"], w[p + "mlp.down_proj.weight"],
                            w[p + "post_feedforward_layernorm_1.weight"], w[p + "pre_feedforward_layernorm_2.weight"], eps)
        e = Experts.apply(y.reshape(b * t, h), ew, chosen, w[p + "experts.gate_up_proj"], w[p + "experts.down_proj"]).view(b, t, h)
        enc = w[f"model.encoder.language_model.layers.{i}.layer_scalar"]
        scalar = torch.where(canvas_mask, w[p + "layer_scalar"], enc).view(1, t, 1)
        x = fused_after(r, m, e, w[p + "post_feedforward_layernorm_2.weight"], w[p + "post_feedforward_layernorm.weight"], scalar, eps)
    return rms(x, w[SHARED + "norm.weight"], eps)


def masks(cfg, prefix_len, prompt_len, prefix_cols, canvases, canvas):
    """Additive masks [B,T,T] (sliding, full) for rows [prefix | canvas * canvases].

    prefix_len [B]: tokens of the causal part; prompt_len [B]: how many of them the canvases may see.
    """
    t = prefix_cols + canvases * canvas
    i = torch.arange(t)
    isc = i >= prefix_cols
    block = torch.where(isc, (i - prefix_cols) // canvas, -1)
    q, k = i[:, None], i[None, :]
    causal = (~isc[:, None]) & (~isc[None, :]) & (k <= q)
    own = isc[:, None] & (block[:, None] == block[None, :])
    base = (causal | own)[None]
    sees = (isc[:, None] & ~isc[None, :])[None] & (k[None] < prompt_len[:, None, None])
    full = base | sees
    win = (causal & (q - k < cfg["window"])) | own
    sliding = win[None] | (sees & (k[None] >= prompt_len[:, None, None] - (cfg["window"] - 1)))
    neg = torch.tensor(-1e9)
    zero = torch.tensor(0.0)
    return torch.where(sliding, zero, neg), torch.where(full, zero, neg)

"""A lean DiffusionGemma for training: the same mathematics as the published class, fewer detours.

Weights live in one flat dictionary under the names of the published checkpoint, in fp32. A step casts
them to bf16 once and runs everything on a batch of rows

    [ prompt and answer, causal | canvas | canvas ... ]

in a single pass: a mask decides who sees whom, and the two layer_scalars are chosen per token. So the
causal loss and the denoising loss share one forward. export.py compares this file with the
published class on every exported checkpoint.
"""
import ctypes
import os
import subprocess
import tempfile

import torch
import torch.nn.functional as F

SHARED = "model.decoder."
HERE = os.path.dirname(os.path.abspath(__file__))
LIB = None


def load_fused():
    """Compiles and loads fused.c where the processor can run it; without it the PyTorch operations below do the same."""
    global LIB
    with open("/proc/cpuinfo") as f:
        if "avx512_bf16" not in f.read():
            return
    with tempfile.TemporaryDirectory() as d:
        so = os.path.join(d, "fused.so")
        subprocess.run(["cc", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-o", so, os.path.join(HERE, "fused.c"), "-lm"], check=True)
        LIB = ctypes.CDLL(so)


def call(name, *args):
    """Tensors as pointers, integers as long, floats as float; the number of threads goes last."""
    out = []
    for a in args:
        if torch.is_tensor(a):
            assert a.is_contiguous()
            out.append(ctypes.c_void_p(a.data_ptr()))
        elif a is None:
            out.append(ctypes.c_void_p(None))
        elif isinstance(a, float):
            out.append(ctypes.c_float(a))
        else:
            out.append(ctypes.c_long(a))
    getattr(LIB, name)(*out, ctypes.c_int(torch.get_num_threads()))


def fast(x):
    return LIB is not None and x.dtype == torch.bfloat16


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


def create(shapes, seed):
    g = torch.Generator().manual_seed(seed)
    params = {}
    for name, (shape, init) in shapes.items():
        t = torch.full(shape, init[1]) if isinstance(init, tuple) else torch.randn(shape, generator=g) * init
        params[name] = t.requires_grad_(True)
    return params


class Rms(torch.autograd.Function):
    """y = x / rms(x) * w, the factor kept for the way back."""

    @staticmethod
    def forward(ctx, x, w, eps):
        y = x.float()
        scale = torch.linalg.vector_norm(y, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        n = y.mul_(scale) if x.dtype != torch.float32 else y * scale
        ctx.save_for_backward(x, scale, w)
        if w is not None:
            n = n.mul_(w)
        return n.to(x.dtype)

    @staticmethod
    def backward(ctx, d):
        x, scale, w = ctx.saved_tensors
        n = x.float() * scale
        d = d.float()
        dw = None
        if w is not None:
            dw = (d * n).reshape(-1, w.shape[0]).sum(0)
            d = d * w
        dot = (d * n).mean(-1, keepdim=True)
        return ((d - n * dot) * scale).to(x.dtype), dw, None


class FusedNorm(torch.autograd.Function):
    """(res + rms(x) * w) * scalar, scalar one number a row."""

    @staticmethod
    def forward(ctx, x, w, res, scalar, eps):
        x = x.contiguous()
        h = x.shape[-1]
        n = x.numel() // h
        out, scale = torch.empty_like(x), torch.empty(n)
        call("rms_fwd", x, w, res, scalar, out, scale, n, h, eps)
        ctx.save_for_backward(x, w, scalar, out if scalar is not None else None, scale)
        ctx.has_res = res is not None
        return out

    @staticmethod
    def backward(ctx, d):
        x, w, scalar, out, scale = ctx.saved_tensors
        d = d.contiguous()
        h = x.shape[-1]
        n = x.numel() // h
        dx = torch.empty_like(x)
        dres = (d if scalar is None else torch.empty_like(x)) if ctx.has_res else None
        dw = torch.zeros_like(w) if w is not None else None
        ds = torch.empty_like(scalar) if scalar is not None else None
        call("rms_bwd", x, w, scalar, out, scale, d, dx, dres if scalar is not None else None, dw, ds, n, h)
        return dx, dw, dres, ds, None


def rms(x, w, eps):
    return FusedNorm.apply(x, w, None, None, eps) if fast(x) else Rms.apply(x, w, eps)


def add_rms(res, x, w, eps):
    return FusedNorm.apply(x, w, res, None, eps) if fast(x) else res + Rms.apply(x, w, eps)


class FusedGated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        ctx.save_for_backward(h)
        return gated_forward(h)

    @staticmethod
    def backward(ctx, d):
        return gated_backward(ctx.saved_tensors[0], d.contiguous())


def gated_forward(h):
    m = h.shape[-1] // 2
    if fast(h):
        out = h.new_empty(*h.shape[:-1], m)
        call("gated_fwd", h, out, h.numel() // (2 * m), m)
        return out
    g, u = h.chunk(2, -1)
    return F.gelu(g, approximate="tanh") * u


def gated_backward(h, d):
    m = h.shape[-1] // 2
    if fast(h):
        out = torch.empty_like(h)
        call("gated_bwd", h, d, out, h.numel() // (2 * m), m)
        return out
    g, u = h.chunk(2, -1)
    act = F.gelu(g, approximate="tanh")
    return torch.cat((torch.ops.aten.gelu_backward(d * u, g, approximate="tanh"), d * act), -1)


def gated(h):
    return FusedGated.apply(h)


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
        a = gated_forward(h)
        s = 0
        for e, t in enumerate(ends):
            if t > s:
                torch.mm(a[s:t], w2[e].t(), out=o[s:t])
            s = t
        ctx.save_for_backward(w, token, inverse, order, xs, h, a, o, w1, w2)
        ctx.ends = ends
        if fast(y):
            out = torch.empty_like(y)
            call("combine", o, inverse, w, out, n, k, y.shape[1])
            return out
        return (o.index_select(0, inverse).view(n, k, -1).float() * w.unsqueeze(-1)).sum(1).to(o.dtype)

    @staticmethod
    def backward(ctx, d):
        w, token, inverse, order, xs, h, a, o, w1, w2 = ctx.saved_tensors
        n, k = w.shape
        d = d.contiguous()
        if fast(d):
            do, dw = torch.empty_like(o), torch.empty_like(w)
            call("spread", d, o, order, w, do, dw, n, k, o.shape[1])
        else:
            dg = d.index_select(0, token).float()
            do = (dg * w.reshape(-1).index_select(0, order).unsqueeze(-1)).to(d.dtype)
            dw = (dg * o.float()).sum(-1).index_select(0, inverse).view(n, k)
        da = torch.empty_like(a)
        dw1, dw2 = torch.zeros_like(w1), torch.zeros_like(w2)
        s = 0
        for e, t in enumerate(ctx.ends):
            if t > s:
                torch.mm(do[s:t], w2[e], out=da[s:t])
                torch.mm(do[s:t].t(), a[s:t], out=dw2[e])
            s = t
        dh = gated_backward(h, da)
        dx = torch.empty_like(xs)
        s = 0
        for e, t in enumerate(ctx.ends):
            if t > s:
                torch.mm(dh[s:t], w1[e], out=dx[s:t])
                torch.mm(dh[s:t].t(), xs[s:t], out=dw1[e])
            s = t
        if fast(d):
            dy = torch.empty_like(d)
            call("combine", dx, inverse, None, dy, n, k, d.shape[1])
        else:
            dy = dx.index_select(0, inverse).view(n, k, -1).float().sum(1).to(d.dtype)
        return dy, dw, None, dw1, dw2


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


class FusedHeads(torch.autograd.Function):
    """The joined projection -> normed, turned heads, [B,heads,T,d] each."""

    @staticmethod
    def forward(ctx, y, qn, kn, cos, sin, heads, kv, full, eps):
        b, t, _ = y.shape
        d = qn.shape[0]
        q, k, v = y.new_empty(b, heads, t, d), y.new_empty(b, kv, t, d), y.new_empty(b, kv, t, d)
        scale = torch.empty(b * t, heads + 2 * kv)
        call("heads_fwd", y, qn, kn, cos, sin, q, k, v, scale, b, t, heads, kv, d, int(full), eps)
        ctx.save_for_backward(y, qn, kn, cos, sin, scale)
        ctx.shape = b, t, heads, kv, d, int(full)
        return q, k, v

    @staticmethod
    def backward(ctx, dq, dk, dv):
        y, qn, kn, cos, sin, scale = ctx.saved_tensors
        dy, dqn, dkn = torch.empty_like(y), torch.zeros_like(qn), torch.zeros_like(kn)
        call("heads_bwd", y, qn, kn, cos, sin, scale, dq.contiguous(), dk.contiguous(), dv.contiguous(), dy, dqn, dkn, *ctx.shape)
        return dy, dqn, dkn, None, None, None, None, None, None


class FusedSoftmax(torch.autograd.Function):
    """softmax(s + bias); works inside s, which nobody else needs."""

    @staticmethod
    def forward(ctx, s, bias, heads):
        b, t, _ = bias.shape
        call("softmax_fwd", s, bias, b, heads, t)
        ctx.save_for_backward(s)
        ctx.mark_dirty(s)
        return s

    @staticmethod
    def backward(ctx, d):
        (p,) = ctx.saved_tensors
        d = d.contiguous()
        t = p.shape[-1]
        call("softmax_bwd", p, d, p.numel() // t, t)
        return d, None, None


def attend(x, qkv_w, o_w, nin, qn, kn, post, cos, sin, bias, heads, kv, full, eps):
    """The attention half of a layer: the new residual."""
    b, t, h = x.shape
    d = qn.shape[0]
    g = heads // kv
    y = F.linear(rms(x, nin, eps), qkv_w)
    if fast(x):
        q, k, v = FusedHeads.apply(y, qn, kn, cos, sin, heads, kv, full, eps)
    else:
        q = y[..., : heads * d].view(b, t, heads, d)
        k = y[..., heads * d: (heads + kv) * d].view(b, t, kv, d)
        v = k if full else y[..., (heads + kv) * d:].view(b, t, kv, d)
        c, s = cos.unsqueeze(2).to(x.dtype), sin.unsqueeze(2).to(x.dtype)
        q = rotate(rms(q, qn, eps), c, s).transpose(1, 2)
        k = rotate(rms(k, kn, eps), c, s).transpose(1, 2)
        v = rms(v, None, eps).transpose(1, 2)
    q = q.reshape(b * kv, g * t, d)
    k = k.reshape(b * kv, t, d)
    v = v.reshape(b * kv, t, d)
    s = torch.bmm(q, k.transpose(1, 2))
    if fast(x):
        p = FusedSoftmax.apply(s, bias, heads)
    else:
        p = torch.softmax(s.view(b, kv, g, t, t).float() + bias[:, None, None], -1).to(x.dtype).view(b * kv, g * t, t)
    o = torch.bmm(p, v).view(b, heads, t, d).transpose(1, 2).reshape(b, t, heads * d)
    return add_rms(x, F.linear(o, o_w), post, eps)


def before_experts(r, pre1, gu, down, post1, pre2, eps):
    m = rms(F.linear(gated(F.linear(rms(r, pre1, eps), gu)), down), post1, eps)
    return m, rms(r, pre2, eps)


def after_experts(r, m, e, post2, post, scalar, eps):
    """scalar [B,T]: the layer_scalar of every token."""
    inner = add_rms(m, e, post2, eps)
    if fast(r):
        return FusedNorm.apply(inner, post, r, scalar, eps)
    return (add_rms(r, inner, post, eps).float() * scalar.unsqueeze(-1)).to(r.dtype)


class FusedLoss(torch.autograd.Function):
    """Leaves the gradient in z, which nobody else needs."""

    @staticmethod
    def forward(ctx, z, target, weight, cap):
        n, v = z.shape
        out = torch.empty(n)
        call("loss", z, target, weight, out, n, v, cap)
        ctx.save_for_backward(z)
        return out.sum()

    @staticmethod
    def backward(ctx, d):
        return ctx.saved_tensors[0].mul_(d.to(torch.bfloat16)), None, None, None


class CappedLoss(torch.autograd.Function):
    """Weighted sum of the losses behind the soft-cap; z is the raw product of hidden state and table."""

    @staticmethod
    def forward(ctx, z, target, weight, cap):
        ctx.kind = z.dtype
        t = (z.float() * (1 / cap)).tanh_()
        p = torch.softmax(t * cap, -1)
        picked = p.gather(1, target.unsqueeze(1)).squeeze(1).clamp_min(1e-30)
        ctx.save_for_backward(t, p, target, weight)
        return -(picked.log() * weight).sum()

    @staticmethod
    def backward(ctx, d):
        t, p, target, weight = ctx.saved_tensors
        p[torch.arange(len(target)), target] -= 1
        p.mul_((weight * d).unsqueeze(1))
        t.square_().neg_().add_(1)
        return p.mul_(t).to(ctx.kind), None, None, None


def cross_entropy_sum(z, target, weight, cap):
    return (FusedLoss if fast(z) else CappedLoss).apply(z, target.contiguous(), weight.contiguous(), cap)


def condition(c, soft, w, eps):
    pre, gu, down = w
    return rms(c + F.linear(gated(F.linear(rms(soft, pre, eps), gu)), down), None, eps)


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
    for base in {n[: n.rindex("self_attn.")] for n in params if n.startswith(SHARED) and "self_attn.q_proj" in n}:
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
    return condition(c, soft * w["scale"], (w[s + "pre_norm.weight"], w[s + "gu"], w[s + "down_proj.weight"]), cfg["eps"])


def forward(cfg, w, tables, x, pos, canvas_mask, bias_sliding, bias_full, balance=None):
    """x [B,T,H] embedded, pos [B,T], canvas_mask [T] true at decoder tokens; the normed hidden states."""
    eps = cfg["eps"]
    b, t, h = x.shape
    rope = [(c[pos], s[pos]) for c, s in tables.rope]
    for i in range(cfg["layers"]):
        p = f"{SHARED}layers.{i}."
        full = is_full(cfg, i)
        cos, sin = rope[full]
        r = attend(x, w[p + "qkv"], w[p + "self_attn.o_proj.weight"], w[p + "input_layernorm.weight"],
                         w[p + "self_attn.q_norm.weight"], w[p + "self_attn.k_norm.weight"], w[p + "post_attention_layernorm.weight"],
                         cos, sin, bias_full if full else bias_sliding, cfg["heads"],
                         cfg["kv_heads_full"] if full else cfg["kv_heads"], full, eps)
        flat = r.reshape(b * t, h)
        prob, ew, chosen = route(flat, w[p + "router.proj.weight"], w[p + "router.scale"],
                                       w[p + "router.per_expert_scale"], cfg["top_k"], eps)
        if balance is not None:
            share = torch.zeros(cfg["experts"]).index_add_(0, chosen.reshape(-1), torch.ones(chosen.numel())) / chosen.numel()
            balance.append((share * prob.mean(0)).sum() * cfg["experts"])
        m, y = before_experts(r, w[p + "pre_feedforward_layernorm.weight"], w[p + "gu"], w[p + "mlp.down_proj.weight"],
                            w[p + "post_feedforward_layernorm_1.weight"], w[p + "pre_feedforward_layernorm_2.weight"], eps)
        e = Experts.apply(y.reshape(b * t, h), ew, chosen, w[p + "experts.gate_up_proj"], w[p + "experts.down_proj"]).view(b, t, h)
        enc = w[f"model.encoder.language_model.layers.{i}.layer_scalar"]
        scalar = torch.where(canvas_mask, w[p + "layer_scalar"], enc).expand(b, t).contiguous()
        x = after_experts(r, m, e, w[p + "post_feedforward_layernorm_2.weight"], w[p + "post_feedforward_layernorm.weight"], scalar, eps)
    return rms(x, w[SHARED + "norm.weight"], eps)


def image_groups(cfg, tokens):
    """The number of the picture that each token [B,T] is a part of, -1 for text: runs of the placeholder."""
    image = tokens == cfg["vocab"] - 1
    begins = image & ~F.pad(image, (1, 0))[:, :-1]
    return torch.where(image, begins.cumsum(1), -1)


def masks(cfg, tokens, prompt_len, canvases, canvas):
    """Additive masks [B,T,T] (sliding, full) for rows [prefix | canvas * canvases].

    tokens [B,P]: the prefixes, padded; prompt_len [B]: how many of their tokens the canvases may see. The tokens
    of one picture see each other, wherever they stand.
    """
    prefix_cols = tokens.shape[1]
    t = prefix_cols + canvases * canvas
    i = torch.arange(t)
    isc = i >= prefix_cols
    block = torch.where(isc, (i - prefix_cols) // canvas, -1)
    q, k = i[:, None], i[None, :]
    causal = (~isc[:, None]) & (~isc[None, :]) & (k <= q)
    own = isc[:, None] & (block[:, None] == block[None, :])
    group = F.pad(image_groups(cfg, tokens), (0, canvases * canvas), value=-1)
    together = (group[:, :, None] == group[:, None, :]) & (group >= 0)[:, :, None]
    base = (causal | own)[None] | together
    sees = (isc[:, None] & ~isc[None, :])[None] & (k[None] < prompt_len[:, None, None])
    full = base | sees
    win = (causal & (q - k < cfg["window"])) | own
    sliding = win[None] | together | (sees & (k[None] >= prompt_len[:, None, None] - (cfg["window"] - 1)))
    neg = torch.tensor(-1e9)
    zero = torch.tensor(0.0)
    return torch.where(sliding, zero, neg), torch.where(full, zero, neg)

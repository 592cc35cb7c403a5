"""The vision tower of the published class, lean: pictures of one size in one batch, plain PyTorch.

    patches -> + place -> layers, every patch sees every other -> pooling -> projector -> soft tokens

The tower is small beside the text layers, so nothing here is fused.
"""
import torch
import torch.nn.functional as F

import model as M
import pictures as P

TOWER = "model.encoder.vision_tower."
PROJECTOR = "model.encoder.embed_vision.embedding_projection.weight"


def shapes(cfg):
    """As model.shapes: name -> (shape, initial value)."""
    v = cfg["vision"]
    h, i, d = v["hidden"], v["intermediate"], v["heads"] * v["head_dim"]
    out = {PROJECTOR: ((cfg["hidden"], h), h ** -0.5),
           TOWER + "patch_embedder.input_proj.weight": ((h, 3 * v["patch"] ** 2), (3 * v["patch"] ** 2) ** -0.5),
           TOWER + "patch_embedder.position_embedding_table": ((2, v["positions"], h), ("fill", 0.0)),
           TOWER + "std_bias": ((h,), ("fill", 0.0)),
           TOWER + "std_scale": ((h,), ("fill", 1.0))}
    for j in range(v["layers"]):
        p = f"{TOWER}encoder.layers.{j}."
        for n, s in (("q", (d, h)), ("k", (d, h)), ("v", (d, h)), ("o", (h, d))):
            out[f"{p}self_attn.{n}_proj.linear.weight"] = (s, s[1] ** -0.5)
        for n in "qk":
            out[f"{p}self_attn.{n}_norm.weight"] = ((v["head_dim"],), ("fill", v["head_dim"] ** -0.25))
        for n, s in (("gate", (i, h)), ("up", (i, h)), ("down", (h, i))):
            out[f"{p}mlp.{n}_proj.linear.weight"] = (s, s[1] ** -0.5)
        for n, x in (("input", 1.0), ("post_attention", 0.4), ("pre_feedforward", 1.0), ("post_feedforward", 0.4)):
            out[f"{p}{n}_layernorm.weight"] = ((h,), ("fill", x))
    return out


def patches(image, size):
    """uint8 [N,H,W,3] -> values 0..1 [N, patches, size*size*3] and (x, y) of every patch [patches, 2]."""
    n, h, w, _ = image.shape
    gh, gw = h // size, w // size
    values = image.view(n, gh, size, gw, size, 3).permute(0, 1, 3, 2, 4, 5).reshape(n, gh * gw, size * size * 3)
    y, x = torch.meshgrid(torch.arange(gh), torch.arange(gw), indexing="ij")
    return values.float() / 255, torch.stack((x.reshape(-1), y.reshape(-1)), 1)


def rope(places, head_dim, theta=100.0):
    """cos, sin [patches, 2, head_dim/4]: the first half of a head turns by x, the second by y."""
    quarter = head_dim // 4
    f = theta ** (-torch.arange(quarter, dtype=torch.float32) / quarter)
    a = places[:, :, None].float() * f
    return a.cos(), a.sin()


def turn(x, cos, sin):
    """x [N, patches, heads, d]: the half-split rotation inside each half of a head."""
    shape = x.shape
    x = x.view(*shape[:-1], 2, 2, shape[-1] // 4)
    a, b = x[..., 0, :], x[..., 1, :]
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -2).view(shape)


def soft_tokens(cfg, w, image):
    """uint8 [N,H,W,3] -> [N, soft tokens, hidden of the text model]."""
    v, eps = cfg["vision"], cfg["eps"]
    dtype = w[PROJECTOR].dtype
    values, places = patches(image, v["patch"])
    n, count, _ = values.shape
    table = w[TOWER + "patch_embedder.position_embedding_table"]
    x = F.linear((2 * (values - 0.5)).to(dtype), w[TOWER + "patch_embedder.input_proj.weight"])
    x = x + table[0][places[:, 0]] + table[1][places[:, 1]]
    cos, sin = rope(places, v["head_dim"])
    for j in range(v["layers"]):
        p = f"{TOWER}encoder.layers.{j}."
        y = M.rms(x, w[p + "input_layernorm.weight"], eps)
        q, k, u = (F.linear(y, w[f"{p}self_attn.{a}_proj.linear.weight"]).view(n, count, v["heads"], v["head_dim"]) for a in "qkv")
        q = turn(M.rms(q, w[p + "self_attn.q_norm.weight"], eps), cos, sin).transpose(1, 2)
        k = turn(M.rms(k, w[p + "self_attn.k_norm.weight"], eps), cos, sin).transpose(1, 2)
        u = M.rms(u, None, eps).transpose(1, 2)
        o = F.scaled_dot_product_attention(q, k, u, scale=1.0).transpose(1, 2).reshape(n, count, -1)
        x = M.add_rms(x, F.linear(o, w[p + "self_attn.o_proj.linear.weight"]), w[p + "post_attention_layernorm.weight"], eps)
        y = M.rms(x, w[p + "pre_feedforward_layernorm.weight"], eps)
        y = F.gelu(F.linear(y, w[p + "mlp.gate_proj.linear.weight"]), approximate="tanh") * F.linear(y, w[p + "mlp.up_proj.linear.weight"])
        x = M.add_rms(x, F.linear(y, w[p + "mlp.down_proj.linear.weight"]), w[p + "post_feedforward_layernorm.weight"], eps)
    k = v["pooling"]
    gh, gw = image.shape[1] // v["patch"], image.shape[2] // v["patch"]
    pooled = x.view(n, gh // k, k, gw // k, k, -1).float().mean((2, 4)).flatten(1, 2) * v["hidden"] ** 0.5
    pooled = ((pooled - w[TOWER + "std_bias"]) * w[TOWER + "std_scale"]).to(dtype)
    return F.linear(M.rms(pooled, None, eps), w[PROJECTOR])


def embed(cfg, w, tokens, numbers):
    """Embedded prefix [B,T,H] of rows with the picture of that number, or None, in each row."""
    x = M.embed(w, tokens)
    rows = [i for i, number in enumerate(numbers) if number is not None]
    if not rows:
        return x
    image = torch.stack([torch.from_numpy(P.pixels(P.picture(numbers[i]))) for i in rows])
    soft = soft_tokens(cfg, w, image).to(x.dtype)
    where = torch.zeros_like(tokens, dtype=torch.bool)
    where[rows] = tokens[rows] == cfg["vocab"] - 1
    return x.masked_scatter(where.unsqueeze(-1), soft)

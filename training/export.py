"""Writes a checkpoint in the published format and checks it:  python export.py WORK STATE OUT

STATE: WORK/stage1.pt or WORK/stage2.pt. The averaged weights are rounded to bf16; transformers' own class loads the
result and must give the same logits as the lean model, causal and canvas, without and with self-conditioning. A fourth
argument `unchecked` leaves that out, for a look in between.
"""
import json
import os
import shutil
import sys

import torch
from safetensors.torch import save_file

import model as M
import sampler as S
from train import load_config


def published_config(cfg):
    m = cfg["model"]
    v = m["vocab"]
    return {
        "architectures": ["DiffusionGemmaForBlockDiffusion"], "model_type": "diffusion_gemma", "dtype": "bfloat16",
        "canvas_length": cfg["canvas"], "boi_token_id": v - 3, "eoi_token_id": v - 2, "image_token_id": v - 1,
        "eos_token_id": [1, 106], "initializer_range": 0.02, "tie_word_embeddings": True,
        "text_config": {
            "model_type": "diffusion_gemma_text", "vocab_size": v, "hidden_size": m["hidden"], "intermediate_size": m["dense"],
            "num_hidden_layers": m["layers"], "num_attention_heads": m["heads"], "num_key_value_heads": m["kv_heads"],
            "num_global_key_value_heads": m["kv_heads_full"], "head_dim": m["head_dim"], "global_head_dim": m["head_dim_full"],
            "layer_types": ["full_attention" if M.is_full(m, i) else "sliding_attention" for i in range(m["layers"])],
            "sliding_window": m["window"], "num_experts": m["experts"], "top_k_experts": m["top_k"], "moe_intermediate_size": m["expert_dim"],
            "rms_norm_eps": m["eps"], "final_logit_softcapping": m["softcap"], "hidden_activation": "gelu_pytorch_tanh",
            "attention_bias": False, "attention_dropout": 0.0, "use_bidirectional_attention": "vision", "max_position_embeddings": 4096,
            "tie_word_embeddings": True, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1, "initializer_range": 0.02,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0}}},
        "vision_config": {
            "model_type": "gemma4_vision", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
            "num_key_value_heads": 2, "head_dim": 16, "patch_size": 16, "pooling_kernel_size": 3, "position_embedding_size": 128,
            "rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "attention_dropout": 0.0,
            "max_position_embeddings": 131072, "initializer_range": 0.02, "standardize": True, "use_clipped_linears": False,
            "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0}},
    }


def generation_config(cfg):
    g = cfg["generation"]
    return {"bos_token_id": 2, "pad_token_id": 0, "eos_token_id": [1, 106, 50], "max_new_tokens": g["max_new_tokens"],
            "max_denoising_steps": g["max_denoising_steps"], "t_min": g["t_min"], "t_max": g["t_max"],
            "stability_threshold": g["stability_threshold"], "confidence_threshold": g["confidence_threshold"],
            "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": g["entropy_bound"]}}


def untrained_vision(cfg, config):
    """A placeholder tower, so that the published class finds every tensor it wants."""
    v = config["vision_config"]
    h, i, d = v["hidden_size"], v["intermediate_size"], v["num_attention_heads"] * v["head_dim"]
    g = torch.Generator().manual_seed(cfg["seed"])
    r = lambda *s: (torch.randn(*s, generator=g) * 0.02).bfloat16()
    one = lambda n: torch.ones(n).bfloat16()
    e = "model.encoder."
    out = {e + "embed_vision.embedding_projection.weight": r(cfg["model"]["hidden"], h),
           e + "vision_tower.patch_embedder.input_proj.weight": r(h, 3 * v["patch_size"] ** 2),
           e + "vision_tower.patch_embedder.position_embedding_table": r(2, v["position_embedding_size"], h),
           e + "vision_tower.std_bias": torch.zeros(h).bfloat16(), e + "vision_tower.std_scale": one(h)}
    for j in range(v["num_hidden_layers"]):
        p = f"{e}vision_tower.encoder.layers.{j}."
        for n, s in (("q", (d, h)), ("k", (d, h)), ("v", (d, h)), ("o", (h, d))):
            out[p + f"self_attn.{n}_proj.linear.weight"] = r(*s)
        out[p + "self_attn.q_norm.weight"] = one(v["head_dim"])
        out[p + "self_attn.k_norm.weight"] = one(v["head_dim"])
        for n, s in (("gate", (i, h)), ("up", (i, h)), ("down", (h, i))):
            out[p + f"mlp.{n}_proj.linear.weight"] = r(*s)
        for n in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            out[p + n + "_layernorm.weight"] = one(h)
    return out


def check(cfg, folder, tensors):
    """Largest difference between the published class and the lean model, both in fp32 on the bf16 weights."""
    from transformers import DiffusionGemmaForBlockDiffusion, DynamicCache

    ref, info = DiffusionGemmaForBlockDiffusion.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    ref.eval()
    m, n = cfg["model"], cfg["canvas"]
    tables = M.Tables(m)
    w = M.cast({k: v.float() for k, v in tensors.items() if k in M.shapes(m)}, torch.float32)
    w["scale"] = m["hidden"] ** 0.5  # in fp32 the class does not round it to bf16
    g = torch.Generator().manual_seed(1)
    worst = {}
    with torch.no_grad():
        for length in (5, 127, 128, 170):
            ids = torch.randint(m["vocab"] - 3, (1, length), generator=g)
            ids[0, 0] = 2
            canvas = torch.randint(m["vocab"] - 3, (1, n), generator=g)
            cache = DynamicCache(config=ref.config.get_text_config())
            enc = ref.model.encoder(input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=cache)
            one = torch.tensor([length])
            bs, bf = M.masks(m, one, one, length, 1, n)
            pos = torch.arange(length + n)[None]
            iscanvas = torch.arange(length + n) >= length
            soft, sc = None, None
            for turn in ("plain", "conditioned"):
                x = torch.cat((M.embed(w, ids), M.embed_canvas(m, w, canvas, soft)), 1)
                h = M.forward(m, w, tables, x, pos, iscanvas, bs, bf)
                mine = S.logits_of(m, w, h)
                out = ref(decoder_input_ids=canvas, past_key_values=cache, self_conditioning_logits=sc).logits
                worst[f"canvas {turn} {length}"] = (mine[:, length:] - out).abs().max().item()
                sc = out / 0.7
                soft = torch.softmax(sc, -1) @ w[M.SHARED + "embed_tokens.weight"]
            causal = S.logits_of(m, w, enc.last_hidden_state)
            worst[f"causal {length}"] = (mine[:, :length] - causal).abs().max().item()
    print(json.dumps({k: float(f"{v:.2g}") for k, v in worst.items()}))
    assert max(worst.values()) < 2e-3, "the export differs from the published class"


def main():
    work, state, out = sys.argv[1:4]
    cfg = load_config()
    torch.set_num_threads(cfg["threads"])
    st = torch.load(state)
    os.makedirs(out, exist_ok=True)
    config = published_config(cfg)
    tensors = {n: st["average"][n].detach().to(torch.bfloat16).contiguous() for n in M.shapes(cfg["model"])}
    save_file({**tensors, **untrained_vision(cfg, config)}, os.path.join(out, "model.safetensors"), metadata={"format": "pt"})
    for name, content in (("config.json", config), ("generation_config.json", generation_config(cfg))):
        with open(os.path.join(out, name), "w") as f:
            json.dump(content, f, indent=2)
            f.write("\n")
    shutil.copyfile(os.path.join(work, "tokenizer.json"), os.path.join(out, "tokenizer.json"))
    if sys.argv[4:] != ["unchecked"]:
        check(cfg, out, tensors)
    print("step", st["step"], "bytes", os.path.getsize(os.path.join(out, "model.safetensors")))


if __name__ == "__main__":
    main()

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
import pictures as P
import sampler as S
import vision as V
from train import load_config, shapes


def published_config(cfg):
    m = cfg["model"]
    v, t = m["vocab"], m["vision"]
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
            "model_type": "gemma4_vision", "hidden_size": t["hidden"], "intermediate_size": t["intermediate"],
            "num_hidden_layers": t["layers"], "num_attention_heads": t["heads"], "num_key_value_heads": t["heads"],
            "head_dim": t["head_dim"], "patch_size": t["patch"], "pooling_kernel_size": t["pooling"],
            "position_embedding_size": t["positions"], "rms_norm_eps": m["eps"], "hidden_activation": "gelu_pytorch_tanh",
            "attention_bias": False, "attention_dropout": 0.0, "max_position_embeddings": 131072, "initializer_range": 0.02,
            "standardize": True, "use_clipped_linears": False, "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0}},
    }


def generation_config(cfg):
    g = cfg["generation"]
    return {"bos_token_id": 2, "pad_token_id": 0, "eos_token_id": [1, 106, 50], "max_new_tokens": g["max_new_tokens"],
            "max_denoising_steps": g["max_denoising_steps"], "t_min": g["t_min"], "t_max": g["t_max"],
            "stability_threshold": g["stability_threshold"], "confidence_threshold": g["confidence_threshold"],
            "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": g["entropy_bound"]}}


def check(cfg, folder, tensors):
    """Largest difference between the published class and the lean model, both in fp32 on the bf16 weights."""
    import published

    ref, info = published.load(folder)
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    m, n = cfg["model"], cfg["canvas"]
    tables = M.Tables(m)
    w = M.cast({k: v.float() for k, v in tensors.items()}, torch.float32)
    soft = (P.SIDE // (m["vision"]["patch"] * m["vision"]["pooling"])) ** 2
    g = torch.Generator().manual_seed(1)
    worst = {}
    with torch.no_grad():
        for length, picture in ((5, None), (127, None), (128, None), (170, None), (90, 3), (170, 4)):
            ids = torch.randint(m["vocab"] - 3, (1, length), generator=g)
            ids[0, 0] = 2
            if picture is not None:
                ids[0, 6: 6 + soft] = m["vocab"] - 1
            canvas = torch.randint(m["vocab"] - 3, (1, n), generator=g)
            hidden, cache = published.encode(ref, ids[0].tolist(), picture)
            bs, bf = M.masks(m, ids, torch.tensor([length]), 1, n)
            pos = torch.arange(length + n)[None]
            iscanvas = torch.arange(length + n) >= length
            soft_canvas, sc = None, None
            at = f"{length}, picture" if picture is not None else length
            for turn in ("plain", "conditioned"):
                x = torch.cat((V.embed(m, w, ids, [picture]), M.embed_canvas(m, w, canvas, soft_canvas)), 1)
                h = M.forward(m, w, tables, x, pos, iscanvas, bs, bf)
                mine = S.logits_of(m, w, h)
                out = ref(decoder_input_ids=canvas, past_key_values=cache, self_conditioning_logits=sc).logits
                worst[f"canvas {turn} {at}"] = (mine[:, length:] - out).abs().max().item()
                sc = out / 0.7
                soft_canvas = torch.softmax(sc, -1) @ w[M.SHARED + "embed_tokens.weight"]
            worst[f"causal {at}"] = (mine[:, :length] - published.logits(ref, hidden)).abs().max().item()
    print(json.dumps({k: float(f"{v:.2g}") for k, v in worst.items()}))
    assert max(worst.values()) < 2e-3, "the export differs from the published class"


def main():
    work, state, out = sys.argv[1:4]
    cfg = load_config()
    torch.set_num_threads(cfg["threads"])
    st = torch.load(state)
    os.makedirs(out, exist_ok=True)
    config = published_config(cfg)
    tensors = {n: st["average"][n].detach().to(torch.bfloat16).contiguous() for n in shapes(cfg["model"])}
    save_file(tensors, os.path.join(out, "model.safetensors"), metadata={"format": "pt"})
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

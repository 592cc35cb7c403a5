"""Hugging Face transformers on nightshift-mid-1: the peer of `make bench`.

    bench/peer.py DIR          writes the weights, once, and a tokenizer for them

nightshift-mid-1 is a synthetic DiffusionGemma with the proportions of the 26B
model: five sliding layers to a full one, head size doubled and key heads
quartered on full layers, a fourth of the hidden size per expert, tied
embedding; random weights from a fixed seed. compare.py imports Peer and times
it against bench/engine.
"""
import json
import os
import pathlib
import sys
import time

import torch
from transformers import (
    DiffusionGemmaConfig,
    DiffusionGemmaForBlockDiffusion,
    DiffusionGemmaTextConfig,
    DynamicCache,
    Gemma4VisionConfig,
)

SEED = 20261130
CANVAS = 256
PROMPT = 1024
TEXT = dict(
    vocab_size=32768, hidden_size=512, intermediate_size=384,
    moe_intermediate_size=128, num_hidden_layers=12, num_attention_heads=4,
    num_key_value_heads=2, head_dim=128, global_head_dim=256,
    num_global_key_value_heads=1, num_experts=64, top_k_experts=4,
    sliding_window=256, max_position_embeddings=8192,
    final_logit_softcapping=30.0, hidden_activation="gelu_pytorch_tanh",
    use_bidirectional_attention=None, attention_bias=False,
    pad_token_id=0, eos_token_id=1, bos_token_id=2,
)
EXPERTS = ("eager", "batched_mm", "grouped_mm")
ENTROPY_BOUND = 0.1


def build():
    torch.manual_seed(SEED)
    # The class wants a vision tower; nothing here uses it.
    vision = Gemma4VisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16,
        position_embedding_size=64)
    config = DiffusionGemmaConfig(
        text_config=DiffusionGemmaTextConfig(**TEXT), vision_config=vision,
        canvas_length=CANVAS, image_token_id=5, boi_token_id=6,
        eoi_token_id=7)
    config._attn_implementation = "sdpa"
    config.text_config._attn_implementation = "sdpa"
    model = DiffusionGemmaForBlockDiffusion(config)
    return model.float().eval()


def write_tokenizer(path):
    """BPE with byte fallback and no merges: ids count here, not text."""
    special = {0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>", 4: "<mask>",
               5: "<|image|>", 6: "<|image>", 7: "<image|>",
               46: "<|tool>", 47: "<tool|>", 48: "<|tool_call>",
               49: "<tool_call|>", 50: "<|tool_response>",
               51: "<tool_response|>", 52: "<|\"|>", 98: "<|think|>",
               100: "<|channel>", 101: "<channel|>", 105: "<|turn>",
               106: "<turn|>"}
    vocab = {text: i for i, text in special.items()}
    free = (i for i in range(TEXT["vocab_size"]) if i not in special)
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = next(free)
    for code in [*range(0x21, 0x7F), 0x0A, 0x2581]:
        vocab[chr(code)] = next(free)
    for i in free:
        vocab[f"w{i}"] = i
    json.dump({
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": text, "single_word": False, "lstrip": False,
             "rstrip": False, "normalized": False, "special": True}
            for i, text in special.items()],
        "normalizer": {"type": "Replace", "pattern": {"String": " "},
                       "content": "\u2581"},
        "pre_tokenizer": {"type": "Split", "pattern": {"String": " "},
                          "behavior": "MergedWithPrevious", "invert": False},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u2581"},
             "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": True,
                  "byte_fallback": True, "vocab": vocab, "merges": []},
    }, open(path, "w", encoding="utf-8"))


def export(directory):
    """Writes the checkpoint unless it is there; whole or not at all."""
    directory = pathlib.Path(directory)
    if (directory / "tokenizer.json").exists():
        return
    build().save_pretrained(directory)
    write_tokenizer(directory / "tokenizer.json.new")
    os.rename(directory / "tokenizer.json.new", directory / "tokenizer.json")


class Peer:
    """The model at its best: fp32, sdpa, the expert code that is fastest for
    the operation at hand, and no more sampler than the rules need."""

    def __init__(self, threads):
        torch.set_num_threads(threads)
        self.model = build()
        self.random = torch.Generator().manual_seed(1)

    def use(self, experts):
        self.model.set_experts_implementation(experts)

    def tokens(self, rows, n):
        return torch.randint(256, TEXT["vocab_size"], (rows, n),
                             generator=self.random)

    @torch.inference_mode()
    def encode(self, ids, cache=None):
        if cache is None:
            cache = DynamicCache(config=self.model.config.text_config)
        self.model.model.encoder(input_ids=ids, past_key_values=cache)
        return cache

    @torch.inference_mode()
    def step(self, canvas, cache, logits, temperature):
        """One denoise step with its sampler; the new canvas and logits."""
        out = self.model(decoder_input_ids=canvas, past_key_values=cache,
                         self_conditioning_logits=logits).logits
        z = out.div_(temperature)
        # The reference builds this three times over; once is enough.
        log_p = torch.log_softmax(z, -1)
        p = log_p.exp()
        entropy = -(p * log_p).sum(-1)
        sampled = torch.multinomial(p.view(-1, p.shape[-1]), 1)
        z.argmax(-1)
        low, order = entropy.sort(-1)
        keep = torch.zeros_like(low, dtype=torch.bool).scatter(
            -1, order, low.cumsum(-1) - low <= ENTROPY_BOUND)
        noise = torch.randint(0, TEXT["vocab_size"], canvas.shape,
                              generator=self.random)
        return torch.where(keep, sampled.view(canvas.shape), noise), z

    def time_prefill(self):
        ids = self.tokens(1, PROMPT)
        start = time.perf_counter()
        self.encode(ids)
        return (time.perf_counter() - start) * 1e3

    def open_denoise(self, batch, prompt=PROMPT):
        """Prompts encoded and a first step taken, which has no soft rows."""
        cache = self.encode(self.tokens(batch, prompt))
        canvas, z = self.step(self.tokens(batch, CANVAS), cache, None, 0.8)
        return [cache, canvas, z]

    def time_denoise(self, state):
        start = time.perf_counter()
        state[1], state[2] = self.step(state[1], state[0], state[2], 0.6)
        return (time.perf_counter() - start) * 1e3

    def time_jobs(self, steps, batch):
        """Whole jobs, `batch` at a time; a batch ends with its last canvas,
        as the reference's generate() has it."""
        start = time.perf_counter()
        for first in range(0, len(steps), batch):
            n = len(steps[first:first + batch])
            cache = self.encode(self.tokens(n, PROMPT))
            canvas, z = self.tokens(n, CANVAS), None
            for _ in range(max(steps[first:first + batch])):
                canvas, z = self.step(canvas, cache, z, 0.6)
        return (time.perf_counter() - start) * 1e3


if __name__ == "__main__":
    export(sys.argv[1])

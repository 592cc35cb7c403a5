#!/usr/bin/env python3
"""Pictures a second: nightshift's vision path against transformers'.

    bench/images.py BUILD_DIR

Decoded pictures of 1024 by 768 to 266 soft tokens each: resize, patches, tower
and projector. The two take turns (A B A B A) on the same weights and pixels;
the peer one by one or in batches, whichever is faster here, with sdpa. The last
line printed is
    ratio: images X
of the minima, and the exit status is 1 below the floor.
"""
import json
import os
import pathlib
import subprocess
import sys
import time

import numpy
import torch
import transformers
from transformers import (
    DiffusionGemmaConfig,
    DiffusionGemmaForBlockDiffusion,
    DiffusionGemmaTextConfig,
    Gemma4VisionConfig,
)
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    Gemma4ImageProcessorPil,
)

ROUNDS = 6   # of the peer; ours runs between them
N = 2        # pictures a turn
WIDTH, HEIGHT, TOKENS = 1024, 768, 280
FLOOR = 1.2  # measured: 1.32 to 1.41, nothing else running, a Xeon with AMX
SEED = 20261201


def build():
    """A tower with the released one's proportions, a text model of no matter."""
    torch.manual_seed(SEED)
    vision = Gemma4VisionConfig(
        hidden_size=288, intermediate_size=1076, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=4, head_dim=72,
        patch_size=16, pooling_kernel_size=3, position_embedding_size=10240,
        standardize=True)
    text = DiffusionGemmaTextConfig(
        vocab_size=512, hidden_size=704, intermediate_size=64,
        moe_intermediate_size=32, num_hidden_layers=6, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, global_head_dim=64,
        num_global_key_value_heads=1, num_experts=2, top_k_experts=1,
        sliding_window=64, max_position_embeddings=4096, pad_token_id=0,
        eos_token_id=1, bos_token_id=2)
    config = DiffusionGemmaConfig(
        text_config=text, vision_config=vision, canvas_length=32,
        image_token_id=5, boi_token_id=6, eoi_token_id=7)
    for part in (config, config.text_config, config.vision_config):
        part._attn_implementation = "sdpa"
    return DiffusionGemmaForBlockDiffusion(config).float().eval()


def pixels(number):
    """As bench/images.c has it."""
    i = numpy.arange(WIDTH * HEIGHT * 3, dtype=numpy.uint64)
    noise = (i * 2654435761 & 0xFFFFFFFF) >> 28
    value = i // 3 % WIDTH * 7 + i // 3 // WIDTH * 5 + number * 31 + noise
    return ((value >> 2) & 255).astype(numpy.uint8).reshape(HEIGHT, WIDTH, 3)


class Peer:
    def __init__(self, model):
        self.encoder = model.model.encoder
        self.processor = Gemma4ImageProcessorPil(
            patch_size=16, pooling_kernel_size=3, max_soft_tokens=TOKENS)
        self.next = 0

    @torch.inference_mode()
    def time(self, batch):
        """Milliseconds for N pictures, and the soft tokens of one."""
        spent, n_tokens = 0.0, 0
        for first in range(0, N, batch):
            pictures = [pixels(self.next + i) for i in range(batch)]
            self.next += batch
            start = time.perf_counter()
            inputs = self.processor(pictures, return_tensors="pt")
            soft = self.encoder.get_image_features(
                inputs["pixel_values"],
                inputs["image_position_ids"]).pooler_output
            spent += time.perf_counter() - start
            n_tokens = soft.reshape(-1, soft.shape[-1]).shape[0] // batch
        return spent * 1e3, n_tokens


def main():
    build_dir = sys.argv[1]
    model_dir = pathlib.Path(f"{build_dir}/bench/nightshift-eye-1")
    threads = min(2, len(os.sched_getaffinity(0)))
    torch.set_num_threads(threads)
    model = build()
    if not (model_dir / "ready").exists():
        model.save_pretrained(model_dir)
        (model_dir / "ready").touch()
    peer = Peer(model)
    ours = subprocess.Popen(
        [f"{build_dir}/bench/images", model_dir, str(threads)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def answer():
        line = ours.stdout.readline()
        if not line:
            sys.exit("bench: images has died")
        return json.loads(line)

    def ask():
        ours.stdin.write(f"encode {N} {WIDTH} {HEIGHT} {TOKENS}\n")
        ours.stdin.flush()
        return answer()

    arithmetic = answer()["arithmetic"]
    took = {batch: min(peer.time(batch)[0] for _ in range(2))
            for batch in (1, N)}
    batch = min(took, key=took.get)
    ask()
    a, b = [], []
    for turn in range(ROUNDS):
        ms, tokens = peer.time(batch)
        a.append(ms)
        if turn < ROUNDS - 1:
            got = ask()
            b.append(got["ms"])
            if got["tokens"] != tokens:
                sys.exit(f"bench: {got['tokens']} soft tokens, the peer has "
                         f"{tokens}")
    ratio = min(a) / min(b)
    print(f"  images       peer {N / min(a) * 1e3:6.2f}/s in batches of "
          f"{batch}   ours {N / min(b) * 1e3:6.2f}/s ({arithmetic})   "
          f"{tokens} soft tokens each, {threads} threads")
    with open(f"{build_dir}/bench/results.jsonl", "a",
              encoding="utf-8") as log:
        log.write(json.dumps(dict(
            kind="images", at=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            load=os.getloadavg()[0], torch=torch.__version__,
            transformers=transformers.__version__, pictures=N, peer_ms=a,
            our_ms=b, ratio=ratio)) + "\n")
    print(f"ratio: images {ratio:.2f}")
    return 0 if ratio >= FLOOR else 1


if __name__ == "__main__":
    sys.exit(main())

"""The soft tokens that transformers gives for a picture on a clipped tower.

    make_checkpoint clipped DIR && python tests/tools/clipped.py DIR > \\
        tests/engine/golden/clipped_soft.json

Needs the Python environment of `make bench`. The picture is that of
tests/engine/test_vision.c: made by a formula, 36 by 24.
"""
import json
import sys

import torch
from transformers import DiffusionGemmaForBlockDiffusion

WIDTH, HEIGHT, PATCH = 36, 24, 4

pixels = torch.tensor([[[((y * WIDTH + x) * 3 + c) * 2654435761 % 2**32 >> 24
                         for c in range(3)] for x in range(WIDTH)]
                       for y in range(HEIGHT)])
grid = pixels.view(HEIGHT // PATCH, PATCH, WIDTH // PATCH, PATCH, 3)
patches = grid.permute(0, 2, 1, 3, 4).reshape(1, -1, PATCH * PATCH * 3) / 255
place = torch.tensor([[[x, y] for y in range(HEIGHT // PATCH)
                       for x in range(WIDTH // PATCH)]])
model = DiffusionGemmaForBlockDiffusion.from_pretrained(
    sys.argv[1], dtype=torch.float32).eval()
limits = [n for n, _ in model.named_buffers() if "input_min" in n]
assert len(limits) == 7, limits
with torch.inference_mode():
    soft = model.model.encoder.get_image_features(
        patches.float(), place).pooler_output
soft = soft.reshape(-1, soft.shape[-1])
json.dump([[float(f"{v:.8g}") for v in row] for row in soft.tolist()],
          sys.stdout)

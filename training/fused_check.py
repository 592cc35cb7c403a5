"""Compares the fused parts with the PyTorch operations: one batch's loss and all gradients, both in bf16.

    python fused_check.py WORK
"""
import sys
import time

import torch

import model as M
import train as T


def main():
    cfg = T.load_config()
    torch.set_num_threads(1)
    m = cfg["model"]
    params = M.create(T.shapes(m), 5)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for n, p in params.items():
            if p.dim() == 1:
                p.mul_(1 + 0.2 * torch.randn(p.shape, generator=g))
    data = T.Data(sys.argv[1], {"image": 1.0}, 3, cfg["canvas"])  # pictures, so that every weight takes part
    part = data.next(2 * cfg["canvas"], 2048)
    tables = M.Tables(m)
    results = []
    for mode in ("plain", "fused"):
        if mode == "fused":
            M.load_fused()
            assert M.LIB is not None, "this processor has no AVX-512 with bf16"
        start = time.process_time()
        out = T.batch_loss(cfg, M.cast(params, torch.bfloat16), tables, part, 2, torch.Generator().manual_seed(2))
        out[0].backward()
        print(mode, [round(x.item(), 4) for x in out[:4]], "cpu seconds", round(time.process_time() - start, 2))
        results.append({n: p.grad.clone() for n, p in params.items()})
        for p in params.values():
            p.grad = None
    cos = {n: torch.nn.functional.cosine_similarity(a.flatten(), results[1][n].flatten(), dim=0).item() for n, a in results[0].items()}
    size = {n: (results[1][n].norm() / a.norm()).item() for n, a in results[0].items() if a.norm() > 0}
    low = sorted(cos.items(), key=lambda x: x[1])[:6]
    print("lowest agreement of gradients", [(n, round(c, 4), round(size[n], 3)) for n, c in low])
    # routing choices flip between two roundings, so single gradients differ a little
    assert sum(cos.values()) / len(cos) > 0.97


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""nightshift against transformers and against the machine, in one run.

    bench/compare.py BUILD_DIR

The two take turns (A B A B A) on the same weights, with the same number of
tokens and steps; the ratio is that of the minima, and medians stand beside it.
Every measurement becomes a JSON line in BUILD_DIR/bench/results.jsonl. The
last line printed is
    ratio: prefill X denoise-b1 X denoise-b8 X job-b8 X job-b16 X limit-share X
and the exit status is 1 if a ratio is below its floor.
"""
import json
import os
import statistics
import subprocess
import sys
import time

import torch
import transformers

from peer import CANVAS, EXPERTS, PROMPT, TEXT, Peer, export

ROUNDS = 3          # of the peer; ours runs between them
JOB_ROUNDS = 1      # a round of the peer's jobs takes minutes
FLOORS = {"prefill": 1.5, "denoise-b1": 1.5, "denoise-b8": 1.5,
          "job-b8": 2.0, "job-b16": 2.0}
IN_FLIGHT = 8
MORE = 16           # jobs in flight, once more
# Denoise steps of the jobs' canvases, in turn; bench/engine.c has the same list.
STEPS = [6, 13, 9, 30, 8, 12, 10, 16, 7, 14, 27, 9, 11, 7, 17, 12]


class Engine:
    """bench/engine behind its pipe."""

    def __init__(self, build, model, threads, *more):
        self.process = subprocess.Popen(
            [f"{build}/bench/engine", model, str(threads), *more],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.revision = self.answer()["engine_rev"]

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit("bench: the engine has died")
        return json.loads(line)

    def close(self):
        self.process.stdin.close()
        self.process.wait()

    def ask(self, command):
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.answer()


def denoise_gflop(prefix):
    """Multiply-adds, doubled, of one canvas's denoise step."""
    t, h = TEXT, TEXT["hidden_size"]
    q, total = t["num_attention_heads"], 0
    for layer in range(t["num_hidden_layers"]):
        full = (layer + 1) % 6 == 0
        d = t["global_head_dim"] if full else t["head_dim"]
        kv = (t["num_global_key_value_heads"] if full
              else t["num_key_value_heads"])
        span = CANVAS + (prefix if full
                         else min(prefix, t["sliding_window"] - 1))
        total += 2 * h * d * (2 * q + (1 if full else 2) * kv)
        total += 6 * h * (t["intermediate_size"] + t["top_k_experts"] *
                          t["moe_intermediate_size"])
        total += 2 * h * t["num_experts"] + 4 * q * d * span
    total += 6 * h * t["intermediate_size"]  # self-conditioning
    total += 4 * h * t["vocab_size"]         # head and soft embedding
    return total * CANVAS / 1e9


def main():
    build = sys.argv[1]
    model = f"{build}/bench/nightshift-mid-1"
    # The peer is measured with two threads where there are two or more.
    threads = min(2, len(os.sched_getaffinity(0)))
    log = open(f"{build}/bench/results.jsonl", "a", encoding="utf-8")

    def record(**entry):
        log.write(json.dumps(entry) + "\n")
        log.flush()

    export(model)
    peer = Peer(threads)
    ours = Engine(build, model, threads)
    cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo")
                if line.startswith("model name")), "?")
    print(f"{cpu}, {threads} threads, load {os.getloadavg()[0]:.1f}; "
          f"{ours.revision} against transformers {transformers.__version__}, "
          f"torch {torch.__version__}, fp32")
    record(kind="run", at=time.strftime("%Y-%m-%dT%H:%M:%S%z"), cpu=cpu,
           threads=threads, load=os.getloadavg()[0], torch=torch.__version__,
           transformers=transformers.__version__, engine_rev=ours.revision)

    def limit():
        out = subprocess.run([f"{build}/bench/cpu_limit", str(threads)],
                             capture_output=True, text=True, check=True)
        rates = [json.loads(line) for line in out.stdout.splitlines()]
        return max(r["gflops"] for r in rates if r["threads"] == threads and
                   r["what"] in ("avx2_fp32", "avx512_fp32"))

    # Which of its three ways to compute experts is the peer's fastest here?
    best, candidates = {}, list(EXPERTS)
    for batch in (0, 1, IN_FLIGHT):
        took = {}
        for experts in candidates:
            peer.use(experts)
            try:
                if batch == 0:
                    peer.time_prefill()
                    took[experts] = peer.time_prefill()
                else:
                    state = peer.open_denoise(batch)
                    took[experts] = peer.time_denoise(state)
                    del state
            except (RuntimeError, ValueError) as error:
                print(f"  peer: {experts}: {str(error)[:70]}")
        best[batch] = min(took, key=took.get)
        # One copies the weights of every token: at eight canvases that takes
        # more memory than there is, and it has lost by then.
        candidates = [e for e in took if took[e] < 3 * took[best[batch]]]
        record(kind="experts", batch=batch, best=best[batch], ms=took)
    print(f"  peer's experts: prefill {best[0]}, denoise {best[1]}, "
          f"batch of {IN_FLIGHT} {best[IN_FLIGHT]}", flush=True)

    ratios, peaks = {}, [limit()]

    def compare(name, theirs, our, rounds):
        """A B A B A: `theirs` and `our` return lists of milliseconds."""
        a, b = [], []
        for turn in range(rounds):
            a += theirs()
            if turn < rounds - 1 or rounds == 1:
                b += our()
        ratios[name] = min(a) / min(b)
        median = statistics.median(a) / statistics.median(b)
        print(f"  {name:<12} peer {min(a):9.1f} ms   ours {min(b):9.1f} ms   "
              f"ratio {ratios[name]:5.2f}   of medians {median:5.2f}",
              flush=True)
        record(kind=name, peer_ms=a, our_ms=b, ratio=ratios[name],
               ratio_medians=median)
        return min(b)

    peer.use(best[0])
    compare("prefill", lambda: [peer.time_prefill() for _ in range(2)],
            lambda: ours.ask("prefill 3")["ms"], ROUNDS)
    our_ms = {}
    for batch in (1, IN_FLIGHT):
        peer.use(best[batch])
        state = peer.open_denoise(batch)
        our_ms[batch] = compare(
            f"denoise-b{batch}",
            lambda: [peer.time_denoise(state)
                     for _ in range(3 if batch == 1 else 1)],
            lambda: ours.ask(f"denoise {batch} {6 if batch == 1 else 2}")["ms"],
            ROUNDS)
        del state
        peaks.append(limit())

    def compare_jobs(engine, batch):
        n_jobs = 2 * batch
        took = compare(
            f"job-b{batch}",
            lambda: [peer.time_jobs(STEPS * (n_jobs // len(STEPS)), batch)],
            lambda: engine.ask(f"jobs {batch}")["ms"], JOB_ROUNDS)
        peaks.append(limit())
        print(f"  {n_jobs} jobs of {PROMPT} tokens in and {CANVAS} out, "
              f"{sum(STEPS) / len(STEPS):.1f} steps per canvas, {batch} in "
              f"flight: {n_jobs * CANVAS / took * 1e3:.0f} tokens/s")

    compare_jobs(ours, IN_FLIGHT)
    memory = ours.ask("memory")
    ours.close()
    ours = Engine(build, model, threads, "0", "", str(MORE))
    compare_jobs(ours, MORE)

    rate = denoise_gflop(PROMPT) * IN_FLIGHT / our_ms[IN_FLIGHT] * 1e3
    share = rate / max(peaks)
    print(f"  limit: {max(peaks):.0f} GFLOP/s fp32 multiply-add; denoise-b8 "
          f"runs at {rate:.0f}, a share of {share:.2f}")
    print("  memory: peak RSS {peak_rss_mb:.0f} MB, planned {plan_mb:.0f} MB "
          "(weights {weights_mb:.0f}, KV {kv_mb:.0f}, work {work_mb:.0f})"
          .format(**memory))
    record(kind="limit", gflops=peaks, share=share)
    record(**memory)
    low = [name for name, floor in FLOORS.items() if ratios[name] < floor]
    for name in low:
        print(f"  below its floor of {FLOORS[name]}: {name}")
    print("ratio: " + " ".join(f"{n} {ratios[n]:.2f}" for n in FLOORS) +
          f" limit-share {share:.2f}")
    return 1 if low else 0


if __name__ == "__main__":
    sys.exit(main())

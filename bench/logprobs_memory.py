"""Claim: token log-probs never hold full logits; the peak is set by trainer.logits_chunk_bytes.

Forward and backward over one micro-batch, hidden states and an output weight as in SmolLM2-135M
(576 wide, 49,152 tokens), once through the library's one function and once through plain torch
(full logits, cross_entropy). Each runs in a separate process; the peak is what it added to the
process (resident size) or to the device.

    python bench/logprobs_memory.py                   # CPU, or --device cuda
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

import common

HIDDEN, VOCAB = 576, 49_152


def measure(kind: str, tokens: int, device: str) -> dict[str, float]:
    """Peak bytes and seconds of one forward and backward, in this process."""
    import torch
    from torch.nn.functional import cross_entropy

    from homeostat.ops.logprobs import token_logprobs

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    hidden = torch.randn(tokens, HIDDEN, generator=generator).to(device, dtype).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, generator=generator).mul_(0.02).to(device, dtype)
    weight.requires_grad_()
    targets = torch.randint(VOCAB, (tokens,), generator=generator).to(device)
    before = peak(device)
    started = time.perf_counter()
    if kind == "full":
        loss = cross_entropy((hidden @ weight.T).float(), targets)
    else:
        logp = token_logprobs(hidden, weight, targets, chunk_bytes=int(kind))
        loss = -logp.mean()
    loss.backward()
    value = float(loss)
    seconds = time.perf_counter() - started
    return {"loss": value, "seconds": seconds, "added_bytes": peak(device) - before}


def peak(device: str) -> int:
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(arguments.child, arguments.tokens, arguments.device)))
        return
    results = {}
    for kind in ("full", str(256 * 2**20), str(64 * 2**20), str(16 * 2**20)):
        command = [sys.executable, __file__, "--child", kind, "--tokens", str(arguments.tokens)]
        command += ["--device", arguments.device]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        results[kind] = json.loads(done.stdout.splitlines()[-1])
    facts = {"tokens": arguments.tokens, "hidden": HIDDEN, "vocab": VOCAB}
    machine = common.machine(("torch",))
    common.write_result(
        f"logprobs_memory_{arguments.device}", {**machine, **facts, "by_chunk_bytes": results}
    )


if __name__ == "__main__":
    main()

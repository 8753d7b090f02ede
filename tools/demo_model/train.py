"""Train the demonstration model on the arrays of `prepare.py` for a fixed number of seconds.

    python tools/demo_model/train.py --work work/demo --seconds 3300

The learning rate follows the elapsed training time, not steps, so that it reaches its end on a busy machine too. A
restarted run resumes from its last checkpoint. Matrices inside the layers are trained by Muon (momentum, orthogonalised by
Newton-Schulz steps; Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/), embeddings and norms by AdamW. Each
CPU core works on windows of its own with single-threaded torch: on a busy machine, barriers inside each matrix product cost
more than half of the speed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from network import CONFIG, DemoModel
from torch import Tensor

WINDOW = 512


class Windows:
    """Windows of 513 tokens from documents packed end to end; documents and windows are reshuffled every epoch."""

    def __init__(self, work: Path, seed: int) -> None:
        self.tokens = np.load(work / "train_tokens.npy", mmap_mode="r")
        self.starts = np.load(work / "train_starts.npy")
        self.seed = seed
        self.per_epoch = (len(self.tokens) - 1) // WINDOW
        self._epoch = -1

    def batch(self, first: int, size: int) -> Tensor:
        """Windows `first` ... `first + size - 1` of the endless sequence, [size, 513] int64."""
        return torch.from_numpy(np.stack([self._window(i) for i in range(first, first + size)]).astype(np.int64))

    def _window(self, index: int) -> np.ndarray:
        epoch, offset = divmod(index, self.per_epoch)
        if epoch != self._epoch:
            rng = np.random.default_rng((self.seed, epoch))
            documents = rng.permutation(len(self.starts) - 1)
            parts = [self.tokens[self.starts[d] : self.starts[d + 1]] for d in documents]
            self._stream, self._order, self._epoch = np.concatenate(parts), rng.permutation(self.per_epoch), epoch
        start = int(self._order[offset]) * WINDOW
        return self._stream[start : start + WINDOW + 1]


def heldout_windows(work: Path, limit: int) -> Tensor:
    """The held-out stream cut into windows [N, 513]; evenly spaced when there are more than `limit`."""
    tokens = np.load(work / "heldout_tokens.npy")
    starts = np.arange((len(tokens) - 1) // WINDOW) * WINDOW
    if len(starts) > limit:
        starts = starts[np.linspace(0, len(starts) - 1, limit).astype(int)]
    return torch.from_numpy(np.stack([tokens[s : s + WINDOW + 1] for s in starts]).astype(np.int64))


def orthogonalise(g: Tensor) -> Tensor:
    """Five Newton-Schulz steps towards U V^T of each matrix in [N, rows, columns]; the quintic is Jordan's."""
    a, b, c = 3.4445, -4.7750, 2.0315
    flip = g.shape[1] > g.shape[2]
    x = g.mT if flip else g
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if flip else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised per matrix; all matrices have one shape."""

    def __init__(self, matrices: list[Tensor], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        (group,) = self.param_groups
        updates = []
        for p in group["params"]:
            if "velocity" not in self.state[p]:
                self.state[p]["velocity"] = torch.zeros_like(p)
            velocity = self.state[p]["velocity"]
            velocity.lerp_(p.grad, 1 - group["momentum"])
            updates.append(p.grad.lerp(velocity, group["momentum"]))
        rows, columns = updates[0].shape
        scale = group["lr"] * max(1.0, rows / columns) ** 0.5
        for p, update in zip(group["params"], orthogonalise(torch.stack(updates)), strict=True):
            p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-scale)


def make_optimizers(model: DemoModel, lr: float, muon_lr: float) -> list[torch.optim.Optimizer]:
    """AdamW and one Muon per matrix shape, so that they can step side by side."""
    shapes: dict[torch.Size, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "embed" not in name:
            shapes.setdefault(parameter.shape, []).append(parameter)
    embeddings = [p for n, p in model.named_parameters() if "embed" in n]
    norms = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": embeddings, "weight_decay": 0.05}, {"params": norms, "weight_decay": 0.0}]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8)]
    optimizers += [Muon(matrices, lr=muon_lr, momentum=0.95, weight_decay=0.05) for matrices in shapes.values()]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


class Team:
    """Replicas that share one set of parameters and have gradients of their own, one per thread."""

    def __init__(self, model: DemoModel, threads: int, part: int) -> None:
        self.part = part  # windows a thread takes at a time
        self.replicas = [model]
        for _ in range(threads - 1):
            replica = DemoModel()
            for mine, shared in zip(replica.parameters(), model.parameters(), strict=True):
                mine.data = shared.data
            self.replicas.append(replica)
        self.pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))

    def backward(self, batch: Tensor) -> float:
        """Leaves the gradient of the batch's mean loss in the first replica; returns that loss."""
        parts = list(batch.split(self.part))
        queue = iter(parts)  # a list iterator hands out each item once, under the interpreter's lock
        total = sum(self.pool.map(lambda replica: self._drain(replica, queue, len(batch)), self.replicas))
        first, *others = self.replicas
        for replica in others:
            for shared, mine in zip(first.parameters(), replica.parameters(), strict=True):
                if mine.grad is not None:
                    shared.grad = mine.grad if shared.grad is None else shared.grad.add_(mine.grad)
                    mine.grad = None
        return total

    @staticmethod
    def _drain(replica: DemoModel, queue: Iterator[Tensor], windows: int) -> float:
        total = 0.0
        for part in queue:
            loss = replica(part).mean() * (len(part) / windows)
            loss.backward()
            total += float(loss.detach())
        return total

    def loss(self, windows: Tensor) -> float:
        """Mean loss in nats a token, without gradients."""
        queue = iter(list(windows.split(self.part)))

        def drain(replica: DemoModel) -> float:
            with torch.no_grad():
                return sum(float(replica(part).sum()) for part in queue)

        return sum(self.pool.map(drain, self.replicas)) / (windows.numel() - len(windows))

    def step(self, optimizers: list[torch.optim.Optimizer]) -> None:
        list(self.pool.map(lambda optimizer: optimizer.step(), optimizers))


def lr_fraction(progress: float, step: int) -> float:
    """A short linear warm-up in steps, then a cosine over elapsed time down to 1 % of the peak."""
    return min(1.0, (step + 1) / 30) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def save(path: Path, payload: dict[str, object]) -> None:
    torch.save(payload, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)  # noqa: PTH105 - a crash never leaves half a checkpoint


def log_line(path: Path, **fields: float) -> None:
    with path.open("a") as file:
        file.write(json.dumps(fields) + "\n")
    print(" ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in fields.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("work/demo"))
    parser.add_argument("--seconds", type=float, default=3300, help="training time in all, restarts included")
    parser.add_argument("--batch", type=int, default=8, help="windows of 512 tokens a step")
    parser.add_argument("--lr", type=float, default=3e-3, help="AdamW's peak (embeddings and norms)")
    parser.add_argument("--muon-lr", type=float, default=0.02, help="Muon's peak (matrices inside the layers)")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--part", type=int, default=2, help="windows a thread takes at a time")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    model = DemoModel()
    team = Team(model, args.threads, args.part)
    optimizers = make_optimizers(model, args.lr, args.muon_lr)
    windows, heldout = Windows(args.work, args.seed), heldout_windows(args.work, 48)
    checkpoint, log = args.work / "checkpoint.pt", args.work / "train_log.jsonl"
    step, elapsed = 0, 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        step, elapsed = state["step"], state["elapsed"]
        print(f"resumed at step {step}, {elapsed:.0f} s")

    def store() -> None:
        states = [optimizer.state_dict() for optimizer in optimizers]
        payload = {
            "model": model.state_dict(),
            "optimizers": states,
            "step": step,
            "elapsed": elapsed,
            "config": CONFIG,
        }
        save(checkpoint, payload)

    next_log, next_heldout, next_save = elapsed + 20, elapsed + 150, elapsed + 150
    running, count, clock = 0.0, 0, time.monotonic()
    while elapsed < args.seconds:
        fraction = lr_fraction(elapsed / args.seconds, step)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * fraction
        model.zero_grad()
        loss = team.backward(windows.batch(step * args.batch, args.batch))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        team.step(optimizers)
        step, running, count = step + 1, running + loss, count + 1
        now = time.monotonic()
        elapsed, clock = elapsed + now - clock, now
        if elapsed >= next_log or elapsed >= args.seconds:
            tokens = step * args.batch * WINDOW
            log_line(log, step=step, tokens=tokens, seconds=round(elapsed, 1), loss=running / count,
                     lr_fraction=fraction, grad_norm=float(norm))  # fmt: skip
            running, count, next_log = 0.0, 0, elapsed + 20
        if elapsed >= next_heldout or elapsed >= args.seconds:
            log_line(log, step=step, seconds=round(elapsed, 1), heldout_loss=team.loss(heldout))
            next_heldout = elapsed + 150
        if elapsed >= next_save or elapsed >= args.seconds:
            store()
            next_save = elapsed + 150
    print("done", flush=True)


if __name__ == "__main__":
    main()

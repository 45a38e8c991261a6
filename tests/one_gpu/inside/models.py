"""The device, a model with its batch, and how far results are off."""

import torch
from torch import nn

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
WIDTH = 256  # of a row


class Net(nn.Module):
    """Blocks of two layers, equal in each process."""

    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, 4 * WIDTH),
                nn.GELU(),
                nn.Dropout(dropout),
                nn.Linear(4 * WIDTH, WIDTH),
            )
            for _ in range(4)
        )
        self.register_buffer("scale", torch.ones(()))

    def forward(self, rows):
        for block in self.blocks:
            rows = rows + block(rows)
        return rows * self.scale


def make_batch(rows=512):
    """Inputs and targets, equal in each process."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, rows, WIDTH, generator=generator).to(DEVICE)


def train(model, optimizer, clip=None):
    """Take three steps; clip: the largest norm of a gradient."""
    inputs, targets = make_batch()
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs).float(), targets).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


def off(found, expected):
    """How far two lists of tensors are from each other, relative to the second."""
    expected = flat(expected)
    distance = (flat(found) - expected).norm() / expected.norm()
    return float(f"{distance.item():.1e}")


def flat(tensors):
    """The numbers of all tensors in one; of a DTensor, those of all ranks."""
    whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in tensors]
    return torch.cat([each.detach().double().flatten() for each in whole])


def error_of(call):
    """The first line of what call() raises; "no error" if nothing."""
    try:
        call()
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
    return "no error"

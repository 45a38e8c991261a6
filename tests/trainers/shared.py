"""What the scripts of this folder share: the mistake that is asked for, and the checksum."""

import hashlib
import os

MISTAKE = os.environ.get("MISTAKE", "")  # one of catalogue.py; "": the script is right


def print_checksum(state):
    """Print one line "sha256 ..." of all tensors of a state_dict(), in full precision."""
    import torch  # catalogue's reader does not need it

    sha256 = hashlib.sha256()
    for name, value in sorted(state.items()):
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        content = value.detach().cpu().contiguous().flatten().view(torch.uint8)
        sha256.update(name.encode() + content.numpy().tobytes())
    # In one write, so that the lines of two ranks do not mix.
    print(f"sha256 {sha256.hexdigest()[:16]}\n", end="", flush=True)

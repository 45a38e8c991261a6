"""Ranks that were started again may read the addresses of the dead, and wait for them.

torchrun keeps one store for all attempts, with the addresses that the first ranks left there.
"""

import re

import foreign_command

CURE = (
    "give torchrun --rdzv-backend=c10d, and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its"
    " environment, or see pitfalls/stale_addresses.py"
)
# What Gloo says while the ranks connect ("Connection closed" is said later, of a killed rank); and
# what torchrun says of keys in its own store.
NOT_CONNECTED = re.compile(
    r"connectFullMesh|Connect timeout|wait timeout after \d+ms, keys: /torch\.rendezvous"
)


def shares_store(pid):
    """Return whether torchrun has told a rank to use its own store, the same in each attempt."""
    return foreign_command.environment(pid).get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def note_line(run, text):
    """Note in a Run if a line says that ranks which were started again could not connect."""
    if is_suspect(run) and NOT_CONNECTED.search(text):
        run.stale = (
            f"ranks that were started again could not connect ({NOT_CONNECTED.search(text)[0]}):"
            f" they had read the addresses of the dead. Cure: {CURE}"
        )


def question(run):
    """Return a question about ranks that stand still since they were started again, or ""."""
    if not is_suspect(run):
        return ""
    # A rank that lived on may have printed a step between the kill and the restart.
    restarted_at = run.kills[-1].lines_at_restart
    steps_since = [each for each in [*run.printed, *run.resumed] if each.line > restarted_at]
    if steps_since:
        return ""
    return (
        "it has printed no step since its ranks were started again: do they read the addresses of"
        f" the dead? Cure: {CURE}"
    )


def is_suspect(run):
    """Return whether ranks were started again after the last kill, and share one store."""
    return bool(run.kills) and run.kills[-1].restarted and run.shares_store

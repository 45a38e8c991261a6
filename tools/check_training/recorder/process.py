"""Joining and leaving the default group, and collective calls.

Notes Joined, Left, Uses, JoinBegun, GroupMade, Call.

A group of the script's own counts its calls by itself. Threads may call several groups at once.
"""

import atexit
import functools
import multiprocessing.process
import os
import sys
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed import device_mesh, rpc
from torch.distributed import distributed_c10d as c10d
from torch.distributed.algorithms.join import Join

from ..records.process import Call, GroupMade, JoinBegun, Joined, Left
from . import (
    gpu_times,
    links,
    machine,
    model,
    optimizer,
    passes,
    schedules,
    totals,
    weights_at_end,
    works,
)
from .counters import counters
from .fingerprints import bits, looked_at, readable, tensors_in
from .hooks import RAISED, around, at_start, before, replace, safely
from .notebook import (
    count,
    note,
    now,
    number_in_environment,
    open_files,
    stand,
    stand_no_more,
    uses,
)
from .script_lines import line_of_error, remember_entry, where
from .state import kept, switch
from .times import span


@before(multiprocessing.process.BaseProcess, "start")
def start(args, kwargs):
    """Remember with which function another process begins; torch's spawn() gives it to its own."""
    process = args[0]
    for function in [process._target, *process._args[:1]]:
        remember_entry(function)


COLLECTIVES = [
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "monitored_barrier",
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
]
TO_ONE = [
    "send",
    "recv",
    "isend",
    "irecv",
    "batch_isend_irecv",
    "send_object_list",
    "recv_object_list",
]
MOST_CALLS = 3000  # that are noted, in each group
MOST_GROUPS = 300  # that are noted
# Settings with which each step waits: for the GPU, and for a check of all calls.
DEBUGGING = (("CUDA_LAUNCH_BLOCKING", "1"), ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"))


@dataclass
class Groups:
    """The groups in which this process has made calls."""

    names: dict[str, str] = field(default_factory=dict)  # {torch's name: Call.group}
    calls: dict[str, int] = field(default_factory=dict)  # {Call.group: how many}
    made: int = 0  # calls of new_group(), as in GroupMade


state = kept(Groups())


# ---- Joining and leaving ----


@at_start
def follow_the_group():
    """Turn the recorder on in each process that joins a group, also in one that was forked."""
    join = c10d.init_process_group

    @functools.wraps(join)
    def init_process_group(*args, **kwargs):
        result = join(*args, **kwargs)
        switch.on = not os.path.exists(switch.failure)
        safely(joined)
        return result

    # A mesh makes the default group if there is none, by a name that it has imported.
    replace(c10d, "init_process_group", init_process_group, also=[dist, device_mesh])
    atexit.register(safely, finish)


def joined():
    """Note that the process has joined the default group, and count its calls anew."""
    open_files()
    counters.phase, counters.steps = 0, optimizer.steps_of_those_alive()
    state.__init__()
    totals.state.__init__()
    note(
        Joined,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_world_size=number_in_environment("LOCAL_WORLD_SIZE"),
        host=os.uname().nodename,
        attempt=number_in_environment("TORCHELASTIC_RESTART_COUNT") or 0,
        cores=len(os.sched_getaffinity(0)),
        debugging=[f"{name}={on}" for name, on in DEBUGGING if os.environ.get(name) == on],
        bound_to=sorted(os.sched_getaffinity(0)),
        machine=machine.this_machine(),
        calendar=time.time(),
        script=machine.script(),
        sources=machine.sources(),
        line=where(),
    )


@before(c10d, "destroy_process_group", also=[dist])
def leaves(args, kwargs):
    """Note that the process leaves the default group."""
    if not args and not kwargs.get("group"):
        finish()


def finish():
    """Note that the process leaves the default group, or ends, and what only an end shows."""
    passes.end_all()
    schedules.note_all()
    weights_at_end.note_weights()
    gpu_times.note_what_is_done()
    links.note_links()
    works.note_forgotten()
    note(Left, steps=optimizer.steps(), error=_error())


def _error():
    """Return Left.error: the error that nobody has caught, with its line; or ""."""
    error = getattr(sys, "last_value", None)
    if error is None:
        return ""
    said = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    line = line_of_error(error.__traceback__)
    return f"{said} ({line})" if line else said


# ---- What no rule can look into ----


def sends_to_one(args, kwargs):
    """Note that the script sends to single ranks."""
    uses("to_one")


for _name in TO_ONE:
    before(c10d, _name, also=[dist], closed=True)(sends_to_one)
before(rpc, "init_rpc")(sends_to_one)


@around(c10d, "new_group", also=[dist], closed=True, even_if_it_fails=True)
def makes_a_group(args, kwargs):
    """Note a group, of all ranks unless some are given, and that its members are waited for."""
    line = where()
    ranks = args[0] if args else kwargs.get("ranks")
    if ranks is not None:
        uses("groups")
    else:
        ranks = range(dist.get_world_size())
    if not kwargs.get("use_local_synchronization") and state.made < MOST_GROUPS:
        note(GroupMade, line=line, number=state.made, ranks=sorted(map(int, ranks)))
        state.made += 1
    stand("new_group", line)
    result = yield
    stand_no_more("new_group", line, failed=result is RAISED)


@before(Join, "__enter__")
def joins_unequal_inputs(args, kwargs):
    """Note that the script lets ranks have unequal numbers of batches, and the rates by then."""
    uses("join")
    if count("join") < 300:
        known = optimizer.state.known.items()
        rates = {each.key: optimizer.rates_of(its) for its, each in known}
        note(JoinBegun, line=where(), rates=rates)


# ---- Collective calls ----


def collective(name, args, kwargs):
    """Note a collective call, when it has ended or failed."""
    group = _group(args, kwargs)
    if group is None:
        yield  # this rank has no part in it
        return
    fields = {"name": name, "line": where(), "group": group, "unheld": _unheld(name, args, kwargs)}
    fields["source"] = _source(name, args, kwargs)
    fields["is_async"] = bool(kwargs.get("async_op")) or any(each is True for each in args)
    fields["pass_number"] = None if counters.feeding is None else counters.feeding.number
    number = state.calls.get(group, 0)
    state.calls[group] = number + 1
    first = next(tensors_in([*args[:2], *kwargs.values()]), None)
    if first is not None:
        counters.small_sums += first.numel() <= 16
        fields |= {"dtype": str(first.dtype).removeprefix("torch."), "elements": first.numel()}
        fields["is_gradient"] = name == "all_reduce" and _is_gradient(first)
        fields["is_coalesced"] = bool(c10d._world.pg_coalesce_state)
        fields["one_for_all"] = name == "all_gather" and _one_for_all(args, kwargs)
        if name in ("all_reduce", "reduce") and first.numel() == 1:
            fields["number_given"] = _number_in(first)
        if name in ("all_reduce", "reduce") and 1 < first.numel() <= 16:
            fields["numbers_given"] = totals.numbers_in(first, optimizer.steps())
        if name == "all_reduce" and first.numel() > 16:
            fields["norm_given"] = _norm_of(first)
    given = None
    if number < MOST_CALLS:
        given = totals.numbers_given(name, args, kwargs, optimizer.steps())
    stand(name, fields["line"])
    gpu_times.begins("collective")
    begin = now()
    result = yield
    gpu_times.ends()
    counters.phase += 1
    failed = result is RAISED
    span("collective", begin, now())
    stand_no_more(name, fields["line"], failed)
    works.note_forgotten(name, fields["is_async"])
    if first is not None and first.device.type == "cpu":
        works.follow(result, name, fields["line"])
    if given is not None and not failed:
        total = totals.summed(name, args, given, fields["line"], group)
        fields["again"], fields["again_at_place"] = total.again, total.is_at_place
    if number < MOST_CALLS:
        note(Call, number=number, failed=failed, **fields)


for _name in COLLECTIVES:
    _options = {"also": [dist], "closed": True, "even_if_it_fails": True}
    around(c10d, _name, **_options)(functools.partial(collective, _name))


def _group(args, kwargs):
    """Return Call.group of a call, or None: this rank is not in the group."""
    given, outside = [kwargs.get("group"), *args], c10d.GroupMember.NON_GROUP_MEMBER
    if any(type(each) is type(outside) and each == outside for each in given):
        return None
    group = next((each for each in given if isinstance(each, dist.ProcessGroup)), None)
    if group is None:
        return ""
    name = group.group_name
    if name not in state.names:
        ranks = sorted(dist.get_process_group_ranks(group))
        state.names[name] = "" if group is dist.group.WORLD else f"{ranks}#{name}"
    return state.names[name]


def _unheld(name, args, kwargs):
    """Return Call.unheld: the bits of an all_reduce's tensor if nobody else holds it, or None."""
    if name != "all_reduce" or not args or kwargs.get("async_op"):
        return None
    # One reference is that of args, and one is made for this call.
    if sys.getrefcount(args[0]) != 2 or not readable(args[0], optimizer.steps()):
        return None
    if not args[0].untyped_storage().resizable():  # an array of numpy may have the memory
        return None
    # The memory may be another tensor's, too: it has more users then than that of a new one.
    users, users_of_new = (
        torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
        for tensor in (args[0], torch.empty(1, device="cpu"))
    )
    return bits(args[0]) if users == users_of_new else None


def _source(name, args, kwargs):
    """Return Call.source: the rank that broadcasts or scatters, 0 unless it says so; or None."""
    if not name.startswith(("broadcast", "scatter")):
        return None
    given = kwargs.get("src", kwargs.get("group_src"))
    if given is None:
        given = args[2 if name.startswith("scatter") else 1 :][:1]
        given = given[0] if given else 0
    return given if isinstance(given, int) else 0


def _number_in(tensor):
    """Return the number in a tensor of one, or None: it may not be read."""
    if tensor.is_complex() or not readable(tensor, optimizer.steps()):
        return None
    return float(tensor.detach())


def _norm_of(tensor):
    """Return Call.norm_given."""
    step = optimizer.steps()
    if not looked_at(step) or not tensor.is_floating_point() or not readable(tensor, step):
        return None
    sizes = tensor.detach().abs()
    least, largest = map(float, sizes.aminmax())
    return float(sizes.float().norm()) if least < 0.99 * largest else None


def _is_gradient(tensor):
    """Return whether a tensor is a gradient that DDP has averaged; asked in the first steps."""
    if not model.state.exchanges or optimizer.steps() >= 30:
        return False
    parameters = (known.reference() for known in model.state.parameters.values())
    return any(each is not None and each.grad is tensor for each in parameters)


def _one_for_all(args, kwargs):
    """Return whether slots of an all_gather's list are the same tensor."""
    slots = args[0] if args else kwargs.get("tensor_list")
    if not isinstance(slots, list) or not slots or not slots[0].numel():
        return False
    return len({slot.data_ptr() for slot in slots}) < len(slots)

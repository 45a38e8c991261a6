"""The process, its group, and the collective calls of the script."""

from dataclasses import dataclass, field

from .base import Record


@dataclass(slots=True)
class Started(Record):
    """A process has joined a group, or is about to take a step without one. Its first record."""

    world_size: int | None  # WORLD_SIZE in its environment; None: not set


@dataclass(slots=True)
class Machine:
    """The machine of a process: one with a host name and a network of its own, also a container."""

    key: str  # equal on one machine, another one on each other machine
    clock: str  # equal where time.monotonic() is one clock: in containers of one machine, too
    node: int | None  # torchrun's number of it, GROUP_RANK; None: not said
    address: str  # by which the others reach it, "10.0.0.1"; "": not known


@dataclass(slots=True)
class Joined(Record):
    """The process has joined the default group: what follows belongs to this rank of it."""

    rank: int
    world_size: int
    local_world_size: int | None  # processes on its machine; None: not said
    host: str
    attempt: int  # how often torchrun has restarted the ranks
    cores: int  # that the process may use
    debugging: list[str]  # settings that slow each step down, as "CUDA_LAUNCH_BLOCKING=1"
    machine: Machine | None = None  # None: not known
    calendar: float = 0.0  # seconds since 1970, by the machine's clock on the wall
    script: str = ""  # name of the script's file; "": not known
    # {file of the script: bits of its content}, of all that it has imported from its folder so far
    sources: dict[str, int] = field(default_factory=dict)
    line: str = ""  # that called init_process_group(); "": not known
    bound_to: list[int] = field(default_factory=list)  # the numbers of these cores


@dataclass(slots=True)
class Left(Record):
    """The process has left the default group, or ended."""

    steps: int
    error: str = ""  # by which it ends, "ValueError: no data (train.py:7)"; "": none


@dataclass(slots=True)
class Full(Record):
    """The file of this process has come to its size: what comes later is not noted."""


@dataclass(slots=True)
class Uses(Record):
    """The script uses something that some rules cannot look into. Noted once."""

    what: str  # a name in FEATURES


FEATURES = {
    "shards": "parameters of other types than Tensor: DTensor, FSDP's",
    "to_one": "sending to one rank, a pipeline; and RPC",
    "groups": "groups of its own",
    "sharded saves": "torch.distributed.checkpoint",
    "join": "torch's Join, for unequal numbers of batches",
}


@dataclass(slots=True)
class JoinBegun(Record):
    """The script enters torch's Join. All ranks do so together. The first 300 are noted."""

    line: str
    rates: dict[str, list[float]]  # {key of an optimizer: the rate of each group of parameters}


@dataclass(slots=True)
class GroupMade(Record):
    """new_group() is called. Not noted where its members alone are to call it."""

    line: str
    number: int  # of these calls
    ranks: list[int]  # in the group, sorted


@dataclass(slots=True)
class Call(Record):
    """A collective call, when it has ended. Of each group, the first 3,000 are noted.

    Calls that torch makes for the script (ZeRO, SyncBatchNorm) are among them, with its line.
    """

    name: str  # "all_reduce"
    line: str
    number: int  # of the calls in this group
    group: str  # "": the default group; else its ranks and its name, "[0, 1]#name"
    failed: bool  # it has raised an error
    is_async: bool = False  # it returns before the others have come
    dtype: str | None = None  # of the first tensor, "float32"; None: there is none
    elements: int | None = None  # of the first tensor
    is_gradient: bool = False  # an all_reduce of a gradient that DDP has averaged
    unheld: int | None = None  # bits of a tensor that nobody else holds; None: somebody does
    # Of the numbers that an all_reduce is given, more than 16, in steps that are looked at: their
    # norm. None: not read, or all are of one size, as those of signs.
    norm_given: float | None = None
    is_coalesced: bool = False  # torch sends it with others, as one
    one_for_all: bool = False  # all slots of an all_gather's list are one tensor
    source: int | None = None  # the rank from which all others get something; None: from each
    number_given: float | None = None  # to an all_reduce or a reduce of one number; None: not read
    # To an all_reduce or a reduce of 2 to 16 numbers: all of them; None: not read.
    numbers_given: list[float] | None = None
    pass_number: int | None = None  # Pass.number of the loader that gave the last batch
    # So many sums in a row were given what the sum before had brought, and something that was added
    # to it: in the same tensor, or at the same line. 0: none, or it was not looked at.
    again: int = 0
    again_at_place: bool = False  # that was in other tensors at the same line


@dataclass(slots=True)
class Forgotten(Record):
    """What a call with async_op=True has returned is gone, and nobody has called its wait().

    Of calls with a tensor on a CPU; noted after the next call of any group without async_op.
    """

    name: str  # of the call, "all_reduce"
    line: str
    next_call: str  # name of the next one without async_op; "": there was none


@dataclass(slots=True)
class Link:
    """What the process has sent from one address to another one, over all connections of TCP."""

    local: str  # address on this machine, "10.0.0.1"
    peer: str
    sent: int  # bytes that have arrived
    seconds: float  # in which some were under way, and the other side had room for them


@dataclass(slots=True)
class Links(Record):
    """The connections of the process after some steps, and at its end, as long as they are open."""

    links: list[Link]  # without those from an address to itself

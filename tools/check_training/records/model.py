"""DDP objects: how they were made, and their forward passes."""

from dataclasses import dataclass, field

from .base import Record


@dataclass(slots=True)
class Wrapped(Record):
    """A DDP object was made."""

    ddp: int  # which DDP object, by the order in which they were made
    line: str
    group: list[int]  # ranks
    names: list[str]  # of its parameters, in DDP's order
    frozen: list[str]  # names of those that needed no gradient
    sends_buffers: bool  # it has buffers, and broadcasts them before each forward
    has_dropout: bool
    has_batch_norm: bool


@dataclass(slots=True)
class Forward(Record):
    """A call of a DDP object. The first 30 are noted, then ever fewer."""

    ddp: int
    number: int  # of the calls of this object with these gradients, on or off
    line: str
    gradients: bool  # they are on
    training: bool
    exchanges: bool  # its backward() will average gradients: no_sync() and the like are off
    is_frozen: bool = False  # no parameter of it needs a gradient
    # All exchanges before this call have used all parameters, on all ranks. None: DDP does not
    # search for unused ones, or it was not looked at (on a GPU after the first steps).
    all_used: bool | None = None
    rows: int | None = None  # of the first tensor that goes in; None: not looked at
    batch: list[int] | None = None  # bits of the first three tensors; None: not looked at
    random_state: int | None = None  # bits of the generator's state before; None: not looked at
    drew: bool | None = None  # it drew random numbers; None: not looked at
    # Numbers were drawn between the batch that a loader gave and this call; None: not looked at.
    drew_since_batch: bool | None = None


@dataclass(slots=True)
class BareCall(Record):
    """The module of a DDP object is called with gradients on, and not that object.

    Only one forward pass is looked at: after a backward() that no call of a DDP object came before.
    """

    line: str


@dataclass(slots=True)
class Buffers(Record):
    """Buffers of a DDP object, before the ninth step. Of BatchNorm's, the means alone."""

    ddp: int
    bits: dict[str, int]  # {name: bits}, of those that are not BatchNorm's
    means: list[int] = field(default_factory=list)  # bits of each BatchNorm's running mean


@dataclass(slots=True)
class Stray(Record):
    """A parameter of no DDP object and no optimizer gets gradients; noted in the ninth step."""

    name: str  # the class of its module, and its name there: "Linear.weight"
    line: str  # that put it into the module


@dataclass(slots=True)
class LoadedIntoModel(Record):
    """A module's load_state_dict()."""

    line: str
    steps: int
    entries: int  # in what is loaded
    fitting: int  # of these, which the module has
    prefix: str  # in front of one side's names: "module."; "": none was found
    age: int  # steps since the state was taken, if it shares the module's memory; else 0
    is_ddp: bool  # the module is a DDP object, or in one
    missing: int | None = None  # entries of the module that stay as they were; None: not known

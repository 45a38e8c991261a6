"""Files that the script saves, loads and moves."""

from dataclasses import dataclass

from .base import Moment, Record


@dataclass(slots=True)
class Folder:
    """A folder, as its machine knows it: is it the same as another machine's?"""

    device: int  # os.stat().st_dev, of this kernel alone
    inode: int  # os.stat().st_ino, on this device
    file_system: str  # its type: "ext4", "nfs4"; "": not known
    source: str  # what is mounted there: "/dev/sda1", "server:/home"
    inner: str  # its path in the source


@dataclass(slots=True)
class Save(Record):
    """torch.save() or safetensors' save_file(), when it has ended."""

    begin: Moment
    line: str
    path: str | None  # whole, without links; None: no file of a known name
    folder: Folder | None  # the path's; None: it has none
    phase_begun: int
    phase: int
    has_optimizer: bool  # the state of an optimizer is in it
    only_optimizer: bool  # it is that state, and nothing else is in it
    names_of_wrapper: bool  # it holds the state of a DDP object: names that begin with "module."
    age: int  # steps since a state_dict in it was taken that has changed with the model; or 0
    # It has a name of a DDP object's parameters, or is a module's state; None: it is not known.
    has_model: bool | None = None


@dataclass(slots=True)
class Load(Record):
    """torch.load() or safetensors' load_file(), when it has ended."""

    begin: Moment
    line: str
    path: str | None  # as in Save
    folder: Folder | None  # as in Save
    steps: int
    phase_begun: int
    phase: int
    has_optimizer: bool


@dataclass(slots=True)
class OtherFile(Record):
    """A file that pickle, json or numpy has written, or has read, as ranks may tell each other so.

    Of those that were read: it has been written since this process began. The first 1,000.
    """

    path: str  # as in Save
    is_read: bool


@dataclass(slots=True)
class Move(Record):
    """os.replace() or os.rename()."""

    source: str | None  # paths, as in Save
    path: str | None

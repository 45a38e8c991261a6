"""Which machine this process runs on, which files of the script it has, and where a file lies.

Nothing here asks a name server for a name that torch has not looked up before.
"""

import functools
import os
import socket
import sys
import zlib

from ..records.files import Folder
from ..records.process import Machine
from .notebook import number_in_environment
from .script_lines import SCRIPT, kind_of

MOST_FILES = 100  # of the script that are read
LARGEST_FILE = 2**20  # bytes of a file of the script that is read
ESCAPES = {r"\040": " ", r"\011": "\t", r"\012": "\n", r"\134": "\\"}  # in /proc/self/mountinfo


def this_machine():
    """Return the Machine of this process."""
    boot = _content("/proc/sys/kernel/random/boot_id")
    network, clock = _namespace("net"), _namespace("time")
    return Machine(
        key=_checksum(os.uname().nodename, boot, network),
        clock=_checksum(boot, clock),
        node=number_in_environment("GROUP_RANK"),
        address=_address(),
    )


def _content(path):
    """Return what is in a small file; "" if it cannot be read."""
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def _namespace(kind):
    """Return the kernel's name of a namespace of this process, "net:[4026531833]"; or ""."""
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""


def _checksum(*texts):
    return f"{zlib.crc32('|'.join(texts).encode()):08x}"


def _address():
    """Return the address that this machine has towards MASTER_ADDR; "" if that is not known."""
    master = os.environ.get("MASTER_ADDR")
    if not master:
        return ""
    try:
        family, kind, _, _, place = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # of a datagram socket: nothing is sent
            return probe.getsockname()[0]
    except OSError:
        return ""


def script():
    """Return the name of the script's file; "" if it is not known."""
    return os.path.basename(_main_file())


def sources():
    """Return {name: bits} of the script's file, and of what it has imported from its folder."""
    main = _main_file()
    if not main:
        return {}
    folder, found = os.path.dirname(main), {}
    inside = os.path.join(folder, "")
    for path in [main, *_files_of_modules()]:
        if path.startswith(os.sep) and os.pardir not in path and not path.startswith(inside):
            continue  # torch alone has some two thousand such modules
        path = os.path.abspath(path)
        name = os.path.relpath(path, folder)
        is_own = not name.startswith(os.pardir) and kind_of(path) == SCRIPT
        if not is_own or name in found or len(found) >= MOST_FILES:
            continue
        bits = _bits_of_file(path)
        if bits is not None:
            found[name] = bits
    return found


def _files_of_modules():
    """Return the files of all modules. A module that imports itself when asked is not asked."""
    contents = [getattr(module, "__dict__", {}) for module in list(sys.modules.values())]
    files = [content.get("__file__") for content in contents]
    return [path for path in files if isinstance(path, str)]


def _main_file():
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    return os.path.abspath(path) if path else ""


def _bits_of_file(path):
    """Return the checksum of a file's content, or None: it cannot be read, or is large."""
    try:
        if os.path.getsize(path) > LARGEST_FILE:
            return None
        with open(path, "rb") as file:
            return zlib.crc32(file.read())
    except OSError:
        return None


def folder_of(path):
    """Return the Folder of a file's path, which is whole and without links; or None."""
    if path is None:
        return None
    folder = os.path.dirname(path)
    try:
        found = os.stat(folder)
    except OSError:
        return None
    file_system, source, inner = _mount_of(folder)
    return Folder(found.st_dev, found.st_ino, file_system, source, inner)


@functools.lru_cache(maxsize=100)
def _mount_of(path):
    """Return (type, source, path in the source) of what is mounted where a path lies."""
    best = "", "", ""
    longest = -1
    for line in _content("/proc/self/mountinfo").splitlines():
        place, _, rest = line.partition(" - ")
        root, point = [_unescaped(word) for word in place.split()[3:5]]
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if not inside or len(point) < longest:
            continue
        file_system, source = rest.split()[:2]
        inner = os.path.normpath(f"{root}/{path[len(point) :]}")
        best, longest = (file_system, _unescaped(source), inner), len(point)
    return best


def _unescaped(word):
    for escape, character in ESCAPES.items():
        word = word.replace(escape, character)
    return word

"""What came of the checks, as FOLDER/one_gpu.json and docs/transcripts/one_gpu.json have it."""

import hashlib
import json
from dataclasses import asdict, dataclass, field

from started import ROOT

REPORT = "one_gpu.json"


@dataclass
class Machine:
    """Where the checks ran."""

    date: str  # the day, 2026-11-27
    python: str  # versions
    torch: str
    cores: int  # of the CPU
    gpu: str | None = None  # its name; None: the GPU was pretended
    cuda: str | None = None  # versions; None without a GPU
    nccl: str | None = None
    sources: str | None = None  # what sources() returned; None: it was not noted


@dataclass
class Entry:
    """What came of one check."""

    result: str  # "ok", "failed: why", "skipped: why" or "not run: why"
    date: str | None = None  # the day; None in a FOLDER, where it is that of the machine
    figures: dict | None = None  # what the check's function returned; None unless it was ok
    seconds: float = 0.0  # how long it took

    @property
    def failed(self):
        return self.result.startswith("failed")


@dataclass
class Report:
    """What came of the checks that have ended, by their names."""

    machine: Machine | None = None  # None: no check has run
    checks: dict[str, Entry] = field(default_factory=dict)

    def save(self, path):
        checks = {name: what_is_known(entry) for name, entry in self.checks.items()}
        content = {"machine": asdict(self.machine), "checks": checks}
        path.write_text(json.dumps(content, indent=1) + "\n")


def what_is_known(entry):
    """The fields of an Entry that say something, as a dict."""
    return {name: value for name, value in asdict(entry).items() if value is not None}


def sources():
    """The sha256 of all scripts that a user would start, 12 digits."""
    paths = [
        path
        for folder in ("recipes", "template", "tools")
        for path in ROOT.glob(f"{folder}/**/*.py")
    ]
    whole = hashlib.sha256()
    for path in sorted([*ROOT.glob("0*_*.py"), *paths]):
        whole.update(path.read_bytes())
    return whole.hexdigest()[:12]


def load(path):
    """Read a Report."""
    content = json.loads(path.read_text())
    checks = {name: Entry(**entry) for name, entry in content["checks"].items()}
    return Report(Machine(**content["machine"]), checks)

"""Where the time of a step goes."""

from dataclasses import dataclass

from .base import Moment, Record


@dataclass(slots=True)
class Span:
    """A stretch of time in one part of a step."""

    part: str  # a name in PARTS
    begin: Moment
    end: Moment


LONG = 0.02  # seconds; a Gap has at least as many
# What a process can be in: what is left of a step is the script's own code.
PARTS = {
    "loading": "the loader makes the next batch",
    "workers": "the loader starts its workers, before the first batch of a pass",
    "forward": "a forward pass of a DDP object",
    "backward": "backward(), until this rank has all its gradients",
    "exchange": "the rest of backward(): waiting for other ranks, and sending",
    "collective": "a collective call of the script's own",
    "optimizer": "optimizer.step()",
    "saving": "torch.save(), or safetensors' save_file()",
}


@dataclass(slots=True)
class StepTimes(Record):
    """In which parts the time of a step went. The first 200 are noted, then ever fewer."""

    number: int  # of the steps of the main optimizer, the first that takes steps
    spans: list[Span]
    end: Moment  # when optimizer.step() ended
    own: float  # seconds that the recorder took itself after that


@dataclass(slots=True)
class Gap(Record):
    """A step that took more than five times as long as those before it. All such are noted.

    Mostly something came before its batch: an evaluation, a save, workers that are started.
    """

    number: int  # as in StepTimes
    begin: Moment | None  # when the step before it ended
    end: Moment
    spans: list[Span]  # those of more than LONG seconds


@dataclass(slots=True)
class GpuPart:
    """How long the GPU was in one part of a step."""

    part: str  # a name in PARTS; "rest": between them
    seconds: float  # by the GPU's own clock


@dataclass(slots=True)
class GpuTimes(Record):
    """Where the time of a step went on the GPU, by its own clock. One step of ten is noted.

    The CPU only hands work to the GPU, and goes on: StepTimes do not tell when it is done. What the
    GPU waits for, in a part or between two, is in these seconds, too.
    """

    number: int  # as in StepTimes
    parts: list[GpuPart]

"""A GPU for a watched script that runs on a CPU: a queue with a clock of its own, and its events.

Work is handed to the queue, and takes its time there. An event has a time when the queue has passed
it, and none before: who asks too early gets an error, as on a real one. Nothing here can be waited
for but by wait(), which the script calls.
"""

import sys
import time

import torch
import torch.distributed as dist
from torch.distributed import AllreduceOptions, ReduceOp

queue_end = 0.0  # seconds of time.monotonic(): when all that was handed to the queue is done


def hand_over(seconds):
    """Put work into the queue."""
    global queue_end
    queue_end = max(queue_end, time.monotonic()) + seconds


def wait():
    """Wait for all that is in the queue, as loss.item() does."""
    time.sleep(max(0, queue_end - time.monotonic()))


class Event:
    """Stands for torch.Event."""

    def __init__(self, device, enable_timing):
        """Begin outside the queue."""
        assert device.type == "cuda" and enable_timing
        self.passed_at = None

    def record(self, stream):
        """Stand in the queue."""
        self.passed_at = max(queue_end, time.monotonic())

    def query(self):
        """Return whether the queue has passed it."""
        return self.passed_at <= time.monotonic()

    def elapsed_time(self, other):
        """Return the milliseconds between two events."""
        if not (self.query() and other.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return 1000 * (other.passed_at - self.passed_at)


class Work(torch.nn.GELU):
    """A layer that takes the GPU some time. At the end of backward(), all wait for the last one."""

    def __init__(self, forward, backward):
        """forward, backward: seconds; forward may be a function that returns them."""
        super().__init__()
        self.seconds = forward, backward

    def forward(self, x):
        """Return what GELU does."""
        seconds = self.seconds[0]
        hand_over(seconds() if callable(seconds) else seconds)
        result = super().forward(x)
        if result.requires_grad:
            result.register_hook(self.goes_back)
        return result

    def goes_back(self, gradient):
        """Take the time of the backward pass."""
        hand_over(self.seconds[1])
        torch.autograd.Variable._execution_engine.queue_callback(exchange)


def exchange():
    """Let this rank's queue wait for those of all others; the exchange itself takes 1 ms."""
    global queue_end
    end = torch.tensor([queue_end], dtype=torch.float64)
    options = AllreduceOptions()
    options.reduceOp = ReduceOp.MAX
    dist.group.WORLD.allreduce([end], options).wait()
    queue_end = float(end)
    hand_over(0.001)


torch.Event = Event
torch.accelerator.current_stream = lambda device: None
torch.cuda.is_current_stream_capturing = lambda: False
for name in "check_training", "check_training_recorder":
    if f"{name}.recorder.gpu_times" in sys.modules:
        module = sys.modules[f"{name}.recorder.gpu_times"]
        module.device_of = lambda parameters: torch.device("cuda")

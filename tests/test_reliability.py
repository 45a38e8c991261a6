"""Many real launches: torch's own faults at exit and at a restart show in some runs only."""

import pytest
from started import PYTHON, ROOT, TORCHRUN, run

pytestmark = pytest.mark.long


def test_plain_runs_of_01_end_well(tmp_path, mnist_dir, rounds):
    command = (PYTHON, ROOT / "01_single_node_multi_gpu.py", 1, "--data-dir", mnist_dir)
    for _ in range(rounds):
        result = run(*command, "--nprocs", 2, cwd=tmp_path)
        assert result.status == 0 and "terminate called" not in result.output, result.output
        assert result.lines(0)[-1].startswith("2 replicas are identical, sha256 ")


def test_every_crash_of_02_costs_exactly_one_restart(tmp_path, mnist_dir, rounds):
    command = (*TORCHRUN, "--standalone", "--nproc-per-node=2", "--max-restarts=3",
               ROOT / "02_torchrun_elastic.py", 2, 1, "--crash-epoch", 2,
               "--data-dir", mnist_dir)  # fmt: skip
    digests = set()
    for _ in range(rounds):
        (tmp_path / "snapshot.pt").unlink(missing_ok=True)
        result = run(*command, cwd=tmp_path)
        # The rank that loses its peer may abort: that is torch's fault, and it fails anyway.
        _, _, after = result.output.partition("] attempt 1: ")
        assert result.status == 0 and "terminate called" not in after, result.output
        attempts = [line for line in result.lines() if line.startswith("attempt")]
        assert attempts == ["attempt 1: resumed from snapshot.pt at epoch 2"], result.output
        digests.add(result.lines(0)[-1])
    assert len(digests) == 1, digests

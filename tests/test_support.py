"""The tests' own helpers: each fails when it should, and says why."""

import os
import pathlib
import socket
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from support import (
    PYTHON,
    ROOT,
    end,
    family,
    free_port,
    listening,
    read_until,
    start,
    variant,
    wait_until,
)


def test_gpus_are_hidden():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "" and not torch.cuda.is_available()
    seen = [sys.executable, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"]
    assert subprocess.run(seen, capture_output=True, text=True, check=True).stdout == "\n"


@pytest.mark.parametrize(("old", "times"), [("never in there", 0), ("import", "several")])
def test_a_variant_changes_one_place(tmp_path, old, times):
    script = "download_mnist.py"
    times = (ROOT / script).read_text().count(old) if times else 0
    with pytest.raises(AssertionError, match=f"^{times} times in {script}: '{old}'"):
        variant(tmp_path, script, {old: "other"})
    assert not (tmp_path / script).exists()
    changed = variant(tmp_path, script, {"def main():": "def main(argument):"})
    assert changed == tmp_path / script and "def main(argument):" in changed.read_text()


def test_waiting_has_an_end():
    answers = iter([0, None, "found"])
    assert wait_until(lambda: next(answers), "never") == "found"
    with pytest.raises(AssertionError, match="^after 0 s: no such file$"):
        wait_until(lambda: False, "no such file", timeout=0)
    with pytest.raises(AssertionError, match="^after 0 s: 7 lines$"):
        wait_until(lambda: False, lambda: f"{3 + 4} lines", timeout=0)


@pytest.mark.parametrize(("then", "how"), [
    ("", "ended"), ("; import time; time.sleep(600)", r"was ended after 3 s,")])  # fmt: skip
def test_reading_has_an_end(tmp_path, then, how):
    process = start(PYTHON, "-c", f"print('one\\ntwo', flush=True){then}", cwd=tmp_path)
    try:
        assert read_until(process, "^on") == "one\n"
        with pytest.raises(AssertionError, match=f"^the process {how} without 'three':\ntwo\n"):
            read_until(process, "three", timeout=3)
        assert process.wait(10) in (0, -9)
    finally:
        end(process)
        process.stdout.close()


def test_a_free_port_is_for_a_store_and_for_nobody_else():
    with free_port() as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)


def test_what_listens_is_seen_and_what_does_not_is_not():
    addresses = {"127.0.0.1": socket.AF_INET, "0.0.0.0": socket.AF_INET}
    there = pathlib.Path("/proc/net/if_inet6")
    if there.exists() and f"{1:032x} " in there.read_text():
        addresses["::1"] = socket.AF_INET6
    before = listening(os.getpid())
    for address, kind in addresses.items():
        with socket.socket(kind) as server:
            server.bind((address, 0))
            assert listening(os.getpid()) == before
            server.listen()
            [found] = set(listening(os.getpid())) - set(before)
            assert found == (address, server.getsockname()[1])


def test_a_family_is_with_or_without_its_head(tmp_path):
    code = "import subprocess; subprocess.run(['sleep', '600'], start_new_session=True)"
    process = start(PYTHON, "-c", code, cwd=tmp_path)
    try:
        wait_until(lambda: "sleep 600 " in family(process).values(), lambda: family(process))
        assert set(family(process, itself=True)) == {process.pid, *family(process)}
        assert process.pid not in family(process)
    finally:
        end(process)

"""download_mnist.py against a mirror on this machine: whole, broken and absent."""

import http.server
import threading

import pytest
from support import ROOT, fork, forkserver, limit_file_size, run_script

SCRIPT = "download_mnist.py"
NAMES = [
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
]


class Mirror:
    """An HTTP server on a free port of loopback; behave(handler, name, data) can be replaced."""

    def __init__(self, archives):
        mirror = self
        self.requests = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                name = self.path.rpartition("/")[2]
                mirror.requests.append(name)
                mirror.behave(self, name, archives[name][0])

            def log_message(self, *args):
                pass

        self.behave = self.send
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/mnist"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @staticmethod
    def send(handler, name, data, cut=0):
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data[: len(data) - cut])


@pytest.fixture
def mirrors(archives):
    made = []

    def make():
        made.append(Mirror(archives))
        return made[-1]

    yield make
    for mirror in made:
        mirror.server.shutdown()
        mirror.server.server_close()


class Checksums:
    """Called in the child: makes torchvision expect the test's files and know no other mirror."""

    def __init__(self, archives):
        self.resources = [(f"{name}.gz", archives[f"{name}.gz"][1]) for name in NAMES]

    def __call__(self):
        from torchvision.datasets import MNIST

        MNIST.resources, MNIST.mirrors = self.resources, []


@pytest.fixture
def download(archives, tmp_path):
    def call(*arguments):
        return fork(SCRIPT, *arguments, cwd=tmp_path, before=Checksums(archives))

    return call


def assert_whole(root, idx_files):
    for name, data in idx_files.items():
        assert (root / "MNIST" / "raw" / name).read_bytes() == data
    assert {path.name for path in root.iterdir()} - {".MNIST.lock"} == {"MNIST"}


def test_fetches_the_set_and_leaves_it_alone_afterwards(download, mirrors, tmp_path, idx_files):
    mirror = mirrors()
    result = download("--mirror", mirror.url + "/")  # with or without the slash
    assert result.status == 0, result.output
    assert_whole(tmp_path / "data", idx_files)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "data").rglob("*")}
    mirror.requests.clear()
    result = download("--mirror", mirror.url)
    assert result.status == 0 and "nothing to do" in result.output
    assert mirror.requests == []
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "data").rglob("*")}


def cuts_off(handler, name, data):
    Mirror.send(handler, name, data, cut=len(data) // 2)


def wrong_bytes(handler, name, data):
    Mirror.send(handler, name, data[:-9] + b"\0" * 9)


def not_found(handler, name, data):
    handler.send_error(404)


@pytest.mark.parametrize("fault", [cuts_off, wrong_bytes, not_found])
def test_a_broken_mirror_is_passed_over(download, mirrors, tmp_path, idx_files, fault):
    broken, sound = mirrors(), mirrors()
    broken.behave = fault
    result = download("--mirror", broken.url, "--mirror", sound.url)
    assert result.status == 0, result.output
    assert_whole(tmp_path / "data", idx_files)
    assert result.output.count("failed:") == 4 and len(set(sound.requests)) == 4


@pytest.mark.parametrize("fault", [cuts_off, wrong_bytes, not_found])
def test_without_a_sound_mirror_one_line_and_no_set(download, mirrors, tmp_path, fault):
    broken = mirrors()
    broken.behave = fault
    result = download("--mirror", broken.url)
    assert result.status == 1
    assert "no mirror" in result.error() and "also run without MNIST" in result.error()
    assert not (tmp_path / "data" / "MNIST").exists()


def test_no_network(download, tmp_path):
    result = download("--mirror", "http://127.0.0.1:9")  # the discard port: nobody listens
    assert result.status == 1
    assert "check the network" in result.error()
    assert "Traceback" not in result.output
    assert not (tmp_path / "data" / "MNIST").exists()


@pytest.mark.parametrize("name", NAMES)
def test_a_truncated_file_is_noticed_and_fetched_again(
    download, mirrors, own_mnist_dir, idx_files, name
):
    file = own_mnist_dir / "MNIST" / "raw" / name
    file.write_bytes(file.read_bytes()[:-100])
    result = download("--data-dir", own_mnist_dir, "--mirror", mirrors().url)
    assert result.status == 0, result.output
    assert "is damaged" in result.output
    assert_whole(own_mnist_dir, idx_files)


def test_a_changed_byte_is_noticed_where_the_archives_are_kept(
    download, mirrors, tmp_path, idx_files
):
    mirror = mirrors()
    assert download("--mirror", mirror.url).status == 0
    for name in (NAMES[0], f"{NAMES[0]}.gz"):
        file = tmp_path / "data" / "MNIST" / "raw" / name
        data = bytearray(file.read_bytes())
        data[5000] ^= 1
        file.write_bytes(data)
        result = download("--mirror", mirror.url)
        assert result.status == 0 and f"{NAMES[0]}.gz" in result.output, result.output
        assert_whole(tmp_path / "data", idx_files)


def test_a_failed_repair_leaves_the_damaged_set_as_it_was(download, mirrors, own_mnist_dir):
    file = own_mnist_dir / "MNIST" / "raw" / NAMES[0]
    file.write_bytes(file.read_bytes()[:-100])
    before = {p.name: p.read_bytes() for p in file.parent.iterdir()}
    broken = mirrors()
    broken.behave = not_found
    assert download("--data-dir", own_mnist_dir, "--mirror", broken.url).status == 1
    assert before == {p.name: p.read_bytes() for p in file.parent.iterdir()}


def test_killed_half_way_then_two_at_once(download, archives, mirrors, tmp_path, idx_files):
    """A mirror stops in the middle of a file; the download is killed there; two others go on."""
    mirror = mirrors()
    stuck, go_on = threading.Event(), threading.Event()

    def stop_in_the_second_file(handler, name, data):
        if name == f"{NAMES[1]}.gz" and not go_on.is_set():
            Mirror.send(handler, name, data, cut=len(data) // 2)
            handler.wfile.flush()
            stuck.set()
            go_on.wait(60)
        else:
            Mirror.send(handler, name, data)

    mirror.behave = stop_in_the_second_file

    def begin(output):
        call = (ROOT / SCRIPT, ["--mirror", mirror.url], {}, tmp_path, output, Checksums(archives))
        process = forkserver.Process(target=run_script, args=call)
        process.start()
        return process

    first = begin(tmp_path / "first")
    assert stuck.wait(60)
    first.kill()
    first.join()
    assert not (tmp_path / "data" / "MNIST").exists()
    go_on.set()
    mirror.requests.clear()
    pair = [begin(tmp_path / "second"), begin(tmp_path / "third")]
    for process in pair:
        process.join(60)
    output = [(tmp_path / name).read_text() for name in ("second", "third")]
    assert [process.exitcode for process in pair] == [0, 0], output
    assert_whole(tmp_path / "data", idx_files)
    # The first archive was kept from the killed download, and no file was fetched by both.
    assert set(mirror.requests) == {f"{name}.gz" for name in NAMES[1:]}, output
    urls = [line for text in output for line in text.splitlines() if line.startswith("http")]
    assert len(urls) == len(NAMES), output


def test_a_folder_that_cannot_be_written(download):
    result = download("--data-dir", "/proc/data")
    assert result.status == 1
    assert "cannot write" in result.error() and "--data-dir" in result.error()


def test_a_full_disk_is_not_the_mirrors_fault(mirrors, tmp_path, archives):
    mirror = mirrors()
    before = (Checksums(archives), limit_file_size)
    result = fork(SCRIPT, "--mirror", mirror.url, cwd=tmp_path, before=before)
    assert result.status == 1
    assert "cannot write to data: [Errno 27] File too large" in result.error()
    assert not (tmp_path / "data" / "MNIST").exists()


def test_a_wrong_call(tmp_path):
    result = fork(SCRIPT, "--mirrors", cwd=tmp_path)
    assert result.status == 2
    assert "--mirror" in result.error()

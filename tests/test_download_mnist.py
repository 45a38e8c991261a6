"""download_mnist.py leaves a whole set or none, with mirrors that are sound, broken or absent."""

import functools
import http.server
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from digits import write_digits
from forked import fork, forkserver, limit_file_size, run_script
from started import ROOT

SCRIPT = "download_mnist.py"
NAMES = [
    f"{split}-{kind}-ubyte"
    for split in ("train", "t10k")
    for kind in ("images-idx3", "labels-idx1")
]


def send(handler, name, data, cut=0):
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data[: len(data) - cut])


@pytest.fixture
def mirrors(archives):
    """A function that starts a mirror, whose answers are behave(handler, name, data)."""
    made = []

    def make(behave=send):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                name = self.path.rpartition("/")[2]
                mirror.requests.append(name)
                behave(self, name, archives[name][0])

            def log_message(self, *args):
                pass

        mirror = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        mirror.url, mirror.requests = f"http://127.0.0.1:{mirror.server_port}/mnist", []
        threading.Thread(target=mirror.serve_forever, daemon=True).start()
        made.append(mirror)
        return mirror

    yield make
    for mirror in made:
        mirror.shutdown()
        mirror.server_close()


def expect(resources):
    """Called in the child: torchvision expects the test's files, and knows no other mirror."""
    from torchvision.datasets import MNIST

    MNIST.resources, MNIST.mirrors = resources, []


@pytest.fixture
def expected(archives):
    return functools.partial(expect, [(name, md5) for name, (_, md5) in archives.items()])


@pytest.fixture
def download(expected, tmp_path):
    return lambda *words, before=(): fork(SCRIPT, *words, cwd=tmp_path, before=(expected, *before))


def assert_whole(root, idx_files):
    for name, data in idx_files.items():
        assert (root / "MNIST" / "raw" / name).read_bytes() == data
    assert {path.name for path in root.iterdir()} - {".MNIST.lock"} == {"MNIST"}


def test_fetches_the_set_and_leaves_it_alone_afterwards(download, mirrors, tmp_path, idx_files):
    mirror = mirrors()
    result = download("--mirror", mirror.url + "/").ok()  # with or without the slash
    assert_whole(tmp_path / "data", idx_files)
    result = download("--mirror", mirrors(not_found).url)
    assert result.status == 0 and "nothing to do" in result.output


def not_found(handler, name, data):
    handler.send_error(404)


@pytest.mark.parametrize(
    "fault",
    [
        lambda handler, name, data: send(handler, name, data, cut=len(data) // 2),
        lambda handler, name, data: send(handler, name, data[:-9] + b"\0" * 9),
        not_found,
    ],
    ids=["cut off", "wrong bytes", "not found"],
)
def test_a_broken_mirror_is_passed_over(download, mirrors, tmp_path, idx_files, fault):
    broken, sound = mirrors(fault), mirrors()
    result = download("--mirror", broken.url)
    assert result.status == 1
    assert "no mirror" in result.error() and "also run without MNIST" in result.error()
    assert not (tmp_path / "data" / "MNIST").exists()
    result = download("--mirror", broken.url, "--mirror", sound.url).ok()
    assert_whole(tmp_path / "data", idx_files)
    assert result.output.count("failed:") == 4 and len(set(sound.requests)) == 4


@pytest.mark.parametrize("name", [NAMES[0], NAMES[3]])
def test_a_truncated_file_is_noticed_and_fetched_again(
    download, mirrors, tmp_path, idx_files, name
):
    own_mnist_dir = write_digits(tmp_path / "digits")
    file = own_mnist_dir / "MNIST" / "raw" / name
    file.write_bytes(file.read_bytes()[:-100])
    before = {p.name: p.read_bytes() for p in file.parent.iterdir()}
    call = ("--data-dir", own_mnist_dir, "--mirror")
    assert download(*call, mirrors(not_found).url).status == 1
    assert before == {p.name: p.read_bytes() for p in file.parent.iterdir()}
    result = download(*call, mirrors().url)
    assert result.status == 0 and "is damaged" in result.output, result.output
    assert_whole(own_mnist_dir, idx_files)


def test_killed_half_way_then_two_at_once(expected, download, mirrors, tmp_path, idx_files):
    """A mirror stops in the middle of a file; the download is killed there; two others go on."""
    stuck, go_on = threading.Event(), threading.Event()

    def stop_in_the_second_file(handler, name, data):
        stop = name == f"{NAMES[1]}.gz" and not go_on.is_set()
        send(handler, name, data, cut=len(data) // 2 * stop)
        if stop:
            handler.wfile.flush()
            stuck.set()
            go_on.wait(60)

    mirror = mirrors(stop_in_the_second_file)
    first = forkserver.Process(
        target=run_script,
        args=(ROOT / SCRIPT, ["--mirror", mirror.url], {}, tmp_path, tmp_path / "output", expected),
    )
    first.start()
    assert stuck.wait(60)
    first.kill()
    first.join()
    assert not (tmp_path / "data" / "MNIST").exists()
    go_on.set()
    mirror.requests.clear()
    with ThreadPoolExecutor() as pool:
        pair = list(pool.map(lambda _: download("--mirror", mirror.url), range(2)))
    assert [result.status for result in pair] == [0, 0], pair
    assert_whole(tmp_path / "data", idx_files)
    # The first archive was kept from the killed download, and no file was fetched by both.
    assert set(mirror.requests) == {f"{name}.gz" for name in NAMES[1:]}, pair
    urls = [line for result in pair for line in result.output.splitlines() if line[:4] == "http"]
    assert len(urls) == len(NAMES), pair


@pytest.mark.parametrize(
    ("call", "before", "status", "message"),
    [
        ("--mirror http://127.0.0.1:9", (), 1, "check the network"),  # nobody listens there
        ("--data-dir /proc/data", (), 1, "cannot write.*--data-dir"),
        (
            "--mirror MIRROR",
            (limit_file_size,),
            1,
            "cannot write to data: .Errno 27. File too large",
        ),
        ("--mirrors", (), 2, "--mirror"),
    ],
)
def test_what_cannot_work_ends_in_one_line(
    download, mirrors, tmp_path, call, before, status, message
):
    result = download(*call.replace("MIRROR", mirrors().url).split(), before=before)
    assert result.status == status and re.search(message, result.error()), result.output
    assert "Traceback" not in result.output
    assert not (tmp_path / "data" / "MNIST").exists()

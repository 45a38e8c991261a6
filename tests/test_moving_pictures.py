"""The pictures that move: they show what commands printed, and are whole where nothing moves."""

import re
from itertools import chain, pairwise
from xml.etree import ElementTree

import pytest
import shown
from support import fork_ranks

SVG = "{http://www.w3.org/2000/svg}"
PICTURES = ["buckets", "kill", "ring"]


@pytest.fixture
def draw(monkeypatch, tmp_path):
    """The module that draws, with a folder of its own for what it reads."""
    pytest.importorskip("matplotlib", reason="pip install -r benchmarks/requirements.txt")
    monkeypatch.syspath_prepend(shown.FOLDER)
    import draw

    for name in ("04_collectives.txt", "main_job.txt", "main_job_not_killed.log"):
        (tmp_path / name).write_text((shown.FOLDER / name).read_text())
    monkeypatch.setattr(draw, "HERE", tmp_path)
    return draw


def committed(name):
    return (shown.FOLDER / f"{name}.svg").read_text()


def change(path, old, new):
    text, count = re.subn(old, new, path.read_text())
    assert count == 1
    path.write_text(text)


def texts(svg, at_rest=True):
    """The texts of a picture; at rest, those that are there when nothing moves."""
    found = []

    def collect(element):
        if not at_rest or element.get("opacity") != "0":
            found.extend([element.text] * (element.tag == f"{SVG}text"))
            for child in element:
                collect(child)

    collect(ElementTree.fromstring(svg))
    return found


@pytest.mark.parametrize("name", PICTURES)
def test_a_moving_picture_needs_nothing_else(name):
    """No script, nothing from elsewhere, and a name and a description for those who cannot see."""
    svg = committed(name)
    root = ElementTree.fromstring(svg)
    assert root.tag == f"{SVG}svg" and len(svg.encode()) < 30_000
    assert len(root.find(f"{SVG}title").text) > 20 and len(root.find(f"{SVG}desc").text) > 100
    known = {"svg", "title", "desc", "style", "defs", "marker", "rect", "text", "path", "g"}
    assert {element.tag.removeprefix(SVG) for element in root.iter()} == known
    for element in root.iter():
        assert not [a for a in element.attrib if a.startswith("on") or "href" in a]
    assert set(re.findall(r"url\((.*?)\)|@import", svg)) == {"#head"}
    assert set(re.findall(r"https?://[^\"]+", svg)) == {SVG[1:-1]}
    assert min(int(n) for n in re.findall(r'font-size="(\d+)"', svg)) >= 18


@pytest.mark.parametrize("name", PICTURES)
def test_a_moving_picture_moves_only_where_it_may(name):
    """One loop for all parts; on a screen only, and not where less motion is asked for."""
    svg = committed(name)
    style = ElementTree.fromstring(svg).find(f"{SVG}style").text
    before, _, rules = style.partition("@media screen and (prefers-reduced-motion:no-preference){")
    [(seconds, delay)] = re.findall(r"\{animation:(\d+)s linear (-\d+)s infinite\}", rules)
    assert 8 <= int(seconds) <= 12 and int(seconds) + int(delay) == 2 and "animation:" not in before
    frames = dict(re.findall(r"@keyframes (\w+)\{(.*)\}\n", before))
    assert len(frames) > 10 and all(f".{name}{{animation-name:{name}}}" in rules for name in frames)
    used = re.findall(r'class="(\w+)', svg)
    assert set(used) == set(frames)
    for steps in frames.values():
        moments = [float(n) for n in re.findall(r"([\d.]+)%\{", steps)]
        assert moments == sorted(moments) and moments[0] == 0 and moments[-1] == 100


def test_the_ring_and_the_buckets_are_those_of_04(draw, tmp_path):
    """Its own functions run here, and what they print leads to the same pictures."""
    result = fork_ranks("04_collectives.py", "--only", "ring", "ddp", cwd=tmp_path, world_size=4)
    assert result.status == 0, result.output
    lines = [line for line in result.output.splitlines() if line.startswith("[rank 0/4]")]
    (tmp_path / "04_collectives.txt").write_text("\n".join(lines))
    assert draw.ring().text() == committed("ring")
    assert draw.buckets().text() == committed("buckets")

    steps = draw.ring_steps()
    assert len(steps) == 7 and steps[0] == [[10 * r + n for n in (1, 2, 3, 4)] for r in range(4)]
    sums = [str(sum(column)) for column in zip(*steps[0], strict=True)]
    numbers = [text for text in texts(committed("ring")) if text in sums]
    assert numbers == [s for _ in range(4) for s in sums]  # at rest, the sums on every rank
    shows = texts(committed("ring"), at_rest=False)
    for one, other in pairwise(steps):
        pairs = zip(chain(*one), chain(*other), strict=True)
        changed = [str(new) for old, new in pairs if new != old]
        assert len(changed) == 4 and set(changed) <= set(shows)


@pytest.mark.parametrize(("old", "new", "message"), [
    (r"\[1 2 3 38\]", "[1 2 3 39]", "step 1: rank 3 sends 34, and 35 arrives"),
    (r"\[64 68 59 76\]", "[64 68 59 77]", "step 5: rank 3 sends 76, and 77 arrives"),
])
def test_a_wrong_number_of_the_ring_is_not_drawn(draw, tmp_path, old, new, message):
    change(tmp_path / "04_collectives.txt", old, new)
    with pytest.raises(ValueError, match=re.escape(message)):
        draw.ring()


def test_other_numbers_make_other_pictures(draw, tmp_path):
    path = tmp_path / "04_collectives.txt"
    head, mark, table = path.read_text().partition("== ring\n")
    table, rest = table.partition("== ddp\n")[::2]
    for old, new in (("1", "5"), ("12", "16"), ("33", "37"), ("64", "68")):
        table = re.sub(rf"\[{old}\b", f"[{new}", table)  # rank 0 starts with 5 in place of 1
    path.write_text(f"{head}{mark}{table}== ddp\n{rest}")
    svg = draw.ring().text()
    assert svg != committed("ring") and ">start: 5 2 3 4<" in svg and ">+37<" in svg

    path.write_text(re.sub(r"(still to come: )(\d+)", lambda m: f"{m[1]}{int(m[2]) // 2}", rest))
    path.write_text(f"\n== ddp\n{path.read_text()}")
    assert "backward, from layer 4 to layer 1" in texts(draw.buckets().text())


def test_the_kill_is_that_of_the_main_job(draw, tmp_path):
    assert draw.kill().text() == committed("kill")
    command, lines = shown.read(tmp_path / "main_job.txt")
    _, alone = draw.read(tmp_path / "main_job_not_killed.log")[0]
    assert command == f"{alone.removeprefix('$ ')} --crash-epoch 3"
    whole = draw.epochs(draw.read(tmp_path / "main_job_not_killed.log"))
    killed = draw.epochs([(0, line) for line in lines])
    assert [found[1:] for found in whole] == [found[1:] for found in killed]  # the same losses
    shows, checksum = texts(committed("kill")), lines[-1].rpartition(" ")[2]
    assert shows.count(checksum) == 2 and shows.count("3") == 2 + 2 + 1 + 1  # lost, again, saved


@pytest.mark.parametrize(("old", "new"), [
    (r"rank 1/2\] crash", "rank 0/2] crash"),
    (r"(epoch  [2]/6.*) \| saved.*\n", r"\1\n"),
    (r"resumed from snapshot.pt at epoch 3", "resumed from snapshot.pt at epoch 2"),
    (r"04064526e58c|(?<=sha256 )\w{12}", "0123456789ab"),
])
def test_another_story_makes_another_picture_or_none(draw, tmp_path, old, new):
    change(tmp_path / "main_job.txt", old, new)
    try:
        svg = draw.kill().text()
    except SystemExit as error:
        assert "rank 0" not in new and "not one story" in str(error)
    else:
        assert "Rank 0 is killed in the middle of epoch 3." in texts(svg, at_rest=False)


@pytest.mark.parametrize("name", PICTURES)
def test_at_rest_a_picture_has_one_caption_a_line(name):
    """The captions take turns when it plays. At rest, no two texts are in one place."""
    found = [(e.get("x"), e.get("y")) for e in ElementTree.fromstring(committed(name)).iter()
             if e.tag == f"{SVG}text" and e.get("opacity") != "0" and e.get("x") == "400"]
    assert len(found) == len(set(found)) >= 3

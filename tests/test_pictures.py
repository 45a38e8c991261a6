"""The pictures belong to their data: each is drawn from committed logs, and a page shows it."""


import pytest
import shown


@pytest.fixture
def draw(monkeypatch):
    """The module that draws."""
    pytest.importorskip("matplotlib", reason="pip install -r requirements-dev.txt")
    monkeypatch.syspath_prepend(shown.PICTURES)
    import draw

    return draw


def test_the_pictures_are_those_of_their_logs(draw):
    """Each still one says from what it was drawn; those that move are drawn anew.

    To draw one, draw.py follows the ring's sums and the story of the kill, and refuses others.
    """
    drawn = {path.stem: path for path in shown.PICTURES.glob("*.svg")}
    assert drawn.keys() == draw.STILL.keys() | draw.MOVING.keys()
    linked = {(document.parent / link).resolve()
              for document in shown.DOCUMENTS for link in shown.links(document)}  # fmt: skip
    for name, path in drawn.items():
        assert path in linked, f"{name}: no document shows it"
        whole = path.read_text()
        assert (draw.source(*draw.STILL[name][1:]) in whole if name in draw.STILL
                else draw.MOVING[name]().text() == whole), (
            f"draw {name} anew: python docs/pictures/draw.py --redraw")  # fmt: skip


def test_a_number_of_the_ring_that_does_not_follow_is_not_drawn(draw, monkeypatch, tmp_path):
    log = (shown.FOLDER / "04_collectives.txt").read_text()
    assert log.count("[1 2 3 38]") == 1
    (tmp_path / "04_collectives.txt").write_text(log.replace("[1 2 3 38]", "[1 2 3 39]"))
    monkeypatch.setattr(draw, "LOGS", tmp_path)
    with pytest.raises(ValueError, match="step 1: rank 3 sends 34, and 35 arrives"):
        draw.ring()


def test_the_killed_run_goes_on_with_the_losses_of_the_other(draw):
    whole = {epoch: loss for *_, epoch, loss in draw.epochs(draw.read(
        draw.LOGS / "uninterrupted.log"))}  # fmt: skip
    lines = draw.read(draw.LOGS / "killed.log")
    [crash] = [i for i, (_, line) in enumerate(lines) if "crash on purpose" in line]
    before, after = draw.epochs(lines[:crash]), draw.epochs(lines[crash:])
    assert sorted(whole) == list(range(1, 21)) and before[-1][2] == 10 and after[0][2] == 9
    assert all(whole[epoch] == loss for *_, epoch, loss in before + after)
    [checksum] = {line for _, line in lines if "sha256" in line}
    assert checksum in (draw.LOGS / "uninterrupted.log").read_text()

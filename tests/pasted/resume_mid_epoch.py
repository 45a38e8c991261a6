dataset, batch_size, total_steps, runs = Drawn(range(26)), 6, 12, []


def your_step():
    seen[step] = sorted(sum(gathered(batch.tolist()), []))


for snapshot in ({"step": 0}, {"step": 6}):
    seen = {}
    # PASTE
    runs.append(seen)
whole, resumed = runs
assert resumed == {step: seen for step, seen in whole.items() if step >= 6}, "not resumed"
for first in (0, 4, 8):
    items = [item for step in range(first, first + 4) for item, _ in whole[step]]
    assert len(items) == len(set(items)) == 24, f"items twice, or never: {items}"
alone = DataLoader(SeededItems(dataset), batch_sampler=GlobalBatches(range(12), 26, 6, 0, 1))
assert whole == {step: sorted(batch.tolist()) for step, batch in enumerate(alone)}, "other items"

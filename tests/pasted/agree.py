# PASTE1
# PASTE2
for epoch in range(1, 8):
    no_progress, deadline = rank == last and epoch >= 3, math.inf
    # PASTE3
assert gathered(epoch) == [3] * world_size, f"left after epochs {gathered(epoch)}"

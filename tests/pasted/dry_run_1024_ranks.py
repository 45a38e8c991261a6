def YourModel():
    return Model(width=1024)
def train_one_step(model):
    model(torch.randn(16, 1024)).square().mean().backward()
# PASTE
with torch.device("meta"):
    whole, block = (4 * weights(net).numel() for net in (YourModel(), Block(1024)))
kept, sent = sum(p.to_local().nbytes for p in model.parameters()), step.bytes["reduce-scatter"]
assert kept == whole / 1024 and sent == whole, f"{kept} and {sent} of {whole}"
assert step.largest["all-gather"] == block, step.largest

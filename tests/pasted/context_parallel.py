class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.qkv, self.head = nn.Embedding(9, 8), nn.Linear(8, 24), nn.Linear(8, 9)

    def forward(self, tokens, positions):
        x = self.embed(tokens)[:, None]  # one head
        for _ in range(2):
            q, k, v = self.qkv(x).chunk(3, dim=-1)
            # PASTE2
            x = x + out
        return self.head(x[:, 0])


plain, model = Transformer().to(device), DDP(Transformer().to(device))
tokens = torch.randint(9, (3, 24)).to(device)
ring_attention, of_ranks = partial(scaled_dot_product_attention, is_causal=True), ring_attention
scores = plain(tokens[:, :-1], torch.arange(23, device=device))
cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten()).backward()
ring_attention = of_ranks
# PASTE1
# PASTE3
check(gradient(model), gradient(plain))
assert len(positions) == 24 // world_size, f"{len(positions)} tokens on a rank"
# A group, bfloat16 (the sums over blocks are float32), and a q whose rows are not contiguous.
group = dist.new_subgroups_by_enumeration([[0], [*range(1, world_size)]])[0]
whole = torch.randn(4, 1, 2, 24, 8).bfloat16()
leaves, own = whole[:3].double().requires_grad_(), own_positions(24, device, group)
expected = scaled_dot_product_attention(*leaves, is_causal=True)
expected.backward(whole[3].double())
parts = whole[:3, ..., own, :].requires_grad_()
with torch.autocast("cpu", torch.bfloat16):
    found = ring_attention(parts[0].mT.contiguous().mT, *parts[1:], group=group)
found.backward(whole[3][..., own, :])
for one, other in ((found, expected), (parts.grad, leaves.grad)):
    check(one, other[..., own, :], 1e-2)
one_step(model)

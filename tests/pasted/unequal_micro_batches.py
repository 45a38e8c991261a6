plain, batches = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 10)).to(device), []
model = DDP(copy.deepcopy(plain))
for number in range(3 * world_size):
    batches.append(torch.randint(10, (2, 2, 3 + number**2)).to(device))
    batches[-1][1, 1, number + 1 :] = -100
scores = torch.cat([plain(inputs).flatten(0, 1) for inputs, _ in batches])
cross_entropy(scores, torch.cat([targets.flatten() for _, targets in batches])).backward()
micro_batches = batches[rank::world_size]
# PASTE
check(gradient(model), gradient(plain))
one_step(model)

class YourModel(nn.Module):
    def __init__(self, mixture=ExpertParallel):
        def new_expert(number):
            torch.manual_seed(number)
            expert = Block(8).requires_grad_(number > 3)  # frozen: all of rank 1 of 2
            expert.register_buffer("number", torch.tensor(number), persistent=False)
            return expert

        super().__init__()
        self.blocks = nn.ModuleList()
        for seed in (10, 20):
            torch.manual_seed(seed)
            self.blocks.append(mixture(8, 7, 2, new_expert))

    def forward(self, x):
        x, balance = self.blocks[0](x)
        x, more = self.blocks[1](x)
        return x, balance + more


def compare(net):
    check(norm, expected)
    trained = [(p.grad, whole[name].grad) for name, p in net.named_parameters() if p.requires_grad]
    found, right = zip(*trained)
    check(flat(found), flat(right))
    for name, expert in net.blocks[0].experts.items():
        assert int(name) == expert.number, "overwritten"
    check(net.blocks[0](inputs[None])[0][0], net.blocks[0](inputs)[0])  # tokens of any shape
    assert "experts.0.up.weight" in sum(gathered(names_of_experts(mixture)), []), "not by itself"


mixture = YourModel().blocks[0]
plain, MAX_NORM = YourModel(OneProcess).to(device), 0.05
outputs, balance = plain(all_inputs)
(mse_loss(outputs, all_targets) + 0.01 * balance).backward()
whole = dict(plain.named_parameters())
expected = nn.utils.clip_grad_norm_(whole.values(), MAX_NORM)
# PASTE1
# PASTE2
compare(model)
optimizer.step()
assert hasattr(model.blocks[0].router.weight, "full_tensor"), "not in shards"
model = YourModel().to(device)
experts, ddp = parameters_of_experts(model), wrap_ddp(model)
outputs, balance = ddp(inputs)
(mse_loss(outputs, targets) + 0.01 * balance).backward()
divide_by_ranks(experts)
norm = clip_with_experts(ddp, experts, MAX_NORM)
compare(model)
one_step(model)

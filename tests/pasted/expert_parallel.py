class YourModel(nn.Module):
    def __init__(self, mixture=ExpertParallel):
        def new_expert(number):
            torch.manual_seed(number)
            expert = Block(8)
            expert.register_buffer("number", torch.tensor(number), persistent=False)
            return expert
        super().__init__()
        self.mixtures = nn.ModuleList()
        for seed in (10, 20):
            torch.manual_seed(seed)
            self.mixtures.append(mixture(8, 7, 2, new_expert))
    def forward(self, x):
        x, balance = self.mixtures[0](x)
        x, more = self.mixtures[1](x)
        return x, balance + more
plain, MAX_NORM = YourModel(OneProcess), 0.05
outputs, balance = plain(all_inputs)
(mse_loss(outputs, all_targets) + 0.01 * balance).backward()
whole = dict(plain.named_parameters())
expected = nn.utils.clip_grad_norm_(whole.values(), MAX_NORM)
# PASTE
check(norm, expected)
check(gradient(model), flat(whole[name].grad for name, _ in model.module.named_parameters()))
mixture = model.module.mixtures[0]
assert all(int(name) == expert.number for name, expert in mixture.experts.items()), "overwritten"
check(mixture(inputs[None])[0][0], mixture(inputs)[0])  # tokens of any shape
assert "experts.0.up.weight" in sum(gathered(names_of_experts(mixture)), []), "not by itself"

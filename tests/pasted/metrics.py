def auc(scores, labels):
    return (scores[labels == 1][:, None] > scores[labels == 0]).double().mean().item()


all_scores, all_labels = torch.rand(101) + torch.arange(101) / 200, torch.arange(101) ** 2 % 3
sizes = [60, *(len(part) for part in torch.arange(41).tensor_split(last))]
scores, labels = (rows.split(sizes)[rank].to(device) for rows in (all_scores, all_labels))
metric = auc
# PASTE
assert value == auc(all_scores, all_labels), f"{value} for {auc(all_scores, all_labels)}"

"""A GPT of one layer, for the scripts that train on tokens."""

import torch
from torch import nn


class GPT(nn.Module):
    """Call it with inputs and targets of (batch, length). It returns (logits, mean loss)."""

    def __init__(self, vocabulary, length, dropout, width=32):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.block = nn.TransformerEncoderLayer(width, 2, 64, dropout=dropout, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, inputs, targets):
        mask = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1])
        hidden = self.tokens(inputs) + self.places(torch.arange(inputs.shape[1]))
        logits = self.head(self.block(hidden, src_mask=mask, is_causal=True))
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

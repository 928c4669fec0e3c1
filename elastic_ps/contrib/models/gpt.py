"""A decoder-only transformer.

It is built as GPT-2 (Radford et al., "Language models are unsupervised multitask learners", 2019): layer
normalisation stands before attention and before the feed-forward layers, and the output layer shares its
weight with the embedding of the tokens.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from elastic_ps.errors import InvalidModel


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.mixed = nn.Linear(width, width)
        self.before_feed = nn.LayerNorm(width)
        self.feed = nn.Linear(width, 4 * width)
        self.fed = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, width) to the same shape."""
        batch, tokens, width = x.shape
        parts = self.attention(self.before_attention(x)).view(batch, tokens, 3, self._heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mixed(seen.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.fed(functional.gelu(self.feed(self.before_feed(x)), approximate="tanh"))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Takes (batch, tokens) int64 numbers and returns (batch, tokens, vocabulary) logits of each next token.

    The defaults make a small one, of 0.8 million parameters.

    Args:
        vocabulary: the number of different tokens.
        context: the largest number of tokens in a piece of text.
        width: of the vectors that stand for tokens.
        layers: the number of blocks.
        heads: of attention in each block; a divisor of `width`.

    Raises:
        InvalidModel: `width` is not a multiple of `heads`.
    """

    def __init__(
        self, *, vocabulary: int = 256, context: int = 128, width: int = 128, layers: int = 4, heads: int = 4
    ) -> None:
        super().__init__()
        if width % heads:
            raise InvalidModel(f"width is {width} and heads is {heads}; expected a multiple of heads")
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.last = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if name.endswith(
                ("mixed.weight", "fed.weight")
            ):  # what is added to the shortcut grows with the depth
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers))
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, tokens) int64 to (batch, tokens, vocabulary)."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x))  # type: ignore[no-any-return]

"""The language model of the demo: a small GPT in plain PyTorch, nothing in it that knows of storage.

Token embedding -> blocks of (RMSNorm, causal self-attention with rotary positions, RMSNorm, MLP) -> RMSNorm -> head.
The head shares its weights with the embedding. No dropout: a step is a function of its parameters and its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class GptOptions:
    """The shape of the model."""

    vocabulary: int
    #: Longest sequence, in tokens.
    sequence: int
    width: int = 192
    heads: int = 6
    layers: int = 4

    def __post_init__(self) -> None:
        for name in ("vocabulary", "sequence", "width", "heads", "layers"):
            if getattr(self, name) < 1:
                raise UsageError(f"GptOptions.{name}", expected="at least 1", found=str(getattr(self, name)))
        if self.width % (2 * self.heads):
            raise UsageError(
                "GptOptions.width", expected=f"a multiple of 2 x heads = {2 * self.heads}", found=str(self.width)
            )


class Attention(nn.Module):
    def __init__(self, options: GptOptions) -> None:
        super().__init__()
        self.heads = options.heads
        self.qkv = nn.Linear(options.width, 3 * options.width, bias=False)
        self.out = nn.Linear(options.width, options.width, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """x: [batch, tokens, width]."""
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(_rotate(q, rotation), _rotate(k, rotation), v, is_causal=True)
        projected: Tensor = self.out(y.transpose(1, 2).reshape(batch, tokens, width))
        return projected


class Block(nn.Module):
    def __init__(self, options: GptOptions) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(options.width)
        self.attention = Attention(options)
        self.mlp_norm = nn.RMSNorm(options.width)
        self.up = nn.Linear(options.width, 4 * options.width, bias=False)
        self.down = nn.Linear(4 * options.width, options.width, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        y: Tensor = x + self.down(F.gelu(self.up(self.mlp_norm(x))))
        return y


class Gpt(nn.Module):
    """`forward(tokens[batch, n + 1])` -> the sum over all n positions of the next token's cross entropy, in nats."""

    def __init__(self, options: GptOptions) -> None:
        super().__init__()
        self.options = options
        self.embedding = nn.Embedding(options.vocabulary, options.width)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.layers))
        self.norm = nn.RMSNorm(options.width)
        self.apply(self._initialise)
        for name, parameter in self.named_parameters():
            # GPT-2's rule: what is added to the residual stream starts smaller the deeper the model is.
            if name.endswith(("attention.out.weight", "down.weight")):
                nn.init.normal_(parameter, std=0.02 / (2 * options.layers) ** 0.5)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.embedding(inputs)
        rotation = _angles(inputs.shape[1], self.options.width // self.options.heads, x.device)
        for block in self.blocks:
            x = block(x, rotation)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def _angles(tokens: int, head_width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary positions (Su et al. 2021), [tokens, head_width / 2] each."""
    frequencies = 10000.0 ** (-torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width)
    angles = torch.outer(torch.arange(tokens, device=device, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cosine, sine = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)

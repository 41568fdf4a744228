"""What sizes count, and how they are written."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Unit:
    """What sizes count: samples, or values of a budget within which loaders form batches.

    Args:
        budget_name: the attribute that holds the budget, such as ``"max_tokens"``; ``None``: sizes
            are in samples.

    Example:
        >>> Unit().size(32), Unit("max_tokens").size(4096)
        ('32 samples', 'max_tokens 4,096')
    """

    budget_name: str | None = None

    @property
    def name(self) -> str:
        """What a size is called."""
        return self.budget_name or "batch size"

    @property
    def items(self) -> str:
        """What the throughput counts: samples, or the items within a budget."""
        return "items" if self.budget_name else "samples"

    @property
    def one(self) -> str:
        """What a line grows with."""
        return f"for each of {self.budget_name}" if self.budget_name else "a sample"

    def size(self, size: int) -> str:
        """A size as a number of samples, or as a budget."""
        name = self.budget_name
        return f"{name} {size:,}" if name else f"{size:,} sample{'s' * (size != 1)}"

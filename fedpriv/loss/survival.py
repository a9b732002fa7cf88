"""Discrete hazards: the time until an event, in K public bins, as a loss of K outputs, and its measures.

A label is one class of 2K + 1: (m, δ) ↦ m + (K + 1) δ, m the bins survived, δ = 1 if the event was seen in bin m
(`TableSchema.survival` makes it of a time and an event).  With h the outputs, sigmoid(h_i) is the hazard of bin i:

    loss = Σ_{i<m} softplus(h_i) + δ softplus(-h_m)

S(k) = Π_{i ≤ k} (1 - sigmoid(h_i)) is survival to the end of bin k.  Antolini's index (`concordance`) is, of pairs
of one with an event in bin m and one who survived it, the share in which the first has the smaller S(m), ties
counted half.  The integrated Brier score is the mean over bins k of the squared error of S(k), weighted by 1/G
against censoring: G is Kaplan and Meier's estimate of not being censored, from the records that are scored; an
event comes before a censoring of the same bin.

Source: Gensheimer & Narasimhan 2019, whose outputs are 1 - hazard; Antolini et al. 2005; Graf et al. 1999.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


def bins_of(classes: int) -> int:
    """K of 2K + 1 classes."""
    return (classes - 1) // 2


def told(labels: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """(m, δ) of labels, each (...): bins survived, and whether the event was seen; others are held to one."""
    held = labels.long().clamp(0, 2 * bins)
    return held % (bins + 1), held > bins


@dataclass(frozen=True)
class Hazard:
    """Σ_{i<m} softplus(h_i) + δ softplus(-h_m); outputs are h, (..., B, K)."""

    def value(self, outputs: Tensor, labels: Tensor) -> Tensor:
        survived, died = self._bins(outputs, labels)
        return (survived * functional.softplus(outputs) + died * functional.softplus(-outputs)).sum(-1)

    def slope(self, outputs: Tensor, labels: Tensor) -> Tensor:
        survived, died = self._bins(outputs, labels)
        return survived * outputs.sigmoid() - died * (-outputs).sigmoid()

    def accuracy(self, outputs: Tensor, labels: Tensor) -> None:
        """None: a hazard is neither right nor wrong."""

    def _bins(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Which bins (..., B, K) a record survived, and in which it had its event, as numbers."""
        bins = outputs.shape[-1]
        last, seen = told(labels, bins)
        place = torch.arange(bins, device=outputs.device)
        survived = place < last.unsqueeze(-1)
        return survived.to(outputs.dtype), ((place == last.unsqueeze(-1)) & seen.unsqueeze(-1)).to(outputs.dtype)


def survival(outputs: Tensor) -> Tensor:
    """S(0) … S(K-1), (..., n, K)."""
    return functional.logsigmoid(-outputs).cumsum(-1).exp()


def concordance(outputs: Tensor, labels: Tensor) -> Tensor:
    bins = outputs.shape[-1]
    (last, seen), alive = told(labels, bins), survival(outputs)
    won, pairs = torch.zeros(outputs.shape[:-2], dtype=torch.float64), 0
    for each in range(bins):
        died, lived = seen & (last == each), last > each
        if not (count := int(died.sum()) * int(lived.sum())):
            continue
        ordered = alive[..., lived, each].sort(dim=-1).values.contiguous()
        own = alive[..., died, each].contiguous()
        below, upto = (torch.searchsorted(ordered, own, right=right).double() for right in (False, True))
        won = won + (int(lived.sum()) - (below + upto) / 2.0).sum(-1)
        pairs += count
    return (won / max(1, pairs)).to(outputs.dtype)


def integrated_brier(outputs: Tensor, labels: Tensor) -> Tensor:
    bins = outputs.shape[-1]
    (last, seen), alive = told(labels, bins), survival(outputs)
    kept = _uncensored(last, seen, bins)
    total, count = torch.zeros(outputs.shape[:-2], dtype=outputs.dtype), 0
    for each in range(bins):
        if not float(kept[each + 1]):
            break
        died, lived = seen & (last <= each), last > each
        squared = (died * alive[..., each].square() / kept[last.clamp(max=each)].to(outputs.dtype)).sum(-1)
        squared = squared + (lived * (1.0 - alive[..., each]).square()).sum(-1) / float(kept[each + 1])
        total, count = total + squared / len(labels), count + 1
    return total / max(1, count)


def _uncensored(last: Tensor, seen: Tensor, bins: int) -> Tensor:
    """G: kept[k] is the chance of not being censored in bins 0 … k-1, (K + 1,)."""
    kept = torch.ones(bins + 1, dtype=torch.float64)
    for each in range(bins):
        here = last == each
        at_risk = int((last >= each).sum()) - int((here & seen).sum())
        lost = int((here & ~seen).sum())
        kept[each + 1] = kept[each] * (1.0 - lost / at_risk if at_risk else 0.0)
    return kept


def no_pairs(labels: Tensor) -> str | None:
    """Why these labels have no pairs to be ordered; None if they have."""
    return None if len(torch.unique(labels)) > 1 else "all alike"

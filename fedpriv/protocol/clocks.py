"""Clocks of machines that work together, and the difference that Flower's SuperLink lets in."""

_TOLERATED = (-305.0, 5.0)
"""Seconds by which a SuperNode's clock may be ahead of the SuperLink's; measured on Flower 1.41."""


def is_tolerated(ahead: float) -> bool:
    """Whether a SuperNode whose clock is so many seconds ahead is let in."""
    return _TOLERATED[0] < ahead < _TOLERATED[1]


def difference(ahead: float) -> str:
    """Say by how much one clock is ahead of, or behind, another one."""
    return f"{abs(ahead):.0f} s {'ahead of' if ahead > 0.0 else 'behind'}"


def told_ahead(told: float, asked: float, came: float) -> float:
    """Least difference that explains a clock's `told` time, in a reply between `asked` and `came` of one's own."""
    return told - min(max(told, asked), came)

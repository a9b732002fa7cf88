"""The words of a report, each in a sentence or two."""

from fedpriv.reports.verdict import WORDS

_WORDS = ", ".join(f"{word} up to {100 * most:g} %" for most, word in WORDS)

GLOSSARY: tuple[tuple[str, str], ...] = (
    ("record", "What one line of a silo's data says: the unit whose presence or content is protected."),
    ("silo", "A party with records of its own, such as a hospital. Its records never leave it."),
    ("round", "The server asks at one model; every silo answers with a sum over some of its records."),
    ("clip", "The norm to which one record's contribution is scaled down, so that it cannot stand out."),
    (
        "neighbours",
        "Two data sets that differ in one record: replace-one exchanges it, zero-out takes it away. Protection "
        "means that nobody can tell which of the two was used.",
    ),
    (
        "μ",
        "Gaussian differential privacy: telling two neighbours apart is as hard as telling one draw of N(0, 1) "
        "from one of N(μ, 1). Smaller is more private.",
    ),
    (
        "ε at δ",
        "With probability 1 - δ or more, what is released is at most e^ε times likelier under one neighbour than "
        "under the other. Smaller is more private.",
    ),
    ("zCDP", "ρ of zero-concentrated differential privacy; μ²/2 for Gaussian noise."),
    (
        "best guess",
        "How often the best attacker tells two neighbours apart, out of equally likely ones. We call protection "
        f"{_WORDS}.",
    ),
    ("mechanism", "How noise of different rounds is correlated: independent, by a tree, by a banded matrix, …"),
    ("audit", "An attack by the code's own authors: records planted on purpose, and tests that look for them."),
)

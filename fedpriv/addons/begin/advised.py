"""The scenario own-data for records that a program gives, with what `fedpriv advise` says of their numbers."""

from collections.abc import Mapping
from typing import Any

from fedpriv.addons.begin.advise import Facts, advice_of
from fedpriv.core.errors import InputError
from fedpriv.data.own import Dataset

OWN = "own-data"
_FACTS = ("federation.silos", "federation.samples", "federation.rounds", "algorithm.trust")
_MORE = ("privacy.epsilon", "privacy.delta", "privacy.relation", "algorithm.clip", "algorithm.step")
_SECTIONS = ("federation.", "algorithm.", "privacy.")


def as_advised(tree: Mapping[str, Any], data: Dataset, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Put advised rounds, clip and step into the tree, for the smallest ε and first trust that are `asked` for.

    Every round reads all records.  The tree stays as it is where `asked` names a key that advice does not know,
    such as another row or unit, and where no advice can be given for its facts.  Guarantee: of `data`
    the number of records, their width and the number of classes decide; no record and no label does.
    """
    if any(key.startswith(_SECTIONS) and key not in (*_FACTS, *_MORE) for key in asked):
        return dict(tree)
    federation, algorithm, privacy = (dict(tree[name]) for name in ("federation", "algorithm", "privacy"))
    given: dict[str, Any] = {key: asked.get(key) for key in (*_FACTS, *_MORE)}
    count = len(data.train_labels)
    try:
        epsilons, trust = given["privacy.epsilon"] or privacy["epsilon"], given["algorithm.trust"]
        trust = trust[0] if isinstance(trust, list | tuple) else trust or algorithm["trust"]
        samples, silos = (
            int(given["federation.samples"] or count),
            int(given["federation.silos"] or federation["silos"]),
        )
        facts = Facts(
            (samples // silos,) * silos,
            data.train_images[0].size,
            data.classes,
            float(min(epsilons) if isinstance(epsilons, list | tuple) else epsilons),
            float(given["privacy.delta"] or privacy["delta"]),
            trust=trust,
            feature_norm=tree.get("model", {}).get("feature_norm"),
            rounds=given["federation.rounds"],
            relation=given["privacy.relation"] or privacy["relation"],
        )
        advised = advice_of(facts).tree
    except (InputError, TypeError, ValueError, ZeroDivisionError):
        return dict(tree)  # what is wrong with a key is said where the scenario is read
    rounds = facts.rounds or advised["federation"]["rounds"]
    algorithm = {**advised["algorithm"]}
    algorithm["step"] *= advised["federation"]["rounds"] / rounds  # as far in more rounds than are needed
    return {
        **tree,
        "federation": {**federation, "samples": samples, "rounds": rounds, "epochs": rounds},
        "algorithm": algorithm,
    }

"""Checks of an admitted combination on a silo's own steps, for `tests/attacks/test_crossings.py`.

| check | statement |
|---|---|
| a | a unit that is exchanged or removed moves its own increment alone, within its bound |
| b | the sum of the other units is the same whether or not a unit is drawn, in a secret order |
| c | the distance that a unit moves a whole run, through C and over σ, is at most the μ in the ledger's claim |
| d | shape, type, length and computations of a message are the same for neighbours, and if nobody is drawn |
| e | a repeated query has the same answer |

Increments are those of `Silo.answer`, and no check computes one by a formula.  Only `reading` sets the rows of a
round.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import fedpriv.loss
import fedpriv.noise.integers.increments as exact
from fedpriv.accounting.gaussian import RELATION_FACTOR
from fedpriv.claims.ledger import ReleaseStream, make_release_streams
from fedpriv.core.random import SERVER, simulation_noise
from fedpriv.loss.objective import Bfloat16View, Records
from fedpriv.loss.views import absent_label
from fedpriv.participation.orders import Participation
from fedpriv.participation.secret import SecretOrder
from fedpriv.plan.plan import Plan
from fedpriv.rounds.round import RoundState, ensure_aligned, gradient_point
from fedpriv.silo.masks import Masker
from fedpriv.silo.silo import Silo, pack_state, unpack_state

KEY = bytes(31) + b"8"
HOSTILE = ("random", "1e30", "denormal", "largest", "cancelling", "all scales", "zeros", "large")
ORDINARY = ("random", "small", "zeros", "random")
OTHER = 5
"""Rows between a unit and the one that takes its place."""


@contextmanager
def reading(schedule: Participation, rows: NDArray[np.int64]) -> Iterator[None]:
    """Let every round read these rows of a silo's order, whatever was drawn."""
    with mock.patch.object(type(schedule), "select_rows", return_value=rows):
        yield


def queries(patterns: Sequence[str], plan: Plan, dtype: torch.dtype) -> list[Tensor]:
    """Make a query for each round, from the patterns in turn.

    If the mechanism limits how far queries move, they alternate between two points within this limit instead.
    """
    draw, size, rounds = np.random.default_rng(3), plan.query_length, plan.schedule.rounds
    if (max_step := plan.mechanism.movement) is not None:
        start, step = draw.standard_normal(size), draw.standard_normal(size)
        step *= 0.5 * float(max_step) / np.linalg.norm(step)
        return [torch.from_numpy(start + step * (t % 2)).to(dtype) for t in range(rounds)]
    limits = torch.finfo(dtype)
    result: list[Tensor] = []
    for t in range(rounds):
        vector = torch.from_numpy(draw.standard_normal(size))
        match patterns[t % len(patterns)]:
            case "1e30":
                vector = 1e30 * vector.sign()
            case "denormal":
                vector = vector * limits.smallest_normal / 8
            case "largest":
                vector = vector.sign() * (limits.max / (2 * size))  # a silo refuses queries with an infinite sum
            case "cancelling":
                vector = -result[-1].double()
            case "all scales":
                vector = vector * torch.from_numpy(10.0 ** draw.uniform(-30.0, 30.0, size))
            case "zeros":
                vector = torch.zeros_like(vector)
            case "small":
                vector = 0.1 * vector
            case "large":
                vector = 100.0 * vector
        result.append(vector.clamp(-limits.max, limits.max).to(dtype))
    return result


def altered(records: Records, changes: dict[int, str]) -> Records:
    """Return the records after changes of some rows: absent, another row's content or label, or hostile."""
    features, labels = (column.clone() for column in records)
    for row, change in changes.items():
        other = (row + OTHER) % len(labels)
        if "other" in change:
            features[row], labels[row] = records.features[other], records.labels[other]
        if "label" in change:
            labels[row] = next((label for label in records.labels if not label.equal(labels[row])), labels[row])
        if "hostile" in change:
            signs = torch.where(torch.arange(features[row].numel()) % 2 == 0, 1.0, -1.0).view(features[row].shape)
            features[row] = (1e30 * signs).to(features.dtype)
        if "absent" in change:
            labels[row] = absent_label(labels)
    return Records(features, labels)


def is_longer(difference: NDArray[Any], max_norm: int) -> bool:
    """Whether integers have a norm above `most`, exactly."""
    if float(np.square(difference.astype(np.float64)).sum()) < float(max_norm) ** 2 * (1.0 - 1e-9):
        return False
    return sum(int(value) ** 2 for value in difference.ravel() if value) > max_norm**2


@dataclass
class Crossing:
    """A plan, the records of its silo 0, and the results of the checks."""

    plan: Plan
    records: Records
    order: Tensor | None = None
    """Unit at each place of the silo's secret order, or None if places are rows."""
    missed_rounds: frozenset[int] = frozenset()
    """Rounds in which the silo does not answer."""
    victim: int = 0
    """Index among the units that are read of the one that is exchanged, -1 for the last."""
    failures: list[str] = field(default_factory=list)
    """A line for each comparison that failed, beginning with the letter of its check."""
    compared: Counter[str] = field(default_factory=Counter)
    largest: float = 0.0
    """Largest distance that a unit moved, as a share of the claimed one."""

    @cached_property
    def is_integer(self) -> bool:
        """Whether increments are integers."""
        return self.plan.exact_plan is not None

    @cached_property
    def rounds(self) -> list[int]:
        """Rounds that the silo answers."""
        return [t for t in range(1, self.plan.schedule.rounds + 1) if t not in self.missed_rounds]

    def silo(self, changes: dict[int, str] | None = None) -> Silo:
        """Silo 0 with these rows of its records changed."""
        records = altered(self.records, changes or {})
        if self.is_integer:
            silo = Silo.for_release(0, self.plan, records, KEY, may_miss_rounds=True)
            return replace(silo, unit_order=self.order)
        dtype = str(records.features.dtype).removeprefix("torch.")
        return Silo(0, self.plan, records, simulation_noise(1, dtype), may_miss_rounds=True, unit_order=self.order)

    def expect(self, check: str, holds: bool, message: str) -> None:
        self.compared[check] += 1
        if not holds:
            self.failures.append(f"{check}: {message}")

    def check(self) -> "Crossing":
        """Run all checks with hostile queries.

        Where a hostile query rounds other units' floating-point sums differently, only bounds are checked with it.
        """
        self._run(HOSTILE, equal=self.is_integer)
        if not self.is_integer:
            self._run(ORDINARY, equal=True)
        return self

    def _run(self, patterns: Sequence[str], equal: bool) -> None:
        run_queries = queries(patterns, self.plan, self.records.features.dtype)
        states = self._answers(run_queries)
        sums = partial(self._sums, states, run_queries)
        places = {t: self._places(t) for t in self.rounds}
        base = sums(self.silo())
        read = sorted(set().union(*(set(rows.tolist()) for rows in places.values())))
        self._check_unit(self._unit(read[self.victim]), base, sums, places, equal)
        if equal and self.plan.schedule.secret:
            for t in self.rounds:
                self._check_draws(t, base[t], sums, places[t])

    def _answers(self, run_queries: Sequence[Tensor]) -> dict[int, RoundState]:
        """Run checks d and e, and return the state before each round."""
        silo, repeater, neighbour = self.silo(), self.silo(), self.silo({0: "other"})
        states, state = {}, silo.initial_state()
        secret = self.is_integer and isinstance(self.plan.schedule, SecretOrder)
        for t in self.rounds:
            states[t], query = state, run_queries[t - 1]
            with count_calls(secret) as calls:
                release, next_state = silo.answer(state, t, query)
            # The repeater has its state as a ledger stores it.
            repeated, repeated_state = repeater.answer(unpack_state(pack_state(state), repeater), t, query)
            messages = [
                message(source, answer.vector, t, answer_state)
                for source, answer, answer_state in (
                    (silo, release, next_state),
                    (repeater, repeated, repeated_state),
                )
            ]
            self.expect(
                "e", messages[0].numpy().tobytes() == messages[1].numpy().tobytes(), f"round {t}: other bytes"
            )
            if t in (self.rounds[0], self.rounds[-1]):
                other, other_state = neighbour.answer(state, t, query)
                self._same_shape(messages[0], message(neighbour, other.vector, t, other_state), t)
            if self.plan.schedule.secret:
                with reading(self.plan.schedule, np.empty(0, np.int64)), count_calls(secret) as empty_calls:
                    empty_release, empty_state = silo.answer(state, t, query)
                self._same_shape(messages[0], message(silo, empty_release.vector, t, empty_state), t)
                if secret:
                    counts = f"round {t}: {dict(calls)} computations, {dict(empty_calls)} where nobody is drawn"
                    self.expect("d", calls == empty_calls, counts)
            state = next_state
        return states

    def _same_shape(self, one: Tensor, other: Tensor, t: int) -> None:
        same = one.shape == other.shape and one.dtype == other.dtype == self.plan.message_dtype
        self.expect(
            "d",
            same and one.numel() == self.plan.rounds[t - 1].message_length,
            f"round {t}: another form of message",
        )

    def _places(self, t: int) -> NDArray[np.int64]:
        """Return the rows of the silo's order that round t reads."""
        return self.silo()._read_batch(self.plan.rounds[t - 1]).row_indices

    def _unit(self, place: int) -> int:
        return place if self.order is None else int(self.order[place])

    def _sums(
        self,
        states: dict[int, RoundState],
        run_queries: Sequence[Tensor],
        silo: Silo,
        only_round: int | None = None,
    ) -> dict[int, NDArray[Any]]:
        """Return the sums (vectors, d) of a silo in each round, with the states of the unchanged silo."""
        sums = {}
        for t in self.rounds if only_round is None else [only_round]:
            state, planned = silo._skip_missed_rounds(states[t], t)
            state = state._replace(past_vectors=tuple(map(ensure_aligned, state.past_vectors)))
            point = gradient_point(planned.step, ensure_aligned(run_queries[t - 1]), state.past_vectors)
            values = silo.steps.sum_increments(state, planned, point, silo._read_batch(planned)).values.numpy()
            sums[t] = np.atleast_2d(values).copy()
        return sums

    def _bounds(self, t: int) -> list[float]:
        """Return the norm bounds of one unit's increment, one for each vector of round t."""
        if self.is_integer:
            return [float(norm) for norm in self.plan.required_exact_plan.norms(t)]
        weight = 1.0 / self.plan.batch_sizes[0] / max(1, self.plan.schedule.expected_batches(t))
        return [weight * self.plan.rounds[t - 1].step.max_contribution]

    def _rounding(self, t: int) -> float:
        """Return the largest rounding difference of two sums of the same rows, 0 for integers."""
        if self.is_integer:
            return 0.0
        tolerance = 1e-9 if self.records.features.dtype == torch.float64 else 1e-4
        tolerance = 2e-2 if isinstance(self.plan.objective, Bfloat16View) else tolerance
        return tolerance * max(self._bounds(t)) * max(1, len(self._places(t)))

    def _is_close(self, t: int, one: NDArray[Any], other: NDArray[Any]) -> bool:
        return float(np.abs(one - other).max()) <= self._rounding(t)

    def _is_within(self, t: int, difference: NDArray[Any], factor: float) -> bool:
        if self.is_integer and factor == 1.0:
            return not any(
                is_longer(part, int(max_norm)) for part, max_norm in zip(difference, self._bounds(t), strict=True)
            )
        norms = np.linalg.norm(difference.astype(np.float64), axis=1)
        slack = 1e-12 if self.is_integer else 1e-5
        return bool(np.all(norms <= factor * np.array(self._bounds(t)) * (1.0 + slack)))

    def _check_unit(
        self,
        row: int,
        base: dict[int, NDArray[Any]],
        sums: Callable[[Silo], dict[int, NDArray[Any]]],
        places: dict[int, NDArray[np.int64]],
        equal: bool,
    ) -> None:
        """Run checks a and c for the unit in `row`."""
        other_row = (row + 1) % len(self.records.labels)
        # Floats of a hostile row are checked in tests/loss/test_hostile_queries.py.
        worst = "hostile" if self.is_integer else "other"
        alone = (f"absent, {worst}",) if equal else ()
        changed = {
            change: sums(self.silo({row: change})) for change in ("absent", "other", "label", worst, *alone)
        }
        if equal:
            near = sums(self.silo({other_row: "other"}))
            near_without = sums(self.silo({other_row: "other", row: "absent"}))
        for t in self.rounds:
            without, read = (changed["absent"][t], row in {self._unit(place) for place in places[t].tolist()})
            increment, subject = base[t] - without, f"round {t}, row {row}"
            self.expect("a", self._is_within(t, increment, 1.0), f"{subject}: beyond its bound")
            for change in ("other", "label", worst):
                self.expect(
                    "a",
                    self._is_within(t, changed[change][t] - without, 1.0),
                    f"{subject}, {change}: beyond its bound",
                )
                near_enough = self._is_within(t, changed[change][t] - base[t], self.plan.increment_diameter)
                self.expect("a", near_enough, f"{subject}, {change}: further apart than is claimed")
            if not equal:
                continue
            unseen = self._is_close(t, changed[f"absent, {worst}"][t], without)
            self.expect("a", unseen, f"{subject}: an absent row adds something")
            self.expect(
                "a",
                self._is_close(t, near[t] - near_without[t], increment),
                f"{subject}: its increment follows another row",
            )
            if not read:
                self.expect(
                    "a", self._is_close(t, changed[worst][t], base[t]), f"{subject}: moves a round without it"
                )
        if equal:
            for change in ("absent", "other", "label", worst):
                if change == "absent" or self.plan.relation == "replace-one":
                    self._check_distance(f"row {row}, {change}", base, changed[change])

    def _check_draws(
        self,
        t: int,
        base: NDArray[Any],
        sums: Callable[..., dict[int, NDArray[Any]]],
        drawn_rows: NDArray[np.int64],
    ) -> None:
        """Run check b: take a row out of those drawn, and put in one that was not, the first and last of each."""
        schedule, count = self.plan.schedule, len(self.records.labels)
        assert isinstance(schedule, SecretOrder)
        for place in sorted({*drawn_rows[:1].tolist(), *drawn_rows[-1:].tolist()}):
            with reading(schedule, drawn_rows[drawn_rows != place]):
                rest = sums(self.silo(), t)[t]
            without = sums(self.silo({self._unit(place): "absent"}), t)[t]
            self.expect(
                "b",
                self._is_close(t, rest, without),
                f"round {t}: others move by {self._in_clips(t, rest, without)} where row {place} is drawn",
            )
        undrawn_rows = np.setdiff1d(np.arange(count)[schedule.group_rows(t)], drawn_rows)
        for place in sorted({*undrawn_rows[:1].tolist(), *undrawn_rows[-1:].tolist()}):
            with reading(schedule, np.sort(np.append(drawn_rows, place))):
                joined = sums(self.silo({self._unit(place): "absent"}), t)[t]
            self.expect(
                "b",
                self._is_close(t, joined, base),
                f"round {t}: others move by {self._in_clips(t, joined, base)} where row {place} is not",
            )

    def _in_clips(self, t: int, one: NDArray[Any], other: NDArray[Any]) -> str:
        """Format the distance of two sums, in clips."""
        norms = np.linalg.norm((one - other).astype(np.float64), axis=1) / np.array(self._bounds(t))
        return f"{norms.max():.2f} clips"

    def _check_distance(self, place: str, base: dict[int, NDArray[Any]], other: dict[int, NDArray[Any]]) -> None:
        """Run check c, for the whole run in a public order, and for single rounds in a secret one."""
        streams = make_release_streams(self.plan, self.plan.schedule.rounds)
        if not self.plan.noise.sources or self.plan.mechanism.assumption is not None:
            return
        through = self._through_integers if self.is_integer else self._through_floats
        runs = [{t: other[t]} for t in self.rounds] if self.plan.schedule.secret else [other]
        for run in runs:
            distance = through(base, {**base, **run})
            if distance is not None:
                self.largest = max(self.largest, distance / self._claimed(streams[0]))
                claimed = self._claimed(streams[0])
                self.expect(
                    "c",
                    distance <= claimed * (1.0 + 1e-9),
                    f"{place}: moves {distance:.6g}, claimed {claimed:.6g}",
                )

    def _claimed(self, stream: ReleaseStream) -> float:
        """Return the claimed μ, in a secret order that of a unit known to take part in one round."""
        guarantee = stream.guarantee
        assert guarantee is not None
        if not self.plan.schedule.secret:
            return stream.mu
        return RELATION_FACTOR[self.plan.relation] / float(guarantee.noise_multiplier)  # type: ignore[attr-defined]

    def _through_integers(self, base: dict[int, NDArray[Any]], other: dict[int, NDArray[Any]]) -> float:
        """Return √Σ ‖Δ(C s)_t / scale_t‖² / σ, computed by the strategy that adds the noise."""
        strategy, owner = (
            self.plan.required_exact_plan.inputs.factorization.strategy,
            SERVER if self.plan.trust.adds_noise(SERVER) else 0,
        )
        claim, total, ends = self.plan.required_exact_plan.party_claim(owner), 0.0, []
        for sums in (base, other):
            state, outputs = strategy.initial_state(), []
            for t in range(1, self.plan.schedule.rounds + 1):
                vectors = sums.get(t, np.zeros((strategy.draws(t) or 1, self.plan.objective.dimension), np.int64))
                output, state = strategy.step(state, t, vectors[0] if strategy.draws(t) is None else vectors)
                outputs.append(np.atleast_2d(output).copy())
            ends.append(outputs)
        for t, (one, two) in enumerate(zip(*ends, strict=True), start=1):
            for vector, scale in zip(two - one, strategy.noise_scales(t), strict=True):
                total += float(np.square(vector.astype(np.float64)).sum()) / float(scale) ** 2
        return math.sqrt(total) / (claim.sigma * math.sqrt(claim.party_count))

    def _through_floats(self, base: dict[int, NDArray[Any]], other: dict[int, NDArray[Any]]) -> float | None:
        """Return ‖z‖ / std for the smallest z with B z equal to the difference of the sums, ‖Δ(C s)‖ or less."""
        if self.plan.rounds[0].step.split is not None:
            return None  # increments build up over epochs: checked on integers
        noise, trust = self.plan.noise, self.plan.trust
        is_silos_own = trust.private_messages
        std = float(noise.std_of(0)) if is_silos_own else noise.std_in_mean
        difference, rows = np.zeros(self.plan.objective.dimension), []
        for t in range(1, self.plan.schedule.rounds + 1):
            difference = float(self.plan.rounds[t - 1].step.decay) * difference
            if t in base:
                difference = difference + (other[t] - base[t])[0]
            rows.append(difference if is_silos_own else difference * self.plan.weights[0])
        least_noise = np.linalg.lstsq(self._correlation, np.stack(rows), rcond=None)[0]
        return float(np.linalg.norm(least_noise)) / std

    @cached_property
    def _correlation(self) -> NDArray[np.float64]:
        """Matrix B, (rounds, all fresh noise vectors)."""
        mechanism, rounds = self.plan.mechanism, self.plan.schedule.rounds
        counts = [mechanism.draws(t) for t in range(1, rounds + 1)]
        size, start, state, rows = sum(count or 1 for count in counts), 0, mechanism.start(), []
        for t, count in zip(range(1, rounds + 1), counts, strict=True):
            fresh = torch.eye(size, dtype=torch.float64)[start : start + (count or 1)]
            row, state = mechanism.noise(state, t, fresh[0] if count is None else fresh)
            rows.append(row.clone())
            start += count or 1
        return torch.stack(rows).numpy()


def message(silo: Silo, release: Tensor, t: int, state: RoundState) -> Tensor:
    """Return the message in which a release leaves the silo, masked for all silos if messages are masked."""
    other_keys = [
        Masker(bytes([number]) * 32, number, silo.scenario_digest).public_key
        for number in range(len(silo.plan.weights))
    ]
    keys = b"".join([silo.masker.public_key, *other_keys[1:]])
    return silo.make_message(release, t, keys, state.query_chain)


_LOSSES = str(Path(fedpriv.loss.__file__).parent)


@contextmanager
def count_calls(is_counting: bool) -> Iterator[Counter[str]]:
    """Count computations of increments by function, as calls, or as records in sums of many records."""
    calls = Counter[str]()

    def record_call(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if (
            event == "call"
            and code.co_filename.startswith(_LOSSES)
            and code.co_name in ("per_record", "increment")
        ):
            calls[code.co_qualname] += 1
        elif event == "call" and code is exact.sum_rank_one.__code__:
            calls[code.co_qualname] += len(frame.f_locals["features"])

    before = sys.getprofile()
    sys.setprofile(record_call if is_counting else before)
    try:
        yield calls
    finally:
        sys.setprofile(before)

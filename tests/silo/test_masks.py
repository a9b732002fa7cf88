"""Masks: they cancel in the sum of all silos and hide everything else; keys are given once, and signed."""

import hashlib
import hmac
import json
import math
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from typer.testing import CliRunner

from fedpriv.cli.app import app
from fedpriv.core.errors import InputError, RunError
from fedpriv.core.random import KeyedNormal, seed_key
from fedpriv.plan.calibration import EncodedMessage, Grid, make_grid
from fedpriv.silo.guard import Guard
from fedpriv.silo.masks import Identity, Masker, load_identity
from tests.silo.charged import charged
from tests.silo.guarded import ZERO, cell_json, find_run, guard_at, guard_of, refused, write_silo


def maskers(silos: int, run: int = 0) -> list[Masker]:
    source = KeyedNormal(seed_key(run, "noise"))
    return [Masker(source.derive_secret(number), number) for number in range(silos)]


def masks(silos: list[Masker], t: int, size: int) -> list[EncodedMessage]:
    keys = b"".join(masker.public_key for masker in silos)
    return [masker.mask(keys, len(silos), t, size) for masker in silos]


def test_keys_of_another_number_of_silos_are_refused_also_when_they_are_known() -> None:
    silos = maskers(3)
    keys = b"".join(masker.public_key for masker in silos)
    silos[0].agree_keys(keys, 3)
    with pytest.raises(RunError, match="expected 2 different public keys"):
        silos[0].agree_keys(keys, 2)
    with pytest.raises(RunError, match="another public key as this silo's"):
        silos[2].agree_keys(keys[:64], 2)


def p_value(words: EncodedMessage) -> float:
    """Of the bytes being uniform: χ² with 255 degrees of freedom."""
    return float(stats.chisquare(np.bincount(words.view(np.uint8), minlength=256)).pvalue)


@settings(max_examples=25)
@given(silos=st.integers(2, 7), size=st.integers(1, 40), t=st.integers(1, 2**40), run=st.integers(0, 2**64))
def test_masks_of_all_silos_cancel_exactly(silos: int, size: int, t: int, run: int) -> None:
    assert not np.any(np.sum(masks(maskers(silos, run), t, size), axis=0, dtype=np.uint64))


def test_a_masked_message_is_uniform_and_so_is_every_sum_of_fewer_than_all() -> None:
    """Guarantee: silos send a constant; 15 tests at level 1e-6 and a fixed seed; without masks each fails."""
    constant = np.full(20_000, 12345, np.uint64)
    messages = [constant + mask for mask in masks(maskers(4), 3, len(constant))]
    for count in (1, 2, 3):
        for subset in combinations(messages, count):
            assert p_value(np.sum(subset, axis=0, dtype=np.uint64)) > 1e-6
    assert np.array_equal(np.sum(messages, axis=0, dtype=np.uint64), 4 * constant)
    assert p_value(constant) < 1e-100


def test_differences_of_masks_between_rounds_and_runs_are_uniform() -> None:
    """Level 1e-6 each: differences of one silo's masks are as uniform as the masks."""
    first, second = (masks(maskers(3), t, 20_000)[0] for t in (1, 2))
    elsewhere = masks(maskers(3, run=1), 1, 20_000)[0]
    assert p_value(first - second) > 1e-6
    assert p_value(first - elsewhere) > 1e-6
    assert np.array_equal(first, masks(maskers(3), 1, 20_000)[0])


def parts(*values: bytes) -> bytes:
    return b"".join(len(value).to_bytes(8, "big") + value for value in values)


def test_a_mask_is_what_silos_of_another_release_compute() -> None:
    """X25519, HKDF of SHA-256, AES in counter mode; the silo of the smaller number adds, the other subtracts."""
    silos = [Masker(bytes([number + 1] * 32), number, b"scenario") for number in range(2)]
    keys = [silo.public_key for silo in silos]
    private, peer = (
        X25519PrivateKey.from_private_bytes(bytes([1] * 32)),
        X25519PublicKey.from_public_bytes(keys[1]),
    )
    extracted = hmac.digest(bytes(32), private.exchange(peer), "sha256")
    info = b"fedpriv pairwise mask" + b"".join(sorted(keys)) + b"scenario"
    shared = hmac.digest(extracted, info + b"\x01", "sha256")
    key = hashlib.sha256(parts(b"fedpriv", shared, b"mask of a round", b"7", b"chain".hex().encode())).digest()
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(24))
    added, subtracted = (silo.mask(b"".join(keys), 2, 7, 3, b"chain") for silo in silos)
    assert added.tobytes() == np.frombuffer(stream, "<u8").astype(np.uint64).tobytes()
    assert not (added + subtracted).any()


def test_a_card_is_what_silos_of_another_release_verify() -> None:
    key = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    card = Identity(1, key, ()).sign_key("run", b"scenario", bytes(32))
    assert card[:32] == bytes(32)
    key.public_key().verify(
        card[32:], parts(b"fedpriv masks", b"run", b"scenario", b"\0\0\0\0\0\0\0\1", bytes(32))
    )
    assert Identity(1, None, ()).sign_key("run", b"scenario", bytes(range(32))) == bytes(range(32)) + bytes(64)


def test_public_keys_that_would_leave_a_message_unmasked_are_refused() -> None:
    own, *_ = silos = maskers(3)
    good = [masker.public_key for masker in silos]
    again = [(int.from_bytes(key, "little") | 1 << 255).to_bytes(32, "little") for key in good]
    bad: list[tuple[list[bytes], str]] = [
        ([], "expected 3 different public keys"),
        (good[:1], "expected 3 different public keys"),
        ([*good, bytes(32)], "expected 3 different public keys"),
        ([good[0], good[1], good[1]], "expected 3 different public keys"),
        ([good[1], good[0], good[2]], "another public key as this silo's"),
        ([good[0], good[1], again[1]], "no usable X25519"),  # the point of silo 1 again, in other bytes
        ([good[0], again[0], good[2]], "no usable X25519"),  # its own: a mask agreed on with itself
        ([good[0], good[1], (2**255 - 19 + 9).to_bytes(32, "little")], "no usable X25519"),
        ([good[0], good[1], bytes(32)], "no usable X25519"),  # low order: the shared secret would be 0
    ]
    for t in (1, 2):  # also after a round with the silos' own keys
        for keys, reason in bad:
            with pytest.raises(RunError, match=f"silo 0: .*{reason}"):
                own.mask(b"".join(keys), 3, t, 8)
        assert np.any(own.mask(b"".join(good), 3, t, 8))


def test_each_run_and_silo_has_a_different_public_mask_key() -> None:
    assert len({masker.public_key for run in (0, 1) for masker in maskers(3, run)}) == 6


UNIT = 2.0**-10
values = st.lists(st.integers(-(2**40), 2**40), min_size=2, max_size=6)


@given(values)
def test_a_sum_of_encoded_vectors_is_exact_and_signed(multiples: list[int]) -> None:
    grid = Grid(UNIT)
    messages = [grid.encode(np.array([k * UNIT, -k * UNIT])) for k in multiples]
    assert grid.decode_sum(messages).tolist() == [sum(multiples) * UNIT, -sum(multiples) * UNIT]


def test_a_sum_beyond_64_bits_wraps_as_a_residue() -> None:
    """The residue is a function of the sum: 3 · 2^61 units come back as 3 · 2^61 - 2^64 if added twice."""
    grid = Grid(1.0)
    words = grid.encode(np.array([3.0 * 2.0**60]))
    assert grid.decode_sum([words] * 4) == [3.0 * 2.0**62 - 2.0**64]


@pytest.mark.parametrize("digits", [24, 53])
@pytest.mark.parametrize("share", [1e-6, 0.7, 1.0, 55.68])
def test_half_of_the_digits_of_the_noise_lie_above_the_grid_unit(share: float, digits: int) -> None:
    unit = make_grid(share, digits, 1.0).unit
    assert math.frexp(unit)[0] == 0.5
    assert 2.0 ** (digits // 2) <= share / unit < 2.0 ** (digits // 2 + 1)


def test_a_grid_on_which_the_sum_may_overflow_is_refused() -> None:
    assert make_grid(1.0, 53, 2.0**22).unit == 2.0**-26
    with pytest.raises(InputError, match="do not fit on a grid"):
        make_grid(1.0, 53, 2.0**22 + 1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2.0**62])
def test_values_that_are_not_finite_or_overflow_the_grid_are_refused(value: float) -> None:
    with pytest.raises(RunError, match="not finite, or outside"):
        Grid(1.0).encode(np.array([0.0, value]))


MASKED = "secure-aggregation"
CELL = cell_json(algorithm__trust=MASKED)
OTHERS = [Masker(bytes([number]) * 32, number).public_key + bytes(64) for number in (1, 2)]


def keys_with(card: bytes) -> bytes:
    """The cards of three silos, of which two do not sign."""
    return b"".join([card, *OTHERS])


def masked_guard(folder: Path) -> tuple[Guard, bytes]:
    """A guard that counts on the other silos, and the card that it gave for a run."""
    guard = guard_at(folder, trust=MASKED)
    return guard, guard.public_key("run", CELL)


def test_a_repeated_masked_round_gets_the_same_bytes_after_a_restart(tmp_path: Path) -> None:
    guard, card = masked_guard(tmp_path)
    first = guard.answer("run", CELL, 1, ZERO, keys_with(card))
    assert (first.dtype, len(first)) == (torch.uint8, 7850 * 6)
    again, repeated = masked_guard(tmp_path)
    assert repeated == card
    assert torch.equal(again.answer("run", CELL, 1, ZERO, keys_with(card)), first)
    changed = b"".join([card, OTHERS[1], OTHERS[0]])
    refused(again, "round 1 was answered already, for another query", CELL, signed_keys=changed)
    assert not torch.equal(again.answer("run", CELL, 2, ZERO, keys_with(card)), first)


def test_requesting_the_public_key_again_does_not_restart_the_run(tmp_path: Path) -> None:
    guard, card = masked_guard(tmp_path)
    guard.answer("run", CELL, 1, ZERO, keys_with(card))
    assert guard.public_key("run", CELL) == card
    refused(guard, "asked for round 3 after round 1", CELL, t=3, signed_keys=keys_with(card))


def test_the_last_round_wipes_the_run_key_but_not_the_public_mask_key(tmp_path: Path) -> None:
    guard, card = masked_guard(tmp_path)
    last = [guard.answer("run", CELL, t, ZERO, keys_with(card)) for t in range(1, 9)][-1]
    again, repeated = masked_guard(tmp_path)
    assert find_run(again).key is None
    assert repeated == card
    assert torch.equal(again.answer("run", CELL, 8, ZERO, keys_with(card)), last)


@pytest.mark.parametrize("keys", [b"", bytes(3 * 32), bytes(3 * 96), b"".join(OTHERS)])
def test_a_masked_release_is_refused_without_the_public_keys_of_all_silos(tmp_path: Path, keys: bytes) -> None:
    guard, card = masked_guard(tmp_path)
    refused(guard, "silo 0: ", CELL, signed_keys=keys)
    assert guard.answer("run", CELL, 1, ZERO, keys_with(card)).dtype == torch.uint8


@pytest.mark.parametrize(
    ("trust", "budget", "price"),
    [
        (MASKED, 4.0, 4.0),
        ("untrusted", 7.0, 4.0 * math.sqrt(3.0)),
        ("untrusted", 4.0, r"the run costs mu = 6\.929"),
        (MASKED, 3.9, "the run costs mu = 4"),
    ],
)
def test_a_masked_run_costs_the_sum_mu_only_if_the_policy_counts_on_other_silos(
    tmp_path: Path, trust: str, budget: float, price: float | str
) -> None:
    """Guarantee: μ with the permission; μ √3 of the own share alone without it; a budget below it is refused."""
    guard = guard_at(tmp_path, trust=trust, budget=budget)
    if isinstance(price, str):
        with pytest.raises(RunError, match=price):
            guard.public_key("run", CELL)
    else:
        guard.public_key("run", CELL)
    assert charged(guard) == ([] if isinstance(price, str) else [pytest.approx(price)])


def test_a_secure_aggregation_policy_releases_neither_key_nor_sum_for_an_unmasked_run(tmp_path: Path) -> None:
    """A policy that counts on silos does not trust the server."""
    guard = guard_at(tmp_path, trust=MASKED)
    with pytest.raises(RunError, match="this run has no masks"):
        guard.public_key("run", cell_json())
    for t in range(1, 9):
        guard.answer("over", cell_json(privacy__rho=0.1), t, ZERO)
    with pytest.raises(RunError, match="a public key: this run is over"):
        guard.public_key("over", cell_json(privacy__rho=0.1))
    refused(guard, "this silo release its sums without noise", cell_json(algorithm__trust="trusted"))


def test_the_command_line_runs_a_masked_federation(tmp_path: Path) -> None:
    scenario = tmp_path / "masked.toml"
    scenario.write_text(
        'name = "masked"\n[data]\nname = "synthetic"\n[federation]\nsilos = 3\nrounds = 6\n'
        '[algorithm]\nname = "dp-mu2-fl"\ntrust = "untrusted"\ndiameter = 0.1\n'
        '[privacy]\nrelation = "replace-one"\nrho = 4.0\n'
    )
    options = ["--set", "algorithm.trust=secure-aggregation", "--engine", "inprocess", "--quiet"]
    result = CliRunner().invoke(app, ["run", str(scenario), *options, "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    (cell,) = json.loads((tmp_path / "out" / "results.json").read_text())["cells"]
    assert (cell["trust"], round(cell["mu"], 9)) == (MASKED, 4.0)
    assert [release["owner"] for release in cell["releases"]] == ["sum of silos 0-2"]
    for command, line in (
        (["privacy", "ledger"], "sum of silos 0-2"),
        (["table"], "untrusted server, secure aggregation"),
    ):
        assert line in CliRunner().invoke(app, [*command, str(tmp_path / "out")]).output


CELL = cell_json(algorithm__trust="secure-aggregation")


def write_identities(folder: Path, silos: int = 3) -> list[Path]:
    """Private keys of so many silos, and `peers` with their public ones, as ssh-keygen writes them."""
    keys = [Ed25519PrivateKey.generate() for _ in range(silos)]
    paths = []
    for silo, key in enumerate(keys):
        paths.append(folder / f"identity-{silo}")
        paths[-1].write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
        paths[-1].chmod(0o600)
    lines = [key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) for key in keys]
    (folder / "peers").write_bytes(b"".join(line + b" silo\n" for line in lines))
    return paths


def guards(folder: Path) -> list[Guard]:
    policies = []
    for silo, identity in enumerate(write_identities(folder)):
        policies.append(path := write_silo(folder, silo, trust="secure-aggregation", silos=None))
        path.write_text(f'identity = "{identity.name}"\npeers = "peers"\n' + path.read_text())
    return [guard_of(path) for path in policies]


def test_silos_accept_public_keys_signed_by_their_registered_peers(tmp_path: Path) -> None:
    silos = guards(tmp_path)
    cards = b"".join(guard.public_key("run", CELL) for guard in silos)
    assert len({guard.answer("run", CELL, 1, ZERO, cards).numpy().tobytes() for guard in silos}) == 3


def test_a_public_key_forged_by_the_server_is_refused(tmp_path: Path) -> None:
    """Guarantee: unsigned, signed by another silo, or signed for another run, whichever silo it stands for."""
    silos = guards(tmp_path)
    cards = [guard.public_key("run", CELL) for guard in silos]
    invented, scenario = Masker(bytes(range(32)), 1).public_key, hashlib.sha256(CELL.encode()).digest()

    def signed(silo: int, key: int, run: str, digest: bytes, public: bytes = cards[1][:32]) -> bytes:
        return load_identity(silo, tmp_path / f"identity-{key}", None).sign_key(run, digest, public)

    assert signed(1, 1, "run", scenario) == cards[1]
    others = [signed(1, 1, "another run", scenario), signed(1, 1, "run", bytes(32)), signed(2, 1, "run", scenario)]
    own = [invented + bytes(64), invented + cards[1][32:], signed(1, 2, "run", scenario, invented)]
    for forged in (*own, *others):
        reason = "relayed as silo 1's is not signed by it for this run and scenario"
        refused(silos[0], reason, CELL, signed_keys=b"".join([cards[0], forged, cards[2]]))
    assert silos[0].answer("run", CELL, 1, ZERO, b"".join(cards)).shape == (6 * len(ZERO),)


def test_a_scenario_with_more_silos_than_registered_peers_is_refused(tmp_path: Path) -> None:
    guard = guards(tmp_path)[0]
    known = load_identity(0, None, tmp_path / "peers")
    with pytest.raises(RunError, match="silo 0 knows 3 silos, and the scenario has 4"):
        known.verify_keys("run", bytes(32), bytes(4 * 96), 4)
    with pytest.raises(RunError, match="knows 3 silos, and the scenario has 4"):
        guard.public_key("run", cell_json(algorithm__trust="secure-aggregation", federation__silos=4))
    assert charged(guard) == []


def test_a_policy_that_counts_on_other_silos_than_it_knows_is_refused(tmp_path: Path) -> None:
    write_identities(tmp_path)
    for count in (2, 4):
        path = write_silo(tmp_path, trust="secure-aggregation", silos=count)
        path.write_text('peers = "peers"\n' + path.read_text())
        with pytest.raises(InputError, match=f"allow.silos = {count}, and .*peers has 3 silos"):
            guard_of(path)


@pytest.mark.parametrize("name", ["identity", "peers"])
@pytest.mark.parametrize("content", [b"nonsense", b"", bytes(range(32))], ids=["nonsense", "empty", "raw"])
def test_identity_and_peers_files_without_valid_keys_are_refused(
    tmp_path: Path, name: str, content: bytes
) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(InputError, match=r"/file.*(cannot be used|expected)"):
        load_identity(0, path if name == "identity" else None, path if name == "peers" else None)
    with pytest.raises(InputError, match=r"none: cannot be read"):
        load_identity(0, tmp_path / "none", None)


def test_a_peers_file_with_an_invalid_or_duplicate_key_is_refused(tmp_path: Path) -> None:
    """Gains: two shares of the noise, one of them another silo's, for a key that is in `peers` twice."""
    write_identities(tmp_path)
    one, two, _ = (tmp_path / "peers").read_bytes().splitlines(keepends=True)
    for lines, reason in (
        ([one, b"\n", b"  \n", b"nonsense\n"], "peers, line 4: cannot be used as an Ed25519 public key"),
        (
            [one, two, two.replace(b" silo", b" other")],
            "peers: silos 1 and 2 have the same key; each needs its own",
        ),
    ):
        (tmp_path / "peers").write_bytes(b"".join(lines))
        with pytest.raises(InputError, match=reason):
            load_identity(0, None, tmp_path / "peers")


def test_an_identity_has_the_key_of_its_silo_and_those_of_all(tmp_path: Path) -> None:
    paths = write_identities(tmp_path)
    for silo, path in enumerate(paths):
        identity = load_identity(silo, path, tmp_path / "peers")
        assert identity.number == silo
        card = identity.sign_key("run", bytes(32), bytes(32))
        assert identity.signing_key is not None
        assert identity.signing_key.public_key() == identity.peers[silo]
        assert len(identity.peers) == 3
        assert load_identity(silo, path, None).sign_key("run", bytes(32), bytes(32)) == card


def test_a_signing_key_that_does_not_match_the_peers_file_is_refused(tmp_path: Path) -> None:
    """Another's number in the policy: every other silo would refuse, in the middle of a run."""
    first, *_ = write_identities(tmp_path)
    with pytest.raises(InputError, match=r"identity-0: its public half is not the one .*peers has for silo 1"):
        load_identity(1, first, tmp_path / "peers")


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_signing_key_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    """Gains: the name of a silo, for any user of its machine: keys of his own under the other silos' masks."""
    first, *_ = write_identities(tmp_path)
    first.chmod(mode)
    with pytest.raises(InputError, match=r"identity-0: others can read this key; chmod 600 it"):
        load_identity(0, first, None)

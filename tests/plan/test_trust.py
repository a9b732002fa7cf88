"""Who adds how much noise, silo sizes and weights as they come."""

import pytest

from fedpriv.core.random import SERVER
from fedpriv.noise.trust import CLIENT, RECORD, TRUSTS, UNITS, find_trust


def test_noise_is_calibrated_to_the_record_with_the_largest_weight() -> None:
    """p_i / B_i is largest in silo 1; a mean that weighs silos by anything but size has such a silo."""
    noise = find_trust("trusted").calibrate_noise(2.0, (10, 4), (0.5, 0.5), "zero-out", 1.5)
    (server,) = noise.sources
    assert server.std == pytest.approx(2.0 / 1.5 * 0.5 / 4)
    own = find_trust("untrusted").calibrate_noise(2.0, (10, 4), (0.5, 0.5), "replace-one", 1.5)
    assert [source.std for source in own.sources] == pytest.approx([2 * 2.0 / 1.5 / 10, 2 * 2.0 / 1.5 / 4])
    assert [source.weight for source in own.sources] == [0.5, 0.5]


def test_single_messages_of_silos_are_private_only_in_the_untrusted_setting() -> None:
    assert [name for name, setting in TRUSTS.items() if setting.private_messages] == ["untrusted"]


def test_the_trust_setting_determines_who_adds_noise_and_who_publishes_running_sums() -> None:
    """Of silo 0 and the server; under secure aggregation silos draw, and the noisy sum is the server's."""
    said = {
        name: [setting.adds_noise(0), setting.adds_noise(SERVER), setting.publishes_sums(0)]
        for name, setting in TRUSTS.items()
    }
    assert said == {
        "untrusted": [True, False, True],
        "trusted": [False, True, False],
        "secure-aggregation": [True, False, False],
        "curator": [False, True, False],
    }
    assert all(setting.publishes_sums(0) != setting.publishes_sums(SERVER) for setting in TRUSTS.values())


def test_a_trust_setting_covers_only_settings_that_need_no_more_trust() -> None:
    order = [TRUSTS[name] for name in ("untrusted", "secure-aggregation", "trusted", "curator")]
    for place, setting in enumerate(order):
        assert [setting.covers(other) for other in order] == [at <= place for at in range(len(order))]
        alone = [asked.charges_own_messages(setting) for asked in order]
        assert alone == [at == 0 or at > place for at in range(len(order))]


def test_guarantee_a_unit_covers_itself_and_records_only() -> None:
    """A person may have several clients, each protected by itself."""
    covered = {
        name: [other.name for other in UNITS.values() if unit.covers(other)] for name, unit in UNITS.items()
    }
    assert covered == {"record": ["record"], "user": ["record", "user"], "client": ["record", "client"]}


def test_protection_texts_differ_for_clients_and_records_under_a_trusted_server() -> None:
    trusted, untrusted = TRUSTS["trusted"], TRUSTS["untrusted"]
    assert trusted.protection_of(CLIENT) == trusted.client_protection != trusted.protection
    assert trusted.protection_of(RECORD) == trusted.protection
    assert untrusted.protection_of(CLIENT) == untrusted.protection

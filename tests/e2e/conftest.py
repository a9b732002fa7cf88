"""Docker, once for all tests that need it: the base image and the wheels take minutes."""

from collections.abc import Iterator

import pytest

from tests.e2e import docker_host
from tests.e2e.docker_host import Docker, UnavailableError


@pytest.fixture(scope="session")
def docker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Docker]:
    try:
        with docker_host.docker(tmp_path_factory.mktemp("docker")) as found:
            yield found
    except UnavailableError as reason:
        pytest.skip(f"no containers here: {reason}")

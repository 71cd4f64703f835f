import pytest

from quartet.openmp import SPIN_COUNT, set_wait_policy


def test_waiting_threads_sleep_after_a_short_spin() -> None:
    environment: dict[str, str] = {}

    set_wait_policy(environment)

    assert environment == {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": str(SPIN_COUNT)}


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_a_policy_of_the_user_is_kept(name: str) -> None:
    environment = {name: "given"}

    set_wait_policy(environment)

    assert environment == {name: "given"}

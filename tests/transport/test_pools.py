"""What a pool does when nothing goes wrong, and when a row raises; local, in threads and in processes."""

import os

import numpy as np
import pytest

from envkit.errors import ArgumentError, ClosedEnvError, WorkerError
from envkit.transport import Pool, ThisThread
from tests.transport.hosts import (
    COMMANDS,
    RAISE_ODD,
    STEP,
    Counter,
    FailsToDescribe,
    FailsToStart,
    layout,
    process_pool,
    thread_pool,
)


def make_local(make_host=Counter, rows=4):
    return Pool(ThisThread(make_host, rows), commands=COMMANDS)


def make_processes(make_host=Counter, rows=4):
    return process_pool(make_host, rows, 2, commands=COMMANDS, timeout_s=20.0)


def make_threads(make_host=Counter, rows=4):
    return thread_pool(make_host, rows, 2, commands=COMMANDS, timeout_s=20.0)


@pytest.fixture(params=[make_local, make_threads, make_processes])
def make_pool(request):
    pools = []

    def make(*args):
        pools.append(request.param(*args))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture
def pool(make_pool):
    pool = make_pool()
    pool.start()
    return pool


def test_start_returns_what_each_host_says_of_itself(make_pool):
    pool = make_pool()

    assert pool.start() == list(pool.rows_of)


def test_a_round_runs_every_row_once(pool):
    arrays = pool.bind(layout(4))

    pool.send(STEP)
    pool.recv()

    assert (arrays["value"] == 1).all()


@pytest.mark.parametrize("rows", [[0, 3], (3, 0), np.array([0, 3]), np.array([1, 0, 0, 1], bool)])
def test_a_round_runs_the_chosen_rows_only(pool, rows):
    arrays = pool.bind(layout(4))

    pool.send(STEP, rows)
    pool.recv()

    assert arrays["value"][:, 0].tolist() == [1, 0, 0, 1]


@pytest.mark.parametrize("rows", [[], np.zeros(4, bool)])
def test_a_round_of_no_rows_does_nothing(pool, rows):
    arrays = pool.bind(layout(4))

    pool.send(STEP, rows)
    pool.recv()

    assert not arrays["value"].any()
    assert not arrays["calls"].any()


@pytest.mark.parametrize("rows", [[4], [-1], [0.5], np.ones(3, bool), np.ones((4, 1), bool)])
def test_rows_that_the_pool_does_not_have_are_refused(pool, rows):
    pool.bind(layout(4))

    with pytest.raises(ArgumentError, match=r"from 0 to 3|shape \(4,\)"):
        pool.send(STEP, rows)


def test_a_row_that_raises_keeps_no_other_row_from_running(pool):
    arrays = pool.bind(layout(4))

    pool.send(RAISE_ODD)
    with pytest.raises(WorkerError, match="ArithmeticError in row 1 during 'raise'") as caught:
        pool.recv()

    assert arrays["value"][:, 0].tolist() == [1, 0, 1, 0]
    assert [failure.rows for failure in caught.value.failures] == [(1,), (3,)]
    assert {failure.command for failure in caught.value.failures} == {"raise"}
    assert "in step\n" in str(caught.value)
    assert isinstance(caught.value.__cause__, ArithmeticError)


def test_the_pool_is_usable_after_a_row_raised(pool):
    arrays = pool.bind(layout(4))
    pool.send(RAISE_ODD)
    with pytest.raises(WorkerError):
        pool.recv()

    pool.send(STEP)
    pool.recv()

    assert arrays["value"][:, 0].tolist() == [2, 1, 2, 1]


def test_an_error_before_the_first_row_is_blamed_on_all_rows(make_pool):
    class FailsEarly(Counter):
        def run(self, command, rows):
            raise ArithmeticError("too early")

    pool = make_pool(FailsEarly)
    pool.start()
    pool.bind(layout(4))

    pool.send(STEP)
    with pytest.raises(WorkerError) as caught:
        pool.recv()

    assert [failure.rows for failure in caught.value.failures] == [tuple(r) for r in pool.rows_of]


def test_an_error_after_the_last_row_is_blamed_on_all_rows(make_pool):
    class FailsLate(Counter):
        def run(self, command, rows):
            super().run(command, rows)
            raise ArithmeticError("too late")

    pool = make_pool(FailsLate)
    pool.start()
    arrays = pool.bind(layout(4))

    pool.send(STEP)
    with pytest.raises(WorkerError) as caught:
        pool.recv()

    assert [failure.rows for failure in caught.value.failures] == [tuple(r) for r in pool.rows_of]
    assert (arrays["value"] == 1).all()


def test_an_error_in_the_constructor_closes_the_pool_and_shows_its_traceback(make_pool):
    pool = make_pool(FailsToStart)

    with pytest.raises(WorkerError, match=r"no licence for rows 0-(.|\n)*in __init__") as caught:
        pool.start()

    assert isinstance(caught.value.__cause__, OSError)
    assert pool.closed
    assert pool.pids == []


def test_an_error_in_describe_is_told(make_pool):
    with pytest.raises(WorkerError, match=r"LookupError in rows .* during 'start': cannot say"):
        make_pool(FailsToDescribe).start()


def test_an_error_in_bind_is_told(make_pool):
    class FailsToBind(Counter):
        def bind(self, arrays, rows):
            raise LookupError("no such array")

    pool = make_pool(FailsToBind)
    pool.start()

    with pytest.raises(WorkerError, match="during 'bind': no such array"):
        pool.bind(layout(4))


def test_call_returns_one_result_for_each_worker(pool):
    results = pool.call("add", 5, to=1)

    assert results == [6 + rows.start for rows in pool.rows_of]


def test_call_each_gives_every_worker_its_own_arguments(pool):
    arguments = [((10 * rows.start,), {"to": 1}) for rows in pool.rows_of]

    results = pool.call_each("add", arguments)

    assert results == [11 * rows.start + 1 for rows in pool.rows_of]


def test_an_error_in_a_call_is_told_and_harms_nothing(pool):
    with pytest.raises(WorkerError, match=r"LookupError in rows .* during 'fail'") as caught:
        pool.call("fail")

    assert isinstance(caught.value.__cause__, LookupError)
    assert pool.call("add", 1)[0] == 1


def test_binding_again_replaces_the_arrays(pool):
    first = pool.bind(layout(4))

    second = pool.bind(layout(4))
    pool.send(STEP)
    pool.recv()

    assert not first["value"].any()
    assert (second["value"] == 1).all()


def test_a_pool_is_closed_once_and_for_all(pool):
    pool.close()
    pool.close()

    assert pool.closed
    for use in (pool.recv, pool.start, lambda: pool.send(STEP), lambda: pool.call("add", 1)):
        with pytest.raises(ClosedEnvError, match=r"closed|make a new one"):
            use()


def test_only_the_owners_of_chosen_rows_are_woken(new_pool):
    pool, arrays = new_pool(rows=4, processes=2)

    pool.send(STEP, [2])
    pool.recv()

    assert arrays["calls"].tolist() == [0, 0, 1, 0]


def test_calls_to_some_workers_reach_only_those(new_pool):
    pool, _ = new_pool(rows=3, processes=3)

    assert pool.call("add", 0, workers=[2, 0]) == [2, 0]


def test_rows_are_spread_evenly_and_no_worker_is_left_without(new_pool):
    pool, _ = new_pool(rows=3, processes=8)
    other = process_pool(Counter, 7, 3)

    assert pool.rows_of == (range(1), range(1, 2), range(2, 3))
    assert [len(rows) for rows in other.rows_of] == [3, 2, 2]


def test_workers_work_at_the_same_time_as_the_caller(new_pool):
    pool, arrays = new_pool()

    pool.send(STEP)  # returns at once: nothing is received yet
    own = os.getpid()
    pool.recv()

    assert own not in pool.pids
    assert (arrays["value"] == 1).all()


def test_a_round_that_was_never_received_is_finished_by_the_next(new_pool):
    pool, arrays = new_pool()

    pool.send(STEP)
    pool.send(STEP)
    pool.recv()

    assert (arrays["value"] == 2).all()


def test_large_messages_pass_both_ways(new_pool):
    pool, _ = new_pool()
    large = np.arange(3_000_000)

    results = pool.call("echo", large)

    assert all(np.array_equal(result, large) for result in results)


def test_forked_workers_draw_different_random_numbers(new_pool):
    pool, _ = new_pool(rows=4, processes=4)

    assert len(set(pool.call("random_draw"))) == 4


def test_forks_of_a_server_that_has_numpys_generator_draw_different_numbers(new_pool):
    pool, _ = new_pool(rows=4, processes=4, preload=["numpy.random"])

    assert len(set(pool.call("random_draw"))) == 4

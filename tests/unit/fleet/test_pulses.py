"""Which replicas count as there, by when they answered."""

from mambaslots.fleet.pulses import Pulses, pulses_of


def test_a_replica_is_silent_where_another_one_answers() -> None:
    now = [0.0]
    pulses = Pulses(lambda: now[0])
    assert pulses.num_serving == 0
    pulses.expect(["a", "b"])
    assert pulses.num_serving == 2
    for now[0] in (1.0, 2.0, 3.0, 4.0, 5.0):
        pulses.note_answer("a")
    assert (pulses.num_serving, pulses.is_silent("a"), pulses.is_silent("b")) == (1, False, True)
    assert not pulses.is_silent("never named")
    pulses.note_answer("b")  # it continues
    assert (pulses.num_serving, pulses.is_silent("b")) == (2, False)
    pulses.expect(["b", "c"])
    pulses.note_answer("a")  # late: Ray has dropped it
    assert pulses.num_serving == 2
    pulses.forget("c")
    assert pulses.num_serving == 1


def test_where_none_answers_none_is_silent_and_all_count_for_ten_seconds() -> None:
    now = [0.0]
    pulses = Pulses(lambda: now[0])
    pulses.expect(["a", "b"])
    now[0] = 9.0
    assert (pulses.num_serving, pulses.is_silent("a")) == (2, False)
    now[0] = 10.0
    assert (pulses.num_serving, pulses.is_silent("a")) == (0, False)


def test_where_requests_are() -> None:
    pulses = Pulses()
    assert pulses.replica_of("one") == ""
    pulses.note_sent("one", "a")
    pulses.note_sent("one", "b")
    assert pulses.replica_of("one") == "b"
    pulses.note_ended("one")
    pulses.note_ended("one")
    assert pulses.replica_of("one") == ""


def test_a_process_has_one_for_each_application() -> None:
    assert pulses_of("a-states") is pulses_of("a-states") is not pulses_of("b-states")

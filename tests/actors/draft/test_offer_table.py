"""An offer is found by the very tokens it continues, and by nothing else."""

from actors.draft.channel_proposer import _MAX_OFFERS, OfferTable
from engine.batch.draft import Draft, Offer


def offer(base_len: int, after: tuple[int, ...], *draft_ids: int) -> Offer:
    return Offer("a", base_len, Draft(draft_ids), after)


def test_the_offer_of_the_outcome_that_came_true_is_found():
    committed = [1, 2]
    table = OfferTable(committed)
    assert table.add(offer(2, (7,), 70))
    assert table.add(offer(2, (7, 8), 80))
    assert table.add(offer(2, (9,), 90))
    assert table.draft is None
    committed += [7, 8]
    assert table.draft == Draft((80,))


def test_an_outcome_that_nobody_expected_finds_nothing():
    committed = [1, 2]
    table = OfferTable(committed)
    table.add(offer(2, (7,), 70))
    committed += [6]
    assert table.draft is None
    committed += [7]
    assert table.draft is None


def test_an_answer_continues_what_is_committed():
    table = OfferTable([1, 2])
    assert table.add(offer(2, (), 5))
    assert table.draft == Draft((5,))


def test_what_cannot_come_true_any_more_is_stale():
    committed = [1, 2, 3]
    table = OfferTable(committed)
    assert not table.add(offer(2, (), 5))
    assert not table.add(offer(2, (4,), 5))
    assert not table.add(offer(4, (), 5))
    assert table.add(offer(2, (3, 4), 5))
    committed += [4]
    assert table.draft == Draft((5,))


def test_offers_on_top_of_an_older_commit_are_stale_once_a_newer_one_is_built_on():
    committed = [1, 2]
    table = OfferTable(committed)
    table.add(offer(2, (3, 4), 5))
    committed += [3]
    assert table.add(offer(3, (8,), 6))
    assert not table.add(offer(2, (3, 9), 7))
    committed += [4]
    assert table.draft is None


def test_an_early_offer_for_the_pass_after_does_not_displace_that_for_the_next():
    committed = [1, 2]
    table = OfferTable(committed)
    table.add(offer(2, (3,), 5))
    committed += [3]
    assert table.add(offer(3, (5, 6), 7))
    assert table.draft == Draft((5,))
    committed += [5, 6]
    assert table.draft == Draft((7,))


def test_a_draft_that_offers_without_end_fills_no_memory():
    table = OfferTable([1, 2])
    assert all(table.add(offer(2, (token_id,))) for token_id in range(_MAX_OFFERS))
    assert not table.add(offer(2, (_MAX_OFFERS,)))

"""What a failed deployment tells its user."""

from cluster.local_cluster import _reason


def test_our_own_error_is_taken_out_of_the_stack():
    message = "Pair: it failed:\n  File x\nprotos.errors.ConfigError: two vocabularies\nuse one"
    assert _reason(message) == "ConfigError: two vocabularies\nuse one"


def test_any_other_message_is_told_whole():
    assert _reason("out of\nmemory") == "out of\nmemory"

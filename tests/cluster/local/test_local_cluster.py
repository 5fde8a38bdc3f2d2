"""The error of a failed deployment."""

from cluster.local.local_cluster import _reason


def test_our_own_error_is_taken_out_of_serves_stack():
    message = "Pair: it failed:\n  File x\nprotos.errors.ConfigError: two vocabularies\nuse one"
    assert _reason(message) == "ConfigError: two vocabularies\nuse one"


def test_any_other_message_of_serve_is_reported_whole():
    assert _reason("out of\nmemory") == "out of\nmemory"

"""Counts of HAProxy's own answers. No ingress has seen them, so HAProxy sends the sums with each scrape.

The configuration of HAProxy (`cluster/proxy/answers.cfg`) sets a header on each request for `/metrics`.
"""

from __future__ import annotations

import re

ANSWERS_HEADER = "x-outrider-proxy-answers"
NAME = "outrider_proxy_answers"
_HELP = (
    f"# HELP {NAME} Answers that the scraped HAProxy gave itself: pairs are full (refused), "
    "a client's mistake or slowness (client), no ingress available or answering (server).\n"
    f"# TYPE {NAME} counter\n"
)
_KINDS = ("refused", "client", "server")
_COUNTS = re.compile(r"(\d{1,19}) (\d{1,19}) (\d{1,19})")


def proxy_text(header: str) -> str:
    """Return the family for the header's three counts; empty without HAProxy."""
    counts = _COUNTS.fullmatch(header)
    if counts is None:
        return ""
    return _HELP + "".join(
        f'{NAME}{{kind="{kind}"}} {count}\n' for kind, count in zip(_KINDS, counts.groups(), strict=True)
    )

"""Answers that HAProxy gave by itself: no ingress has seen them, so it counts them and hands the sums to a scrape.

The configuration of HAProxy (`cluster/proxy/answers.cfg`) sets a header on each request for `/metrics`.
"""

from __future__ import annotations

import re

ANSWERS_HEADER = "x-outrider-proxy-answers"
NAME = "outrider_proxy_answers"
_HELP = (
    f"# HELP {NAME} Answers of the HAProxy that was scraped through, by itself: pairs are full (refused), "
    "what a client did wrong or too slowly (client), no ingress to ask, or none that answered (server).\n"
    f"# TYPE {NAME} counter\n"
)
_KINDS = ("refused", "client", "server")
_COUNTS = re.compile(r"(\d{1,19}) (\d{1,19}) (\d{1,19})")


def proxy_text(header: str) -> str:
    """Return the family for the header's three counts; nothing where there is no HAProxy."""
    counts = _COUNTS.fullmatch(header)
    if counts is None:
        return ""
    return _HELP + "".join(
        f'{NAME}{{kind="{kind}"}} {count}\n' for kind, count in zip(_KINDS, counts.groups(), strict=True)
    )

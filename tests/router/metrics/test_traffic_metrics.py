"""Acceptance by tenant and route, in a bounded number of series."""

from __future__ import annotations

import httpx

from protos.messages import SpeculationStats
from router.generation.generation_service import GenerationService
from router.metrics.ingress_metrics import IngressMetrics
from router.openai.api import build_app
from tests.router.fixtures.key_files import api_keys

STATS = SpeculationStats(num_draft_tokens=8, num_accepted_tokens=5, accepted_histogram=(0, 1, 2))


def series_of(metrics: IngressMetrics, name: str) -> list[str]:
    return [line for line in metrics.text().splitlines() if line.startswith(f"outrider_spec_decode_traffic_{name}{{")]


def test_tenants_beyond_the_first_ones_share_a_label():
    metrics = IngressMetrics()
    for number in range(100):
        metrics.count_traffic(f"tenant-{number}", "chat", STATS)
    metrics.count_traffic("tenant-3", "chat", STATS)
    found = [
        line for line in metrics.text().splitlines() if line.startswith("outrider_spec_decode_traffic_passes_total{")
    ]
    assert len(found) == 33
    assert 'outrider_spec_decode_traffic_passes_total{route="chat",tenant="other"} 204.0' in found
    assert 'outrider_spec_decode_traffic_passes_total{route="chat",tenant="tenant-3"} 6.0' in found


def test_a_digest_is_shortened_and_a_sequence_without_drafts_is_no_pass():
    metrics = IngressMetrics()
    metrics.count_traffic("ab" * 32, "completion", STATS)
    metrics.count_traffic("b", "completion", SpeculationStats())
    found = [
        line
        for line in metrics.text().splitlines()
        if line.startswith("outrider_spec_decode_traffic_accepted_tokens_total{")
    ]
    assert found == ['outrider_spec_decode_traffic_accepted_tokens_total{route="completion",tenant="key-abababab"} 5.0']


async def test_requests_count_for_the_tenant_of_their_key_and_for_their_route(service: GenerationService):
    transport = httpx.ASGITransport(app=build_app(service, api_keys("secret tenant=alpha", "other")))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for key, path, body in (
            ("secret", "/v1/completions", {"prompt": "ab", "max_tokens": 6}),
            ("secret", "/v1/completions", {"prompt": "ab", "max_tokens": 6, "stream": True}),
            ("other", "/v1/completions", {"prompt": "ab", "max_tokens": 6}),
        ):
            answer = await client.post(path, json=body, headers={"Authorization": f"Bearer {key}"})
            assert answer.status_code == 200
    text = service.metrics.text()
    passes = {
        line.split()[0].partition("{")[2]: float(line.split()[1])
        for line in text.splitlines()
        if line.startswith("outrider_spec_decode_traffic_passes_total{")
    }
    alpha, other = passes['route="completion",tenant="alpha"}'], passes.keys() - {'route="completion",tenant="alpha"}'}
    assert alpha > 0
    (label,) = other
    assert label.startswith('route="completion",tenant="key-')
    assert passes[label] == alpha / 2


async def test_tenants_are_named_to_admins_and_where_operators_alone_ask(service: GenerationService):
    keys = api_keys("secret tenant=alpha", "other tenant=beta", "boss tenant=gamma admin=true")

    async def texts(*candidates: str, is_metrics_private: bool = False) -> list[str]:
        app = build_app(service, keys, is_metrics_private=is_metrics_private)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
            return [
                (await client.get("/metrics", headers={"Authorization": f"Bearer {key}"} if key else {})).text
                for key in candidates
            ]

    for tenant, route in (("alpha", "chat"), ("beta", "chat"), ("beta", "completion")):
        service.metrics.count_traffic(tenant, route, STATS)
    for text in await texts("", "wrong", "secret"):
        assert "alpha" not in text
        assert "tenant=" not in text
        assert 'outrider_spec_decode_traffic_passes{route="chat"} 6.0' in text
        assert 'outrider_spec_decode_traffic_passes{route="completion"} 3.0' in text
    for text in (*await texts("boss"), *await texts("", "secret", is_metrics_private=True)):
        assert 'outrider_spec_decode_traffic_passes{route="chat",tenant="alpha"} 3.0' in text
        assert 'outrider_spec_decode_traffic_passes{route="chat",tenant="beta"} 3.0' in text

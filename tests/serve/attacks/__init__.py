"""Short bursts of hostile and careless clients against a served application, and their answers."""

from tests.serve.attacks import bodies, connections, grpc_calls, tenants
from tests.serve.attacks.attack import ATTACKS, BROKEN, TENANT_ATTACKS, TENANTS, Answers, Face

__all__ = ["ATTACKS", "BROKEN", "TENANTS", "TENANT_ATTACKS", "Answers", "Face"]
__all__ += ["bodies", "connections", "grpc_calls", "tenants"]  # each enters its attacks into the tables

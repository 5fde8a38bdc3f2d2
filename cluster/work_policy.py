"""The number of replicas for the present work: seconds of queued prompts and decode speed against latency limits.

Serve's controller calls the policy with the means of replicas' reports (`record_autoscaling_stats`) over the look-back
period, and applies bounds and delays itself. Pairs and prefill replicas have separate decisions.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from ray.serve.config import AutoscalingContext

logger = logging.getLogger("ray.serve")  # the controller logs under this name only


class WorkPolicy:
    """A replica at its limits needs 1 replica, with twice the queue or half the speed 2, and idle 0.

    Args:
        ttft_s: seconds that queued prompts of one replica may take; any time if None.
        itl_s: seconds per token that a running stream may take; any time if None.
    """

    def __init__(self, ttft_s: float | None = None, itl_s: float | None = None) -> None:
        self._ttft_s = ttft_s or float("inf")
        self._itl_s = itl_s or float("inf")
        self._num_logged = 0

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """Return the wanted number of replicas, not rounded, and an empty state."""
        metrics = context.aggregated_metrics or {}
        queues_s, tokens_s = metrics.get("queued_prefill_s", {}), metrics.get("token_s", {})
        loads = [
            max(queues_s.get(replica, 0.0) / self._ttft_s, tokens_s.get(replica, 0.0) / self._itl_s)
            for replica in context.running_replicas
        ]
        wanted = sum(loads)
        if context.total_num_requests > 0:
            wanted = max(wanted, 1.0)  # the last replica stays while it has requests
        self._log(wanted, context, queues_s, tokens_s)
        return wanted, {}

    def _log(
        self, wanted: float, context: AutoscalingContext, queues_s: Mapping[Any, float], tokens_s: Mapping[Any, float]
    ) -> None:
        """Log the numbers of a decision, clamped to its bounds, if it differs from the last one."""
        least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        if (number := min(max(math.ceil(wanted), least), most)) == self._num_logged:
            return
        self._num_logged = number
        logger.info(
            "%s: work for %.2f replicas (target %d): queued prefill %s s against %g, a token %s s against %g",
            context.deployment_name,
            wanted,
            context.target_num_replicas,
            [round(queues_s.get(replica, 0.0), 3) for replica in context.running_replicas],
            self._ttft_s,
            [round(tokens_s.get(replica, 0.0), 4) for replica in context.running_replicas],
            self._itl_s,
        )
